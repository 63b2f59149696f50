"""Multipole heads by name for models.

The heads are those of `routing_tf.layers`: one softmax over near tokens, the best
clusters, and the mean of each other cluster.

Reference: this package's own, see `MultipoleHeads`.
"""

from routing_tf.layers.heads.multipole import MultipoleHeads
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share


def _settings(sizes):
    # Recent tokens and those of clusters have half of the window each.
    half = share(sizes, 2)
    return {
        "num_clusters": sizes.num_clusters,
        "attention_window": half,
        "clusters_per_query": min(4, sizes.num_clusters, half),
        "num_recent": half,
    }


PATTERNS = {
    "multipole": Pattern(
        MultipoleHeads,
        _settings,
        has_relative_positions=False,
        is_bounded=True,
        has_centroids=True,
        refuses=("entmax_alpha",),
    )
}

"""Multipole heads by name for models.

The heads are those of `routing_tf.layers`: one softmax over near tokens, the best
cluster, and the mean of all that is not read of each cluster.

Reference: this package's own, see `MultipoleHeads`.
"""

from routing_tf.layers.heads.multipole import MultipoleHeads
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share


def _settings(sizes):
    # All but the most recent tokens are read from one cluster, chosen as by routed
    # heads: trained from scratch, that was best.
    block = min(16, share(sizes, 4))
    return {
        "num_clusters": sizes.num_clusters,
        "attention_window": max(1, sizes.attention_window - block),
        "clusters_per_query": 1,
        "num_recent": 0,
        "num_sinks": 0,
        "block_length": block,
        "normalization": "layer",
        "choice": "centroid",
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

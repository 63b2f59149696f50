"""Multipole heads with settings that `routing="multipole"` does not have, by name.

`--import=benchmarks.multipole_rows` registers them for `routing`. A query reads as many
keys as with token choice in the same window: recent pairs and members of one cluster.
"""

import functools

from routing_tf import layers
from routing_tf.models import patterns
from routing_tf.zoo import PATTERNS
from routing_tf.zoo import Pattern

BLOCK = 16  # pairs that stop being near at once


def of_one_cluster(sizes, choice):
    """Returns the settings of heads in which a query reads one cluster."""
    return {
        "num_clusters": sizes.num_clusters,
        "attention_window": sizes.attention_window - BLOCK,
        "clusters_per_query": 1,
        "num_recent": 0,
        "num_sinks": 0,
        "block_length": BLOCK,
        "normalization": "layer",
        "choice": choice,
    }


ROWS = {f"multipole_by_{choice}": choice for choice in ("mass", "centroid")}
for name, choice in ROWS.items():
    if name not in PATTERNS and patterns.find(name) is None:
        own = Pattern(
            layers.MultipoleHeads,
            functools.partial(of_one_cluster, choice=choice),
            has_relative_positions=False,
            is_bounded=True,
            has_centroids=True,
            refuses=("entmax_alpha",),
        )
        patterns.register(name, own)

"""Multipole heads of other settings than `routing="multipole"` has, by name.

`--import=benchmarks.multipole_rows` registers them for `routing`. A query reads about
as many keys as with token choice in the same window: near pairs and members.
"""

from routing_tf import layers
from routing_tf.models import patterns
from routing_tf.zoo import PATTERNS
from routing_tf.zoo import Pattern

BLOCK = 16  # pairs that stop being near at once


def of_window(clusters_per_query, **settings):
    """Returns the settings of heads whose near pairs and members fill the window."""

    def made(sizes):
        near = settings.get("num_recent", 0) + BLOCK
        return {
            "num_clusters": sizes.num_clusters,
            "attention_window": sizes.attention_window - near,
            "clusters_per_query": clusters_per_query,
            "num_recent": 0,
            "num_sinks": 0,
            "block_length": BLOCK,
            "normalization": "layer",
            **settings,
        }

    return made


ROWS = {
    "multipole_one": of_window(1),
    "multipole_two": of_window(2),
    "multipole_four": of_window(4),
    "multipole_plain": of_window(4, normalization=None),
    "multipole_near": of_window(1, num_recent=16),
}
for name, settings in ROWS.items():
    if name not in PATTERNS and patterns.find(name) is None:
        own = Pattern(
            layers.MultipoleHeads,
            settings,
            has_relative_positions=False,
            is_bounded=True,
            has_centroids=True,
            refuses=("entmax_alpha",),
        )
        patterns.register(name, own)

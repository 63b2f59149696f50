"""Multipole heads with settings that `routing="multipole"` does not have, by name.

`--import=benchmarks.multipole_rows` registers them for `routing`.
"""

import dataclasses

from routing_tf.models import patterns
from routing_tf.zoo import PATTERNS


def by_mass(sizes):
    """Returns the settings of the package, with clusters chosen by their mass."""
    return {**PATTERNS["multipole"].settings(sizes), "choice": "mass"}


def half_near(sizes):
    """Returns those of trained models: half of the window near, plain logits."""
    half = max(1, sizes.attention_window // 2)
    return {
        "num_clusters": sizes.num_clusters,
        "attention_window": half,
        "clusters_per_query": min(4, sizes.num_clusters, half),
        "num_recent": half,
    }


def four_clusters(sizes):
    """Returns those of the package, with clusters a fourth as large, four read."""
    number = 4 * sizes.num_clusters
    small = dataclasses.replace(sizes, num_clusters=number, clusters_per_query=4)
    return PATTERNS["multipole"].settings(small)


ROWS = {
    "multipole_by_mass": by_mass,
    "multipole_half_near": half_near,
    "multipole_four_clusters": four_clusters,
}
for name, settings in ROWS.items():
    if patterns.find(name) is None:
        changes = {"settings": settings, "reads_clusters": settings is by_mass}
        own = dataclasses.replace(PATTERNS["multipole"], **changes)
        patterns.register(name, own)

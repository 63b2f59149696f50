"""Reformer: hashed heads with rounds, whose queries are their keys.

Reference: Kitaev et al., "Reformer: The Efficient Transformer"
(https://arxiv.org/abs/2001.04451), section 2.
"""

from routing_tf.layers import HashedHeads
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share

__all__ = []


def _settings(sizes):
    return {
        # Half of the buckets are directions, the others their opposites.
        "num_buckets": sizes.num_clusters + sizes.num_clusters % 2,
        "attention_window": share(sizes, 2),
        "hash": "rotation",
        "num_rounds": 2,
        "normalization": "unit_keys",
        "attends_to_self": False,
    }


PATTERNS = {
    "reformer": Pattern(
        HashedHeads,
        _settings,
        is_bounded=True,
        shares_query_key=True,
        is_clustered=True,
    )
}

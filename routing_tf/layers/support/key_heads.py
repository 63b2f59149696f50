"""Key heads: heads of keys and values, each of which serves several heads of queries.

Letters: B batch, H heads of queries, K key heads, L length. Each key head belongs to
the H / K heads of queries that stand side by side at its place.

Reference: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models
from Multi-Head Checkpoints" (https://arxiv.org/abs/2305.13245).
"""

from keras import ops


def for_queries(x, num_heads):
    """Repeats `[B, K, ...]` for the heads of queries: `[B, H, ...]`; None for None."""
    if x is None or x.shape[1] == num_heads:
        return x
    return ops.repeat(x, num_heads // x.shape[1], axis=1)


def of_queries(x, num_key_heads):
    """Gives queries of a key head an axis: `[B, H, ...]` to `[B, K, H / K, ...]`."""
    batch, heads, *rest = ops.shape(x)
    return ops.reshape(x, (batch, num_key_heads, heads // num_key_heads, *rest))


def all_queries(x):
    """Undoes `of_queries`."""
    batch, num_key_heads, per_key, *rest = ops.shape(x)
    return ops.reshape(x, (batch, num_key_heads * per_key, *rest))


def in_one_sequence(x, num_key_heads):
    """Joins the queries of a key head, one head after the other.

    From `[B, H, L, ...]` to `[B, K, H / K * L, ...]`.
    """
    if x.shape[1] == num_key_heads:
        return x
    batch, heads, length, *rest = ops.shape(x)
    length = heads // num_key_heads * length
    return ops.reshape(x, (batch, num_key_heads, length, *rest))


def in_heads(x, like):
    """Undoes `in_one_sequence`; `like` gives the sizes of the axes 0 to 2."""
    batch, heads, length = ops.shape(like)[:3]
    if x.shape[1] == heads:
        return x
    return ops.reshape(x, (batch, heads, length, *ops.shape(x)[3:]))

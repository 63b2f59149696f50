"""Masks, which are True for tokens that take part."""

import functools

import keras
from keras import ops

from routing_tf.layers.support.lengths import numbers


def combine_masks(*masks):
    """Returns the logical and of the masks that are not None, or None."""
    masks = [mask for mask in masks if mask is not None]
    combined = masks[0] if masks else None
    for mask in masks[1:]:
        combined = ops.logical_and(combined, mask)
    return combined


def known_mask(x, mask):
    """Returns which tokens of `[B, H, L, D]` are real; never None."""
    return combine_masks(ops.ones_like(x[:, :1, :, 0], dtype="bool"), mask)


def without_padding(output, mask):
    """Returns `output` `[B, H, L, D]`, zero where `mask` `[B, H, L]` is False."""
    return output if mask is None else ops.where(mask[..., None], output, 0)


@functools.cache
def large_negative(dtype):
    """Returns a logit that has no weight in a softmax, finite in `dtype`."""
    return -3.0e4 if keras.backend.standardize_dtype(dtype) == "float16" else -1.0e30


def mask_as_bias(dtype, mask, bias=None):
    """Returns a bias of logits that hides the keys that the mask hides; or None.

    It takes few passes: selecting among the logits takes as long as a softmax.
    """
    hidden = large_negative(dtype)
    if bias is not None:
        # A bias may hide a key, but never below those that the mask hides.
        bias = ops.maximum(ops.cast(bias, dtype), hidden / 2)
    if mask is not None:
        seen = ops.cast(0, dtype) if bias is None else bias
        bias = ops.where(mask, seen, ops.cast(hidden, dtype))
    return bias


def causal_mask_as_bias(dtype, mask):
    """Returns what to add to logits of `dtype`, which hides later keys."""
    # Lower than all else: a query that sees padding alone weighs no later key. Relative
    # positions would add those to the row of the next query.
    hidden = ops.cast(2 * large_negative(dtype), dtype)
    return ops.where(mask, ops.cast(0, dtype), hidden)


def causal_mask(num_queries, num_keys):
    """Returns which keys each query sees; the last query sees all."""
    # Computed in the graph: as a constant of full attention it would be as large as a
    # model.
    last = numbers(num_queries) + (num_keys - num_queries)
    return ops.arange(num_keys, dtype="int32") <= last[:, None]


def sees_some(mask, num_queries, num_keys):
    """Returns which queries see any key under a causal mask and another one.

    Args:
        mask: the other one, `<bool>`, broadcastable to `[..., queries, keys]`.
        num_queries: number of queries.
        num_keys: number of keys.

    Returns:
        `<bool>`, broadcastable to `[..., queries, 1]`.
    """
    # Queries of one row see the same keys, except later ones, so pairs need not be
    # compared.
    has_one_row = len(mask.shape) == 1 or (len(mask.shape) > 1 and mask.shape[-2] == 1)
    if not has_one_row or mask.shape[-1] == 0:
        seen = ops.logical_and(mask, causal_mask(num_queries, num_keys))
        return ops.any(seen, axis=-1, keepdims=True)
    sees_one = ops.any(mask, axis=-1, keepdims=True)
    first = ops.argmax(ops.cast(mask, "int32"), axis=-1, keepdims=True)
    last = numbers(num_queries) + (num_keys - num_queries)
    sees_first = ops.cast(first, "int32") <= last[:, None]
    return ops.logical_and(sees_one, sees_first)

"""Masks: True where something takes part."""

import keras
from keras import ops


def combine_masks(*masks):
    """Returns the logical and of the masks that are not None, or None."""
    masks = [mask for mask in masks if mask is not None]
    combined = masks[0] if masks else None
    for mask in masks[1:]:
        combined = ops.logical_and(combined, mask)
    return combined


def known_mask(x, mask):
    """Returns which tokens of `[B, H, L, D]` are real, broadcastable to `[B, H, L]`.

    `mask`, likewise, is False for padding; None for none. The result is a tensor in any
    case, and tells tokens from what blocks are filled up with.
    """
    return combine_masks(ops.ones_like(x[:, :1, :, 0], dtype="bool"), mask)


def without_padding(output, mask):
    """Returns `output` `[B, H, L, D]`, zero where `mask` `[B, H, L]` is False."""
    return output if mask is None else ops.where(mask[..., None], output, 0)


def large_negative(dtype):
    """Returns a logit that no softmax sees, finite in `dtype`."""
    return -3.0e4 if keras.backend.standardize_dtype(dtype) == "float16" else -1.0e30


def masks_as_bias(dtype, mask, bias, causal_mask=None):
    """Returns what to add to logits, which hides what the masks hide; or None.

    In few passes: to select among the logits, and the gradient of that, take as long as
    a softmax.

    Args:
        dtype: of the logits.
        mask: as `attention_mask` in a call of `ScaledDotProduct`.
        bias: as in such a call.
        causal_mask: `<bool>[queries, keys]`; None (the default) for none.
    """
    hidden = large_negative(dtype)
    if bias is not None:
        # A bias may hide a key, but never below those that the mask hides.
        bias = ops.maximum(ops.cast(bias, dtype), hidden / 2)
    if mask is not None:
        bias = ops.where(mask, ops.cast(0, dtype) if bias is None else bias, hidden)
    if causal_mask is not None:
        # Lower than all else: a query that sees padding alone weighs no later key.
        # Relative positions would add those to the row of the next query.
        causal_bias = ops.where(causal_mask, ops.cast(0, dtype), 2 * hidden)
        bias = causal_bias if bias is None else bias + causal_bias
    return bias


def causal_mask(num_queries, num_keys):
    """Returns which keys each query sees, the last query all of them."""
    # In the graph: as a constant of full attention it would be as large as a model.
    last = ops.arange(num_queries, dtype="int32") + (num_keys - num_queries)
    return ops.arange(num_keys, dtype="int32") <= last[:, None]

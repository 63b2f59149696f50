"""Masks: True where something takes part."""

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

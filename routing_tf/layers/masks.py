"""Masks: True where something takes part."""

from keras import ops


def combine_masks(*masks):
    """Returns the logical and of the masks that are not None, or None."""
    masks = [mask for mask in masks if mask is not None]
    combined = masks[0] if masks else None
    for mask in masks[1:]:
        combined = ops.logical_and(combined, mask)
    return combined


def without_padding(output, mask):
    """Returns `output` `[B, H, L, D]`, zero where `mask` `[B, H, L]` is False."""
    return output if mask is None else ops.where(mask[..., None], output, 0)

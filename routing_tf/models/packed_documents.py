"""Ids of packed documents among the inputs of a model, which may be there or not."""

SEGMENT_IDS = "segment_ids"


def without_segment_ids(inputs):
    """Returns inputs without the ids of segments, and these; None if there are none.

    Args:
        inputs: dict of tensors; anything else has no such ids.
    """
    if not isinstance(inputs, dict) or SEGMENT_IDS not in inputs:
        return inputs, None
    others = {name: x for name, x in inputs.items() if name != SEGMENT_IDS}
    return others, inputs[SEGMENT_IDS]


def inputs_of(model, batch):
    """Returns what a model takes of a batch: its inputs, and ids of segments if any.

    Args:
        model: a functional model whose inputs are a dict.
        batch: dict of tensors or arrays.
    """
    names = [*model.input, *(name for name in (SEGMENT_IDS,) if name in batch)]
    return {name: batch[name] for name in names}

"""Optional ids of packed documents among the inputs of a model."""

SEGMENT_IDS = "segment_ids"


def without_segment_ids(inputs):
    """Returns inputs without segment ids, and these ids; None if there are none.

    Args:
        inputs: dict of tensors; other inputs have no such ids.
    """
    if not isinstance(inputs, dict) or SEGMENT_IDS not in inputs:
        return inputs, None
    others = {name: x for name, x in inputs.items() if name != SEGMENT_IDS}
    return others, inputs[SEGMENT_IDS]


def inputs_of(model, batch):
    """Returns the part of a batch that a model takes: its inputs and segment ids.

    Args:
        model: a functional model whose inputs are a dict.
        batch: dict of tensors or arrays.
    """
    names = [*model.input, *(name for name in (SEGMENT_IDS,) if name in batch)]
    return {name: batch[name] for name in names}

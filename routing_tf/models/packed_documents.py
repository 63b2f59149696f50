"""Optional ids of packed documents among the inputs of a model."""

import numpy as np

from routing_tf.layers.support.segments import check_fit

OF_TEXT = ("segment_ids",)
# In the order of attention to another sequence: of query, of value.
OF_PAIR = ("decoder_segment_ids", "encoder_segment_ids")
NAMES = OF_TEXT + OF_PAIR


def without_segment_ids(inputs, names=OF_TEXT):
    """Returns inputs without segment ids, and these ids; None if there are none.

    Args:
        inputs: dict of tensors; other inputs have no such ids.
        names: the names of the ids that the model takes. If it takes several, they come
            together, and the ids are a tuple in this order.

    Raises:
        ValueError: if there are ids of other names or axes, or only one of a pair.
    """
    found = [name for name in NAMES if isinstance(inputs, dict) and name in inputs]
    if not found:
        return inputs, None
    if set(found) != set(names):
        raise ValueError(
            "The segment ids of packed documents must be "
            f"{' and '.join(f'`{name}`' for name in names)}. Received: "
            f"{', '.join(found)}. A model with an encoder takes `decoder_segment_ids` "
            "and `encoder_segment_ids`, another one `segment_ids`"
        )
    others = {name: x for name, x in inputs.items() if name not in names}
    ids = tuple(_checked(name, inputs[name]) for name in names)
    return others, ids if len(ids) > 1 else ids[0]


class ChecksSegmentIds:
    """The part of a model that checks ids before Keras converts them."""

    def __call__(self, inputs, *args, **kwargs):
        given = [kwargs.get("segment_ids")]
        if isinstance(inputs, dict):
            given += [inputs.get(name) for name in NAMES]
        check_fit(given)
        return super().__call__(inputs, *args, **kwargs)


def _checked(name, ids):
    # The same names have masks, which may be None.
    ids = np.asarray(ids) if isinstance(ids, list) else ids
    if ids is not None and len(ids.shape) != 2:
        raise ValueError(
            f"`{name}` must have the shape [batch, length] of the token ids. Received: "
            f"shape={tuple(ids.shape)}"
        )
    check_fit(ids)
    return ids


def inputs_of(model, batch):
    """Returns the part of a batch that a model takes: its inputs and segment ids."""
    names = [*model.input, *(name for name in NAMES if name in batch)]
    return {name: batch[name] for name in names}

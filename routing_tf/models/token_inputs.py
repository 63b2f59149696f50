"""Ids among the inputs of a model: of tokens as callers give them, and of documents."""

import numpy as np
from keras import ops

from routing_tf.layers.support.masks import check_fit


def known_ids(ids, vocabulary_size, where, mask=None):
    """Returns ids as a NumPy array `<int32>`; refuses those that a model does not have.

    Those of padding, where `mask` is False, become 0; None for no padding. `where` ends
    the message.

    Example:

    ```python
    from routing_tf.models.known_ids import known_ids

    known_ids([0, 5, 257], vocabulary_size=258, where="the prompt")
    ```
    """
    ids = np.asarray(ops.convert_to_numpy(ids))
    if mask is None:
        mask = np.ones(ids.shape, "bool")
    mask = np.asarray(ops.convert_to_numpy(mask)).astype("bool")
    real, kept = ids[mask], np.zeros(ids.shape, "int32")
    if real.size:
        smallest, largest = real.min(), real.max()
        is_whole = real.dtype.kind in "iu" or (real == np.round(real)).all()
        # NaN is in no range.
        if not is_whole or not 0 <= smallest <= largest < vocabulary_size:
            raise ValueError(
                f"Ids must be integers from 0 to {vocabulary_size - 1}, as the model's "
                f"`vocabulary_size` says. Received: {smallest} to {largest} in {where}"
            )
    kept[mask] = real
    return kept


OF_TEXT = ("segment_ids",)
# In the order of attention to another sequence: of query, of value.
OF_PAIR = ("decoder_segment_ids", "encoder_segment_ids")
SEGMENT_NAMES = OF_TEXT + OF_PAIR


def without_segment_ids(inputs, names=OF_TEXT):
    """Returns inputs without segment ids, and these ids; None if there are none.

    Args:
        inputs: dict of tensors; other inputs have no such ids.
        names: the names of the ids that the model takes. If it takes several, they come
            together, and the ids are a tuple in this order.

    Raises:
        ValueError: if there are ids of other names or axes, or only one of a pair.
    """
    found = [
        name for name in SEGMENT_NAMES if isinstance(inputs, dict) and name in inputs
    ]
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
            given += [inputs.get(name) for name in SEGMENT_NAMES]
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
    names = [*model.input, *(name for name in SEGMENT_NAMES if name in batch)]
    return {name: batch[name] for name in names}

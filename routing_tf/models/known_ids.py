"""Ids of tokens as callers give them."""

import numpy as np
from keras import ops


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

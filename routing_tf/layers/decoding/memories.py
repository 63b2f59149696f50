"""Another sequence that heads attend to, arranged once for all steps."""

import numpy as np

from routing_tf.layers.decoding import rows


def make(group, inputs):
    """Returns the cache of heads that find their keys by position."""
    mask, bias = group.remembered(inputs)
    return {"rows": rows.make_rows(inputs.key, inputs.value, mask, bias)}


def read(group, cache, index, inputs):
    """Attends with the query at position `index`; returns output and cache."""
    keys = np.arange(cache["rows"].shape[2], dtype="int32")[None, None]
    visible, distances = group.sees(index, keys, cache)
    output = rows.attend_to_rows(group, inputs.query, cache["rows"], visible, distances)
    return output, cache

"""The positions at which the next token of a cache may stand.

A dict of `"least"`, the position after the last real token, and `"most"`, the one after
the last token, `<int32>[B]`. They differ where a call ended with padding, which is not
remembered: the next call may begin in its place.
"""

from keras import ops

from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.support.validation import known_values


def first(batch_size):
    """Returns what an empty cache holds."""
    return {name: ops.zeros((batch_size,), "int32") for name in ("least", "most")}


def after(before, index, length, mask=None):
    """Returns what a cache holds after more tokens, from what it held `before`.

    `index` is the position of the first one; the mask `<bool>[B or 1, length]` is False
    for padding.
    """
    most = ops.zeros_like(before["most"]) + (index + length)
    if mask is None:
        return {"least": most, "most": most}
    last = ops.cast(last_token(ops.cast(mask, "bool")), "int32")
    least = ops.where(last >= 0, index + last + 1, before["least"])
    return {"least": least, "most": most}


def check(known, index, may_skip=False):
    """Refuses an integer as `cache_index` at which no next token can stand.

    Nothing is refused where the cache is traced. In rows that were fed fewer tokens
    than others, those that lack count as padding.

    Args:
        known: as returned by `after`.
        index: the integer.
        may_skip: whether positions may be left out, as those that pad blocks. Defaults
            to False.
    """
    values = known_values(ops.stack([known["least"], known["most"]]))
    if values is None or values.size == 0:
        return
    least, most = values.max(axis=1)
    if least <= index and (may_skip or index <= most):
        return
    fed = f"{most}" if least == most else f"{most}, of which {least} are no padding"
    raise ValueError(
        "`cache_index` must be the number of tokens that the cache was fed. Received: "
        f"cache_index={index} with a cache that was fed {fed}. To go back, use the "
        "cache that an earlier call returned, which still stands for its tokens; feed "
        "a prompt without its padding, or with a mask of its real tokens; pass 0 to "
        "start anew"
    )

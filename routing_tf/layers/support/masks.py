"""Masks, which are True for tokens that take part, and segments of packed sequences.

No token sees another segment than its own, a run of tokens with one id: an id that
comes again after another one is a new segment. In attention to another sequence, a
query sees the segment with its id there; of several such segments, the first one of the
query sees the first one of the value, and so on.

Letters: B batch, L length, M memory length.
"""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support.backends import longest_integer
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers


def combine_masks(*masks):
    """Returns the logical and of the masks that are not None, or None."""
    masks = [mask for mask in masks if mask is not None]
    combined = masks[0] if masks else None
    for mask in masks[1:]:
        combined = ops.logical_and(combined, mask)
    return combined


def known_mask(x, mask):
    """Returns which tokens of `[B, H, L, D]` are real; never None."""
    return combine_masks(ops.ones_like(x[:, :1, :, 0], dtype="bool"), mask)


def without_padding(output, mask):
    """Returns `output` `[B, H, L, D]`, zero where `mask` `[B, H, L]` is False."""
    return output if mask is None else ops.where(mask[..., None], output, 0)


@functools.cache
def large_negative(dtype):
    """Returns a logit that has no weight in a softmax, finite in `dtype`."""
    return -3.0e4 if keras.backend.standardize_dtype(dtype) == "float16" else -1.0e30


def mask_as_bias(dtype, mask, bias=None):
    """Returns a bias of logits that hides the keys that the mask hides; or None.

    It takes few passes: selecting among the logits takes as long as a softmax.
    """
    hidden = large_negative(dtype)
    if bias is not None:
        # A bias may hide a key, but never below those that the mask hides.
        bias = ops.maximum(ops.cast(bias, dtype), hidden / 2)
    if mask is not None:
        seen = ops.cast(0, dtype) if bias is None else bias
        bias = ops.where(mask, seen, ops.cast(hidden, dtype))
    return bias


def causal_mask_as_bias(dtype, mask):
    """Returns what to add to logits of `dtype`, which hides later keys."""
    # Lower than all else: a query that sees padding alone weighs no later key. Relative
    # positions would add those to the row of the next query.
    hidden = ops.cast(2 * large_negative(dtype), dtype)
    return ops.where(mask, ops.cast(0, dtype), hidden)


def causal_mask(num_queries, num_keys):
    """Returns which keys each query sees; the last query sees all."""
    # Computed in the graph: as a constant of full attention it would be as large as a
    # model.
    last = numbers(num_queries) + (num_keys - num_queries)
    return ops.arange(num_keys, dtype="int32") <= last[:, None]


def sees_some(mask, num_queries, num_keys):
    """Returns which queries see any key under a causal mask and another one.

    Args:
        mask: the other one, `<bool>`, broadcastable to `[..., queries, keys]`.
        num_queries: number of queries.
        num_keys: number of keys.

    Returns:
        `<bool>`, broadcastable to `[..., queries, 1]`.
    """
    # Queries of one row see the same keys, except later ones, so pairs need not be
    # compared.
    has_one_row = len(mask.shape) == 1 or (len(mask.shape) > 1 and mask.shape[-2] == 1)
    if not has_one_row or mask.shape[-1] == 0:
        seen = ops.logical_and(mask, causal_mask(num_queries, num_keys))
        return ops.any(seen, axis=-1, keepdims=True)
    sees_one = ops.any(mask, axis=-1, keepdims=True)
    first = ops.argmax(ops.cast(mask, "int32"), axis=-1, keepdims=True)
    last = numbers(num_queries) + (num_keys - num_queries)
    sees_first = ops.cast(first, "int32") <= last[:, None]
    return ops.logical_and(sees_one, sees_first)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """The segments of queries and of values.

    Args:
        query: `<int32>[B, 1, L]`, number of the segment that each query sees.
        value: `<int32>[B, 1, M]`, number of the segment of each value.
        query_starts: `<int32>[B, 1, L]`, the position at which each query's segment
            starts, counted from the first query of the call.
        value_starts: `<int32>[B, 1, M]`, the same for values.

    Example:

    ```python
    import numpy as np
    from keras import ops
    from routing_tf.layers.support.masks import Segments

    segments = Segments.of_ids(np.array([[7, 7, 3, 3, 3, 7]]))
    assert ops.convert_to_numpy(segments.query_starts).tolist() == [
        [[0, 0, 2, 2, 2, 5]]
    ]
    ```
    """

    query: Any
    value: Any
    query_starts: Any
    value_starts: Any

    @classmethod
    def of_ids(cls, query_ids, value_ids=None):
        """Returns the segments of ids `<int>[B, L]` and `[B, M]`.

        Without `value_ids` queries see their own sequence.
        """
        query_ids, value_ids = comparable(query_ids, value_ids)
        starts = first_positions(changes(query_ids))
        if value_ids is None:
            return cls(*[starts[:, None]] * 4)
        value_starts = first_positions(changes(value_ids))
        numbers = _numbers_of_pair(query_ids, value_ids)
        return cls(*(x[:, None] for x in (*numbers, starts, value_starts)))

    @property
    def query_places(self):
        """The place of each query in its segment, `<int32>[B, 1, L]`."""
        return numbers(length_of(self.query_starts, 2)) - self.query_starts

    @property
    def value_places(self):
        """The place of each value in its segment, `<int32>[B, 1, M]`."""
        return numbers(length_of(self.value_starts, 2)) - self.value_starts

    @property
    def is_in_last(self):
        """Returns which tokens are in the last segment, `<bool>[B, 1, L]`."""
        starts = self.query_starts
        return starts == starts[:, :, length_of(starts, 2) - 1 :]


def check_integers(ids):
    """Refuses ids of segments that are no tensor of integers."""
    received = f"a {type(ids).__name__}"
    if hasattr(ids, "dtype"):
        received = f"dtype={keras.backend.standardize_dtype(ids.dtype)}"
    if "dtype=int" not in received and "dtype=uint" not in received:
        raise ValueError(
            "`segment_ids` must be tensors of integers, the same for all tokens of a "
            f"document. Received: {received}. Pass "
            '`keras.ops.cast(segment_ids, "int32")`'
        )


def check_fit(segment_ids):
    """Refuses ids in arrays whose last bits JAX would drop, before Keras converts them.

    Args:
        segment_ids: as in a call of `MixedAttention`, or any structure of them.
    """
    for ids in keras.tree.flatten(segment_ids):
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
            continue
        bits = 8 * min(ids.itemsize, np.dtype(longest_integer()).itemsize)
        limits = np.iinfo(f"{'u' * (ids.dtype.kind == 'u')}int{bits}")
        if ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            raise ValueError(
                f"`segment_ids` must be from {limits.min} to {limits.max}, because JAX "
                f"computes with {bits} bits. Received: ids from {ids.min()} to "
                f"{ids.max()}. Number the documents of each row from 1 on, or set "
                '`jax.config.update("jax_enable_x64", True)`'
            )


def comparable(query_ids, value_ids=None):
    """Returns ids with signs, of one type, that are equal where the given ones are.

    Ids of 32 bits or less become int32 or, as all others, integers of 64 bits where
    there are any.

    Args:
        query_ids: `<int>[B, L]`.
        value_ids: `<int>[B, M]`, or None.
    """
    given = [query_ids] if value_ids is None else [query_ids, value_ids]
    for ids in given:
        check_integers(ids)
    names = [keras.backend.standardize_dtype(ids.dtype) for ids in given]
    sizes = [_num_bits(name) for name in names]
    longest = longest_integer()
    dtype = "int32" if max(sizes) <= 32 else longest
    if len(set(names)) > 1 and max(sizes) > _num_bits(longest):
        # Large ids without a sign would be equal to negative ones.
        raise ValueError(
            "`segment_ids` of query and value must fit into one type of integers. "
            f"Received: {names[0]} and {names[1]}. Pass ids of the same type"
        )
    ids = [ops.cast(ids, dtype) for ids in given]
    return ids if len(ids) > 1 else (*ids, None)


def _num_bits(name):
    """Returns how many bits a signed integer needs for those of a type."""
    is_unsigned = name.startswith("u")
    return int(name.removeprefix("u").removeprefix("int")) + is_unsigned


def segment_mask(segments, of_queries, of_keys):
    """Returns which keys are in a query's segment, `<bool>[..., queries, keys]`.

    The functions move `[B, 1, length]` to the places of queries and of keys.
    """
    if segments is None:
        return None
    query, key = of_queries(segments.query), of_keys(segments.value)
    return query[..., :, None] == key[..., None, :]


def offsets_behind(segment, segment_ids, index):
    """Returns how many tokens of their segment a cache contains, `<int32>[B, L]`.

    Plus `query_places` of their own `Segments`, they are the places of tokens.
    `segment` is the entry `"segment"` of the cache of a `MixedAttention`.
    """
    ids = ops.cast(segment_ids, segment["id"].dtype)
    starts = Segments.of_ids(ids).query_starts[:, 0]
    goes_on = ops.logical_and(ids[:, 0] == segment["id"], index <= segment["end"])
    goes_on = ops.logical_and(starts == 0, goes_on[:, None])
    return ops.where(goes_on, index - segment["start"][:, None], 0)


def first_positions(is_first):
    """Returns the last position up to each one at which `<bool>[..., L]` is True.

    It must be True at position 0. Returns `<int32>[..., L]`.
    """
    length = length_of(is_first, -1)
    firsts = ops.sort(ops.where(is_first, numbers(length), length), axis=-1)
    index = ops.cumsum(ops.cast(is_first, "int32"), axis=-1) - 1
    return ops.take_along_axis(firsts, index, axis=-1)


def next_positions(starts):
    """Returns the position after the segment of each token, from their `starts`.

    From `<int32>[..., L]` to `<int32>[..., L]`.
    """
    length = length_of(starts, -1)
    backwards = ops.flip(starts, axis=-1)
    is_last = changes(backwards)
    return length - ops.flip(first_positions(is_last), axis=-1)


def changes(x):
    """Returns where `[..., L]` changes; True at position 0."""
    first = ops.ones_like(x[..., :1], dtype="bool")
    return ops.concatenate([first, x[..., 1:] != x[..., :-1]], axis=-1)


def _numbers_of_pair(query_ids, value_ids):
    """Returns numbers of segments `[B, L]` and `[B, M]`: equal ones see each other."""
    ids = ops.concatenate([query_ids, value_ids], axis=1)
    order, first = _sorted_by_id(ids)
    first = ops.take_along_axis(first, ops.argsort(order, axis=-1), axis=-1)
    # An id has at most as many segments as tokens, so two ids never get the same
    # number.
    length = length_of(query_ids, 1)
    return (
        first[:, :length] + _num_earlier(query_ids),
        first[:, length:] + _num_earlier(value_ids),
    )


def _num_earlier(ids):
    """Returns how many segments with its id come before that of each token."""
    order, first = _sorted_by_id(ids)
    starts = ops.cast(changes(ids), "int32")
    count = ops.cumsum(ops.take_along_axis(starts, order, axis=-1), axis=-1)
    count = count - ops.take_along_axis(count, first, axis=-1)
    return ops.take_along_axis(count, ops.argsort(order, axis=-1), axis=-1)


def _sorted_by_id(ids):
    """Returns a stable order of tokens by id, and the first place of each id."""
    order = ops.cast(ops.argsort(ids, axis=-1), "int32")
    by_id = ops.take_along_axis(ids, order, axis=-1)
    return order, first_positions(changes(by_id))

"""Members of clusters, chosen within each segment.

Letters: B batch, H heads, L length, K clusters.
"""

from keras import ops

from routing_tf.layers.routing import membership
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import next_positions
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import smaller


def expert_choice(scores, attention_window, starts, mask=None, near_tie=0.0):
    """Returns the best tokens of each segment, `<bool>[B, H, K, L]`.

    Like `membership.expert_choice`, but padding is never taken. `starts` `<int32>[B, 1,
    L]` has the position at which each token's segment starts.
    """
    scores = ops.swapaxes(membership.padding_last(scores, mask), 2, 3)
    order = _best_first(scores, starts)
    if near_tie:
        scores = _settled(scores, order, attention_window, starts, near_tie)
        order = _best_first(scores, starts)
    is_member = _ranks(order, starts) < attention_window
    return is_member if mask is None else ops.logical_and(is_member, mask[:, :, None])


def strided_choice(scores, attention_window, starts, mask=None):
    """Lets each centroid take tokens evenly spread over the scores of each segment.

    The same as `membership.strided_choice`, for all segments; see `expert_choice`.
    """
    scores = ops.swapaxes(membership.padding_last(scores, mask), 2, 3)
    ranks = _ranks(_best_first(scores, starts), starts)
    ends, length = next_positions(starts), length_of(starts, 2)
    count = ends - starts
    if mask is not None:
        real = ops.cast(ops.broadcast_to(mask, (*ops.shape(mask)[:2], length)), "int32")
        # Counts of the tokens before each position, with one more place at the end.
        before = ops.pad(ops.cumsum(real, axis=-1), [(0, 0), (0, 0), (1, 0)])
        ends, starts = (_broadcast_to_heads(x, before) for x in (ends, starts))
        count = tensors.entries_at(before, ends)
        count = count - tensors.entries_at(before, starts)
    stride = ops.maximum(count // attention_window, 1)[:, :, None]
    is_member = ops.logical_and(ranks % stride == 0, ranks < stride * attention_window)
    return is_member if mask is None else ops.logical_and(is_member, mask[:, :, None])


def ranks_of_members(is_member, starts):
    """Counts the members before each token in its segment.

    From `<bool>[B, H, K, L]` and `starts` as above to `<int32>[B, H, K, L]`.
    """
    count = ops.cast(is_member, "int32")
    before = ops.cumsum(count, axis=-1) - count
    starts = _broadcast_to_heads(starts[:, :, None], before)
    return before - ops.take_along_axis(before, starts, axis=-1)


def lists(is_member, starts):
    """Puts the members of each segment before its other tokens.

    Returns the token at each place `<int32>[B, H, K, L]`, and whether it is a member.
    """
    keys = 2 * starts[:, :, None] + ops.cast(ops.logical_not(is_member), "int32")
    # Tokens with one key stay in order of position.
    tokens = ops.cast(ops.argsort(keys, axis=-1), "int32")
    return tokens, ops.take_along_axis(is_member, tokens, axis=-1)


def _best_first(scores, starts):
    """Returns the tokens of each segment, best first; of equal ones, earlier first."""
    by_score = ops.cast(ops.argsort(-scores, axis=-1), "int32")
    start = tensors.gather_entries(starts, by_score, length_of(starts, 2))
    return ops.take_along_axis(by_score, ops.argsort(start, axis=-1), axis=-1)


def _ranks(order, starts):
    """Returns the rank of each token in its segment, `<int32>[B, H, K, L]`."""
    places = ops.cast(ops.argsort(order, axis=-1), "int32")
    return places - starts[:, :, None]


def _settled(scores, order, count, starts, near_tie):
    """The same as `membership.settled`, for each segment."""
    by_rank = ops.take_along_axis(scores, order, axis=-1)
    ends = next_positions(starts)
    last = ops.minimum(starts + smaller(count, length_of(starts, 2)), ends) - 1
    last = _broadcast_to_heads(last[:, :, None], scores)
    last = ops.take_along_axis(by_rank, last, axis=-1)
    return ops.where(ops.abs(scores - last) <= near_tie, last, scores)


def _broadcast_to_heads(x, like):
    """Broadcasts `[B, 1, ..., L]` over the middle axes of `like`."""
    return ops.broadcast_to(x, (*ops.shape(like)[:-1], length_of(x, -1)))

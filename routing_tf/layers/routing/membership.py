"""Members of clusters, and the scattering of their results to tokens.

Letters: B batch, H heads, L length, K clusters, W members of a cluster, D dim.
"""

from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import length_of

# A fraction of the largest score, the size of the vectors. It exceeds the differences
# that rounding, which depends on places and shapes, makes between equal tokens in
# float32.
NEAR_TIE = 2e-7


def expert_choice(scores, attention_window, mask=None, near_tie=0.0):
    """Returns the tokens that score highest, `<int>[B, H, K, W]`, in ascending order.

    Of scores that differ by at most `near_tie`, the earlier ones are taken; padding
    only if a cluster finds too few tokens, and after them.

    Reference: paper, Algorithm 1, lines 13-16; `gather_cluster_attention_items`.
    """
    scores = padding_last(scores, mask)
    # Positions sort them in the end.
    scores_of_clusters = ops.swapaxes(scores, 2, 3)
    if near_tie:
        scores_of_clusters = settled(scores_of_clusters, attention_window, near_tie)
    _, members = backends.top_k(scores_of_clusters, attention_window, sorted=False)
    return _in_order(members, mask, scores)


def settled(scores, count, near_tie):
    """Equalises scores that nearly tie for the last place among the `count` best."""
    best, _ = ops.top_k(scores, count, sorted=False)
    last = tensors.smallest(best, axis=-1, keepdims=True)
    return ops.where(ops.abs(scores - last) <= near_tie, last, scores)


def strided_choice(scores, attention_window, mask=None):
    """Lets each centroid take tokens evenly spread over the order of their scores.

    With n tokens each centroid takes every `max(1, n // attention_window)`-th one,
    starting with the one that scores highest, so near and far tokens are members.
    Padding is taken only if a cluster finds too few tokens. Shapes are those of
    `expert_choice`.

    Reference: `gather_cluster_attention_items(strided_attention=True)` of the release.
    """
    length = length_of(scores, 2)
    scores = ops.swapaxes(padding_last(scores, mask), 2, 3)
    nearest_first = ops.cast(ops.argsort(-scores, axis=-1), "int32")
    num_tokens = length
    if mask is not None:
        num_tokens = ops.sum(ops.cast(mask, "int32"), axis=-1)[..., None, None]
    stride = ops.maximum(num_tokens // attention_window, 1)
    places = stride * ops.arange(attention_window, dtype="int32")
    places = ops.broadcast_to(places, (*ops.shape(scores)[:3], attention_window))
    members = ops.take_along_axis(nearest_first, places, axis=-1)
    return _in_order(members, mask, ops.swapaxes(scores, 2, 3))


def padding_last(scores, mask):
    """Gives padding the lowest scores."""
    if mask is None:
        return scores
    return ops.where(mask[..., None], scores, large_negative(scores.dtype))


def _in_order(members, mask, scores):
    """Sorts the members of each cluster by position, followed by padding."""
    if mask is None:
        return ops.sort(members, axis=-1)
    length = length_of(scores, 2)
    is_token = tensors.gather_entries(mask, members, length)
    return ops.sort(ops.where(is_token, members, members + length), axis=-1) % length


def scatter_mean(clustered, members, length, filled=None, count_offset=0.0):
    """Averages a token's results over its clusters; see `mean_of`.

    From `[B, H, K, W, D]` to `[B, H, L, D]`; `filled`, `<bool>[B, H, K, W]`, is False
    for slots whose token is not a member; None if there are no such slots.

    Reference: `scatter_cluster_items` of the release.
    """
    batch, heads = ops.shape(members)[:2]
    dim = clustered.shape[-1]
    positions = tensors.flat_positions(members, length)
    num_rows = batch * heads * length
    rows = ops.reshape(clustered, (-1, dim))
    weights = ops.ones_like(rows[:, :1])
    if filled is not None:
        weights = ops.reshape(ops.cast(filled, rows.dtype), (-1, 1))
        rows = rows * weights

    # It states its gradient: TensorFlow's looks for negative positions, which takes
    # twice as long. Positions are an argument, because JAX allows no traced tensor
    # otherwise.
    @stated_gradient
    def add_up(rows, positions):
        def gradient(upstream):
            return ops.take(upstream, positions, axis=0), None

        return backends.segment_sum(rows, positions, num_segments=num_rows), gradient

    sums = add_up(rows, positions)
    counts = backends.segment_sum(weights, positions, num_segments=num_rows)
    means = mean_of(sums, counts, count_offset)
    return ops.reshape(means, (batch, heads, length, dim))


def mean_of(sums, counts, count_offset=0.0):
    """Divides sums by each token's number of clusters; zero for none."""
    return sums / (counts + count_offset if count_offset else ops.maximum(counts, 1))

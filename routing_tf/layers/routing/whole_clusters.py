"""The pairs of whole clusters in a cache, in order of position.

Letters: B batch, G key heads, R queries, P clusters that a query reads, X places, K
clusters, M chunks, S slots of a chunk, E size of a row.
"""

from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.routing.far_field import HIDDEN
from routing_tf.layers.routing.whole_reads import after_turns
from routing_tf.layers.routing.whole_reads import before_turns
from routing_tf.layers.routing.whole_reads import next_turn
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product

CHUNK_SIZE = 64
#: Names of what says which pairs clusters have.
ORDER = ("clusters", "chunks", "first_chunk")


def make(group, shape, max_length):
    """Returns the dict of empty places for pairs; `shape` is `(batch, key heads)`."""
    none = group.num_clusters
    clusters = ops.full((*shape, max_length), none, dtype="int32")
    return {
        "rows": rows.empty_rows(group, *shape, max_length),
        "token_clusters": clusters,
        **_order(group, clusters),
    }


def written(cache, index, x, clusters):
    """Returns the cache with rows `[B, G, T, E]` from place `index` on.

    `clusters` are `<int32>[B, G, T]`, those that they will be in.
    """
    places = (0, 0, index)
    return {
        "rows": ops.slice_update(cache["rows"], (*places, 0), x),
        "token_clusters": ops.slice_update(cache["token_clusters"], places, clusters),
    }


def ordered(group, parts, is_in):
    """Returns the order of the pairs that `is_in` `<bool>[B, G, X]` says."""
    clusters = ops.where(is_in, parts["token_clusters"], group.num_clusters)
    return _order(group, clusters)


def _order(group, clusters):
    order = ClusterOrder(clusters, group.num_clusters + 1, CHUNK_SIZE)
    return {
        "clusters": clusters,
        "chunks": order.tokens,
        "first_chunk": order.first_chunk[..., :-1],
    }


def attend(group, cache, query, choice):
    """Attends with a few queries to all pairs of the clusters that they choose.

    Args:
        group: the `MultipoleHeads`.
        cache: as returned by `make`.
        query: `<float32>[B, G, 1, R, D]`.
        choice: `Choice`.

    Returns:
        `<float32>[B, G, 1, R, P, D]`, and the logarithms of the sums of exponentials,
        `<float32>[B, G, 1, R, P]`, hidden where nothing is read.
    """
    clusters, counts = choice.clusters[:, :, 0], choice.counts[:, :, 0]
    first = tensors.entries_at(cache["first_chunk"], clusters)
    last_chunk = cache["chunks"].shape[2] - 1
    query = query[:, :, 0, :, None, None, :]
    query = ops.broadcast_to(query, (*ops.shape(clusters), 1, query.shape[-1]))

    def turn(place, *state):
        chunk = ops.minimum(first + place, last_chunk)
        tokens = tensors.gather_blocks(cache["chunks"], chunk)
        x = tensors.gather(cache["rows"], tokens)
        key, value, bias, _ = rows.split_rows(group, ops.cast(x, "float32"))
        logits = group.capped(product(query, key, transpose_y=True))
        ranks = place * CHUNK_SIZE + numbers(CHUNK_SIZE)
        is_there = (ranks < counts[..., None])[..., None, :]
        logits = ops.where(is_there, logits + bias[..., None, :], HIDDEN)
        return place + 1, *next_turn(state, logits, value)

    most = tensors.largest(num_parts(counts, CHUNK_SIZE))
    state = ops.zeros((), "int32"), *before_turns(query, group.value_dim)
    _, *state = ops.while_loop(lambda place, *_: place < most, turn, state)
    output, sums = after_turns(*state)
    return output[:, :, None, ..., 0, :], sums[:, :, None, ..., 0, 0]

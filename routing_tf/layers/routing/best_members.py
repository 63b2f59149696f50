"""Clusters that choose their best tokens, judged among those up to the query."""

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.caches import rows
from routing_tf.layers.routing import membership
from routing_tf.layers.routing.rule import Rule
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import break_into_blocks
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import put_back_blocks
from routing_tf.layers.support.tensors import running_sum
from routing_tf.layers.support.tensors import smaller

NO_TOKEN = large_negative("float32")


class Prefixes(Rule):
    """Attention of each query as if the sequence ended with it.

    In each prefix the clusters choose their members again. A query that is a member of
    a cluster attends to all its members, and its results are averaged over these
    clusters; a query in none gets zero. Relative positions are those in the list of
    members at that moment.

    Queries are computed in blocks of `group.prefix_block_size` tokens, block after
    block. For each cluster, the tokens that a block may read are gathered: the
    candidates among the tokens before the block, and the block itself. Counting which
    tokens outrank which tells who is a member at each token of the block. That takes
    `L * K * (candidates + block size)` pairs.

    Subclasses say what a cache remembers, and who is a member: `num_candidates(length)`
    is how many tokens of a prefix can be members, and `is_member(ranks, num_tokens)`
    tells which tokens are, if `ranks` count the tokens that score higher.
    """

    def __init__(self, group):
        super().__init__(group)
        self.block_size = group.prefix_block_size or self.window
        self.near_tie, self.shares_vectors = group.near_tie, group.share_query_key

    def attend(self, tokens, training=None):
        size = self.block_size
        if is_known(tokens.length):
            size = min(size, tokens.length)
        queries = ops.cast(tokens.query, self.compute_dtype)
        queries = ops.moveaxis(break_into_blocks(queries, size, axis=2), 2, 0)
        num_blocks = length_of(queries, 0)
        starts = numbers(num_blocks) * size
        draws = _Draws(self.dot_product, num_blocks, training)

        def attend_with(block):
            start, query, seed = block
            with draws.starting_at(seed):
                return self.attend_block(tokens, start, query, training)

        # A loop, because all blocks at once would need more memory than full attention.
        output = ops.map(attend_with, (starts, queries, draws.seeds))
        output = put_back_blocks(ops.moveaxis(output, 0, 2), tokens.length, axis=2)
        return without_padding(output, tokens.inputs.query_mask)

    def attend_block(self, tokens, start, query, training):
        """Lets the queries `<float>[B, H, C, D]` of one block attend.

        `start` is the position of the first query; tokens after the block are not read.
        """
        size = query.shape[2]
        segment_starts = None
        if tokens.inputs.segments is not None:
            segment_starts = tokens.inputs.segments.query_starts
        keys = queries = self._find(
            tokens.of_keys.scores, tokens.key_mask, segment_starts, start, size
        )
        if not tokens.shares_vectors:
            queries = self._find(
                tokens.of_queries.scores,
                tokens.query_mask,
                segment_starts,
                start,
                size,
            )
        visible = keys.is_member
        real = self.member_mask(tokens.inputs, keys.positions)
        visible = combine_masks(visible, real)
        if self.key_shift:
            # A token does not see its own key.
            visible = ops.logical_and(visible, keys.before(start))
        key = ops.cast(tokens.key, self.compute_dtype)
        output = self.dot_product(
            query[:, :, None],
            tensors.gather(key, keys.positions),
            tensors.gather(tokens.inputs.value, keys.positions),
            attention_mask=visible,
            bias=self.member_bias(tokens.inputs, keys.positions),
            distances=keys.distances(),
            training=training,
        )
        return self.mean_over_clusters(output, queries.own(), axis=2)

    def _find(self, scores, mask, segment_starts, start, size):
        """Finds who can be a member, and who is one, at the queries of a block.

        `segment_starts`, `<int32>[B, 1, L]` or None, are those of the tokens' segments.
        Before the block, only tokens in the segment of its first token are candidates.
        """
        batch, heads, length, clusters = ops.shape(scores)
        scores = ops.swapaxes(scores, 2, 3)
        real = ops.ones((1, 1, length), "bool") if mask is None else mask
        real = ops.broadcast_to(real, (batch, heads, length))
        before = ops.logical_and(real, numbers(length) < start)
        if segment_starts is not None:
            first = ops.take(segment_starts, start[None], axis=2)
            before = ops.logical_and(before, segment_starts == first)
        best = _best(
            ops.where(before[:, :, None], scores, large_negative(scores.dtype)),
            self.num_candidates(length),
            self.near_tie,
        )
        block = start + numbers(size)
        own = ops.broadcast_to(
            ops.minimum(block, length - 1), (batch, heads, clusters, size)
        )
        positions = ops.concatenate([ops.sort(best, axis=-1), own], axis=-1)
        exists = ops.concatenate(
            [
                tensors.gather_entries(before, positions[..., :-size], length),
                ops.logical_and(
                    tensors.gather_entries(real, own, length), block < length
                ),
            ],
            axis=-1,
        )
        segments = None
        if segment_starts is not None:
            segments = tensors.gather_entries(segment_starts, positions, length)
        ranks = _ranks(
            _entries(scores, positions),
            exists,
            ops.argsort(best),
            size,
            self.near_tie,
            segments,
        )
        num_tokens = _num_tokens(real, segment_starts)
        num_tokens = tensors.gather_entries(num_tokens, own, length)[..., None]
        members = self.is_member(ranks, num_tokens)
        earlier = positions[..., None, :] <= own[..., None]
        in_segment = None
        if segments is not None:
            in_segment = segments[..., -size:, None] == segments[..., None, :]
        return _Candidates(
            positions,
            combine_masks(members, earlier, exists[..., None, :], in_segment),
        )


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """Tokens that can be members at the queries of a block; J of them per cluster.

    Args:
        positions: `<int32>[B, H, K, J]`, ascending; the block's own tokens are last.
        is_member: `<bool>[B, H, K, C, J]`, who is a member at each of the C queries.
    """

    positions: Any
    is_member: Any

    def before(self, start):
        """Returns which tokens come before each query, `<bool>[B, H, K, C, J]`."""
        size = self.is_member.shape[-2]
        query = start + numbers(size)[:, None]
        return self.positions[..., None, :] < query

    def own(self):
        """Returns which queries are members themselves, `<bool>[B, H, K, C]`."""
        size = self.is_member.shape[-2]
        own = ops.logical_and(self.is_member[..., -size:], np.eye(size, dtype="bool"))
        return ops.any(own, axis=-1)

    def distances(self):
        """Ranks among the members minus the last rank, `<int32>[B, H, K, C, J]`."""
        ranks = _count(self.is_member)
        return ranks - ranks[..., -1:]


class _Draws:
    """Seeds of dropout for each block, as JAX forbids changes of state in `ops.map`.

    `seeds`, `[number, ...]`, are what the draws of each block start from.
    """

    def __init__(self, dot_product, number, training):
        self._values = None
        self.seeds = numbers(number)
        if training and dot_product.dropout:
            generator = dot_product.dropout_layer.seed_generator
            self._state = generator.state
            self.seeds = _next_seeds(generator, number)
            self._values = [(v, ops.convert_to_tensor(v)) for v in dot_product.weights]

    def starting_at(self, seed):
        """Returns a scope in which the state is `seed` and changes are discarded."""
        if self._values is None:
            return contextlib.nullcontext()
        return keras.StatelessScope([*self._values, (self._state, seed)])


def _next_seeds(generator, number):
    """Returns the results of `number` calls of `generator.next()`, `[number, 2]`."""
    first = generator.next()
    counts = ops.cast(numbers(number + 1), first.dtype)
    counts = ops.stack([ops.zeros_like(counts), counts], axis=1)
    generator.state.assign(first + counts[-1])
    return first + counts[:-1]


def _best(scores, count, near_tie):
    """Positions of the best tokens, best first; of equal ones, the earlier first."""
    length = length_of(scores, -1)
    scores = membership.settled(scores, count, near_tie)
    best, positions = backends.top_k(scores, count)
    differs = ops.cast(best[..., :-1] - best[..., 1:] > near_tie, "int32")
    level = ops.pad(ops.cumsum(differs, axis=-1), [(0, 0)] * 3 + [(1, 0)])
    positions = ops.cast(positions, "int32")
    order = ops.argsort(level * length + positions, axis=-1)
    return ops.take_along_axis(positions, order, axis=-1)


def _ranks(scores, exists, ranks_before, size, near_tie, segments):
    """Counts how many outrank each candidate at each query: `[B, H, K, C, J]`.

    Of equal scores, the earlier one wins. Scores are `<float32>[B, H, K, J]`, those of
    the block's `size` queries C last; `exists` is False for empty places;
    `ranks_before`, `<int>[B, H, K, J - C]`, are the ranks before the block. With
    segments, `<int32>[B, H, K, J]` or None, only tokens of one segment outrank each
    other.
    """
    first, own = scores[..., :-size], scores[..., -size:]
    wins = first[..., None, :] >= own[..., None] - near_tie
    wins = ops.logical_and(wins, exists[..., None, :-size])
    if segments is not None:
        of_segment = segments[..., None, :-size] == segments[..., -size:, None]
        wins = ops.logical_and(wins, of_segment)
    own_before = ops.sum(ops.cast(wins, "int32"), axis=-1)
    ranks_before = ops.cast(ranks_before, "int32")
    ranks_before = ops.concatenate([ranks_before, own_before], axis=-1)
    # A token of the block, along the last axis, outranks a candidate.
    wins = own[..., None, :] > scores[..., None] + near_tie
    ties = ops.abs(own[..., None, :] - own[..., None]) <= near_tie
    ties = ops.logical_and(ties, np.tri(size, k=-1, dtype="bool"))
    padding = [(0, 0)] * 3 + [(length_of(first, -1), 0), (0, 0)]
    wins = ops.logical_or(wins, ops.pad(ties, padding))
    wins = ops.logical_and(wins, exists[..., None, -size:])
    if segments is not None:
        of_segment = segments[..., None, -size:] == segments[..., None]
        wins = ops.logical_and(wins, of_segment)
    ranks = ranks_before[..., None] + _count(wins)
    return ops.swapaxes(ranks, -1, -2)


def _num_tokens(real, starts):
    """Counts the real tokens up to each one, in its segment: `<int32>[B, H, L]`."""
    real = ops.cast(real, "int32")
    count = ops.cumsum(real, axis=-1)
    if starts is None:
        return count
    starts = ops.broadcast_to(starts, ops.shape(real))
    return count - ops.take_along_axis(count - real, starts, axis=-1)


def _count(x):
    """Counts the True entries up to each place of the last axis, as integers."""
    return ops.cast(running_sum(ops.cast(x, "float32")), "int32")


def _entries(scores, positions):
    """Returns the scores `[B, H, K, L]` at positions `[B, H, K, J]`."""
    batch, heads, clusters, length = ops.shape(scores)
    shape = ops.shape(positions)
    flat = tensors.gather(
        ops.reshape(scores, (batch, heads * clusters, length, 1)),
        ops.reshape(positions, (batch, heads * clusters, shape[-1])),
    )
    return ops.reshape(flat, shape)


class BestMembers(Prefixes):
    """Prefixes in which the tokens that score highest are members.

    A token that is not a member among the tokens so far will never become one. So a
    cache contains only the members, in order of position, with their scores, and its
    size does not grow with long contexts.
    """

    # Evaluation does the same, at the cost of full attention.
    lets_explore = False

    #: Who is a member at a token depends on who left before.
    tokens_per_step = 1

    def num_candidates(self, length):
        return smaller(self.window, length)

    def is_member(self, ranks, num_tokens):
        return ranks < self.window

    def make_cache(self, batch_size, max_length):
        lists = {"key_scores": (batch_size, self.num_key_heads, self.num_clusters)}
        if not self.shares_vectors:
            heads = (batch_size, self.num_heads)
            lists["query_scores"] = (*heads, self.num_clusters)
        window = self.window
        return {
            **self._no_pending_key(batch_size),
            "rows": rows.empty_rows(self, *lists["key_scores"], window),
            **{
                name: ops.full((*shape, window), NO_TOKEN, dtype="float32")
                for name, shape in lists.items()
            },
        }

    def restart(self, cache):
        lists = {n: ops.full_like(cache[n], NO_TOKEN) for n in _lists(cache)}
        return {**pending_keys.forgotten(cache), **lists}

    def fill_cache(self, cache, tokens):
        cache, offered = self._offered(self.restart(cache), 0, tokens)
        members, scores = self._best(_scores(offered, "key_scores"))
        filled = {
            "rows": tensors.gather(rows.of_tokens(offered), members),
            "key_scores": scores,
        }
        if "query_scores" in cache:
            _, filled["query_scores"] = self._best(_scores(tokens, "query_scores"))
        return {**cache, **filled}

    def step(self, cache, index, tokens):
        cache, offered = self._offered(cache, index, tokens)
        row = rows.of_tokens(offered)
        scores = {name: _scores(tokens, name)[..., 0] for name in _lists(cache)}
        if self.key_shift:
            # The key before this one is read, with its own value.
            offered_scores = _scores(offered, "key_scores")[..., 0]
            cache, _ = self._with_member(cache, offered_scores, row)
        # The members before the token, which has the last place if it is one itself.
        seen, enters = self._with_member(cache, scores["key_scores"], row)
        places = numbers(self.window) - (self.window - 1)
        visible = seen["key_scores"] > NO_TOKEN / 2
        if self.key_shift:
            is_own = ops.logical_and(enters[..., None], places == 0)
            visible = ops.logical_and(visible, ops.logical_not(is_own))
        else:
            cache = seen
        if "query_scores" in scores:
            own, new = cache["query_scores"], scores["query_scores"]
            place, enters = self._entry(own, new)
            own = _append(own, new[..., None], place, enters[..., None])
            cache = {**cache, "query_scores": own}
        query = ops.cast(tokens.query, self.compute_dtype)[:, :, None]
        visible, enters = (
            head_inputs.for_queries(x, query.shape[1]) for x in (visible, enters)
        )
        output = rows.attend_to_rows(
            self, query, seen["rows"], visible[..., None, :], places
        )
        output = self.mean_over_clusters(output[..., 0, :], enters, axis=2)
        return without_padding(output[:, :, None], tokens.inputs.query_mask), cache

    def _with_member(self, cache, scores, row):
        """Puts a token's scores `[B, H, K]` and row `[B, H, 1, E]` into the lists.

        Also returns the clusters that it enters, `<bool>[B, H, K]`.
        """
        place, enters = self._entry(cache["key_scores"], scores)
        moves, everywhere = enters[..., None], ops.shape(cache["rows"][:, :, :, :1])
        row = ops.broadcast_to(row[:, :, None], everywhere)
        lists = {
            "key_scores": _append(cache["key_scores"], scores[..., None], place, moves),
            "rows": _append(cache["rows"], row, place[..., None], moves[..., None]),
        }
        return {**cache, **lists}, enters

    def _best(self, scores):
        """Positions and scores of the best tokens, by position, after empty places."""
        length, window = scores.shape[-1], self.window
        count = min(window, length)
        settled = membership.settled(scores, count, self.near_tie)
        _, members = backends.top_k(settled, count)
        best = ops.take_along_axis(scores, members, axis=-1)
        members = ops.cast(members, "int32")
        # Sorted together with their places in the list: empty places come first.
        keys = ops.where(best > NO_TOKEN / 2, members + length, members)
        order = ops.argsort(keys, axis=-1)
        members, best = (
            ops.take_along_axis(x, order, axis=-1) for x in (members, best)
        )
        missing = [(0, 0)] * 3 + [(window - members.shape[-1], 0)]
        best = ops.pad(best, missing, constant_values=NO_TOKEN)
        return ops.pad(members, missing), best

    def _entry(self, scores, new):
        """Returns which place in a list a new token frees, and whether it enters.

        The list has scores `[B, H, K, W]` in order of position; `new`, `[B, H, K]`, are
        those of the next token. The place, `[B, H, K, 1]`, is that of the member with
        the lowest score, of equal ones the last.
        """
        lowest = tensors.smallest(scores, axis=-1) + self.near_tie
        places = numbers(scores.shape[-1])
        is_lowest = scores <= lowest[..., None]
        places = ops.where(is_lowest, places, -1)
        place = tensors.largest(places, axis=-1, keepdims=True)
        return place, new > lowest


def _lists(cache):
    """Names of the lists of members: of keys, and of queries if they are separate."""
    return [name for name in ("key_scores", "query_scores") if name in cache]


def _scores(tokens, name):
    """Scores `[B, H, K, L]` of keys or queries; padding never wins."""
    mask, found = tokens.key_mask, tokens.of_keys
    if name == "query_scores":
        mask, found = tokens.query_mask, tokens.of_queries
    scores = ops.swapaxes(found.scores, 2, 3)
    return scores if mask is None else ops.where(mask[:, :, None], scores, NO_TOKEN)


def _append(x, new, place, moves):
    """Removes one place of `[B, H, K, W, ...]` and appends `new`."""
    shifted = ops.concatenate([x[:, :, :, 1:], new], axis=3)
    places = numbers(x.shape[3])
    places = places.reshape(places.shape + (1,) * (len(x.shape) - 4))
    return ops.where(ops.logical_and(moves, places >= place), shifted, x)

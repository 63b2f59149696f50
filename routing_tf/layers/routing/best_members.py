"""Clusters that choose their best tokens, judged among those up to the query."""

from keras import ops

from routing_tf.layers.caches import pending_keys
from routing_tf.layers.caches import rows
from routing_tf.layers.routing import membership
from routing_tf.layers.routing.prefixes import Prefixes
from routing_tf.layers.support import backends
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.masks import without_padding
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import smaller

NO_TOKEN = large_negative("float32")


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

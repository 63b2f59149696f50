"""Clusters that choose their best tokens, judged among those up to the query."""

import numpy as np
from keras import ops

from routing_tf.layers import extremes
from routing_tf.layers import key_heads
from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import large_negative
from routing_tf.layers.masks import without_padding
from routing_tf.layers.rules.prefixes import Prefixes

NO_TOKEN = large_negative("float32")


class BestMembers(Prefixes):
    """Prefixes in which the tokens that score highest are members.

    A token that is not a member among the tokens so far will never become one. So a
    cache contains only the members, in order of position, with their scores, and its
    size does not grow with long contexts.
    """

    # Evaluation does the same, at the cost of full attention.
    lets_explore = False

    def make_cache(self, batch_size, max_length):
        group, heads = self.group, self.group.num_key_heads
        newest = (batch_size, heads, group.num_clusters)
        # The entries of each list of members, and of only the newest token.
        shapes = {"key_scores": newest}
        if not group.share_query_key:
            shapes["query_scores"] = (batch_size, group.num_heads, group.num_clusters)
        members, newest_scores = (
            {
                name: ops.full((*x, *end), NO_TOKEN, "float32")
                for name, x in shapes.items()
            }
            for end in ((group.attention_window,), ())
        )
        cache = {}
        if group.key_shift:
            # The last rows of the lists that were completed, and the position of the
            # key.
            cache["open"] = {
                "is_last": ops.zeros(newest, "bool"),
                "position": ops.full((batch_size,), -1, dtype="int32"),
            }
        return {
            **cache,
            "rows": rows.empty_rows(group, *newest, group.attention_window),
            **members,
            "newest": {
                "row": rows.empty_rows(group, batch_size, heads),
                "position": ops.full((batch_size,), -1, dtype="int32"),
                **newest_scores,
            },
        }

    def restart(self, cache):
        newest = cache["newest"]
        position = ops.full_like(newest["position"], -1)
        if "open" in cache:
            cache = {**cache, "open": {**cache["open"], "position": position}}
        names = _lists(cache)
        newest = {**newest, "position": position, **_without_tokens(newest, names)}
        return {**cache, **_without_tokens(cache, names), "newest": newest}

    def fill_cache(self, cache, tokens):
        batch, _, length, _ = ops.shape(tokens.value)
        new_rows = rows.make_offers(self.group, tokens)
        last = rows.last_token(_real(tokens, (batch, length)))
        filled = {"newest": {"position": last}}
        at_last = ops.arange(length, dtype="int32") == last[:, None]
        for name in _lists(cache):
            scores = _scores(tokens, name)
            earlier = ops.where(at_last[:, None, None], NO_TOKEN, scores)
            members, filled[name] = self._best(earlier, cache[name].shape[-1])
            filled["newest"][name] = _at_last(ops.swapaxes(scores, 2, 3), last)
            if name == "key_scores":
                filled["rows"] = membership.gather(new_rows, members)
                if "open" in cache:
                    is_last = members[..., -1] == last[:, None, None] - 1
                    is_last &= filled[name][..., -1] > NO_TOKEN / 2
                    filled["open"] = {"is_last": is_last, "position": last - 1}
        filled["newest"]["row"] = _at_last(new_rows, last)
        return {**cache, **filled}

    def step(self, cache, index, tokens):
        row = rows.of_tokens(tokens)
        cache = self._remember_newest(cache, index, row)
        newest = {name: _scores(tokens, name)[..., 0] for name in _lists(cache)}
        place, enters = self._entry(cache["key_scores"], newest["key_scores"])
        visible, distances = _visible(cache["key_scores"], place, enters)
        members = cache["rows"]
        if self.group.key_shift:
            visible, distances = visible[..., :-1], distances[..., :-1]
        else:
            everywhere = ops.broadcast_to(
                row[:, :, None], (*ops.shape(members)[:3], 1, ops.shape(row)[-1])
            )
            members = ops.concatenate([members, everywhere], axis=3)
        query = ops.cast(tokens.query, self.group.compute_dtype)[:, :, None]
        visible, distances, enters = (
            key_heads.for_queries(x, query.shape[1])
            for x in (visible, distances, enters)
        )
        output = rows.attend_to_rows(self.group, query, members, visible, distances)
        output = output[..., 0, :]
        is_member = enters
        if "query_scores" in newest:
            _, is_member = self._entry(cache["query_scores"], newest["query_scores"])
        output = self.mean_over_clusters(output, is_member, axis=2)[:, :, None]
        position = ops.zeros_like(cache["newest"]["position"]) + index
        newest |= {"row": row[:, :, 0], "position": position}
        output = without_padding(output, tokens.inputs.query_mask)
        return output, {**cache, "newest": newest}

    def _best(self, scores, window):
        """Positions and scores of the best tokens by position, after empty places."""
        length = scores.shape[-1]
        count = min(window, length)
        settled = membership.settled(scores, count, self.group.near_tie)
        _, members = ops.top_k(settled, count)
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
        """Tells which place in a list a new token frees, and whether it enters.

        The list has scores `[B, H, K, W]` in order of position; `new`, `[B, H, K]`, are
        those of the next token. The place, `[B, H, K, 1]`, is that of the member with
        the lowest score, of equal ones the last.
        """
        lowest = extremes.smallest(scores, axis=-1) + self.group.near_tie
        places = np.arange(scores.shape[-1], dtype="int32")
        is_lowest = scores <= lowest[..., None]
        places = ops.where(is_lowest, places, -1)
        place = extremes.largest(places, axis=-1, keepdims=True)
        return place, new > lowest

    def _remember_newest(self, cache, index, row):
        """Adds the newest token to the members, unless it will be replaced.

        With shifted keys, its value is that of the token at `index`, whose row
        `[B, H, 1, E]` is given.
        """
        newest, remembered = cache["newest"], {}
        is_older = (newest["position"] < index)[:, None, None]
        newest_row = newest["row"]
        if self.group.key_shift:
            newest_row = rows.open_rows(self.group, newest_row)
        for name in _lists(cache):
            place, enters = self._entry(cache[name], newest[name])
            moves = ops.logical_and(enters, is_older)[..., None]
            remembered[name] = _append(
                cache[name], newest[name][..., None], place, moves
            )
            if name == "key_scores":
                everywhere = ops.broadcast_to(
                    newest_row[:, :, None, None], ops.shape(cache["rows"][:, :, :, :1])
                )
                remembered["rows"] = _append(
                    cache["rows"], everywhere, place[..., None], moves[..., None]
                )
                entered = moves[..., 0]
        cache = {**cache, **remembered}
        if not self.group.key_shift:
            return cache
        last = cache["open"]
        is_last = ops.where(is_older, entered, last["is_last"])
        position = ops.where(is_older[:, 0, 0], newest["position"], last["position"])
        follows = ops.logical_and(is_last, (position == index - 1)[:, None, None])
        completed = rows.complete_rows(
            self.group,
            cache["rows"][:, :, :, -1],
            row,
            ops.logical_and(follows, index > 0),
        )
        return {
            **cache,
            "rows": ops.concatenate(
                [cache["rows"][:, :, :, :-1], completed[:, :, :, None]], axis=3
            ),
            "open": {"is_last": is_last, "position": position},
        }


def _lists(cache):
    """Names of the lists of members: of keys, and of queries if they are separate."""
    return [name for name in ("key_scores", "query_scores") if name in cache]


def _without_tokens(scores, names):
    """Returns the lists of these names without any token."""
    return {name: ops.full_like(scores[name], NO_TOKEN) for name in names}


def _real(tokens, shape):
    """Tells tokens of which query or key is real, `<bool>[B, L]`."""
    masks = (tokens.query_mask, tokens.key_mask)
    if any(mask is None for mask in masks):
        return ops.ones(shape, "bool")
    query, key = (ops.any(mask, axis=1) for mask in masks)
    return ops.broadcast_to(ops.logical_or(query, key), shape)


def _scores(tokens, name):
    """Scores `[B, H, K, L]` of keys or queries; padding never wins."""
    mask = tokens.key_mask if name == "key_scores" else tokens.query_mask
    scores = ops.swapaxes(getattr(tokens, name), 2, 3)
    return scores if mask is None else ops.where(mask[:, :, None], scores, NO_TOKEN)


def _at_last(x, last):
    """Returns `x` `[B, H, L, D]` at the last token `[B]`, as `[B, H, D]`."""
    index = ops.maximum(last, 0)[:, None, None]
    index = ops.broadcast_to(index, (*ops.shape(x)[:2], 1))
    return membership.gather(x, index)[:, :, 0]


def _visible(scores, place, enters):
    """Tells which members a new token sees, including itself, and at what distances."""
    places = np.arange(scores.shape[-1], dtype="int32")
    enters = enters[..., None]
    stays = ops.logical_not(ops.logical_and(places == place, enters))
    visible = ops.logical_and(scores > NO_TOKEN / 2, stays)
    visible = ops.concatenate([visible, enters], axis=-1)
    # Ranks count from the last member, which is the new one if it enters.
    distances = places - places[-1]
    behind_all = ops.cast(ops.logical_and(enters, places > place), "int32")
    distances = distances - behind_all
    return visible, ops.concatenate([distances, ops.zeros_like(place)], axis=-1)


def _append(x, new, place, moves):
    """Removes one place of `[B, H, K, W, ...]` and appends `new`."""
    shifted = ops.concatenate([x[:, :, :, 1:], new], axis=3)
    places = np.arange(x.shape[3], dtype="int32")
    places = places.reshape(places.shape + (1,) * (len(x.shape) - 4))
    return ops.where(ops.logical_and(moves, places >= place), shifted, x)

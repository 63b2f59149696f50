"""Attention to the last members of a token's cluster: strictly causal."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.decoding import rows
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import entries_at
from routing_tf.layers.membership import gather_entries
from routing_tf.layers.rules import members_of_query
from routing_tf.layers.rules.routed_tokens import own_clusters
from routing_tf.layers.rules.routed_tokens import real_tokens
from routing_tf.layers.rules.rule import Rule


class LastMembers(Rule):
    """Attention of each token to the last members of its cluster, itself included.

    A token has one cluster; where queries choose on their own, see `members_of_query`.
    With shifted keys a token reads the values that follow the last members before it.
    Relative positions are differences of rank in the cluster. Padding belongs to a
    cluster of its own that nobody reads, and gets zero. The work is `(L + K * C) *
    (W + C)` pairs, linear in the length. A cache holds the last members of each
    cluster: its size does not grow with long contexts.
    """

    tokens_choose = True

    def attend(self, tokens, training=None):
        if not tokens.shares_scores:
            return members_of_query.attend(self.group, tokens, training)
        inputs = tokens.inputs
        clusters, num_clusters = own_clusters(tokens.key_scores, inputs.key_mask)
        window = self.group.known_window(tokens.length)
        order = ClusterOrder(clusters, num_clusters, chunk_size_for(window))
        key = order.arrange(ops.cast(tokens.key, self.group.compute_dtype))
        query = key
        if not tokens.shares_vectors:
            query = order.arrange(ops.cast(tokens.query, self.group.compute_dtype))
        # The token itself stands in its window, seen or not.
        window += self.group.key_shift
        mask = order.window_mask(window, nearest=self.group.key_shift)
        if self.group.key_shift:
            mask = combine_masks(
                mask, _entries(inputs.value_mask, inputs, order, window)
            )
        output = self.group.dot_product(
            query,
            order.windows(key, window),
            order.windows(order.arrange(tokens.value), window),
            attention_mask=mask,
            bias=_entries(inputs.token_bias, inputs, order, window),
            offset=order.window_offset(window),
            training=training,
        )
        return without_padding(order.restore(output), real_tokens(inputs))

    def make_cache(self, batch_size, max_length):
        # Where a token always sees itself, it is the window's last one.
        sees_itself = not self.group.key_shift and not self.group.routes_queries
        num_rows = max(self.group.attention_window - sees_itself, 1)
        shape = (batch_size, self.group.num_heads)
        cache = {}
        if self.group.key_shift:
            # The row that was completed last, and the position of its key.
            cache["open"] = {
                "place": ops.zeros(shape, "int32"),
                "position": ops.full(shape, -1, dtype="int32"),
            }
        return {
            **cache,
            "rows": rows.empty_rows(
                self.group, *shape, self.group.num_clusters, num_rows
            ),
            "counts": ops.zeros((*shape, self.group.num_clusters), "int32"),
            "newest": {
                "row": rows.empty_rows(self.group, *shape),
                "cluster": ops.zeros(shape, "int32"),
                "position": ops.full(shape, -1, dtype="int32"),
            },
        }

    def fill_cache(self, cache, tokens):
        num_clusters, num_rows = cache["rows"].shape[2:4]
        batch, heads, length, _ = ops.shape(tokens.value)
        new_rows = rows.make_offers(self.group, tokens)
        clusters = ops.cast(ops.argmax(tokens.key_scores, axis=-1), "int32")
        real = _real(tokens, (batch, heads, length))
        last = rows.last_token(real)
        positions = np.arange(length, dtype="int32")
        older = ops.logical_and(real, positions != last[..., None])
        # Sorted by cluster and position; what is not older comes last.
        sorted_clusters = ops.where(older, clusters, num_clusters)
        by_cluster = ops.sort(sorted_clusters * length + positions, axis=-1) % length
        one_hot = ops.one_hot(sorted_clusters, num_clusters, dtype="int32")
        counts = ops.sum(one_hot, axis=2)
        first = ops.cumsum(counts, axis=-1) - counts
        ranks = _ranks(counts, num_rows)
        index = ops.clip(first[..., None] + ranks, 0, length - 1)
        newest = ops.maximum(last, 0)[..., None]
        if "open" in cache:
            before = ops.maximum(newest - 1, 0)
            cluster = entries_at(clusters, before)
            rank = entries_at(counts, cluster) - 1
            is_open = ops.logical_and(entries_at(older, before), newest > 0)
            cache = {
                **cache,
                "open": {
                    "place": (cluster * num_rows + rank % num_rows)[..., 0],
                    "position": ops.where(is_open, before, -1)[..., 0],
                },
            }
        return {
            **cache,
            "rows": membership.gather(new_rows, entries_at(by_cluster, index)),
            "counts": counts,
            "newest": {
                "row": membership.gather(new_rows, newest)[..., 0, :],
                "cluster": entries_at(clusters, newest)[..., 0],
                "position": last,
            },
        }

    def step(self, cache, index, tokens):
        inputs = tokens.inputs
        row = rows.of_tokens(tokens)
        cache = self._remember_newest(cache, index, row[:, :, 0])
        shape = ops.shape(cache["counts"])[:2]
        read, cluster = (
            ops.cast(ops.argmax(scores[:, :, 0], axis=-1), "int32")
            for scores in (tokens.query_scores, tokens.key_scores)
        )
        # Whether the token is the last member of the cluster that it reads.
        sees_itself = ops.logical_and(read == cluster, not self.group.key_shift)
        sees_itself = sees_itself[..., None]
        members, near, distances = self._last_members(cache, read, sees_itself)
        if not self.group.key_shift:
            members = ops.concatenate([members, row], axis=2)
            near = ops.concatenate([near, sees_itself], axis=-1)
            own = ops.zeros_like(distances[..., :1])
            distances = ops.concatenate([distances, own], axis=-1)
        query = ops.cast(tokens.query, self.group.compute_dtype)
        output = rows.attend_to_rows(self.group, query, members, near, distances)
        real = _real(tokens, (*shape, 1))[..., 0]
        newest = {
            "row": row[:, :, 0],
            "cluster": cluster,
            "position": ops.where(real, index, -1),
        }
        output = without_padding(output, real_tokens(inputs))
        return output, {**cache, "newest": newest}

    def _last_members(self, cache, cluster, sees_itself):
        """Returns what is remembered of a cluster `<int32>[B, H]`.

        `sees_itself`, `<bool>[B, H, 1]`, tells whether the token is a member. Returns
        rows `[B, H, R, E]`, which of them it sees `<bool>[B, H, R]`, and their relative
        positions `<int32>[B, H, R]`.
        """
        batch, heads, num_clusters, num_rows, size = ops.shape(cache["rows"])
        flat = ops.reshape(cache["rows"], (batch, heads, num_clusters, num_rows * size))
        members = membership.gather(flat, cluster[..., None])
        members = ops.reshape(members, (batch, heads, num_rows, size))
        count = entries_at(cache["counts"], cluster[..., None])
        ranks = _ranks(count[..., 0], num_rows)
        distances = ranks - count
        furthest = self.group.attention_window - ops.cast(sees_itself, "int32")
        near = ops.logical_and(ranks >= 0, distances >= -furthest)
        return members, near, distances

    def _remember_newest(self, cache, index, row):
        """Puts the newest token among the others, unless it is to be replaced.

        With shifted keys its value is that of the token `row` at `index`.
        """
        newest, counts = cache["newest"], cache["counts"]
        batch, heads, num_clusters, num_rows, size = ops.shape(cache["rows"])
        is_older = ops.logical_and(newest["position"] >= 0, newest["position"] < index)
        place = entries_at(counts, newest["cluster"][..., None])[..., 0] % num_rows
        place = newest["cluster"] * num_rows + place
        new = newest["row"]
        if self.group.key_shift:
            new = rows.open_rows(self.group, new)
            place = ops.where(is_older, place, cache["open"]["place"])
            position = ops.where(
                is_older, newest["position"], cache["open"]["position"]
            )
            cache = {**cache, "open": {"place": place, "position": position}}
        flat = ops.reshape(cache["rows"], (batch, heads, num_clusters * num_rows, size))
        old = membership.gather(flat, place[..., None])[..., 0, :]
        new = ops.where(is_older[..., None], new, old)
        if self.group.key_shift:
            follows = ops.logical_and(position >= 0, position == index - 1)
            new = rows.complete_rows(self.group, new, row, follows)
        place = membership.flat_positions(place[..., None], num_clusters * num_rows)
        flat = ops.scatter_update(
            ops.reshape(flat, (-1, size)), place[:, None], ops.reshape(new, (-1, size))
        )
        added = ops.one_hot(newest["cluster"], num_clusters, dtype="int32")
        return {
            **cache,
            "rows": ops.reshape(flat, ops.shape(cache["rows"])),
            "counts": counts + added * ops.cast(is_older, "int32")[..., None],
        }


def _entries(x, inputs, order, window):
    """Returns a mask or bias of positions for each window, or None."""
    if x is None:
        return None
    entries = gather_entries(x, order.tokens, length_of(inputs.value, 2))
    return ops.swapaxes(order.windows(entries[..., None], window), -1, -2)


def _ranks(counts, num_rows):
    """Ranks of the members in the places of a cluster; negative in empty ones.

    From `[...]` to `[..., num_rows]`: the member of rank r is at r modulo `num_rows`.
    """
    newest = counts[..., None] - 1
    places = np.arange(num_rows, dtype="int32")
    return newest - (newest - places) % num_rows


def _real(tokens, shape):
    """Tells which keys are no padding; their queries may be all the same."""
    mask = combine_masks(tokens.key_mask, tokens.inputs.key_mask)
    return ops.ones(shape, "bool") if mask is None else ops.broadcast_to(mask, shape)

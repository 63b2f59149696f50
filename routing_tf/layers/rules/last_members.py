"""Attention to the last members of a token's cluster: strictly causal."""

import numpy as np
from keras import ops

from routing_tf.layers import data_shapes
from routing_tf.layers import fused_attention
from routing_tf.layers import key_heads
from routing_tf.layers import membership
from routing_tf.layers import splash_attention
from routing_tf.layers.cluster_blocks import ClusterBlocks
from routing_tf.layers.cluster_blocks import block_size_for
from routing_tf.layers.cluster_order import ClusterOrder
from routing_tf.layers.cluster_order import chunk_size_for
from routing_tf.layers.cluster_order import ranks_in_clusters
from routing_tf.layers.decoding import rows
from routing_tf.layers.lengths import is_known
from routing_tf.layers.lengths import length_of
from routing_tf.layers.masks import combine_masks
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import entries_at
from routing_tf.layers.membership import gather_entries
from routing_tf.layers.rules import members_of_query
from routing_tf.layers.rules import rings
from routing_tf.layers.rules import rounds
from routing_tf.layers.rules.routed_tokens import best_clusters
from routing_tf.layers.rules.routed_tokens import own_clusters
from routing_tf.layers.rules.routed_tokens import real_keys
from routing_tf.layers.rules.routed_tokens import real_tokens
from routing_tf.layers.rules.rule import Rule
from routing_tf.layers.segments import segment_mask

# Blocks of first members are worth it up to so many windows of members of a cluster.
MOST_WINDOWS = 2


class LastMembers(Rule):
    """Attention of each token to the last members of its cluster, itself included.

    A token has one cluster; where queries choose on their own, or read several, see
    `members_of_query`.
    With shifted keys a token reads the values that follow the last members before it.
    Relative positions are differences of rank in the cluster. Padding belongs to a
    cluster of its own that nobody reads, and gets zero. The work is `(L + K * C) *
    (W + C)` pairs, linear in the length. A cache holds the last members of each
    cluster: its size does not grow with long contexts.
    """

    tokens_choose = True

    def attend(self, tokens, training=None):
        by_kernel = self._takes_kernel(tokens, training)
        if not tokens.shares_scores or self.group.clusters_per_query > 1:
            return members_of_query.attend(self.group, tokens, training)
        inputs = tokens.inputs
        clusters, num_clusters = own_clusters(tokens.key_scores, inputs.key_mask)
        window = self.group.known_window(tokens.length // tokens.num_copies)
        if by_kernel:
            return self._attend_by_kernel(tokens, clusters, num_clusters, window)
        joins = self._rounds(clusters, num_clusters, window, inputs.segments)
        if joins is None and self._fits_blocks(tokens, window, training):
            all_have_one = num_clusters == tokens.num_clusters
            blocks = self._blocks(tokens, clusters, window, all_have_one)
            return self._attend_in_blocks(tokens, blocks, training)
        order = ClusterOrder(clusters, num_clusters, chunk_size_for(window))
        key = order.arrange(ops.cast(tokens.key, self.group.compute_dtype))
        query = key
        if not tokens.shares_vectors:
            query = order.arrange(ops.cast(tokens.query, self.group.compute_dtype))
        # The token itself stands in its window, seen or not.
        window += self.group.key_shift
        mask = combine_masks(
            order.window_mask(window, self._nearest),
            segment_mask(
                inputs.segments,
                lambda x: gather_entries(x, order.tokens, tokens.length),
                lambda x: _entries(x, inputs, order, window)[..., 0, :],
            ),
        )
        if self.group.key_shift:
            mask = combine_masks(
                mask, _entries(inputs.value_mask, inputs, order, window)
            )
        output = rounds.attend(
            self.group,
            joins,
            order,
            lambda x: order.windows(order.arrange(x), window),
            tokens.value,
            (query, order.windows(key, window)),
            mask,
            _entries(inputs.token_bias, inputs, order, window),
            training,
            offset=order.window_offset(window),
        )
        return without_padding(output, real_tokens(inputs))

    def _takes_kernel(self, tokens, training):
        """Whether a kernel computes the attention, which keeps no weights of pairs."""
        implementation = fused_attention.chosen(self.group.attention_implementation)
        takes_it = implementation == "auto" and splash_attention.is_there()
        if implementation != "splash" and not takes_it:
            return False
        reason = splash_attention.obstacle(self.group, tokens.inputs, training)
        if not tokens.shares_scores:
            reason = "queries choose clusters apart from keys"
        if self.group.clusters_per_query > 1:
            reason = "queries read several clusters"
        if reason is not None:
            fused_attention.decline(implementation, reason)
        return reason is None

    def _attend_by_kernel(self, tokens, clusters, num_clusters, window):
        group, inputs = self.group, tokens.inputs
        query, key = (
            ops.cast(x, group.compute_dtype) for x in (tokens.query, tokens.key)
        )
        output = splash_attention.attend(
            query,
            key,
            tokens.value,
            clusters,
            num_clusters,
            window + group.key_shift,
            self._nearest,
            inputs.value_mask if group.key_shift else None,
        )
        return without_padding(output, real_tokens(inputs))

    @property
    def _nearest(self):
        """How far back in its cluster a token sees the first one, 0 for itself."""
        sees_itself = not self.group.key_shift and self.group.attends_to_self
        return int(not sees_itself)

    def _fits_blocks(self, tokens, window, training):
        """Whether first members in blocks, and later ones in chunks, are faster."""
        group = self.group
        # What is traced for batches of any size is often exported, too.
        if not is_known(*tokens.value.shape) or not data_shapes.may_follow_data():
            return False
        if 0 in tokens.value.shape:
            return False
        if group.entmax_alpha == "learned" or (group.dropout and training):
            return False  # Chunks know no heads, and would draw other numbers.
        # With fewer clusters most members are later ones.
        return tokens.length <= MOST_WINDOWS * window * tokens.num_clusters

    def _blocks(self, tokens, clusters, window, all_have_one):
        size, count = chunk_size_for(window), tokens.num_clusters
        block = block_size_for(tokens.length, count, window, size)
        window += self.group.key_shift
        return ClusterBlocks(clusters, count, window, block, size, all_have_one)

    def _attend_in_blocks(self, tokens, blocks, training):
        group, inputs = self.group, tokens.inputs
        key = ops.cast(tokens.key, group.compute_dtype)
        query, later_query, key_windows = blocks.arrange_and_read(key)
        key = query
        if not tokens.shares_vectors:
            query = ops.cast(tokens.query, group.compute_dtype)
            query, later_query = blocks.arrange(query)
        value, _, value_windows = blocks.arrange_and_read(tokens.value)
        value_mask = inputs.value_mask if group.key_shift else None
        mask, later_mask = blocks.entries(value_mask)
        bias, later_bias = blocks.entries(inputs.token_bias)
        own, later_own = _own_segments(blocks, inputs.segments)
        first = group.dot_product(
            query,
            key,
            value,
            attention_mask=combine_masks(blocks.mask(self._nearest), mask, own),
            bias=bias,
            use_causal_mask=True,
            training=training,
        )
        later = group.dot_product(
            later_query,
            key_windows,
            value_windows,
            attention_mask=combine_masks(
                blocks.window_mask(self._nearest), later_mask, later_own
            ),
            bias=later_bias,
            offset=blocks.offset,
            training=training,
        )
        output = blocks.restore(first, later)
        return without_padding(output, real_tokens(inputs))

    def _rounds(self, clusters, num_clusters, window, segments):
        if not self.group.joins_rounds:
            return None
        ranks = ranks_in_clusters(clusters, num_clusters)
        places = clusters * rounds.stride(self.group.num_clusters) + ranks
        ends = ranks + 1 - self.group.key_shift
        first, end = rounds.range_of_bucket(
            clusters, ends, window, self.group.num_clusters
        )
        if segments is not None:
            starts = ops.broadcast_to(segments.query_starts, ops.shape(clusters))
            first_own = places - ranks_in_clusters(clusters, num_clusters, starts)
            first = ops.maximum(first, first_own)
        return rounds.of_group(self.group, places, first, end)

    def make_cache(self, batch_size, max_length):
        group = self.group
        # Where a token always sees itself, it is the window's last one.
        sees_itself = not group.key_shift and not group.routes_queries
        sees_itself = sees_itself and group.clusters_per_query == 1
        num_rows = max(group.members_per_cluster - sees_itself, 1)
        num_rounds = self.group.num_rounds
        shape = (batch_size, self.group.num_key_heads * num_rounds)
        cache = {}
        if self.group.key_shift:
            # The row that was completed last, and the position of its key.
            cache["open"] = {
                "place": ops.zeros(shape, "int32"),
                "position": ops.full(shape, -1, dtype="int32"),
            }
        places, newest = (*shape, self.group.num_clusters, num_rows), {}
        if num_rounds > 1:
            # Where the keys of the rows stand in every round.
            cache["places"] = ops.zeros((*places, num_rounds), "int32")
            newest["places"] = ops.zeros((*shape, num_rounds), "int32")
        return {
            **cache,
            "rows": rows.empty_rows(self.group, *places),
            "counts": ops.zeros((*shape, self.group.num_clusters), "int32"),
            "newest": {
                "row": rows.empty_rows(self.group, *shape),
                "cluster": ops.zeros(shape, "int32"),
                "position": ops.full(shape, -1, dtype="int32"),
                **newest,
            },
        }

    def restart(self, cache):
        return restarted(cache)

    def fill_cache(self, cache, tokens):
        num_clusters, num_rows = cache["rows"].shape[2:4]
        batch, heads, length, _ = ops.shape(tokens.value)
        new_rows = rows.make_offers(self.group, tokens)
        clusters = ops.cast(ops.argmax(tokens.key_scores, axis=-1), "int32")
        real = real_keys(tokens, (batch, heads, length))
        last = rows.last_token(real)
        places = self._places(clusters, real)
        positions = np.arange(length, dtype="int32")
        older = ops.logical_and(real, positions != last[..., None])
        member_of = ops.where(older, clusters, num_clusters)
        members, counts = rings.last_entries(member_of, num_clusters, num_rows)
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
        own = {
            "row": membership.gather(new_rows, newest)[..., 0, :],
            "cluster": entries_at(clusters, newest)[..., 0],
            "position": last,
        }
        if "places" in cache:
            cache = {**cache, "places": membership.gather(places, members)}
            own["places"] = membership.gather(places, newest)[..., 0, :]
        return {
            **cache,
            "rows": membership.gather(new_rows, members),
            "counts": counts,
            "newest": own,
        }

    def _places(self, clusters, real):
        """Returns where keys stand in all rounds, `<int32>[B, H, L, R]`; or None."""
        group = self.group
        if group.num_rounds == 1:
            return None
        clusters = ops.where(real, clusters, group.num_clusters)
        places = clusters * rounds.stride(group.num_clusters)
        places += ranks_in_clusters(clusters, group.num_clusters + 1)
        return rounds.of_each_round(places, group.num_rounds)

    def step(self, cache, index, tokens):
        inputs = tokens.inputs
        row = rows.of_tokens(tokens)
        cache = self._remember_newest(cache, index, row[:, :, 0])
        shape = ops.shape(cache["counts"])[:2]
        cluster = ops.cast(ops.argmax(tokens.key_scores[:, :, 0], axis=-1), "int32")
        scores = tokens.query_scores[:, :, 0]
        read = best_clusters(scores, self.group.clusters_per_query)
        read, own_cluster, own_row = (
            key_heads.for_queries(x, tokens.query.shape[1])
            for x in (read, cluster, row)
        )
        # Whether the token is the last member of a cluster that it reads.
        is_member = ops.logical_and(
            read == own_cluster[..., None], not self.group.key_shift
        )
        members, near, distances, places = self._last_members(cache, read, is_member)
        if not self.group.key_shift:
            members = ops.concatenate([members, own_row], axis=2)
            sees_itself = ops.any(is_member, axis=-1, keepdims=True)
            sees_itself = ops.logical_and(sees_itself, self.group.attends_to_self)
            near = ops.concatenate([near, sees_itself], axis=-1)
            own = ops.zeros_like(distances[..., :1])
            distances = ops.concatenate([distances, own], axis=-1)
        query = ops.cast(tokens.query, self.group.compute_dtype)
        real = real_keys(tokens, (*shape, 1))[..., 0]
        newest = {
            "row": row[:, :, 0],
            "cluster": cluster,
            "position": ops.where(real, index, -1),
        }
        if not self.group.joins_rounds:
            output = rows.attend_to_rows(self.group, query, members, near, distances)
        else:
            joins = self._rounds_of_token(cache["counts"], cluster, read, is_member)
            bias = None
            if places is not None:
                newest["places"] = joins.places[:, :, 0]
                if not self.group.key_shift:
                    places = ops.concatenate([places, joins.places], axis=2)
                bias = joins.bias(places, joins.ranges)
            output = rows.attend_to_rows(
                self.group,
                query,
                members,
                near,
                distances,
                bias=bias,
                return_logsumexp=True,
            )
            output = joins.joined(*output, inputs.value)
        output = without_padding(output, real_tokens(inputs))
        return output, {**cache, "newest": newest}

    def _rounds_of_token(self, counts, cluster, read, is_member):
        """Returns the `Rounds` of the newest token, which reads one cluster."""
        num_clusters = self.group.num_clusters
        rank, end = (entries_at(counts, each) for each in (cluster[..., None], read))
        end += ops.cast(is_member, "int32")
        first, end = rounds.range_of_bucket(
            read, end, self.group.attention_window, num_clusters
        )
        place = cluster[..., None] * rounds.stride(num_clusters) + rank
        return rounds.of_group(self.group, place, first, end)

    def _last_members(self, cache, clusters, is_member):
        """Returns what is remembered of the N clusters `<int32>[B, H, N]` of a token.

        `is_member`, `<bool>[B, H, N]`, tells whether the token is a member. Returns M
        rows `[B, H, M, E]`, which of them it sees `<bool>[B, H, M]`, their relative
        positions `<int32>[B, H, M]`, and the places of their keys in all rounds, or
        None.
        """
        num_key_heads, _, num_rows = cache["rows"].shape[1:4]
        batch, heads, number = ops.shape(clusters)
        shape = (batch, heads, number * num_rows)
        clusters = key_heads.of_queries(clusters, num_key_heads)

        def members_of(x):
            found = rings.of_cluster(x, clusters)
            return ops.reshape(found, (*shape, ops.shape(x)[-1]))

        places = cache.get("places")
        places = None if places is None else members_of(places)
        counts = key_heads.all_queries(entries_at(cache["counts"], clusters))
        ranks = rings.ranks(counts, num_rows)
        distances = ranks - counts[..., None]
        furthest = self.group.members_per_cluster - ops.cast(is_member, "int32")
        near = ops.logical_and(ranks >= 0, distances >= -furthest[..., None])
        near, distances = (ops.reshape(x, shape) for x in (near, distances))
        return members_of(cache["rows"]), near, distances, places

    def _remember_newest(self, cache, index, row):
        """Puts the newest token among the others, unless it is to be replaced.

        With shifted keys its value is that of the token `row` at `index`.
        """
        newest, counts = cache["newest"], cache["counts"]
        num_clusters, num_rows = cache["rows"].shape[2:4]
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
        new = ops.where(is_older[..., None], new, rings.at(cache["rows"], place))
        if self.group.key_shift:
            follows = ops.logical_and(position >= 0, position == index - 1)
            new = rows.complete_rows(self.group, new, row, follows)
        if "places" in cache:
            old = cache["places"]
            own = ops.where(is_older[..., None], newest["places"], rings.at(old, place))
            cache = {**cache, "places": rings.updated(old, place, own)}
        added = ops.one_hot(newest["cluster"], num_clusters, dtype="int32")
        return {
            **cache,
            "rows": rings.updated(cache["rows"], place, new),
            "counts": counts + added * ops.cast(is_older, "int32")[..., None],
        }


def restarted(cache):
    """Returns a cache of last members in which there is none."""
    parts = {
        name: {**cache[name], "position": ops.full_like(cache[name]["position"], -1)}
        for name in ("newest", "open")
        if name in cache
    }
    return {**cache, "counts": ops.zeros_like(cache["counts"]), **parts}


def _own_segments(blocks, segments):
    """Tells which keys lie in a token's segment, in blocks and in chunks.

    Returns `<bool>[B, H, K, T, T]` and `<bool>[N, C, S]`, or None twice.
    """
    if segments is None:
        return None, None
    keys = blocks.entries(segments.value)
    first, windows = (x[..., 0, :, None] for x in keys)
    own = first, windows[:, -blocks.chunk_size :]
    return [query == key for query, key in zip(own, keys)]


def _entries(x, inputs, order, window):
    """Returns a mask or bias of positions for each window, or None."""
    if x is None:
        return None
    entries = gather_entries(x, order.tokens, length_of(inputs.value, 2))
    return ops.swapaxes(order.windows(entries[..., None], window), -1, -2)

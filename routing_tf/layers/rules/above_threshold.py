"""Clusters that choose all tokens above a threshold: strictly causal."""

import dataclasses

import numpy as np
from keras import ops

from routing_tf.layers import key_heads
from routing_tf.layers import membership
from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import without_padding
from routing_tf.layers.membership import entries_at
from routing_tf.layers.rules import rings
from routing_tf.layers.rules.last_members import LastMembers
from routing_tf.layers.rules.last_members import restarted
from routing_tf.layers.rules.routed_tokens import real_keys
from routing_tf.layers.rules.routed_tokens import real_tokens
from routing_tf.layers.rules.rule import Rule


class AboveThreshold(Rule):
    """Attention to the last members of all clusters whose thresholds a token reaches.

    Scores are differences from the thresholds. A token is a member of the clusters in
    which its score is not negative, of at most M = `group.max_clusters_per_token`
    clusters, those with its highest scores. Its results are averaged, as in expert
    choice; a token in no cluster gets zero. Other tokens have no influence on this, so
    no cluster overflows.

    A pass is that of `LastMembers` with M copies of each token, one after the other,
    each in another cluster. Copies that are not needed are in one more cluster and do
    not count. The work is M times that of token choice. A cache contains the last
    members of each cluster.
    """

    tokens_choose = True

    @property
    def num_copies(self):
        """Number of clusters that a token can be in."""
        return min(self.group.max_clusters_per_token, self.group.num_clusters)

    def members(self, scores):
        is_member, clusters = self._best(scores)
        chosen = ops.one_hot(clusters, scores.shape[-1], dtype="bool")
        return ops.any(ops.logical_and(chosen, is_member[..., None]), axis=-2)

    def attend(self, tokens, training=None):
        asks, read = is_member, clusters = self._best(tokens.query_scores)
        if not tokens.shares_scores:
            is_member, clusters = self._best(tokens.key_scores)
        copies = self._copies(tokens, (read, asks), (clusters, is_member))
        output = LastMembers(self.group).attend(copies, training=training)
        shape = (*ops.shape(asks), output.shape[-1])
        return self.mean_over_clusters(ops.reshape(output, shape), asks, axis=-2)

    def _best(self, scores):
        """Returns which thresholds are reached `<bool>[..., M]` of the best clusters.

        Also returns these clusters, `<int32>[..., M]`, all different, best first.
        """
        best, clusters = ops.top_k(scores, self.num_copies)
        return best >= 0, ops.cast(clusters, "int32")

    def _copies(self, tokens, of_queries, of_keys):
        """Returns `RoutedTokens` in which each token has a copy for each cluster."""
        number = self.num_copies

        def repeated(x):
            return None if x is None else ops.repeat(x, number, axis=2)

        def scores(clusters, is_member):
            own = ops.where(is_member, clusters, tokens.num_clusters)
            batch, heads, length, _ = ops.shape(own)
            own = ops.reshape(own, (batch, heads, length * number))
            return ops.one_hot(own, tokens.num_clusters + 1, dtype="float32")

        segments = tokens.inputs.segments
        names = ("value", "query_mask", "key_mask", "value_mask", "token_bias")
        inputs = dataclasses.replace(
            tokens.inputs,
            segments=segments and segments.repeated(number),
            **{n: repeated(getattr(tokens.inputs, n)) for n in names},
        )
        query = repeated(tokens.query)
        return dataclasses.replace(
            tokens,
            query=query,
            key=query if tokens.shares_vectors else repeated(tokens.key),
            query_scores=scores(*of_queries),
            key_scores=scores(*of_keys),
            query_mask=repeated(tokens.query_mask),
            key_mask=repeated(tokens.key_mask),
            inputs=inputs,
            num_copies=number,
        )

    def make_cache(self, batch_size, max_length):
        group = self.group
        # If a member always sees itself, it is the last one of the window.
        sees_itself = not group.key_shift and not group.routes_queries
        num_rows = max(group.attention_window - sees_itself, 1)
        shape = (batch_size, group.num_key_heads)
        chosen = (*shape, self.num_copies)
        cache = {}
        if group.key_shift:
            # The rows that were completed last, and the position of their key.
            cache["open"] = {
                "places": ops.zeros(chosen, "int32"),
                "is_member": ops.zeros(chosen, "bool"),
                "position": ops.full(shape, -1, dtype="int32"),
            }
        return {
            **cache,
            "rows": rows.empty_rows(group, *shape, group.num_clusters, num_rows),
            "counts": ops.zeros((*shape, group.num_clusters), "int32"),
            "newest": {
                "row": rows.empty_rows(group, *shape),
                "clusters": ops.zeros(chosen, "int32"),
                "is_member": ops.zeros(chosen, "bool"),
                "position": ops.full(shape, -1, dtype="int32"),
            },
        }

    def restart(self, cache):
        return restarted(cache)

    def fill_cache(self, cache, tokens):
        num_clusters, num_rows = cache["rows"].shape[2:4]
        batch, heads, length, _ = ops.shape(tokens.value)
        new_rows = rows.make_offers(self.group, tokens)
        is_member, clusters = self._best(tokens.key_scores)
        real = real_keys(tokens, (batch, heads, length))
        last = rows.last_token(real)
        positions = np.arange(length, dtype="int32")
        older = ops.logical_and(real, positions != last[..., None])
        stored = ops.logical_and(is_member, older[..., None])
        member_of = ops.where(stored, clusters, num_clusters)
        member_of = ops.reshape(member_of, (batch, heads, length * self.num_copies))
        entries, counts = rings.last_entries(member_of, num_clusters, num_rows)
        newest = ops.maximum(last, 0)
        if "open" in cache:
            before = ops.maximum(newest - 1, 0)
            of_before = membership.gather(clusters, before)
            rank = entries_at(counts, of_before) - 1
            is_open = membership.gather(stored, before)
            cache = {
                **cache,
                "open": {
                    "places": of_before * num_rows + rank % num_rows,
                    "is_member": ops.logical_and(is_open, newest[..., None] > 0),
                    "position": before,
                },
            }
        return {
            **cache,
            "rows": membership.gather(new_rows, entries // self.num_copies),
            "counts": counts,
            "newest": {
                "row": membership.gather(new_rows, newest),
                "clusters": membership.gather(clusters, newest),
                "is_member": membership.gather(is_member, newest),
                "position": last,
            },
        }

    def step(self, cache, index, tokens):
        group, inputs = self.group, tokens.inputs
        row = rows.of_tokens(tokens)
        cache = self._remember_newest(cache, index, row)
        asks, read = self._best(tokens.query_scores[:, :, 0])
        is_member, clusters = self._best(tokens.key_scores[:, :, 0])
        asks, read, own_is_member, own_clusters, own_row = (
            key_heads.for_queries(x, tokens.query.shape[1])
            for x in (asks, read, is_member, clusters, row)
        )
        # Whether the token is the last member of the clusters that it reads.
        sees_itself = ops.logical_and(
            read[..., None] == own_clusters[..., None, :], own_is_member[..., None, :]
        )
        sees_itself = ops.logical_and(
            ops.any(sees_itself, axis=-1, keepdims=True), not group.key_shift
        )
        read_of_keys = key_heads.of_queries(read, cache["rows"].shape[1])
        members, counts = (
            key_heads.all_queries(find(cache[name], read_of_keys))
            for name, find in (("rows", rings.of_cluster), ("counts", entries_at))
        )
        ranks = rings.ranks(counts, cache["rows"].shape[3])
        distances = ranks - counts[..., None]
        furthest = group.attention_window - ops.cast(sees_itself, "int32")
        near = ops.logical_and(ranks >= 0, distances >= -furthest)
        if not group.key_shift:
            shape = (*ops.shape(read), 1, row.shape[-1])
            own = ops.broadcast_to(own_row[:, :, None], shape)
            members = ops.concatenate([members, own], axis=3)
            near = ops.concatenate([near, sees_itself], axis=-1)
            own = ops.zeros_like(distances[..., :1])
            distances = ops.concatenate([distances, own], axis=-1)
        query = ops.cast(tokens.query, group.compute_dtype)[:, :, None]
        output = rows.attend_to_rows(group, query, members, near, distances)
        output = self.mean_over_clusters(output[..., 0, :], asks, axis=-2)
        output = output[:, :, None]
        real = real_keys(tokens, (*ops.shape(clusters)[:2], 1))[..., 0]
        newest = {
            "row": row[:, :, 0],
            "clusters": clusters,
            "is_member": is_member,
            "position": ops.where(real, index, -1),
        }
        output = without_padding(output, real_tokens(inputs))
        return output, {**cache, "newest": newest}

    def _remember_newest(self, cache, index, row):
        """Adds the newest token to the others, unless it will be replaced.

        With shifted keys, its value is that of the token `row` at `index`.
        """
        newest, counts = cache["newest"], cache["counts"]
        num_clusters, num_rows = cache["rows"].shape[2:4]
        clusters, position = newest["clusters"], newest["position"]
        is_older = ops.logical_and(position >= 0, position < index)
        enters = ops.logical_and(newest["is_member"], is_older[..., None])
        places = clusters * num_rows + entries_at(counts, clusters) % num_rows
        new = newest["row"]
        if self.group.key_shift:
            new, last = rows.open_rows(self.group, new), cache["open"]
            places = ops.where(is_older[..., None], places, last["places"])
            is_open = ops.where(is_older[..., None], enters, last["is_member"])
            position = ops.where(is_older, position, last["position"])
            opened = {"places": places, "is_member": is_open, "position": position}
            cache = {**cache, "open": opened}
        old = rings.at(cache["rows"], places)
        new = ops.where(enters[..., None], new[:, :, None], old)
        if self.group.key_shift:
            follows = ops.logical_and(position >= 0, position == index - 1)
            follows = ops.logical_and(is_open, follows[..., None])
            new = rows.complete_rows(self.group, new, row, follows)
        added = ops.one_hot(clusters, num_clusters, dtype="int32")
        added = added * ops.cast(enters, "int32")[..., None]
        return {
            **cache,
            "rows": rings.updated(cache["rows"], places, new),
            "counts": counts + ops.sum(added, axis=2),
        }

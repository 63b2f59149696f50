"""Clusters that choose all tokens above a threshold: strictly causal."""

import dataclasses

from keras import ops

from routing_tf.layers import backends
from routing_tf.layers import key_heads
from routing_tf.layers.decoding import rows
from routing_tf.layers.masks import without_padding
from routing_tf.layers.rules import rings
from routing_tf.layers.rules.last_members import LastMembers
from routing_tf.layers.rules.next_members import NextMembers
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
        chosen = backends.one_hot(clusters, scores.shape[-1], dtype="bool")
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
        best, clusters = backends.top_k(scores, self.num_copies)
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
            return backends.one_hot(own, tokens.num_clusters + 1, dtype="float32")

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
        shape = (batch_size, group.num_key_heads, group.num_clusters)
        return {
            **self._no_pending_key(batch_size),
            "rows": rows.empty_rows(group, *shape, num_rows),
            "counts": ops.zeros(shape, "int32"),
        }

    def restart(self, cache):
        cache = self._restarted(cache)
        return {**cache, "counts": ops.zeros_like(cache["counts"])}

    def fill_cache(self, cache, tokens):
        cache, tokens = self._offered(self.restart(cache), 0, tokens)
        is_member, clusters = self._joined(tokens)
        return rings.joined(cache, clusters, is_member, rows=rows.of_tokens(tokens))

    def step(self, cache, index, tokens):
        group, inputs = self.group, tokens.inputs
        cache, tokens = self._offered(cache, index, tokens)
        asks, read = (
            # where the cluster of the key serves its queries
            key_heads.for_queries(x, tokens.query.shape[1])
            for x in self._best(tokens.query_scores)
        )
        is_member, clusters = self._joined(tokens)
        joins = backends.one_hot(clusters, tokens.num_clusters, dtype="int32")
        joins = ops.sum(joins * ops.cast(is_member, "int32")[..., None], axis=3)
        members = NextMembers(
            cache,
            joins,
            read,
            cache["rows"].shape[3],
            group.attention_window,
            group.key_shift,
        )
        new_rows = rows.of_tokens(tokens)
        query = ops.cast(tokens.query, group.compute_dtype)
        output = rows.attend_to_rows(
            group,
            ops.repeat(query, self.num_copies, axis=2)[:, :, :, None],
            _apart(members.rows(cache["rows"], new_rows)),
            _apart(members.visible)[..., None, :],
            _apart(members.distances)[..., None, :],
        )
        output = ops.reshape(output, (*ops.shape(asks), output.shape[-1]))
        output = self.mean_over_clusters(output, asks, axis=-2)
        cache = rings.joined(cache, clusters, is_member, rows=new_rows)
        return without_padding(output, real_tokens(inputs)), cache

    def _joined(self, tokens):
        """Returns what `_best` does for keys, of which padding is no member."""
        is_member, clusters = self._best(tokens.key_scores)
        if tokens.key_mask is not None:
            is_member = ops.logical_and(is_member, tokens.key_mask[..., None])
        return is_member, clusters


def _apart(x):
    """From `[B, H, T, M, ...]` to `[B, H, T * M, ...]`: each read on its own."""
    batch, heads, length, number, *rest = ops.shape(x)
    return ops.reshape(x, (batch, heads, length * number, *rest))

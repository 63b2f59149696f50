"""The common part of all patterns whose queries see the members of a cluster."""

import dataclasses

from keras import ops

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.routing import exploring
from routing_tf.layers.routing import membership
from routing_tf.layers.routing import segment_members
from routing_tf.layers.routing.inside_clusters import BestCluster
from routing_tf.layers.routing.inside_clusters import BestClusterOfSegment
from routing_tf.layers.routing.inside_clusters import InsideClusters
from routing_tf.layers.routing.inside_clusters import InsideSegments
from routing_tf.layers.routing.online_kmeans import OnlineKMeans
from routing_tf.layers.routing.online_kmeans import normalize
from routing_tf.layers.routing.rule import Assignment
from routing_tf.layers.routing.rule import RoutedTokens
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.head_inputs import read_next_values
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import smaller
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_positive_integer

QUERY_CLUSTERS = ("query", "key")


class ClusteredHeads(HeadGroup):
    """Heads that attend inside clusters; subclasses say who is a member.

    Queries and keys are layer-normalised and scored against the clusters, in float32
    even with `dtype="float64"`. Then one of `layers.routing` says how tokens
    attend: under a causal mask the group's `causal_rule`; in attention to another
    sequence each query sees the members of its best cluster; elsewhere attention is
    dense inside each cluster, and a token's results are averaged over its clusters.
    Rotary positions turn queries and keys after scoring: only content chooses clusters,
    and positions count inside a cluster. With `qk_norm`, learned scales multiply these
    vectors before they are compared, without the factor `key_dim**-0.5`, so that scales
    of 1 change no logit. Where queries are keys, both scales multiply each vector.

    Args:
        num_heads: number of heads in the group.
        attention_window: number of members of a cluster, in tokens. A window longer
            than the input is cut to it.
        share_query_key: whether the projection of the queries also makes the keys. In
            self-attention, queries and keys are then the same and have one membership.
            Defaults to True.
        query_cluster: which cluster a token reads if queries and keys are projected
            separately and each token has one cluster: the best one of its `"query"`
            (the default) or that of its `"key"`.
        exploring_queries: how many random queries of each head, new ones in each
            training step of self-attention, see everything that the mask lets them see
            instead of their cluster, so that a head learns about matches in other
            clusters. Work grows by that many queries times the length; more than the
            length means all queries. They have no relative positions. Padding does not
            explore, and expert choice in the scope `"prefix"` has no exploring queries.
            Positions are the same for all sequences of a batch, and `dropout_seed` is
            also their seed. Defaults to 0.
        **kwargs: arguments of `HeadGroup`.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members.

    Raises:
        ValueError: when built, if `key_dim` is less than 2; when called, if
            `use_causal_mask=True` and query and value differ in length.

    Reference: `clustered_local_attention_helper` of the release.
    """

    has_one_softmax = True
    compares_by_products = True
    supports_segments = True
    # Only content finds clusters; their members are also compared by position.
    compares_inputs = False
    #: Number of clusters that a query reads in token choice, see `RoutedHeads`.
    clusters_per_query = 1
    # Each of them reads a copy of its members.
    queries_per_step = 32
    kmeans_class = OnlineKMeans
    #: Added to a token's number of clusters, by which what it gets there is divided.
    count_offset = 0.0

    attention_window = Argument(check_positive_integer)
    share_query_key = Argument(check_flag)
    query_cluster = Argument(check_choice, QUERY_CLUSTERS)
    exploring_queries = Argument(check_non_negative_integer)

    def __init__(
        self,
        num_heads,
        attention_window,
        share_query_key=True,
        query_cluster="query",
        exploring_queries=0,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        self.query_cluster = query_cluster
        self.attention_window = attention_window
        self.share_query_key = share_query_key
        self.exploring_queries = exploring_queries
        if self.exploring_queries:
            self.exploring_seed = exploring.make_seed(self.dropout_seed)
        # The centroids, see `add_centroids`; None if clusters have none.
        self.kmeans = None
        # Not for Keras to track.
        object.__setattr__(self, "_rules", {})

    def add_centroids(self, num_clusters, clustering):
        """Gives the clusters learned centroids, which a `Clustering` moves."""
        self.kmeans = self.kmeans_class(
            num_clusters=num_clusters,
            **clustering.to_dict(),
            name="kmeans",
            dtype="float32",
        )
        self.num_clusters = num_clusters
        clustering.set_attributes(self)

    @property
    def needs_keys(self):
        return not self.share_query_key

    def has_softmax_alone(self, inputs, training):
        if self.clusters_per_query > 1:
            return False
        return super().has_softmax_alone(inputs, training)

    def build(self, query_shape, key_shape, value_shape):
        if query_shape[-1] < 2:
            raise ValueError(
                "`key_dim` must be at least 2 in heads that normalize each query over "
                f"it. Received: key_dim={query_shape[-1]}"
            )
        super().build(query_shape, key_shape or query_shape, value_shape)
        if self.kmeans is not None:
            batch, _, *rest = query_shape
            self.kmeans.build((batch, self.num_key_heads, *rest))

    @property
    def routes_queries(self):
        """Whether queries choose the cluster that they read separately from keys."""
        return not self.share_query_key and self.query_cluster == "query"

    def rule(self, kind):
        """Returns the `Rule` of a class, which is made once sizes are known."""
        if kind in self._rules:
            return self._rules[kind]
        rule = kind(self)
        if self.key_dim is not None:
            self._rules[kind] = rule
        return rule

    def whole_sequence_rule(self, has_segments=False):
        """Returns the `Rule` of members that are chosen from the whole sequence."""
        return self.rule(InsideSegments if has_segments else InsideClusters)

    def memory_rule(self, has_segments=False):
        """Returns how queries attend to another sequence, a `Rule`."""
        return self.rule(BestClusterOfSegment if has_segments else BestCluster)

    def causal_rule(self, routing_scope=None, has_segments=False):
        """Returns the `Rule` of attention under a causal mask."""
        return self.whole_sequence_rule(has_segments)

    def assign(self, streams, masks, training=None, adds_losses=True):
        """Finds the clusters of tokens; a subclass without centroids says how.

        `streams` are normalised queries and keys, or only keys that are also the
        queries, `<float32>[batch, heads, length, key_dim]`. `masks`, one for each
        stream, are `<bool>[batch, 1 or heads, length]`, True for real tokens, or None.
        Returns a list of `Assignment`. State moves only in training.
        """
        number, own = self.num_key_value_heads, streams
        is_grouped = number < self.num_heads and self.remembers_key_heads
        if is_grouped:
            streams = [head_inputs.in_one_sequence(x, number) for x in own]
            masks = [
                None if mask is None else ops.tile(mask, (1, 1, x.shape[1] // number))
                for mask, x in zip(masks, own, strict=True)
            ]
        scores = self.scores(streams, masks, training, adds_losses)
        if is_grouped:
            scores = [
                head_inputs.in_heads(*each) for each in zip(scores, own, strict=True)
            ]
        return [Assignment(own, self.num_clusters) for own in scores]

    def scores(self, streams, masks, training=None, adds_losses=True):
        """Returns scores against the centroids, `<float32>[B, H, L, K]` each."""
        if adds_losses:
            return self.kmeans(tuple(streams), token_mask=masks, training=training)
        return [self.kmeans.scores(stream) for stream in streams]

    @property
    def near_tie(self):
        """Difference of scores up to which tokens are equal, see `membership`."""
        if self.kmeans is None:
            return 0.0
        return membership.NEAR_TIE * (self.key_dim or 0)

    def choose(self, assigned, mask, training=None):
        """Returns sorted members `<int>[B, H, K, W]`, and a mask of them or None.

        Each cluster takes the tokens that score highest. `mask` is `[B, 1 or H, L]`.
        """
        scores = assigned.scores
        window = self.window(length_of(scores, 2))
        near_tie = 0.0 if training else self.near_tie
        return membership.expert_choice(scores, window, mask, near_tie), None

    def choose_in_segments(self, assigned, starts, mask, training=None):
        """Returns who is a member within each segment, `<bool>[B, H, K, L]`.

        `starts` `<int32>[B, 1, L]` are positions at which their segments start.
        """
        near_tie, window = 0.0 if training else self.near_tie, self.attention_window
        return segment_members.expert_choice(
            assigned.scores, window, starts, mask, near_tie
        )

    def shifted(self, inputs):
        # Members are keys, so values are moved to them.
        return read_next_values(inputs) if self.key_shift else inputs

    def attend(self, inputs, training=None):
        rule = self._rule_of(inputs)
        tokens = self.routed_tokens(inputs, rule, training)
        if self.num_key_value_heads != self.num_heads:
            tokens = tokens.for_queries(self.num_heads)
        output = rule.attend(tokens, training=training)
        if not (training and self.exploring_queries and rule.lets_explore):
            return output
        if inputs.is_cross_attention:
            return output
        return self.explored(output, tokens, self.for_queries(inputs), training)

    def explored(self, output, tokens, inputs, training):
        """Returns the output with that of exploring queries, see `exploring`."""
        return exploring.explore(self, tokens, inputs, output, training)

    def _rule_of(self, inputs):
        has_segments = inputs.segments is not None
        if inputs.use_causal_mask:
            return self.causal_rule(inputs.routing_scope, has_segments)
        if inputs.is_cross_attention:
            return self.memory_rule(has_segments)
        return self.whole_sequence_rule(has_segments)

    @property
    def tokens_per_step(self):
        return self.causal_rule("prefix").tokens_per_step

    def make_cache(self, batch_size, max_length, positions=None):
        return self.causal_rule("prefix").make_cache(batch_size, max_length)

    def start(self, cache, inputs):
        # What attends and what is remembered has the same clusters.
        rule = self.causal_rule("prefix")
        tokens = self.routed_tokens(inputs, rule)
        shifted = dataclasses.replace(tokens, inputs=self.shifted(tokens.inputs))
        attending = self._rule_of(inputs)
        output = attending.attend(shifted.for_queries(self.num_heads), training=False)
        return output, rule.fill_cache(cache, tokens.in_last_segment())

    def step(self, cache, index, inputs):
        rule = self.causal_rule("prefix")
        tokens = self.next_tokens(inputs, rule, cache, index)
        return rule.step(cache, index, tokens)

    def restart_cache(self, cache):
        return self.causal_rule("prefix").restart(cache)

    def max_positions(self, cache):
        return None

    def make_memory(self, inputs, max_length):
        rule = self.memory_rule()
        # Only the memory: its keys serve as queries.
        inputs = dataclasses.replace(inputs, query=inputs.key, key=None)
        return rule.make_memory(self.routed_tokens(inputs, rule))

    def restart_memory(self, cache):
        return self.memory_rule().restart(cache)

    def read_memory(self, cache, index, inputs):
        rule = self.memory_rule()
        tokens = self.next_tokens(inputs, rule, cache, index)
        return rule.step(cache, index, tokens)

    def routed_tokens(self, inputs, rule, training=False):
        """Returns the `RoutedTokens` of a call for a `Rule`; training moves state."""
        query, key = self.vectors(inputs)
        shares_clusters = inputs.key is None
        if not shares_clusters and rule.tokens_choose:
            shares_clusters = not self.routes_queries
        streams, masks = [query, key], [inputs.query_mask, inputs.key_mask]
        if shares_clusters:
            streams, masks = streams[1:], masks[1:]
        assigned = self.assign(streams, masks, training, inputs.adds_losses)
        shares_vectors = query is key
        if self.qk_norm:
            query, key = self.normalized(query, key)
            shares_vectors = False
        if self.rotary_positions:
            query = self.rotated(query, inputs)
            key = query if shares_vectors else self.rotated(key, inputs)
        return RoutedTokens(
            query,
            key,
            assigned[0],
            assigned[-1],
            masks[0],
            masks[-1],
            inputs,
            shares_vectors,
            shares_clusters,
        )

    def normalized(self, query, key):
        given = (query, self.query_scale), (key, self.key_scale)
        return [x * ops.cast(scale, x.dtype) for x, scale in given]

    def vectors(self, inputs):
        """Returns normalised queries and keys, `<float32>`; the same if they are."""
        query = normalize(inputs.query)
        return query, query if inputs.key is None else normalize(inputs.key)

    def next_tokens(self, inputs, rule, cache, index):
        """Returns the `RoutedTokens` of tokens from `index` on, after a cache."""
        return self.routed_tokens(inputs, rule)

    def window(self, length):
        """Number of members of a cluster among `length` tokens."""
        return smaller(self.attention_window, length)

    def get_config(self):
        config = super().get_config()
        return (
            config if self.kmeans is None else {**config, **self.clustering.to_dict()}
        )

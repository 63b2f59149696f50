"""Routing attention: queries see the keys of their cluster."""

import keras

from routing_tf.layers.heads.clustered import CentroidHeads
from routing_tf.layers.moving_thresholds import MovingThresholds
from routing_tf.layers.rules.above_threshold import AboveThreshold
from routing_tf.layers.rules.best_members import BestMembers
from routing_tf.layers.rules.last_members import LastMembers
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_positive_integer
from routing_tf.layers.validation import check_rate

ROUTINGS = (None, "expert_choice", "token_choice", "expert_threshold")
TOKEN_CHOICE = (None, "token_choice")
# Those in which each token attends to the last members of clusters up to itself.
CAUSAL_ROUTINGS = ("token_choice", "expert_threshold")
ROUTING_SCOPES = ("full", "prefix")


@keras.saving.register_keras_serializable("routing_tf")
class RoutedHeads(CentroidHeads):
    """Heads that attend inside clusters of tokens with similar content.

    Queries and keys are layer-normalised and scored against learned centroids. Who
    chooses is the argument `routing`; with None, the default, what is sound: token
    choice in self-attention under a causal mask, expert choice elsewhere.

    - `"expert_choice"`: each centroid takes the `attention_window` tokens that score
      highest. Attention is dense inside a cluster, and a token's results are averaged
      over the clusters it sits in. Clusters are balanced. Under a causal mask no query
      sees a later key, but with `routing_scope="full"`, the rule of the paper and the
      release, whether a token is a member depends on later tokens: outputs leak.
      `routing_scope="prefix"` judges membership among the tokens up to the query, with
      `length * num_clusters * (attention_window + prefix_block_size)` pairs: those of
      full attention and more.
    - `"token_choice"`: each token goes to the best centroid of its key, and attends to
      the last `attention_window` tokens of the cluster that its query finds best (the
      same one with shared queries and keys), itself included. Strictly causal, at a
      cost that is linear in the length. It needs a causal mask and works in
      self-attention only.
    - `"expert_threshold"`: expert choice without competition. Each centroid takes the
      tokens that score at least as high as its threshold, a moving average of the score
      that one of `num_clusters` even shares of the tokens reaches in training, see
      `MovingThresholds`. So a token sits in about one cluster on average: in none, or
      in as many as `max_clusters_per_token`, those whose thresholds it is furthest
      above. In each it attends to the last `attention_window` members, itself included,
      and its results are averaged; in none it gets zero. Strictly causal, at
      `max_clusters_per_token` times the cost of token choice, and for causal
      self-attention like it. Queries that are projected apart have thresholds of their
      own. Before the first training step all thresholds are 0.

    In attention to another sequence each centroid takes the `attention_window` best
    tokens of that sequence, and each query sees those of its own best centroid.

    Tokens of equal content have equal scores. In expert choice the earlier ones are
    taken; scores that the rounding of float32 could tell apart are equal but in
    training. In half precision rounding may decide.

    With `key_shift=1` members and clusters are the same; but a query compares itself
    with the earlier members, without itself, and reads the value that follows each.
    Ranks are those of the members, so relative positions count from 1. In token choice
    those are the last `attention_window` members before it.

    State: that of `OnlineKMeans`, and with `"expert_threshold"` of `MovingThresholds`,
    moved when `training=True`. Padding is no member as long as there are enough tokens,
    is never seen, and moves no centroid and no threshold.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster that a token sees, in tokens.
            A window longer than the input is cut to it.
        routing: who chooses, `"expert_choice"`, `"token_choice"` or
            `"expert_threshold"`; None (the default) for the one of the first two that
            is sound, see above.
        routing_scope: in expert choice under a causal mask, the tokens that compete
            with each other: `"full"` (the default), those of the whole sequence, or
            `"prefix"`, those up to the query. The other routings are the same in both.
            Calls of layers and models may name another one, as the argument
            `routing_scope`.
        prefix_block_size: number of queries that go at once with the scope
            `"prefix"`, in tokens. It does not change results: more take more memory,
            fewer more turns. None (the default) for `attention_window`.
        max_clusters_per_token: number of clusters that a token may sit in with
            `"expert_threshold"`. If scores were independent, about 8 of 100 tokens
            would be in more than 2, the default.
        clusters_per_query: in token choice, number of clusters that a query reads, its
            best ones: the last `attention_window // clusters_per_query` members of
            each. What lies behind the border of the best cluster is not lost then. A
            token is still a member of one. It must divide `attention_window`. Defaults
            to 1.
        threshold_decay: share of the thresholds' old average kept at each training
            step, in [0, 1). Defaults to 0.99.
        share_query_key: whether keys are made by the projection of the queries. In
            self-attention queries and keys are then the same and have one routing.
            Defaults to True.
        **kwargs: arguments of `Clustering`, which say how centroids move;
            `query_cluster` and `exploring_queries` of `ClusteredHeads`; and those of
            `HeadGroup`, where relative positions are in ranks.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the list of members in order of position. The clustering loss is added
    to `losses`.

    Raises:
        ValueError: if `attention_window`, `prefix_block_size` or
            `max_clusters_per_token` is not a positive integer, `routing` or
            `routing_scope` is unknown, `threshold_decay` is not in [0, 1), or an
            argument is refused by `HeadGroup` or `Clustering`; when built, if `key_dim`
            is less than 2; when called, if `use_causal_mask=True` and query and value
            differ in length, with token choice or thresholds if there is no causal mask
            or the value is another sequence, or with `routing=None` if there is a
            causal mask and the value is another sequence.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.RoutedHeads(2, num_clusters=4, attention_window=8, key_shift=1)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: paper, section 4.1 and Algorithm 1, and
    `clustered_local_attention_helper` of the release for expert choice. Thresholds are
    those of `MovingThresholds`, whose paper lets tokens above them pass an expert's
    feed-forward network. What members attend to, and a limit of clusters per token in
    place of one of tokens per cluster, are this package's own; so are token choice and
    the prefix scope.
    """

    def __init__(
        self,
        num_heads,
        num_clusters,
        attention_window,
        routing=None,
        routing_scope="full",
        max_clusters_per_token=2,
        threshold_decay=0.99,
        clusters_per_query=1,
        **kwargs,
    ):
        super().__init__(num_heads, num_clusters, attention_window, **kwargs)
        check_choice("routing", routing, ROUTINGS)
        check_rate("threshold_decay", threshold_decay)
        self.routing = routing
        self.routing_scope = routing_scope
        self.max_clusters_per_token = check_positive_integer(
            "max_clusters_per_token", max_clusters_per_token
        )
        self.threshold_decay = threshold_decay
        self.clusters_per_query = check_positive_integer(
            "clusters_per_query", clusters_per_query
        )
        check_clusters_per_query(self)
        self.thresholds = None
        if routing == "expert_threshold":
            self.thresholds = MovingThresholds(
                num_streams=1 + self.routes_queries,
                decay=threshold_decay,
                name="thresholds",
                dtype="float32",
            )

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        if self.thresholds is not None:
            self.thresholds.build((None, self.num_key_heads, None, self.num_clusters))

    def scores(self, streams, masks, training=None):
        scores = super().scores(streams, masks, training=training)
        if self.thresholds is None:
            return scores
        return self.thresholds(list(scores), token_masks=masks, training=training)

    def bare_scores(self, streams):
        scores = super().bare_scores(streams)
        return scores if self.thresholds is None else self.thresholds.margins(scores)

    @property
    def routing_scope(self):
        """The tokens that compete in expert choice; may be set, see above."""
        return self._routing_scope

    @routing_scope.setter
    def routing_scope(self, value):
        check_choice("routing_scope", value, ROUTING_SCOPES)
        self._routing_scope = value

    def causal_rule(self, routing_scope=None):
        if self.routing in TOKEN_CHOICE:
            return LastMembers(self)
        if self.routing == "expert_threshold":
            return AboveThreshold(self)
        if (routing_scope or self.routing_scope) == "prefix":
            return BestMembers(self)
        return super().causal_rule()

    def attend(self, inputs, training=None):
        self._check_call(inputs)
        return super().attend(inputs, training=training)

    def make_memory(self, inputs, max_length):
        self._check_call(inputs)
        return super().make_memory(inputs, max_length)

    def _check_call(self, inputs):
        """Refuses calls for which the routing has no rule."""
        is_causal = inputs.use_causal_mask and not inputs.is_cross_attention
        if self.routing in CAUSAL_ROUTINGS and not is_causal:
            raise ValueError(
                f'`routing="{self.routing}"` works in self-attention under a causal '
                f"mask only. Received: use_causal_mask={inputs.use_causal_mask}, "
                f"is_cross_attention={inputs.is_cross_attention}. Pass "
                "`use_causal_mask=True` and no `value`, or take "
                '`routing="expert_choice"`'
            )
        if self.routing is None and inputs.use_causal_mask and not is_causal:
            raise ValueError(
                "`routing=None` is the sound routing, and there is none for a causal "
                "mask over another sequence. Received: use_causal_mask=True, "
                "is_cross_attention=True. Leave the mask or the `value` out, or name "
                'what is meant, `routing="expert_choice"`'
            )

    def num_candidates(self, length):
        return self.window(length)

    def is_member(self, ranks, num_tokens):
        return ranks < self.attention_window


def check_clusters_per_query(settings):
    """Raises a `ValueError` unless a query can read so many clusters.

    Args:
        settings: the heads, or what has their settings under the same names.
    """
    number = settings.clusters_per_query
    if number == 1:
        return
    if settings.routing not in TOKEN_CHOICE:
        raise ValueError(
            '`clusters_per_query` must be 1 except with `routing="token_choice"`. '
            f"Received: clusters_per_query={number} with routing={settings.routing!r}"
        )
    if settings.entmax_alpha is not None:
        raise ValueError(
            "`clusters_per_query` must be 1 with `entmax_alpha`, whose weights in "
            "several clusters cannot be joined. Received: clusters_per_query="
            f"{number} with entmax_alpha={settings.entmax_alpha!r}"
        )
    if number > settings.num_clusters or settings.attention_window % number:
        raise ValueError(
            "`clusters_per_query` must divide `attention_window` and be at most "
            f"`num_clusters`. Received: clusters_per_query={number} with "
            f"attention_window={settings.attention_window} and "
            f"num_clusters={settings.num_clusters}"
        )

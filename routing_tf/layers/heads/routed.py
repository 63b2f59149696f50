"""Routing attention: queries see the keys of their cluster."""

import keras

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing.best_members import BestMembers
from routing_tf.layers.routing.clustering import Clustering
from routing_tf.layers.routing.last_members import LastMembers
from routing_tf.layers.support.serialization import class_of_the_zoo
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate

ROUTINGS = (None, "expert_choice", "token_choice", "expert_threshold")
TOKEN_CHOICE = (None, "token_choice")
# The rules in which each token attends to the last members of clusters up to itself.
CAUSAL_ROUTINGS = ("token_choice", "expert_threshold")
ROUTING_SCOPES = ("full", "prefix")


@keras.saving.register_keras_serializable("routing_tf")
class RoutedHeads(ClusteredHeads):
    """Heads that attend inside clusters of tokens with similar content.

    Queries and keys are layer-normalised and scored against learned centroids. The
    argument `routing` says who chooses:

    - `"token_choice"`: each token goes to the best centroid of its key, and attends to
      the last `attention_window` tokens of the cluster that is best for its query,
      itself included. Strictly causal, at a cost that is linear in the length. Only for
      self-attention under a causal mask.
    - `"expert_choice"` (the paper): each centroid takes the `attention_window` tokens
      that score highest, so clusters are balanced. Attention is dense inside a cluster,
      and a token's results are averaged over its clusters. Under a causal mask, with
      `routing_scope="full"`, later tokens influence who is a member, so outputs leak;
      `routing_scope="prefix"` judges membership among the tokens up to the query, and
      costs more than full attention.
    - `"expert_threshold"`: each centroid takes the tokens that score at least as high
      as its threshold. Makes `zoo.ThresholdHeads`.

    `None`, the default, is token choice in self-attention under a causal mask, and
    expert choice elsewhere. In attention to another sequence, each centroid takes the
    best tokens of that sequence, and each query sees those of its best centroid.

    With `key_shift=1`, clusters and members stay the same. A query compares itself with
    the earlier members, not with itself, and reads the value that follows each member.
    Relative positions then count from 1.

    State: that of `OnlineKMeans`, which moves when `training=True`. Padding is never
    seen, and moves no centroid.

    [How routing works](docs/how_routing_works.md) explains all this with pictures, and
    has the details of each rule.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster that a token sees, in tokens.
            A window longer than the input is cut to it.
        routing: who chooses, `"expert_choice"`, `"token_choice"` or
            `"expert_threshold"`; None (the default) for the sound choice, see above.
        routing_scope: in expert choice under a causal mask, the tokens that compete
            with each other: `"full"` (the default), those of the whole sequence, or
            `"prefix"`, those up to the query. The other rules are the same in both
            scopes. The call argument `routing_scope` of layers and models overrides it.
        prefix_block_size: number of queries that are computed at once in the scope
            `"prefix"`, in tokens. It does not change results: more queries take more
            memory, fewer take more turns. None (the default) for `attention_window`.
        max_clusters_per_token: number of clusters that a token may sit in with
            `"expert_threshold"`. Defaults to 2.
        clusters_per_query: in token choice, number of clusters that a query reads: the
            last `attention_window // clusters_per_query` members of each of its best
            clusters. A query then also finds matches just across the border of its best
            cluster. A token is still a member of one cluster. It must divide
            `attention_window`. Defaults to 1.
        threshold_decay: share of the thresholds' old average kept at each training
            step with `"expert_threshold"`, in [0, 1). Defaults to 0.99.
        share_query_key: whether the projection of the queries also makes the keys. In
            self-attention, queries and keys are then the same and are routed once.
            Defaults to True.
        **kwargs: arguments of `Clustering`, which say how centroids move;
            `query_cluster` and `exploring_queries` of `ClusteredHeads`; and arguments
            of `HeadGroup`, whose relative positions are in ranks.

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
    `clustered_local_attention_helper` of the release for expert choice. Token choice
    and the prefix scope are this package's own.
    """

    remembers_key_heads = True
    #: Values of `routing` that the class itself has.
    routings = (None, "expert_choice", "token_choice")

    def __new__(cls, *args, **kwargs):
        routing = kwargs.get("routing", args[3] if len(args) > 3 else None)
        if routing == "expert_threshold" and cls is RoutedHeads:
            cls = class_of_the_zoo("ThresholdHeads")
        return super().__new__(cls, *args, **kwargs)

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
        prefix_block_size=None,
        **kwargs,
    ):
        clustering, kwargs = Clustering.taken_from(kwargs)
        super().__init__(num_heads, attention_window, **kwargs)
        self.add_centroids(num_clusters, prefix_block_size, clustering)
        check_choice("routing", routing, ROUTINGS)
        if routing not in self.routings:
            raise ValueError(
                f"`routing` must be one of {self.routings} in subclasses of "
                f"`RoutedHeads`. Received: routing={routing!r}. Take "
                "`zoo.ThresholdHeads` as the base of yours"
            )
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

    @property
    def routing_scope(self):
        """The tokens that compete in expert choice; may be set, see above."""
        return self._routing_scope

    @routing_scope.setter
    def routing_scope(self, value):
        check_choice("routing_scope", value, ROUTING_SCOPES)
        self._routing_scope = value

    def causal_rule(self, routing_scope=None, has_segments=False):
        if self.routing in TOKEN_CHOICE:
            return self.rule(LastMembers)
        if (routing_scope or self.routing_scope) == "prefix":
            return self.rule(BestMembers)
        return self.whole_sequence_rule(has_segments)

    def attend(self, inputs, training=None):
        if inputs.is_cross_attention or not inputs.use_causal_mask:
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
                "`use_causal_mask=True` and no `value`, or use "
                '`routing="expert_choice"`'
            )
        if self.routing is None and inputs.use_causal_mask and not is_causal:
            raise ValueError(
                "`routing=None` has no sound rule for a causal mask over another "
                "sequence. Received: use_causal_mask=True, is_cross_attention=True. "
                "Leave the mask or the `value` out, or name the rule, "
                '`routing="expert_choice"`'
            )


def check_clusters_per_query(settings):
    """Raises a `ValueError` unless a query can read that many clusters.

    Args:
        settings: the heads, or another object with their settings under the same names.
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
            "`clusters_per_query` must be 1 with `entmax_alpha`, because its weights "
            "in several clusters cannot be joined. Received: "
            f"clusters_per_query={number} with entmax_alpha={settings.entmax_alpha!r}"
        )
    if number > settings.num_clusters or settings.attention_window % number:
        raise ValueError(
            "`clusters_per_query` must divide `attention_window` and be at most "
            f"`num_clusters`. Received: clusters_per_query={number} with "
            f"attention_window={settings.attention_window} and "
            f"num_clusters={settings.num_clusters}"
        )

"""Routing attention: queries see the keys of their cluster."""

import keras

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing.best_members import BestMembers
from routing_tf.layers.routing.last_members import LastMembers
from routing_tf.layers.routing.online_kmeans import Clustering
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer

ROUTINGS = (None, "expert_choice", "token_choice")
TOKEN_CHOICE = (None, "token_choice")
ROUTING_SCOPES = ("full", "prefix")


@keras.saving.register_keras_serializable("routing_tf")
class RoutedHeads(ClusteredHeads):
    """Heads that attend inside clusters of tokens with similar content.

    Queries and keys are layer-normalised and scored against learned centroids. The
    argument `routing` says who chooses:

    - `"token_choice"`: each token goes to the best centroid of its key, and attends to
      the last `attention_window` tokens of the cluster that is best for its query.
      Strictly causal; only for self-attention under a causal mask.
    - `"expert_choice"` (the paper): each centroid takes the `attention_window` tokens
      that score highest, and attention is dense inside a cluster; a token's results are
      averaged over its clusters. Under a causal mask, outputs depend on later tokens
      unless `routing_scope="prefix"`.

    In attention to another sequence, each query sees the tokens that its best centroid
    takes. State: that of `OnlineKMeans`, which moves when `training=True`. Padding is
    never seen, and moves no centroid. [How routing works](docs/how_routing_works.md)
    has pictures, costs and the details of each rule.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster that a token sees, in tokens. A
            window longer than the input is cut to it.
        routing: `"expert_choice"` or `"token_choice"`; None (the default) for token
            choice in self-attention under a causal mask, and expert choice elsewhere.
        routing_scope: in expert choice under a causal mask, the tokens that compete:
            `"full"` (the default), the whole sequence, or `"prefix"`, those up to the
            query. The call argument `routing_scope` overrides it.
        prefix_block_size: number of queries that are computed at once in the scope
            `"prefix"`; more take more memory. None (the default) for
            `attention_window`.
        clusters_per_query: in token choice, number of clusters that a query reads, an
            equal share of `attention_window` in each. It must divide that. Defaults to
            1.
        share_query_key: whether the projection of the queries also makes the keys.
            Defaults to True.
        **kwargs: arguments of `Clustering`; `query_cluster` and `exploring_queries` of
            `ClusteredHeads`; and arguments of `HeadGroup`.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences of
    rank in the list of members in order of position. The clustering loss is added to
    `losses`.

    Raises:
        ValueError: when built, if `key_dim` is less than 2; when called, if a causal
            mask has queries and values of different lengths, or another sequence with
            `routing=None`, or if token choice gets no causal mask or another sequence.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.RoutedHeads(2, num_clusters=4, attention_window=8, key_shift=1)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: paper, section 4.1 and Algorithm 1, for expert choice. Token choice and
    the prefix scope are this package's own.
    """

    remembers_key_heads = True

    routing = Argument(check_choice, ROUTINGS)
    routing_scope = Argument(check_choice, ROUTING_SCOPES)
    clusters_per_query = Argument(check_positive_integer)
    prefix_block_size = Argument(check_optional_integer)

    def __init__(
        self,
        num_heads,
        num_clusters,
        attention_window,
        routing=None,
        routing_scope="full",
        clusters_per_query=1,
        prefix_block_size=None,
        **kwargs,
    ):
        clustering, kwargs = Clustering.taken_from(kwargs)
        super().__init__(num_heads, attention_window, **kwargs)
        self.add_centroids(num_clusters, clustering)
        self.routing = routing
        self.routing_scope = routing_scope
        self.clusters_per_query = clusters_per_query
        self.prefix_block_size = prefix_block_size
        check_clusters_per_query(self)

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
        if self.routing == "token_choice" and not is_causal:
            raise ValueError(
                '`routing="token_choice"` works in self-attention under a causal mask '
                f"only. Received: use_causal_mask={inputs.use_causal_mask}, "
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
            "`clusters_per_query` must be 1 except in token choice and multipole "
            f"heads. Received: clusters_per_query={number} with "
            f"routing={settings.routing!r}"
        )
    if number > settings.num_clusters or settings.attention_window % number:
        raise ValueError(
            "`clusters_per_query` must divide `attention_window` and be at most "
            f"`num_clusters`. Received: clusters_per_query={number} with "
            f"attention_window={settings.attention_window} and "
            f"num_clusters={settings.num_clusters}"
        )

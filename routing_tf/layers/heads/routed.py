"""Routing attention: queries see the keys of their cluster."""

import keras

from routing_tf.layers import membership
from routing_tf.layers.heads.clustered import CentroidHeads
from routing_tf.layers.validation import check_choice

ROUTINGS = ("expert_choice",)


@keras.saving.register_keras_serializable("routing_tf")
class RoutedHeads(CentroidHeads):
    """Heads that attend inside clusters of tokens with similar content.

    Queries and keys are layer-normalised and scored against learned centroids. With
    `routing="expert_choice"` the clusters choose: each centroid takes the
    `attention_window` tokens that score highest. Attention is dense inside a cluster,
    and a token's results are averaged over the clusters it sits in. A window longer
    than the input is cut to it.

    Under a causal mask no query sees a later key. But whether a token is a member of a
    cluster depends on the whole sequence, later tokens included, as in the release.

    Tokens of equal content have equal scores, and rounding decides between them; local
    heads in earlier layers or a timing signal tell them apart.

    State: that of `OnlineKMeans`, moved when `training=True`. Padding is no member as
    long as there are enough tokens, is never seen, and moves no centroid.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster, in tokens.
        routing: who chooses, so far only `"expert_choice"` (the default): each
            centroid chooses its tokens.
        share_query_key: whether keys are made by the projection of the queries. In
            self-attention queries and keys are then the same and have one routing.
            Defaults to True.
        decay: share of the old average of the centroids kept at each training step, in
            [0, 1]. Defaults to 0.999.
        commitment_weight: factor of the commitment loss, at least 0. Defaults to 1e-4.
        ema: whether centroids follow moving averages (True) or gradients (False).
            Defaults to True.
        update_rule: `"ema"` or `"paper"`, see `OnlineKMeans`. Defaults to `"ema"`.
        **kwargs: arguments of `HeadGroup`: `max_relative_position` (ranks, defaults
            to None), `dropout` (a rate in [0, 1), defaults to 0.0),
            `embeddings_initializer` (defaults to `"glorot_uniform"`),
            `relative_key_initializer`, `token_bias_weight` and `compatibility` (all
            default to None); and those of `keras.layers.Layer`, such as `name`.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members. The clustering loss is added to `losses`.

    Raises:
        ValueError: if `attention_window` is not a positive integer, `routing` is
            unknown, or an argument is refused by `HeadGroup` or `OnlineKMeans`; when
            built, if `key_dim` is less than 2; when called, if `use_causal_mask=True`
            and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.RoutedHeads(2, num_clusters=4, attention_window=8)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: paper, section 4.1 and Algorithm 1; `clustered_local_attention_helper`
    of the release.
    """

    def __init__(
        self,
        num_heads,
        num_clusters,
        attention_window,
        routing="expert_choice",
        **kwargs,
    ):
        super().__init__(num_heads, num_clusters, attention_window, **kwargs)
        check_choice("routing", routing, ROUTINGS)
        self.routing = routing

    def choose(self, scores, mask):
        return membership.expert_choice(scores, self.window(scores.shape[2]), mask)

    def get_config(self):
        return {**super().get_config(), "routing": self.routing}

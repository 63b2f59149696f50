"""What all patterns share whose queries see the members of a cluster."""

import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.heads.head_group import combine_masks
from routing_tf.layers.online_kmeans import OnlineKMeans
from routing_tf.layers.online_kmeans import normalize
from routing_tf.layers.validation import check_positive_integer


class ClusteredHeads(HeadGroup):
    """Heads that attend inside clusters; subclasses say in `route` who is a member.

    Queries and keys are layer-normalised. Attention is dense inside a cluster, and a
    token's results are averaged over the clusters it sits in; a token in none gets
    zero.

    Args:
        num_heads: number of heads in the group.
        attention_window: number of members of a cluster, in tokens. A window longer
            than the input is cut to it.
        share_query_key: whether keys are made by the projection of the queries. In
            self-attention queries and keys are then the same and have one membership.
            Defaults to True.
        **kwargs: arguments of `HeadGroup`.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members.

    Raises:
        ValueError: if `attention_window` is not a positive integer, or an argument is
            refused by `HeadGroup`; when built, if `key_dim` is less than 2; when
            called, if `use_causal_mask=True` and query and value differ in length.

    Reference: `clustered_local_attention_helper` of the release.
    """

    def __init__(self, num_heads, attention_window, share_query_key=True, **kwargs):
        super().__init__(num_heads, **kwargs)
        check_positive_integer("attention_window", attention_window)
        self.attention_window = attention_window
        self.share_query_key = share_query_key

    @property
    def needs_keys(self):
        return not self.share_query_key

    def build(self, query_shape, key_shape, value_shape):
        if query_shape[-1] < 2:
            raise ValueError(
                "`key_dim` must be at least 2 with heads that normalize each query "
                f"over it. Received: key_dim={query_shape[-1]}"
            )
        super().build(query_shape, key_shape or query_shape, value_shape)

    def route(self, streams, masks, training=None):
        """Decides who is a member of which cluster.

        Args:
            streams: list of one or two tensors, normalised queries and keys,
                `<float32>[batch, heads, length, key_dim]`; with one, queries are keys.
            masks: list of their masks, `<bool>[batch, 1 or heads, length]`, True for
                real tokens, or None.
            training: whether state moves; None (the default) for no.

        Returns:
            List with a pair for each stream: members
            `<int>[batch, heads, clusters, window]`, sorted, and a mask of that shape,
            False in slots that hold no member; None for a mask of all True.

        Raises:
            NotImplementedError: if the subclass has no rule of its own.
        """
        raise NotImplementedError

    def attend(self, inputs, training=None):
        query, value = normalize(inputs.query), inputs.value
        if inputs.key is None:
            key, streams, masks = query, [query], [inputs.value_mask]
        else:
            key = normalize(inputs.key)
            streams, masks = [query, key], [inputs.query_mask, inputs.value_mask]
        if self.compatibility.padding_by_zero_rows:
            masks = [ops.any(stream != 0, axis=-1) for stream in streams]
        routes = self.route(streams, masks, training=training)
        members, belongs = routes[0]
        key_members, key_belongs = routes[-1]
        output = self.dot_product(
            ops.cast(membership.gather(query, members), self.compute_dtype),
            *self._keys_and_values(key, value, key_members),
            attention_mask=self._mask(members, key_members, key_belongs, inputs),
            bias=self._bias(inputs.token_bias, key_members, value.shape[2]),
            training=training,
        )
        return membership.scatter_mean(output, members, query.shape[2], belongs)

    def window(self, length):
        """Number of members of a cluster among `length` tokens."""
        return min(self.attention_window, length)

    def masks_for_choice(self, masks):
        """The masks by which padding is kept from being a member."""
        return [None] * len(masks) if self.compatibility.padding_is_routed else masks

    def _keys_and_values(self, key, value, members):
        size = key.shape[-1]
        joined = ops.concatenate([ops.cast(key, value.dtype), value], axis=-1)
        joined = membership.gather(joined, members)
        return joined[..., :size], joined[..., size:]

    def _mask(self, members, key_members, belongs, inputs):
        real = causal = None
        if inputs.value_mask is not None:
            real = membership.gather_entries(
                inputs.value_mask, key_members, inputs.value.shape[2]
            )
            real = self._shared_padding(real)[..., None, :]
        if belongs is not None:
            belongs = belongs[..., None, :]
        if inputs.use_causal_mask:
            causal = self._causal_mask(members, key_members)
        return combine_masks(real, belongs, causal)

    def _causal_mask(self, members, key_members):
        if key_members is members or self.compatibility.rank_mask:
            return np.tri(members.shape[-1], key_members.shape[-1], dtype="bool")
        return key_members[..., None, :] <= members[..., :, None]

    def _bias(self, token_bias, key_members, length):
        if token_bias is None:
            return None
        bias = membership.gather_entries(token_bias, key_members, length)
        return bias[..., None, :]

    def get_config(self):
        return {
            **super().get_config(),
            "attention_window": self.attention_window,
            "share_query_key": self.share_query_key,
        }


class CentroidHeads(ClusteredHeads):
    """Clustered heads with learned centroids; `choose` turns scores into members.

    State: that of `OnlineKMeans`, moved when `training=True`. Padding is no member as
    long as there are enough tokens, is never seen, and moves no centroid.

    Args:
        num_heads: number of heads in the group.
        num_clusters: number of centroids of each head.
        attention_window: number of members of a cluster, in tokens.
        decay: share of the old average of the centroids kept at each training step, in
            [0, 1]. Defaults to 0.999.
        commitment_weight: factor of the commitment loss, at least 0. Defaults to 1e-4.
        ema: whether centroids follow moving averages (True) or gradients (False).
            Defaults to True.
        update_rule: `"ema"` or `"paper"`, see `OnlineKMeans`. Defaults to `"ema"`.
        **kwargs: arguments of `ClusteredHeads`.

    Call arguments and Returns: as in `ClusteredHeads`. The clustering loss is added to
    `losses`.

    Raises:
        ValueError: if an argument is refused by `ClusteredHeads` or `OnlineKMeans`.
    """

    def __init__(
        self,
        num_heads,
        num_clusters,
        attention_window,
        decay=0.999,
        commitment_weight=1e-4,
        ema=True,
        update_rule="ema",
        **kwargs,
    ):
        super().__init__(num_heads, attention_window, **kwargs)
        self.num_clusters = num_clusters
        self.decay = decay
        self.commitment_weight = commitment_weight
        self.ema = ema
        self.update_rule = update_rule
        self.kmeans = OnlineKMeans(
            num_clusters=num_clusters,
            decay=decay,
            commitment_weight=commitment_weight,
            ema=ema,
            update_rule=update_rule,
            compatibility=self.compatibility,
            name="kmeans",
            dtype="float32",
        )

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.kmeans.build(query_shape)

    def choose(self, scores, mask):
        """Turns scores into members.

        Args:
            scores: `<float32>[batch, heads, length, clusters]`.
            mask: `<bool>[batch, 1 or heads, length]`, True for real tokens; or None.

        Returns:
            `<int>[batch, heads, clusters, window]`, sorted.

        Raises:
            NotImplementedError: if the subclass has no rule of its own.
        """
        raise NotImplementedError

    def route(self, streams, masks, training=None):
        scores = self.kmeans(tuple(streams), token_mask=masks, training=training)
        masks = self.masks_for_choice(masks)
        return [
            (self.choose(stream_scores, mask), None)
            for stream_scores, mask in zip(scores, masks, strict=True)
        ]

    def get_config(self):
        return {
            **super().get_config(),
            "num_clusters": self.num_clusters,
            "decay": self.decay,
            "commitment_weight": self.commitment_weight,
            "ema": self.ema,
            "update_rule": self.update_rule,
        }

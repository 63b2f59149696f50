"""Locality-sensitive hashing: queries see the keys of their bucket."""

import keras
import numpy as np
from keras import ops

from routing_tf.layers import membership
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.lengths import length_of
from routing_tf.layers.rules.last_members import LastMembers
from routing_tf.layers.validation import is_integer


@keras.saving.register_keras_serializable("routing_tf")
class HashedHeads(ClusteredHeads):
    """Heads that attend inside buckets of a random hash of the content.

    The bits of a bucket's number are the signs of the layer-normalised token's
    products with fixed random projections, so tokens that point in like directions
    meet.

    Under a causal mask a token attends to the last `attention_window` tokens of the
    bucket of its query, itself included where its key lies there: strictly causal,
    linear in the length. Without one a bucket holds its first `attention_window`
    tokens, which attend to each other, and later ones get zero. In attention to another
    sequence each query sees the first `attention_window` tokens of its own bucket
    there.

    State: `projections` `(heads, bits, key_dim)`, float32, never trained. Padding
    lies in no bucket.

    Args:
        num_heads: number of heads in the group.
        num_buckets: number of buckets of each head, at least 2; rounded down to a power
            of two.
        attention_window: number of members of a bucket, in tokens.
        share_query_key: whether keys are made by the projection of the queries. In
            self-attention queries and keys are then the same and lie in one bucket.
            Defaults to True.
        **kwargs: arguments of `HeadGroup`; relative positions are in ranks.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members.

    Raises:
        ValueError: if `num_buckets` is not an integer of at least 2,
            `attention_window` is not a positive integer, or an argument is refused by
            `HeadGroup`; when built, if `key_dim` is less than 2; when called, if
            `use_causal_mask=True` and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.HashedHeads(2, num_buckets=4, attention_window=16)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer"
    (https://arxiv.org/abs/2001.04451), section 2; `hash_items_fn` and
    `gather_hashed_attention_items` of the release.
    """

    def __init__(self, num_heads, num_buckets, attention_window, **kwargs):
        super().__init__(num_heads, attention_window, **kwargs)
        if not is_integer(num_buckets) or num_buckets < 2:
            raise ValueError(
                "`num_buckets` must be an integer of at least 2. "
                f"Received: num_buckets={num_buckets!r}"
            )
        self.num_buckets = int(num_buckets)

    @property
    def num_bits(self):
        """Number of projections of each head."""
        return self.num_buckets.bit_length() - 1

    @property
    def num_clusters(self):
        """Number of buckets that tokens lie in."""
        return 2**self.num_bits

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        self.projections = self.add_weight(
            name="projections",
            shape=(self.num_heads, self.num_bits, query_shape[-1]),
            initializer=_orthogonal_for_each_head,
            dtype="float32",
            trainable=False,
            autocast=False,
        )

    def buckets(self, tokens):
        """Returns the number of each token's bucket.

        Args:
            tokens: `<float32>[batch, heads, length, key_dim]`, normalised.

        Returns:
            `<int32>[batch, heads, length]`.
        """
        products = ops.einsum(
            "bhld,hnd->bhln", tokens, ops.convert_to_tensor(self.projections)
        )
        bits = ops.cast(products > 0, "int32")
        return ops.sum(bits * (2 ** np.arange(self.num_bits, dtype="int32")), axis=-1)

    def causal_rule(self, routing_scope=None):
        return LastMembers(self)

    def scores(self, streams, masks, training=None):
        return [
            ops.one_hot(self.buckets(stream), self.num_clusters, dtype="float32")
            for stream in streams
        ]

    def choose(self, scores, mask, training=None):
        # Equal scores: the first tokens win.
        length = length_of(scores, 2)
        members, _ = super().choose(scores, mask)
        buckets = ops.cast(ops.argmax(scores, axis=-1), "int32")
        if mask is not None:
            buckets = ops.where(mask, buckets, -1)
        bucket_of_member = membership.gather_entries(buckets, members, length)
        filled = bucket_of_member == np.arange(scores.shape[-1])[:, None]
        # Strangers stand behind the members, so that ranks count members alone.
        places = ops.sort(ops.where(filled, members, members + length), axis=-1)
        return places % length, places < length


def _orthogonal_for_each_head(shape, dtype=None):
    heads, *rest = shape
    draws = [keras.initializers.Orthogonal()(rest, dtype) for _ in range(heads)]
    return ops.stack(draws)

"""Locality-sensitive hashing: queries see the keys of their bucket."""

import keras
from keras import ops

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing import segment_members
from routing_tf.layers.routing.cluster_order import SortedTokens
from routing_tf.layers.routing.last_members import LastMembers
from routing_tf.layers.routing.rule import Assignment
from routing_tf.layers.support.tensors import entries_at
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import is_integer


@keras.saving.register_keras_serializable("routing_tf")
class HashedHeads(ClusteredHeads):
    """Heads that attend inside buckets of a random hash of the content.

    The bits of a bucket's number are the signs of the token's products with fixed
    random projections, so tokens with similar directions meet.

    Under a causal mask, a token attends to the last `attention_window` tokens of the
    bucket of its query, itself included if its key is there. This is strictly causal
    and linear in the length. Without a causal mask, a bucket contains its first
    `attention_window` tokens, which attend to each other, and later ones get zero. In
    attention to another sequence, each query sees the first `attention_window` tokens
    of its bucket there.

    State: `projections` `(heads, bits, key_dim)`, float32, never trained. Padding is in
    no bucket.

    Args:
        num_heads: number of heads in the group.
        num_buckets: number of buckets of each head, at least 2; rounded down to a power
            of two.
        attention_window: number of members of a bucket, in tokens.
        share_query_key: whether the projection of the queries also makes the keys. In
            self-attention, queries and keys are then the same and are in one bucket.
            Defaults to True.
        **kwargs: `exploring_queries` of `ClusteredHeads`, and arguments of `HeadGroup`;
            relative positions are in ranks.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members.

    Raises:
        ValueError: when built, if `key_dim` is less than 2; when called, if
            `use_causal_mask=True` and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.HashedHeads(2, num_buckets=4, attention_window=16)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)
    ```

    Reference: `hash_items_fn` and `gather_hashed_attention_items` of the release.
    """

    #: Number of hashes of each token.
    num_rounds = 1

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
            shape=(self.num_rounds * self.num_heads, self.num_bits, query_shape[-1]),
            initializer=self.initial_projections,
            dtype="float32",
            trainable=False,
            autocast=False,
        )

    def initial_projections(self, shape, dtype=None):
        """Draws orthogonal projections for each head."""
        heads, *rest = shape
        draws = [keras.initializers.Orthogonal()(rest, dtype) for _ in range(heads)]
        return ops.stack(draws)

    def buckets(self, tokens):
        """Returns buckets `<int32>[B, H, L]` of normalised `<float32>[B, H, L, D]`."""
        bits = ops.cast(self.products(tokens) > 0, "int32")
        return ops.sum(bits * (2 ** numbers(self.num_bits)), axis=-1)

    def products(self, tokens):
        """Returns the products of tokens with the projections, `[..., num_bits]`."""
        return ops.einsum(
            "bhld,hnd->bhln", tokens, ops.convert_to_tensor(self.projections)
        )

    def causal_rule(self, routing_scope=None, has_segments=False):
        return self.rule(LastMembers)

    def assign(self, streams, masks, training=None, adds_losses=True):
        return [
            Assignment(self.buckets(stream)[..., None], self.num_clusters, False)
            for stream in streams
        ]

    def choose(self, assigned, mask, training=None):
        # Buckets as wide as the window, whose first tokens win; others stand after
        # the members, so that ranks count members alone.
        buckets, _ = assigned.apart_from_padding(mask)
        length = length_of(buckets, 2)
        found = SortedTokens(buckets, self.num_clusters + 1)
        first, counts = (x[..., :-1, None] for x in (found.starts, found.counts))
        ranks = numbers(self.window(length))
        members = entries_at(found.tokens, ops.minimum(first + ranks, length - 1))
        return members, ranks < counts

    def choose_in_segments(self, assigned, starts, mask, training=None):
        is_member = assigned.numbers[:, :, None] == numbers(self.num_clusters)[:, None]
        if mask is not None:
            is_member = ops.logical_and(is_member, mask[:, :, None])
        # The first tokens of a bucket in each segment.
        ranks = segment_members.ranks_of_members(is_member, starts)
        return ops.logical_and(is_member, ranks < self.attention_window)

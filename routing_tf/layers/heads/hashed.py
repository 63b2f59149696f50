"""Locality-sensitive hashing: queries see the keys of their bucket."""

import keras
from keras import ops

from routing_tf.layers import backends
from routing_tf.layers import membership
from routing_tf.layers import segment_members
from routing_tf.layers.extremes import place_of_largest
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import numbers
from routing_tf.layers.rules.last_members import LastMembers
from routing_tf.layers.rules.rounds import fold_inputs
from routing_tf.layers.rules.sorted_chunks import SortedChunks
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_positive_integer
from routing_tf.layers.validation import is_integer

# Smallest length of a key that is scaled to 1: shorter keys stay shorter than 1.
LEAST_SQUARE = 1e-12
HASHES = ("signs", "rotation")
NORMALIZATIONS = ("layer", "unit_keys")


@keras.saving.register_keras_serializable("routing_tf")
class HashedHeads(ClusteredHeads):
    """Heads that attend inside buckets of a random hash of the content.

    The bits of a bucket's number are the signs of the token's products with fixed
    random projections, so tokens with similar directions meet. With `hash="rotation"`
    (the Reformer), the bucket is the largest entry of `[xR, -xR]` with a random matrix
    R. With several rounds, each with its own hashes, a token attends in one softmax to
    all keys that it sees in any round; a key that it sees in several rounds counts
    once.

    Under a causal mask, a token attends to the last `attention_window` tokens of the
    bucket of its query, itself included if its key is there. This is strictly causal
    and linear in the length. (Chunks of the Reformer would move with later tokens.)

    Without a causal mask, a bucket contains its first `attention_window` tokens, which
    attend to each other, and later ones get zero. With `hash="rotation"`, several
    rounds or `attends_to_self=False`, the tokens are sorted by bucket and cut into
    chunks of `attention_window`, and see their own chunk and the one before it, as in
    the Reformer.

    In attention to another sequence, each query sees the first `attention_window`
    tokens of its bucket there.

    State: `projections` `(rounds * heads, bits, key_dim)`, float32, never trained; with
    `hash="rotation"`, half the number of buckets instead of bits. Padding is in no
    bucket.

    Args:
        num_heads: number of heads in the group.
        num_buckets: number of buckets of each head, at least 2; rounded down to a power
            of two. With `hash="rotation"` it must be even.
        attention_window: number of members of a bucket, in tokens.
        hash: `"signs"` (the default) or `"rotation"`.
        num_rounds: number of hashes of each token. Defaults to 1. Work grows with it.
        normalization: `"layer"` (the default): queries and keys are layer-normalised.
            `"unit_keys"`: keys have the length 1, and queries stay unchanged (the
            Reformer); with `qk_norm` both are compared as in `HeadGroup`.
        attends_to_self: whether a token sees itself (the default), which takes most of
            the weight if its query is its key. False (the Reformer): it sees itself
            only if it sees nothing else in any round, and then gets its own value.
        share_query_key: whether the projection of the queries also makes the keys. In
            self-attention, queries and keys are then the same and are in one bucket.
            Defaults to True.
        **kwargs: `exploring_queries` of `ClusteredHeads`, and arguments of `HeadGroup`;
            relative positions are in ranks.

    Call arguments and Returns: as in `HeadGroup`. Relative positions are differences
    of rank in the sorted list of members; in chunks, differences of place in the order
    of buckets.

    Raises:
        ValueError: if `num_buckets` is not an integer of at least 2 or odd with
            `hash="rotation"`, `attention_window` or `num_rounds` is not a positive
            integer, `hash` or `normalization` is unknown, `attends_to_self=False` comes
            with shifted or separate keys, `entmax_alpha` comes with it or with several
            rounds, or `HeadGroup` refuses an argument; when built, if `key_dim` is less
            than 2; when called, if `use_causal_mask=True` and query and value differ in
            length, with several rounds if the value is another sequence, and in chunks
            with separate keys.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    heads = layers.HashedHeads(2, num_buckets=4, attention_window=16)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16)), use_causal_mask=True).shape == (1, 32, 16)

    reformer = {"hash": "rotation", "num_rounds": 2, "normalization": "unit_keys"}
    heads = layers.HashedHeads(2, 4, 16, attends_to_self=False, **reformer)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16))).shape == (1, 32, 16)
    ```

    Reference: Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer"
    (https://arxiv.org/abs/2001.04451), section 2 and appendix A, where the first chunk
    has no neighbour before it, as here, and each step draws new hashes, unlike here;
    `hash_items_fn` and `gather_hashed_attention_items` of the release.
    """

    def __init__(
        self,
        num_heads,
        num_buckets,
        attention_window,
        *,
        hash="signs",
        num_rounds=1,
        normalization="layer",
        attends_to_self=True,
        **kwargs,
    ):
        super().__init__(num_heads, attention_window, **kwargs)
        if not is_integer(num_buckets) or num_buckets < 2:
            raise ValueError(
                "`num_buckets` must be an integer of at least 2. "
                f"Received: num_buckets={num_buckets!r}"
            )
        check_choice("hash", hash, HASHES)
        check_choice("normalization", normalization, NORMALIZATIONS)
        if hash == "rotation" and num_buckets % 2:
            raise ValueError(
                '`num_buckets` must be even with `hash="rotation"`, which has a bucket '
                "on each side of every direction. Received: "
                f"num_buckets={num_buckets}. Add 1"
            )
        self.num_buckets = int(num_buckets)
        self.hash = hash
        self.num_rounds = check_positive_integer("num_rounds", num_rounds)
        self.normalization = normalization
        check_choice("attends_to_self", attends_to_self, (True, False))
        self.attends_to_self = bool(attends_to_self)
        if not attends_to_self and (self.key_shift or not self.share_query_key):
            raise ValueError(
                "`attends_to_self=False` needs tokens whose query is their own key. "
                f"Received: share_query_key={self.share_query_key}, "
                f"key_shift={self.key_shift}. Leave it out"
            )
        if self.joins_rounds and self.entmax_alpha is not None:
            raise ValueError(
                "`entmax_alpha` must be None with several rounds and with "
                "`attends_to_self=False`, where sums of exponentials are joined. "
                f"Received: entmax_alpha={self.entmax_alpha!r}, "
                f"num_rounds={self.num_rounds}, attends_to_self={self.attends_to_self}"
                ". Leave it out"
            )

    @property
    def num_bits(self):
        """Number of projections of each head in a round."""
        if self.hash == "rotation":
            return self.num_buckets // 2
        return self.num_buckets.bit_length() - 1

    @property
    def num_clusters(self):
        """Number of buckets that tokens lie in."""
        return self.num_buckets if self.hash == "rotation" else 2**self.num_bits

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        initializer = _orthogonal_for_each_head
        if self.hash == "rotation":
            initializer = keras.initializers.RandomNormal(stddev=1.0)
        self.projections = self.add_weight(
            name="projections",
            shape=(self.num_rounds * self.num_heads, self.num_bits, query_shape[-1]),
            initializer=initializer,
            dtype="float32",
            trainable=False,
            autocast=False,
        )

    def buckets(self, tokens):
        """Returns the number of each token's bucket.

        Args:
            tokens: `<float32>[batch, rounds * heads, length, key_dim]`, normalised,
                the heads of a round side by side.

        Returns:
            `<int32>[batch, rounds * heads, length]`.
        """
        products = ops.einsum(
            "bhld,hnd->bhln", tokens, ops.convert_to_tensor(self.projections)
        )
        if self.hash == "rotation":
            products = ops.concatenate([products, -products], axis=-1)
            return place_of_largest(products)
        bits = ops.cast(products > 0, "int32")
        return ops.sum(bits * (2 ** numbers(self.num_bits)), axis=-1)

    def vectors(self, inputs):
        if self.normalization == "layer":
            return super().vectors(inputs)
        query = ops.cast(inputs.query, "float32")
        key = query if inputs.key is None else ops.cast(inputs.key, "float32")
        squares = ops.sum(ops.square(key), axis=-1, keepdims=True)
        return query, key * ops.rsqrt(ops.maximum(squares, LEAST_SQUARE))

    def normalized_query(self, query):
        # With unit keys they are not normalised yet.
        has_unit_keys = self.normalization == "unit_keys"
        base = HeadGroup if has_unit_keys else ClusteredHeads
        return base.normalized_query(self, query)

    def normalized_key(self, key):
        has_unit_keys = self.normalization == "unit_keys"
        base = HeadGroup if has_unit_keys else ClusteredHeads
        return base.normalized_key(self, key)

    def routed_tokens(self, inputs, rule, training=False):
        inputs = fold_inputs(inputs, self.num_heads, self.num_rounds)
        return super().routed_tokens(inputs, rule, training)

    def whole_sequence_rule(self):
        if self.hash == "rotation" or self.joins_rounds:
            return SortedChunks(self)
        return super().whole_sequence_rule()

    def memory_rule(self):
        if self.num_rounds > 1:
            raise ValueError(
                "`num_rounds` must be 1 in attention to another sequence. Received: "
                f"num_rounds={self.num_rounds}. Use more heads with one round each, or "
                "`FullHeads`"
            )
        return super().memory_rule()

    def causal_rule(self, routing_scope=None):
        return LastMembers(self)

    def scores(self, streams, masks, training=None):
        return [
            backends.one_hot(self.buckets(stream), self.num_clusters, dtype="float32")
            for stream in streams
        ]

    def choose(self, scores, mask, training=None):
        # Equal scores: the first tokens win.
        length = length_of(scores, 2)
        members, _ = super().choose(scores, mask)
        buckets = place_of_largest(scores)
        if mask is not None:
            buckets = ops.where(mask, buckets, -1)
        bucket_of_member = membership.gather_entries(buckets, members, length)
        filled = bucket_of_member == numbers(scores.shape[-1])[:, None]
        # Strangers stand behind the members, so that ranks count members alone.
        places = ops.sort(ops.where(filled, members, members + length), axis=-1)
        return places % length, places < length

    def choose_in_segments(self, scores, starts, mask, training=None):
        buckets = place_of_largest(scores)
        is_member = buckets[:, :, None] == numbers(self.num_clusters)[:, None]
        if mask is not None:
            is_member = ops.logical_and(is_member, mask[:, :, None])
        # The first tokens of a bucket in each segment.
        ranks = segment_members.ranks_of_members(is_member, starts)
        return ops.logical_and(is_member, ranks < self.attention_window)


def _orthogonal_for_each_head(shape, dtype=None):
    heads, *rest = shape
    draws = [keras.initializers.Orthogonal()(rest, dtype) for _ in range(heads)]
    return ops.stack(draws)

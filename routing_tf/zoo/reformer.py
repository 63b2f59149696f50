"""Reformer: hashed heads with rounds, whose queries are their keys."""

import dataclasses

import keras
from keras import ops

from routing_tf.layers import HashedHeads
from routing_tf.layers import HeadGroup
from routing_tf.layers.caches import rows
from routing_tf.layers.heads.head_group import refuse_segments
from routing_tf.layers.routing import exploring
from routing_tf.layers.routing import rings
from routing_tf.layers.routing.cluster_order import ranks_in_clusters
from routing_tf.layers.routing.last_members import LastMembers
from routing_tf.layers.routing.last_members import joined_cluster
from routing_tf.layers.routing.rule import Rule
from routing_tf.layers.support import backends
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.rounds import Rounds
from routing_tf.zoo.parts.rounds import SortedOrder
from routing_tf.zoo.parts.rounds import fold_inputs
from routing_tf.zoo.parts.rounds import of_each_round
from routing_tf.zoo.parts.rounds import range_of_bucket
from routing_tf.zoo.parts.rounds import stride

__all__ = ["ReformerHeads"]

# Smallest length of a key that is scaled to 1: shorter keys stay shorter than 1.
LEAST_SQUARE = 1e-12
HASHES = ("signs", "rotation")
NORMALIZATIONS = ("layer", "unit_keys")


@keras.saving.register_keras_serializable("routing_tf")
class ReformerHeads(HashedHeads):
    """Hashed heads in the manner of the Reformer.

    With `hash="rotation"`, the bucket of a token is the largest entry of `[xR, -xR]`
    with a random matrix R. With several rounds, each with its own hashes, a token
    attends in one softmax to all keys that it sees in any round; a key that it sees in
    several rounds counts once.

    Under a causal mask, a token attends to the last `attention_window` tokens of the
    bucket of its query, as in `HashedHeads`. (Chunks of the Reformer would move with
    later tokens.) Without one, the tokens are sorted by bucket and cut into chunks of
    `attention_window`, and see their own chunk and the one before it, as in the paper,
    unless `hash`, `num_rounds` and `attends_to_self` are those of `HashedHeads`.

    State: `projections` `(rounds * heads, bits, key_dim)`, float32, never trained; with
    `hash="rotation"`, half the number of buckets instead of bits.

    Args:
        num_heads: number of heads in the group.
        num_buckets: number of buckets of each head, at least 2; even for
            `hash="rotation"`, otherwise rounded down to a power of two.
        attention_window: number of members of a bucket, in tokens.
        hash: `"signs"` (the default) or `"rotation"`.
        num_rounds: number of hashes of each token. Defaults to 1. Work grows with it.
        normalization: `"layer"` (the default): queries and keys are layer-normalised.
            `"unit_keys"`: keys have the length 1, and queries stay unchanged (the
            Reformer); with `qk_norm` both are compared as in `HeadGroup`.
        attends_to_self: whether a token sees itself (the default), which takes most of
            the weight if its query is its key. False (the Reformer): it sees itself
            only if it sees nothing else in any round, and then gets its own value.
        **kwargs: arguments of `HashedHeads`.

    Call arguments and Returns: as in `HashedHeads`. In chunks, relative positions are
    differences of place in the order of buckets.

    Raises:
        ValueError: if `num_buckets` is odd with `hash="rotation"`, or
            `attends_to_self=False` comes with shifted or separate keys; when called, as
            in `HashedHeads`, with several rounds if the value is another sequence, and
            in chunks with separate keys.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    reformer = {"hash": "rotation", "num_rounds": 2, "normalization": "unit_keys"}
    heads = zoo.ReformerHeads(2, 4, 16, attends_to_self=False, **reformer)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 32, 16))).shape == (1, 32, 16)
    ```

    Reference: Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer"
    (https://arxiv.org/abs/2001.04451), section 2 and appendix A, where the first chunk
    has no neighbour before it, as here, and each step draws new hashes, unlike here.
    """

    hash = Argument(check_choice, HASHES)
    num_rounds = Argument(check_positive_integer)
    normalization = Argument(check_choice, NORMALIZATIONS)
    attends_to_self = Argument(check_flag)

    def __init__(
        self,
        num_heads,
        num_buckets,
        attention_window,
        hash="signs",
        num_rounds=1,
        normalization="layer",
        attends_to_self=True,
        **kwargs,
    ):
        super().__init__(num_heads, num_buckets, attention_window, **kwargs)
        self.hash = hash
        self.num_rounds = num_rounds
        self.normalization = normalization
        self.attends_to_self = attends_to_self
        if self.hash == "rotation" and num_buckets % 2:
            raise ValueError(
                '`num_buckets` must be even with `hash="rotation"`, which has a bucket '
                "on each side of every direction. Received: "
                f"num_buckets={num_buckets}. Add 1"
            )
        if not self.attends_to_self and (self.key_shift or not self.share_query_key):
            raise ValueError(
                "`attends_to_self=False` needs tokens whose query is their own key. "
                f"Received: share_query_key={self.share_query_key}, "
                f"key_shift={self.key_shift}. Leave it out"
            )

    @property
    def joins_rounds(self):
        """Whether `Rounds` join what tokens see."""
        return self.num_rounds > 1 or not self.attends_to_self

    def has_softmax_alone(self, inputs, training):
        return super().has_softmax_alone(inputs, training) and not self.joins_rounds

    @property
    def num_bits(self):
        return self.num_buckets // 2 if self.hash == "rotation" else super().num_bits

    @property
    def num_clusters(self):
        is_rotation = self.hash == "rotation"
        return self.num_buckets if is_rotation else super().num_clusters

    def initial_projections(self, shape, dtype=None):
        if self.hash == "rotation":
            return keras.initializers.RandomNormal(stddev=1.0)(shape, dtype)
        return super().initial_projections(shape, dtype)

    def buckets(self, tokens):
        """Returns buckets `<int32>[B, rounds * H, L]` of normalised tokens.

        The heads of a round are side by side.
        """
        if self.hash == "signs":
            return super().buckets(tokens)
        products = self.products(tokens)
        products = ops.concatenate([products, -products], axis=-1)
        return tensors.place_of_largest(products)

    def vectors(self, inputs):
        if self.normalization == "layer":
            return super().vectors(inputs)
        query = ops.cast(inputs.query, "float32")
        key = query if inputs.key is None else ops.cast(inputs.key, "float32")
        squares = ops.sum(ops.square(key), axis=-1, keepdims=True)
        return query, key * ops.rsqrt(ops.maximum(squares, LEAST_SQUARE))

    def normalized(self, query, key):
        # Unit keys are not normalised yet.
        base = HeadGroup if self.normalization == "unit_keys" else HashedHeads
        return base.normalized(self, query, key)

    def routed_tokens(self, inputs, rule, training=False):
        inputs = fold_inputs(inputs, self.num_heads, self.num_rounds)
        return super().routed_tokens(inputs, rule, training)

    def explored(self, output, tokens, inputs, training):
        # The heads of a round stand side by side, and all rounds have the same.
        query, key = (x[:, : self.num_heads] for x in (tokens.query, tokens.key))
        tokens = dataclasses.replace(tokens, query=query, key=key)
        hides_own = not self.attends_to_self
        return exploring.explore(self, tokens, inputs, output, training, hides_own)

    def whole_sequence_rule(self, has_segments=False):
        if self.hash == "signs" and not self.joins_rounds:
            return super().whole_sequence_rule(has_segments)
        if has_segments:
            reason = "their chunks contain tokens of several segments"
            refuse_segments(self, f"without a causal mask, {reason}")
        return self.rule(SortedChunks)

    def memory_rule(self, has_segments=False):
        if self.num_rounds > 1:
            raise ValueError(
                "`num_rounds` must be 1 in attention to another sequence. Received: "
                f"num_rounds={self.num_rounds}. Use more heads with one round each, or "
                "`FullHeads`"
            )
        return super().memory_rule(has_segments)

    def causal_rule(self, routing_scope=None, has_segments=False):
        return self.rule(LastOfRounds if self.joins_rounds else LastMembers)


class _InRounds:
    """A rule that joins the rounds of each head into one softmax.

    Letters: as of `parts.rounds`.
    """

    def __init__(self, group):
        super().__init__(group)
        self.num_rounds = group.num_rounds
        self.attends_to_self = group.attends_to_self

    def joined(self, rounds, queries, read, value, vectors, bias=None, **options):
        """Attends in chunks, and joins the rounds, `<float>[B, H, L, D]`.

        `queries` is their order, with `arrange` and `restore`; `read` maps entries of
        keys `[B, F, L, D]` to those of each chunk, `[B, F, N, S, D]`. `vectors` are
        queries and keys in chunks.
        """
        if self.num_rounds == 1 and self.attends_to_self:
            return queries.restore(
                self.dot_product(*vectors, read(value), bias=bias, **options)
            )
        if self.num_rounds > 1:
            own = rounds.bias(read(rounds.places), queries.arrange(rounds.ranges))
            bias = own if bias is None else own + ops.cast(bias, own.dtype)
        output, logsumexp = self.dot_product(
            *vectors, read(value), bias=bias, return_logsumexp=True, **options
        )
        logsumexp = queries.restore(logsumexp[..., None])[..., 0]
        return rounds.joined(queries.restore(output), logsumexp, value)


class LastOfRounds(_InRounds, LastMembers):
    """Attention to the last members of a token's buckets in all rounds.

    A cache also tells where the keys of its rows stand in every round.
    """

    def __init__(self, group):
        super().__init__(group)
        self.num_key_heads = group.num_heads * group.num_rounds
        self.sees_itself = self.attends_to_self
        if not self.attends_to_self:
            self.nearest = 1

    def obstacle(self, tokens, training):
        reason = super().obstacle(tokens, training)
        return reason or "the sums of exponentials are needed"

    def fits_blocks(self, tokens, window, training):
        return False

    def attend_in(self, arranged, tokens, training):
        clusters, segments = arranged.clusters, tokens.inputs.segments
        ranks, ends = ranks_in_clusters(clusters, arranged.num_clusters), arranged.ends
        places = clusters * stride(self.num_clusters) + ranks
        window = self.window_in(tokens.query)
        shares = ends is None
        if shares:
            ends = ranks + 1 - self.key_shift
        first, end = range_of_bucket(arranged.asked, ends, window, self.num_clusters)
        if segments is not None and shares:
            starts = ops.broadcast_to(segments.query_starts, ops.shape(clusters))
            own = ranks_in_clusters(clusters, arranged.num_clusters, starts)
            first = ops.maximum(first, places - own)
        return self.joined(
            Rounds(self.num_rounds, places, first, end, self.attends_to_self),
            arranged.order,
            arranged.read,
            tokens.inputs.value,
            (arranged.query, arranged.key),
            attention_mask=arranged.mask,
            bias=arranged.bias,
            training=training,
            **arranged.distances,
        )

    def make_cache(self, batch_size, max_length):
        cache = super().make_cache(batch_size, max_length)
        if self.num_rounds > 1:
            # Where the keys of the rows stand in every round.
            places = (*cache["rows"].shape[:4], self.num_rounds)
            cache["places"] = ops.zeros(places, "int32")
        return cache

    def fill_cache(self, cache, tokens):
        cache, tokens = self._offered(self.restart(cache), 0, tokens)
        clusters, is_member = joined_cluster(tokens)
        new = {"rows": rows.of_tokens(tokens)}
        if "places" in cache:
            members = ops.where(is_member, clusters, self.num_clusters)
            places = members * stride(self.num_clusters)
            places = places + ranks_in_clusters(members, self.num_clusters + 1)
            new["places"] = of_each_round(places, self.num_rounds)
        return rings.joined(cache, clusters[..., None], is_member[..., None], **new)

    def step(self, cache, index, tokens):
        cache, tokens = self._offered(cache, index, tokens)
        clusters, is_member = joined_cluster(tokens)
        new, bias = {"rows": rows.of_tokens(tokens)}, None
        members, seen = self.next_members(
            cache, tokens, clusters, is_member, new["rows"]
        )
        first, end = range_of_bucket(
            members.read[..., 0], members.ends[..., 0], self.window, self.num_clusters
        )
        ranks = self._new_ranks(cache, clusters, is_member)
        places = clusters * stride(self.num_clusters) + ranks
        own = Rounds(self.num_rounds, places, first, end, self.attends_to_self)
        if "places" in cache:
            new["places"] = own.places
            places = members.rows(cache["places"], own.places)
            places = ops.reshape(places, (*ops.shape(places)[:3], -1, self.num_rounds))
            bias = own.bias(places, own.ranges[..., None, :])
        output, logsumexp = rows.attend_to_rows(
            self, *seen, bias=bias, return_logsumexp=True
        )
        output = own.joined(output[..., 0, :], logsumexp[..., 0], tokens.inputs.value)
        cache = rings.joined(cache, clusters[..., None], is_member[..., None], **new)
        return tokens.inputs.without_padding(output), cache

    def _new_ranks(self, cache, clusters, is_member):
        """Returns the ranks of tokens that follow a cache, `<int32>[B, F, T]`."""
        joins = backends.one_hot(clusters, self.num_clusters, dtype="int32")
        joins = joins * ops.cast(is_member, "int32")[..., None]
        ranks = cache["counts"][:, :, None] + ops.cumsum(joins, axis=2) - joins
        return ops.take_along_axis(ranks, clusters[..., None], axis=-1)[..., 0]


class SortedChunks(_InRounds, Rule):
    """Attention of each token to its chunk of the sorted tokens, and the one before.

    Tokens are sorted by cluster, and by position inside a cluster; a chunk has as many
    tokens as the attention window. Tokens also see tokens of other clusters in these
    chunks. Padding comes last, is never seen and gets zero. The ends of chunks depend
    on all tokens, so there is no causal form. Relative positions are differences of
    place in the order.

    Reference: Kitaev et al., "Reformer: The Efficient Transformer", section 2, the
    sets after equation 5.
    """

    def attend(self, tokens, training=None):
        if not tokens.shares_clusters:
            raise ValueError(
                "`share_query_key` must be True without a causal mask, because queries "
                "and keys form the same chunks. Received: share_query_key=False, "
                "use_causal_mask=False. Pass `use_causal_mask=True`, or leave "
                "`share_query_key` and `hash` out"
            )
        inputs, bias = tokens.inputs, tokens.inputs.token_bias
        clusters, count = tokens.of_keys.apart_from_padding(inputs.key_mask)
        order = SortedOrder(clusters, count, self.window_in(tokens.query))
        num_real = tokens.length
        if inputs.key_mask is not None:
            real = ops.cast(inputs.key_mask, "int32")
            num_real = ops.sum(real, axis=-1, keepdims=True)
        chunk = order.places // order.size
        first = ops.maximum(chunk - 1, 0) * order.size
        end = ops.minimum((chunk + 1) * order.size, num_real)
        key = order.arrange(ops.cast(tokens.key, self.compute_dtype))
        query = key
        if not tokens.shares_vectors:
            query = order.arrange(ops.cast(tokens.query, self.compute_dtype))
        output = self.joined(
            Rounds(self.num_rounds, order.places, first, end, self.attends_to_self),
            order,
            lambda x: order.windows(order.arrange(x)),
            inputs.value,
            (query, order.windows(key)),
            attention_mask=self._mask(order, num_real),
            bias=None if bias is None else order.entries(bias),
            offset=order.size,
            training=training,
        )
        return inputs.without_padding(output)

    def _mask(self, order, num_real):
        """Returns which keys queries see, broadcastable to `[B, F, N, C, S]`."""
        chunks, slots = numbers(order.num_chunks), numbers(order.size)
        places = chunks[:, None] * order.size + numbers(2 * order.size) - order.size
        seen = ops.convert_to_tensor(places >= 0)
        if len(getattr(num_real, "shape", ())):
            num_real = num_real[..., None]
        seen = ops.logical_and(seen, places < num_real)[..., None, :]
        if self.attends_to_self:
            return seen
        own = numbers(2 * order.size) == slots[:, None] + order.size
        return combine_masks(seen, ops.logical_not(own))


def _settings(sizes):
    return {
        # Half of the buckets are directions, the others their opposites.
        "num_buckets": sizes.num_clusters + sizes.num_clusters % 2,
        "attention_window": share(sizes, 2),
        "hash": "rotation",
        "num_rounds": 2,
        "normalization": "unit_keys",
        "attends_to_self": False,
    }


PATTERNS = {
    "reformer": Pattern(
        ReformerHeads,
        _settings,
        is_bounded=True,
        shares_query_key=True,
        is_clustered=True,
        refuses=("entmax_alpha", "key_shift"),
    )
}

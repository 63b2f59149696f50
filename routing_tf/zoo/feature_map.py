"""Linear attention: products of features instead of a softmax.

The weight of a key is the product of two vectors of features, its own and that of the
query, so sums over keys serve all queries. Each key may also have a scale, the
logarithm of another factor. Sums are relative to the largest scale among their keys, as
in a softmax, so they neither overflow nor depend on later keys.

Letters: B batch, H heads, L length, F features, E columns of values, N chunks.
"""

import dataclasses

import keras
import numpy as np
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.caches import pending_keys
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.tensors import break_into_blocks
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import put_back_blocks
from routing_tf.layers.support.tensors import smaller
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.pattern import Pattern

__all__ = ["FeatureMapHeads"]


# The scale of a key that nobody sees, and of no key at all. A key that a bias hides has
# half of it, and counts as long as nothing else is visible.
NOTHING = -1e30
# One matrix product adds up this many sums; further products add up groups of them.
GROUP_SIZE = 16

FEATURE_MAPS = ("elu", "positive", "fourier")
# The exact kernel of unit vectors is at least this for `sigma` 1; smaller or negative
# sums of random features are errors.
LEAST_FOURIER_SUM = float(np.exp(-2.0))
LEAST_SUM = 1e-30


def sums_of_keys(key, value, scale=None):
    """Returns sums over keys `<float32>[B, H, F, E]`, and their scale or None.

    `scale` is `<float32>[B, 1 or H, L]`; None for zeros.
    """
    largest = None
    if scale is not None:
        largest = ops.stop_gradient(tensors.largest(scale, axis=-1))
        value = value * ops.exp(scale - largest[..., None])[..., None]
    return ops.matmul(ops.swapaxes(key, -1, -2), value), largest


def joined_sums(sums, largest, more, more_largest):
    """Joins two results of `sums_of_keys`, which have scales.

    Sums are `[B, H, F, E]`, their largest scales `[B, H]`.
    """
    both = ops.maximum(largest, more_largest)
    sums = sums * ops.exp(largest - both)[..., None, None]
    more = more * ops.exp(more_largest - both)[..., None, None]
    return sums + more, both


def running_sums(query, key, value, scale, chunk_length):
    """Returns for each query the sums over the keys up to its own place.

    Computed in chunks: weights of pairs inside a chunk, and sums of earlier chunks.
    Later keys change no bit of a result.

    Args:
        query: `<float32>[B, H, L, F]`, features of queries.
        key: as in `sums_of_keys`.
        value: as in `sums_of_keys`.
        scale: as in `sums_of_keys`.
        chunk_length: number of places in a chunk.

    Returns:
        `<float32>[B, H, L, E]`, relative to the largest scale up to each place.
    """
    length = length_of(query, 2)
    chunk_length = smaller(chunk_length, length)
    query, key, value, scale = (
        None if x is None else break_into_blocks(x, chunk_length, axis=2)
        for x in (query, key, value, scale)
    )
    places = numbers(chunk_length)
    earlier = places <= places[:, None]
    weights = ops.matmul(query, ops.swapaxes(key, -1, -2))
    if scale is None:
        before, _ = _before(*sums_of_keys(key, value))
        sums = ops.matmul(ops.where(earlier, weights, 0.0), value)
        sums = sums + ops.matmul(query, before)
    else:
        before, largest_before = _before(*sums_of_keys(key, value, scale))
        largest = running_largest(scale)
        largest = ops.maximum(largest, largest_before[..., None])
        largest = ops.stop_gradient(largest)
        # What is masked here has no gradient, and cannot overflow.
        pairs = ops.where(earlier, scale[..., None, :] - largest[..., None], NOTHING)
        sums = ops.matmul(weights * ops.exp(pairs), value)
        factor = ops.exp(largest_before[..., None] - largest)
        sums = sums + factor[..., None] * ops.matmul(query, before)
    return put_back_blocks(sums, length, axis=2)


def running_largest(scale):
    """Returns the largest one of scales `[..., L]` up to each place, for a few."""
    places = numbers(length_of(scale, -1))
    pairs = ops.where(places <= places[:, None], scale[..., None, :], NOTHING)
    return tensors.largest(pairs, axis=-1)


def _before(sums, largest):
    """Returns the sums over all chunks before each one, with their largest scales.

    From `[B, H, N, F, E]` and `[B, 1 or H, N]`, or None, to the same shapes.
    """
    batch, heads, chunks, features, columns = ops.shape(sums)
    flat = ops.reshape(sums, (batch, heads, chunks, features * columns))
    flat, largest = _flat_before(flat, largest)
    return ops.reshape(flat, (batch, heads, chunks, features, columns)), largest


def _flat_before(sums, largest):
    """The same as `_before`, for `[B, H, N, F * E]`."""
    chunks = length_of(sums, 2)
    if not is_known(chunks) or chunks <= GROUP_SIZE:
        return _before_in_group(sums, largest)
    grouped = break_into_blocks(sums, GROUP_SIZE, axis=2)
    if largest is None:
        outside, _ = _flat_before(ops.sum(grouped, axis=3), None)
        inside, _ = _before_in_group(grouped, None)
        inside = inside + outside[..., None, :]
        return put_back_blocks(inside, chunks, axis=2), None
    group_largest = break_into_blocks(largest, GROUP_SIZE, axis=2)
    inside, largest_inside = _before_in_group(grouped, group_largest)
    whole = tensors.largest(group_largest, axis=-1)
    factors = ops.exp(group_largest - whole[..., None])
    totals = ops.sum(grouped * factors[..., None], axis=3)
    outside, largest_outside = (x[:, :, :, None] for x in _flat_before(totals, whole))
    both = ops.maximum(largest_inside, largest_outside)
    inside = inside * ops.exp(largest_inside - both)[..., None]
    inside = inside + ops.exp(largest_outside - both)[..., None] * outside
    return (
        put_back_blocks(inside, chunks, axis=2),
        put_back_blocks(both, chunks, axis=2),
    )


def _before_in_group(sums, largest):
    """The same as `_before`, for `[..., N, F * E]` and few chunks."""
    places = numbers(length_of(sums, -2))
    is_before = places < places[:, None]
    if largest is None:
        return ops.matmul(ops.cast(is_before, sums.dtype), sums), None
    pairs = ops.where(is_before, largest[..., None, :], NOTHING)
    largest = tensors.largest(pairs, axis=-1)
    pairs = ops.where(is_before, pairs - largest[..., None], NOTHING)
    return product(ops.exp(pairs), sums), largest


@keras.saving.register_keras_serializable("routing_tf")
class FeatureMapHeads(HeadGroup):
    """Heads that weigh a key by the product of its features with those of the query.

    Output i is `sum_j f(q_i)·f(k_j) v_j / sum_j f(q_i)·f(k_j)`, over all keys, or over
    those up to i with a causal mask. The sums over keys serve every query, so work and
    memory are linear in the length, and decoding remembers only the sums, whose size is
    constant. Everything is computed in float32.

    The maps f, of a query and a key of `key_dim` numbers d:

    - `"elu"` (Linear Transformer): `elu(x) + 1`, d features.
    - `"positive"` (Performer, FAVOR+): `exp(w·x - |x|²/2)` of `x / d**0.25` for m
      random vectors w, orthogonal in blocks of d, so that products estimate the
      weights of softmax attention. The paper's code divides by the maximum over all
      keys and adds a small number; here each sum is relative to its largest key so far.
      The quotient is the same, and later tokens do not change it.
    - `"fourier"` (Random Feature Attention): sine and cosine of `sigma * w·x` for
      m normal vectors w and x of length 1; products estimate
      `exp(-|sigma * (q - k)|²/2)`. The weight `sigma`, for each head and number of x,
      starts at 1 and learns. Estimates may be near zero or negative, so the denominator
      is at least exp(-2) times the factor of the largest bias.

    The random vectors are drawn once, and do not change in training.

    Args:
        num_heads: number of heads in the group.
        feature_map: `"elu"` (the default), `"positive"` or `"fourier"`.
        num_features: number m of random vectors of each head. Defaults to 256;
            `"elu"` has none.
        seed: integer seed of the random vectors. Defaults to 0.
        chunk_length: number of tokens in a chunk under a causal mask, inside which
            weights of pairs are computed. It influences time and memory, not results.
            Defaults to 128.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position` and
            `dropout`: there are no logits and no weights to apply them to.

    Call arguments and Returns: as in `HeadGroup`. A token bias multiplies the weights
    of its key by its exponential. A query that sees no key returns zero.

    Raises:
        ValueError: if `max_relative_position` or `dropout` is given; when called, if
            `use_causal_mask=True` and query and value differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.FeatureMapHeads(2, feature_map="positive", num_features=32)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Katharopoulos et al., "Transformers are RNNs"
    (https://arxiv.org/abs/2006.16236), equations 4 to 12; Choromanski et al.,
    "Rethinking Attention with Performers" (https://arxiv.org/abs/2009.14794), section
    2; Peng et al., "Random Feature Attention" (https://arxiv.org/abs/2103.02143),
    section 3.1.
    """

    feature_map = Argument(check_choice, FEATURE_MAPS)
    num_features = Argument(check_positive_integer)
    seed = Argument(check_non_negative_integer)
    chunk_length = Argument(check_positive_integer)

    def __init__(
        self,
        num_heads,
        feature_map="elu",
        num_features=256,
        seed=0,
        chunk_length=128,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self, "features replace logits", "max_relative_position"
        )
        refusals.refuse_arguments(self, refusals.NO_WEIGHTS, "dropout")
        self.feature_map = feature_map
        self.num_features = num_features
        self.seed = seed
        self.chunk_length = chunk_length

    def build(self, query_shape, key_shape, value_shape):
        super().build(query_shape, key_shape, value_shape)
        if self.feature_map == "elu":
            return
        self.random_vectors = self.add_weight(
            name="random_vectors",
            shape=(self.num_heads, self.num_features, self.key_dim),
            initializer=self._draw,
            dtype="float32",
            trainable=False,
            autocast=False,
        )
        if self.feature_map == "fourier":
            self.sigma = self.add_weight(
                name="sigma",
                shape=(self.num_heads, self.key_dim),
                initializer="ones",
                dtype="float32",
                autocast=False,
            )

    def attend(self, inputs, training=None):
        query = self.query_features(inputs.query)
        keys = self._weighted_keys(inputs)
        if inputs.use_causal_mask:
            return self._quotient(running_sums(query, *keys, self.chunk_length))
        sums, _ = sums_of_keys(*keys)
        return self._quotient(ops.matmul(query, sums))

    def query_features(self, query):
        """Returns `<float32>[B, H, L, features]`, up to a factor for each query."""
        # The paper scales queries as much as keys, or not at all.
        power = {"elu": 0.5, "positive": 0.25, "fourier": 0.0}[self.feature_map]
        return self._features(ops.cast(query, "float32") * self.key_dim**power)[0]

    def key_features(self, key):
        """Returns features of keys, and logarithms of factors `[B, H, L]` or None."""
        power = -0.25 if self.feature_map == "positive" else 0.0
        return self._features(ops.cast(key, "float32") * self.key_dim**power)

    @property
    def tokens_per_step(self):
        # A step is one chunk.
        return self.chunk_length

    def make_cache(self, batch_size, max_length, positions=None):
        shape = (batch_size, self.num_heads)
        features = {
            "elu": self.key_dim,
            "positive": self.num_features,
            "fourier": 2 * self.num_features,
        }[self.feature_map]
        cache = {
            "sums": ops.zeros((*shape, features, self.value_dim + 1), "float32"),
            "largest": ops.full(shape, NOTHING, dtype="float32"),
        }
        if self.key_shift:
            key = ops.zeros((*shape, 1, self.key_dim), self.compute_dtype)
            cache["pending"] = pending_keys.none(batch_size, key=key)
        return cache

    def fill_cache(self, cache, inputs):
        pending = {}
        if self.key_shift:
            before = pending_keys.forgotten(cache)["pending"]
            inputs, pending["pending"] = pending_keys.offer_inputs(before, 0, inputs)
        return {**self.make_memory(inputs, inputs.value.shape[2]), **pending}

    def restart_cache(self, cache):
        empty = super().restart_cache(cache)
        empty["largest"] = ops.full_like(cache["largest"], NOTHING)
        return pending_keys.forgotten(empty)

    def step(self, cache, index, inputs):
        if self.key_shift:
            inputs, pending = pending_keys.offer_inputs(cache["pending"], index, inputs)
            cache = {**cache, "pending": pending}
        query = self.query_features(inputs.query)
        key, value, scale = self._weighted_keys(_with_bias(inputs))
        largest = cache["largest"][..., None]
        scale = ops.broadcast_to(scale, ops.shape(key)[:3])
        sums = running_sums(query, key, value, scale, self.tokens_per_step)
        own_largest = running_largest(scale)
        both = ops.maximum(largest, own_largest)
        sums = sums * ops.exp(own_largest - both)[..., None]
        before = ops.matmul(query, cache["sums"])
        sums = sums + ops.exp(largest - both)[..., None] * before
        new = joined_sums(
            cache["sums"], cache["largest"], *sums_of_keys(key, value, scale)
        )
        cache = {**cache, "sums": new[0], "largest": new[1]}
        return self._quotient(sums), cache

    def max_positions(self, cache):
        return None

    def make_memory(self, inputs, max_length):
        sums, largest = sums_of_keys(*self._weighted_keys(_with_bias(inputs)))
        largest = ops.broadcast_to(largest, ops.shape(sums)[:2])
        return {"sums": sums, "largest": largest}

    def read_memory(self, cache, index, inputs):
        query = self.query_features(inputs.query)
        return self._quotient(ops.matmul(query, cache["sums"])), cache

    def _weighted_keys(self, inputs):
        """Returns features of keys, values with a column of ones, and scales or None.

        Values and ones are zero at padding.
        """
        key, scale = self.key_features(inputs.key)
        value, mask = ops.cast(inputs.value, "float32"), inputs.value_mask
        value = ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1)
        if mask is not None:
            value = ops.where(mask[..., None], value, 0.0)
        if inputs.token_bias is not None:
            bias = ops.cast(inputs.token_bias, "float32")
            scale = bias if scale is None else scale + bias
        if scale is not None:
            scale = ops.maximum(scale, NOTHING / 2)
            if mask is not None:
                scale = ops.where(mask, scale, NOTHING)
        return key, value, scale

    def _features(self, x):
        """Returns features, and the logarithm of a factor of each token's or None."""
        if self.feature_map == "elu":
            return ops.elu(x) + 1.0, None
        vectors = ops.convert_to_tensor(self.random_vectors)
        if self.feature_map == "fourier":
            squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
            x = x * ops.rsqrt(ops.maximum(squares, 1e-12))
            vectors = vectors * ops.convert_to_tensor(self.sigma)[:, None]
            angles = product(x, ops.swapaxes(vectors, -1, -2))
            both = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
            return both * self.num_features**-0.5, None
        products = product(x, ops.swapaxes(vectors, -1, -2))
        largest = ops.stop_gradient(tensors.largest(products, axis=-1))
        features = ops.exp(products - largest[..., None])
        return features, largest - ops.sum(ops.square(x), axis=-1) / 2.0

    def _quotient(self, sums):
        """Divides sums of values by the sums of ones after them; zero without a key."""
        output, ones = sums[..., :-1], sums[..., -1:]
        if self.feature_map == "fourier":
            output = output / ops.maximum(ones, LEAST_FOURIER_SUM)
        else:
            # Division of zero by a tiny number would give NaN gradients.
            sees = ones > LEAST_SUM
            output = ops.where(sees, output / ops.where(sees, ones, 1.0), 0.0)
        return ops.cast(output, self.compute_dtype)

    def _draw(self, shape, dtype=None):
        """Draws the random vectors of all heads."""
        random = np.random.default_rng(self.seed)
        vectors = random.normal(size=shape)
        if self.feature_map == "positive":
            vectors = np.stack([_orthogonal(each, random) for each in vectors])
        return ops.convert_to_tensor(vectors.astype("float32"))


def _with_bias(inputs):
    """Returns inputs that have a token bias, as tokens to come may."""
    if inputs.token_bias is not None:
        return inputs
    bias = ops.zeros_like(inputs.value[:, :1, :, 0])
    return dataclasses.replace(inputs, token_bias=bias)


def _orthogonal(vectors, random):
    """Turns vectors so that each `dim` of them are orthogonal; keeps their lengths."""
    number, dim = vectors.shape
    blocks = []
    for _ in range(-(-number // dim)):
        orthogonal, triangle = np.linalg.qr(random.normal(size=(dim, dim)))
        # Otherwise some numbers would always have the same sign.
        blocks.append(orthogonal.T * np.sign(np.diag(triangle))[:, None])
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.concatenate(blocks)[:number] * norms


def _pattern(feature_map):
    def settings(sizes):
        return {
            "feature_map": feature_map,
            "num_features": sizes.attention_window,
            "seed": sizes.index,
        }

    return Pattern(
        FeatureMapHeads,
        settings,
        has_relative_positions=False,
        is_bounded=True,
        refuses=("entmax_alpha", "dropout"),
    )


PATTERNS = {
    "linear": _pattern("elu"),
    "performer": _pattern("positive"),
    "random_features": _pattern("fourier"),
}

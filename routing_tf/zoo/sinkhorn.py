"""Sinkhorn attention: queries see their own block and one that is sorted to it."""

import keras
from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_positive_number
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share
from routing_tf.zoo.parts.refusals import OneSequenceHeads

__all__ = ["SinkhornHeads"]

MIXTURE = "a place of a sorted block is a mixture of keys of several places"
# The logarithm used for zero, and the smallest sum that counts.
HIDDEN, SMALLEST = -1e9, 1e-30


@keras.saving.register_keras_serializable("routing_tf")
class SinkhornHeads(OneSequenceHeads):
    """Heads whose queries see their own block and one that is sorted to its place.

    A matrix R between blocks, whose rows and columns each sum to about 1, sorts them:
    place s of the block that is sorted to block i is the mean of the places s of all
    blocks j with the weights `R[i, j]`. Queries attend to this block and to their own
    block in one softmax. R starts as `exp(scores / temperature)`; then rows and columns
    are divided by their sums in turn, `num_iterations` times. Scores are products of
    the mean query of a block and the mean key of another one, with Gumbel noise in
    training. Work is that of attention to two blocks, plus `length ** 2 / block_length`
    products for sorting.

    Under a causal mask, only earlier blocks are sorted, and the first block finds none.
    The query of a block is the mean of all queries up to its first token. An entry is
    divided by the sum of its column over rows up to its own, so that no later token
    counts, and in the end rows are divided by their sums. Only one triangular matrix
    has sums of 1 in rows and columns: the one that assigns each block the block before
    it. More iterations bring R nearer to it; with one iteration, R is near a softmax of
    the scores.

    Means leave out padding, and in mixtures with padding the weights of real keys are
    increased.

    Args:
        num_heads: number of heads in the group.
        block_length: number of tokens of a block. Defaults to 64.
        num_iterations: number of iterations. Defaults to 7.
        temperature: divisor of the scores; small numbers choose one block. Defaults to
            0.75.
        gumbel_noise: whether there is noise in training, drawn with `dropout_seed`.
            Defaults to True.
        **kwargs: arguments of `HeadGroup`, without `max_relative_position`,
            `key_shift`, `rotary_positions` and `token_bias_weight`: places of a sorted
            block are mixtures.

    Call arguments and Returns: as in `HeadGroup`. A cache remembers all tokens, and
    each step sorts again.

    Raises:
        ValueError: if an argument has no meaning; when called, with a token bias or
            another sequence as value.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.SinkhornHeads(2, block_length=4)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Tay et al., "Sparse Sinkhorn Attention"
    (https://arxiv.org/abs/2002.11296), section 3. There, a network makes scores from
    the features of a block, for a fixed number of blocks, and sums of columns under a
    causal mask include later rows. Products of means are the scores of the package
    `sinkhorn-transformer`, which takes the logarithm of their positive part. The causal
    form is tested only against NumPy code of this repository.
    """

    compares_by_products = True
    tokens_per_step = 1

    block_length = Argument(check_positive_integer)
    num_iterations = Argument(check_positive_integer)
    temperature = Argument(check_positive_number)
    gumbel_noise = Argument(check_flag)

    def __init__(
        self,
        num_heads,
        block_length=64,
        num_iterations=7,
        temperature=0.75,
        gumbel_noise=True,
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        refusals.refuse_arguments(
            self,
            MIXTURE,
            "max_relative_position",
            "key_shift",
            "rotary_positions",
            "token_bias_weight",
        )
        self.block_length = block_length
        self.num_iterations = num_iterations
        self.temperature = temperature
        self.gumbel_noise = gumbel_noise
        self.noise_seed = keras.random.SeedGenerator(self.dropout_seed)

    def prepared(self, inputs):
        refusals.refuse_bias(inputs, MIXTURE)
        return super().prepared(inputs)

    def attend(self, inputs, training=None):
        length = length_of(inputs.query, 2)
        real = self._in_blocks(known_mask(inputs.value, inputs.value_mask))
        query, key, value = (
            self._in_blocks(x) for x in (inputs.query, inputs.key, inputs.value)
        )
        is_causal = inputs.use_causal_mask
        sorting = self.sorting(query, key, real, is_causal, training)
        (sorted_key, sorted_value), filled = _mixtures(sorting, (key, value), real)
        own = real[..., None, :]
        if is_causal:
            slots = numbers(self.block_length)
            own = ops.logical_and(own, slots <= slots[:, None])
        shape = (*ops.shape(filled)[:3], self.block_length, self.block_length)
        mask = [ops.broadcast_to(x, shape) for x in (filled[..., None, :], own)]
        output = self.dot_product(
            query,
            ops.concatenate([sorted_key, key], axis=-2),
            ops.concatenate([sorted_value, value], axis=-2),
            attention_mask=ops.concatenate(mask, axis=-1),
            training=training,
        )
        return tensors.put_back_blocks(output, length, axis=2)

    def sorting(self, query, key, real, use_causal_mask, training=False):
        """Returns the matrix that sorts blocks.

        Args:
            query: `<float>[batch, heads, blocks, slots, dim]`.
            key: the same of keys.
            real: `<bool>[batch, 1, blocks, slots]`, False for padding.
            use_causal_mask: whether later blocks must not count.
            training: whether there may be noise.

        Returns:
            `<float32>[batch, heads, blocks, blocks]`; row i holds what block i sees.
        """
        sums, counts = _sums(query, real)
        if use_causal_mask:
            first, is_real = _sums(query[..., :1, :], real[..., :1])
            sums, counts = _before(sums) + first, _before(counts) + is_real
        queries = sums / ops.maximum(counts, 1.0)
        sums, counts = _sums(key, real)
        keys = sums / ops.maximum(counts, 1.0)
        scores = ops.matmul(queries, ops.swapaxes(keys, -1, -2))
        if training and self.gumbel_noise:
            scores = scores + self._noise(scores)
        places = numbers(length_of(scores, -1))
        has_tokens = counts[..., 0] > 0
        mask = ops.logical_and(has_tokens[..., None], has_tokens[..., None, :])
        if use_causal_mask:
            mask = ops.logical_and(mask, places < places[:, None])
        logits = ops.where(mask, scores / self.temperature, HIDDEN)
        for _ in range(self.num_iterations):
            logits = logits - _logsumexp(logits, axis=-1)
            logits = ops.where(mask, logits, HIDDEN)
            if use_causal_mask:
                # At most 0, so that exponentials can be summed directly.
                sums = ops.cumsum(ops.exp(logits), axis=-2)
                logits = logits - ops.log(ops.maximum(sums, SMALLEST))
            else:
                logits = logits - _logsumexp(logits, axis=-2)
            logits = ops.where(mask, logits, HIDDEN)
        if use_causal_mask:
            logits = logits - _logsumexp(logits, axis=-1)
        return ops.where(mask, ops.exp(logits), 0.0)

    def make_cache(self, batch_size, max_length, positions=None):
        shape = (batch_size, self.num_heads, max_length)
        return {
            "rows": rows.empty_rows(self, *shape),
            "queries": ops.zeros((*shape, self.key_dim), self.compute_dtype),
        }

    def fill_cache(self, cache, inputs):
        return {
            name: ops.slice_update(ops.zeros_like(cache[name]), (0, 0, 0, 0), x)
            for name, x in self._to_remember(inputs).items()
        }

    def step(self, cache, index, inputs):
        cache = {
            name: ops.slice_update(cache[name], (0, 0, index, 0), x)
            for name, x in self._to_remember(inputs).items()
        }
        key, value, _, real = rows.split_rows(self, cache["rows"])
        real = ops.logical_and(real, numbers(real.shape[-1]) <= index)[:, :1]
        query, key, value, real = (
            self._in_blocks(x) for x in (cache["queries"], key, value, real)
        )
        block = (index // self.block_length)[None]

        def own(x):
            return ops.take(x, block, axis=2)

        sorting = own(self.sorting(query, key, real, use_causal_mask=True))
        mixtures, filled = _mixtures(sorting, (key, value), real)
        keys, values = (
            ops.concatenate([x, own(y)], axis=-2)
            for x, y in zip(mixtures, (key, value), strict=True)
        )
        own_real = ops.broadcast_to(own(real), ops.shape(filled))
        mask = ops.concatenate([filled, own_real], axis=-1)
        output = self.dot_product(
            inputs.query,
            keys[:, :, 0],
            values[:, :, 0],
            attention_mask=mask,
            training=False,
        )
        return output, cache

    def _to_remember(self, inputs):
        return {"rows": rows.of_inputs(self, inputs), "queries": inputs.query}

    def _in_blocks(self, x):
        return tensors.break_into_blocks(x, self.block_length, axis=2)

    def _noise(self, scores):
        """Returns Gumbel noise of the shape of the scores."""
        uniform = keras.random.uniform(
            ops.shape(scores), minval=1e-6, maxval=1.0, seed=self.noise_seed
        )
        return -ops.log(-ops.log(uniform) + 1e-6)


def _sums(x, real):
    """Returns sums of blocks `<float32>[..., N, D]`, and counts `[..., N, 1]`."""
    weights = ops.cast(real, "float32")[..., None]
    sums = ops.sum(ops.cast(x, "float32") * weights, axis=-2)
    return sums, ops.sum(weights, axis=-2)


def _before(x):
    """Returns sums over earlier blocks, exactly without the block itself."""
    earlier = ops.pad(ops.cumsum(x, axis=2), [(0, 0), (0, 0), (1, 0), (0, 0)])
    return cut_axis(earlier, 0, length_of(x, 2), axis=2)


def _mixtures(sorting, tokens, real):
    """Mixes the blocks of each tensor, and tells which places have entries.

    Args:
        sorting: `<float32>[B, H, rows, N]`.
        tokens: tensors `<float>[B, H, N, S, D]`.
        real: `<bool>[B, 1, N, S]`.

    Returns:
        Tensors `<float>[B, H, rows, S, D]`, and `<bool>[B, H, rows, S]`.
    """
    weights = ops.cast(real, "float32")
    found = product(sorting, weights)
    total = ops.sum(sorting, axis=-1, keepdims=True)
    filled = found > SMALLEST
    # One if all are real, so that the sums are the same.
    scale = ops.where(filled, total / ops.maximum(found, SMALLEST), 0.0)
    mixed = []
    for x in tokens:
        batch, heads, num_blocks, slots, dim = ops.shape(x)
        # In float32, because increased weights may have been tiny before.
        rows = ops.cast(ops.where(real[..., None], x, 0), "float32")
        rows = ops.reshape(rows, (batch, heads, num_blocks, slots * dim))
        rows = ops.matmul(sorting, rows)
        rows = ops.reshape(rows, (batch, heads, ops.shape(rows)[2], slots, dim))
        mixed.append(ops.cast(rows * scale[..., None], x.dtype))
    return mixed, filled


def _logsumexp(x, axis):
    return ops.logsumexp(x, axis=axis, keepdims=True)


def _settings(sizes):
    return {"block_length": share(sizes, 2), "dropout_seed": sizes.index}


PATTERNS = {
    "sinkhorn": Pattern(
        SinkhornHeads,
        _settings,
        has_relative_positions=False,
        refuses=("entmax_alpha", "key_shift", "rotary_positions"),
    )
}

"""Sparse attention of DeepSeek: a small indexer chooses the tokens that heads read."""

import dataclasses
import functools
import typing

import keras
from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.caches import rows
from routing_tf.layers.softmax.queries_and_keys import rotate
from routing_tf.layers.support import head_inputs as shift
from routing_tf.layers.support import parts_of_batches
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.keras_internals import OwnLosses
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.parts_of_batches import update_or_hold
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import put_back_blocks
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_not_negative
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.chosen_blocks import ReadsFeatures
from routing_tf.zoo.parts.chosen_blocks import best_blocks
from routing_tf.zoo.parts.chosen_blocks import is_among
from routing_tf.zoo.parts.pattern import Pattern

__all__ = ["IndexedHeads"]

# What the kernels of an indexer make of a token.
NAMES = ("query", "key", "head")
ONE_SEQUENCE = "the indexer makes its keys from the tokens of the queries"
# In sequences so many times as long as what a query reads, copies are about as fast as
# masked pairs.
COPIES_PAY = 32
# Numbers of a block of queries that are in memory at once where gradients need none.
MOST_NUMBERS = 1 << 26


class Index(typing.NamedTuple):
    """What the indexer makes of a sequence. J is its number of heads, E their size.

    Attributes:
        query: `<float>[B, L, J, E]`.
        weights: `<float>[B, L, J]`, those of the heads of each query.
        key: `<float>[B, S, E]`, the same for all heads; or other keys for each query,
            `[B, L, S, E]`.
    """

    query: typing.Any
    weights: typing.Any
    key: typing.Any

    def scores(self):
        """Returns the scores of the keys, `<float32>[B, L, S]`."""
        batch, length, heads, size = ops.shape(self.query)
        if len(self.key.shape) == 4:
            products = product(self.query, self.key, transpose_y=True)
        else:
            query = ops.reshape(self.query, (batch, length * heads, size))
            products = product(query, self.key, transpose_y=True)
            shape = (batch, length, heads, ops.shape(self.key)[1])
            products = ops.reshape(products, shape)
        products = ops.cast(ops.relu(products), "float32")
        return ops.sum(ops.cast(self.weights, "float32")[..., None] * products, axis=2)


def in_blocks(function, length, size, axis):
    """Joins the results of a function of places, `<int32>[Q]`, along an axis."""
    if size >= length:
        return function(numbers(length))
    size = max(1, size)
    starts = ops.arange(0, length, size, dtype="int32")
    # A loop, so that one block is in memory at once.
    found = ops.map(
        lambda start: function(ops.minimum(start + numbers(size), length - 1)), starts
    )
    return put_back_blocks(ops.moveaxis(found, 0, axis), length, axis=axis)


@keras.saving.register_keras_serializable("routing_tf")
class IndexedHeads(ReadsFeatures, HeadGroup, OwnLosses):
    """Heads that read the tokens which a small indexer scores highest.

    The indexer has its own projections of the tokens h, and scores token s for query t
    by

        I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s]),

    with `num_indexer_heads` heads j that share one key. All heads of the group attend
    to the `num_selected` visible tokens with the highest scores; of equal ones, to the
    earlier ones.

    The choice has no gradient. Instead, training adds a loss, `indexer_loss_weight`
    times the mean over real queries of the Kullback-Leibler divergence of the softmax
    of the scores from the mean of the heads' attention weights. It moves the indexer
    alone: attention weights count as given, and so do the tokens that the indexer
    reads. During the first `warm_up_steps` training steps, queries attend to all
    visible tokens, and the loss compares all of them; after that, only those that are
    chosen. Evaluation and decoding always choose. In the paper, all other weights stand
    still in the warm-up of a trained model; here they learn, too.

    Scores of all pairs are computed, with few and small heads. In steps with a cache,
    and in sequences of `gather_length` tokens or more, heads read only the chosen
    tokens, of which each query gets copies; in shorter ones and in training with a
    warm-up, they compare all pairs and mask those not chosen. So train a warmed-up
    model on long sequences with `warm_up_steps=0`: the weights are the same.

    State (float32): `training_steps`, and `indexer_loss`, the last loss without its
    weight. Both move if `training=True` and the layer is trainable.

    As in DeepSeek's code, `w` is scaled by `(num_indexer_heads * indexer_dim)**-0.5`.
    Its layer normalization and Hadamard transform of queries and keys of the indexer,
    and its 8-bit products, are left out.

    Args:
        num_heads: number of heads in the group.
        num_selected: number of tokens that a query reads. Defaults to 256 (2,048 in the
            paper).
        num_indexer_heads: number of heads of the indexer. Defaults to 4.
        indexer_dim: size of a query or key of the indexer. Defaults to 32.
        indexer_rotary_dim: number of first entries of the indexer's queries and keys
            that are turned by the positions of their tokens, so that scores may depend
            on distances: half of them in DeepSeek's code. Defaults to 0, for content
            alone.
        warm_up_steps: number of training steps in which queries attend to all visible
            tokens. Defaults to 1000.
        indexer_loss_weight: factor of the loss of the indexer. Defaults to 1.0.
        gather_length: length from which on queries get copies of the chosen tokens. It
            influences time and memory, not results. None (the default) for 32 times
            `num_selected`.
        kernel_initializer: initializer of the indexer's projections. Defaults to
            `"glorot_uniform"`.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens. Neither
            they nor a token bias influence the scores of the indexer. With
            `key_shift=1`, a position offers the indexer's key of the token before it,
            too.

    Call arguments and Returns: as in `HeadGroup`; `features` are required, and
    `MixedAttention` passes them.

    Raises:
        ValueError: if `indexer_rotary_dim` is odd or exceeds `indexer_dim`; when
            called, without features, or with another sequence as value.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    heads = zoo.IndexedHeads(2, num_selected=4, num_indexer_heads=2)
    attention = layers.MixedAttention([heads], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language
    Models" (https://arxiv.org/abs/2512.02556), section 2.1; the released inference code
    of DeepSeek-V3.2-Exp.
    """

    compares_by_products = True
    supports_segments = True
    remembers_key_heads = True
    loss_names = ("indexer_loss",)
    # Each query reads tokens of its own.
    tokens_per_step = 32

    num_selected = Argument(check_positive_integer)
    num_indexer_heads = Argument(check_positive_integer)
    indexer_dim = Argument(check_positive_integer)
    indexer_rotary_dim = Argument(check_non_negative_integer)
    warm_up_steps = Argument(check_non_negative_integer)
    indexer_loss_weight = Argument(check_not_negative)
    gather_length = Argument(check_optional_integer)
    kernel_initializer = Argument(initializer)

    def __init__(
        self,
        num_heads,
        num_selected=256,
        num_indexer_heads=4,
        indexer_dim=32,
        indexer_rotary_dim=0,
        warm_up_steps=1000,
        indexer_loss_weight=1.0,
        gather_length=None,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(num_heads, **kwargs)
        self.num_selected = num_selected
        self.num_indexer_heads = num_indexer_heads
        self.indexer_dim = indexer_dim
        self.indexer_rotary_dim = indexer_rotary_dim
        if self.indexer_rotary_dim % 2 or self.indexer_rotary_dim > self.indexer_dim:
            raise ValueError(
                "`indexer_rotary_dim` must be even, because pairs of entries are "
                "turned, and at most `indexer_dim`. Received: indexer_rotary_dim="
                f"{indexer_rotary_dim}, indexer_dim={self.indexer_dim}"
            )
        self.warm_up_steps = warm_up_steps
        self.indexer_loss_weight = indexer_loss_weight
        self.gather_length = gather_length
        self.kernel_initializer = kernel_initializer

    def build(self, query_shape, key_shape, value_shape, features_shape=None):
        super().build(query_shape, key_shape, value_shape)
        dim = self.dim_of_features(features_shape)
        heads, size = self.num_indexer_heads, self.indexer_dim
        self.indexer_kernels = [
            self.add_weight(
                name=f"indexer_{name}_kernel",
                shape=(dim, columns),
                initializer=cloned(self.kernel_initializer),
            )
            for name, columns in zip(NAMES, (heads * size, size, heads), strict=True)
        ]
        state = {"dtype": "float32", "trainable": False, "autocast": False}
        self.training_steps, self.indexer_loss = (
            self.add_weight(name=name, shape=(), initializer="zeros", **state)
            for name in ("training_steps", "indexer_loss")
        )

    def prepared(self, inputs):
        inputs = super().prepared(inputs)
        refusals.refuse_another_sequence(inputs, ONE_SEQUENCE)
        return self.with_features(inputs)

    def attend(self, inputs, training=None):
        index = self._index(inputs)
        if self.key_shift:
            own = dataclasses.replace(inputs, key=index.key[:, None])
            index = index._replace(key=shift.offer_previous_keys(own).key[:, 0])
        learns = bool(training and self.trainable)
        warms_up = learns and self.warm_up_steps > 0
        length = length_of(inputs.value, 2)
        fewest = self.gather_length or COPIES_PAY * self.num_selected
        if is_known(length) and length >= fewest and not warms_up:
            return self._attend_to_copies(inputs, index, training, learns)
        visible = self._visible(inputs, numbers(length))
        scores = index.scores()
        chosen = best_blocks(scores, visible, self.num_selected, training)
        seen = is_among(chosen, length)
        if warms_up:
            warm = ops.convert_to_tensor(self.training_steps) < self.warm_up_steps
            seen = ops.where(warm, visible, seen)
        bias = inputs.token_bias
        pairs = {
            "attention_mask": seen[:, None],
            "bias": None if bias is None else bias[:, :, None],
        }
        if learns:
            target = self._mean_weights(inputs.query, inputs.key, **pairs)
            self._learn(inputs, scores, target, seen)
        return self.dot_product(
            inputs.query,
            inputs.key,
            inputs.value,
            **pairs,
            use_causal_mask=inputs.use_causal_mask,
            training=training,
        )

    def _attend_to_copies(self, inputs, index, training, learns):
        """Attends to the chosen tokens alone, of which each query gets copies."""
        length, heads = inputs.value.shape[2], self.num_indexer_heads
        choose = functools.partial(self._choose, inputs, index, training)
        if training:
            size = MOST_NUMBERS // (heads * length)
            chosen = in_blocks(choose, length, size, axis=1)
            places = numbers(length)
            return self._read(inputs, index, places, chosen, training, learns)
        columns = self.num_heads * (self.key_dim + inputs.value.shape[-1])
        size = MOST_NUMBERS // (heads * length + columns * self.num_selected)
        return in_blocks(
            lambda places: self._read(inputs, index, places, choose(places)),
            length,
            size,
            axis=2,
        )

    def _choose(self, inputs, index, training, places):
        """Returns the tokens that queries read, `<int32>[B, Q, K]`; S for none.

        `places` are those of the queries, `<int32>[Q]`.
        """
        query, weights = (ops.take(x, places, axis=1) for x in index[:2])
        scores = Index(query, weights, index.key).scores()
        visible = self._visible(inputs, places)
        return best_blocks(scores, visible, self.num_selected, training)

    def _read(self, inputs, index, places, chosen, training=None, learns=False):
        """Attends with the queries at `places` to the tokens that each has chosen."""
        length = inputs.value.shape[2]
        exists = chosen < length
        chosen = ops.where(exists, chosen, 0)
        batch, heads = ops.shape(inputs.query)[:2]
        own = ops.broadcast_to(chosen[:, None], (batch, heads, *ops.shape(chosen)[1:]))
        query = ops.take(inputs.query, places, axis=2)[:, :, :, None]
        key, value = (tensors.gather(x, own) for x in (inputs.key, inputs.value))
        bias = inputs.token_bias
        if bias is not None:
            bias = tensors.gather_entries(bias, own, length)[..., None, :]
        pairs = {
            "attention_mask": exists[:, None, :, None],
            "bias": bias,
            "distances": (chosen - places[:, None])[:, None, :, None],
        }
        if learns:
            target = self._mean_weights(query, key, **pairs)[:, :, 0]
            read = tensors.gather(index.key[:, None], chosen[:, None])[:, 0]
            self._learn(inputs, index._replace(key=read).scores(), target, exists)
        output = self.dot_product(query, key, value, **pairs, training=training)
        return output[:, :, :, 0]

    def _index(self, inputs):
        """Returns the `Index` of tokens; keys are those of the tokens themselves."""
        features = ops.stop_gradient(inputs.features)
        query, key, weights = (
            ops.matmul(features, ops.cast(kernel, features.dtype))
            for kernel in self.indexer_kernels
        )
        batch, length, _ = ops.shape(features)
        heads, size = self.num_indexer_heads, self.indexer_dim
        query = ops.reshape(query, (batch, length, heads, size))
        query = ops.swapaxes(self._turned(ops.swapaxes(query, 1, 2), inputs), 1, 2)
        key = self._turned(key[:, None], inputs)[:, 0]
        return Index(query, weights * (heads * size) ** -0.5, key)

    def _turned(self, x, inputs):
        """Returns `[B, J, L, E]` of the indexer, the first entries turned."""
        size, segments = self.indexer_rotary_dim, inputs.segments
        if not size:
            return x
        places = None if segments is None else segments.query_places
        position = inputs.first_position, self.rotary_wavelength, places
        return ops.concatenate([rotate(x[..., :size], *position), x[..., size:]], -1)

    def _visible(self, inputs, places):
        """Returns which tokens queries see, broadcastable to `<bool>[B, Q, S]`.

        `places` are those of the queries, `<int32>[Q]`.
        """
        real = known_mask(inputs.value, inputs.value_mask)
        causal = own = None
        if inputs.use_causal_mask:
            causal = numbers(length_of(inputs.value, 2)) <= places[:, None]
        if inputs.segments is not None:
            segment = ops.take(inputs.segments.query, places, axis=2)[:, 0]
            own = segment[..., None] == inputs.segments.value
        return combine_masks(real, causal, own)

    def _mean_weights(self, query, key, attention_mask, bias, distances=None):
        """Returns the mean over heads of the attention weights, without a gradient.

        Arguments are those of `dot_product`, with the heads on axis 1.
        """
        attention = self.dot_product
        query, key = ops.stop_gradient(query), ops.stop_gradient(key)
        logits = product(query, key, transpose_y=True)
        positions = attention.relative_position
        if positions is not None and distances is None:
            logits = logits + positions.key_logits(query, length_of(key, -2), 0)
        elif positions is not None:
            logits = logits + positions.key_logits_at(query, distances)
        if attention.logit_soft_cap is not None:
            logits = attention.capped(logits)
        weights = attention.normalized(attention.masked(logits, attention_mask, bias))
        return ops.stop_gradient(ops.mean(ops.cast(weights, "float32"), axis=1))

    def _learn(self, inputs, scores, target, seen):
        """Adds the loss of the indexer, and counts the step.

        Scores, attention weights as their target, and which tokens queries attend to
        are `[B, L, S]`.
        """
        scores = ops.where(seen, scores, large_negative("float32"))
        logarithms = ops.log(ops.maximum(target, 1e-30)) - ops.log_softmax(scores)
        divergence = ops.sum(ops.where(seen, target * logarithms, 0.0), axis=-1)
        counts = ops.any(seen, axis=-1)
        if inputs.query_mask is not None:
            counts = ops.logical_and(counts, inputs.query_mask[:, 0])
        counts = ops.cast(counts, "float32")
        total, number = ops.sum(divergence * counts), ops.sum(counts)
        if inputs.adds_losses:
            own = [self.indexer_loss_weight * total]
            parts_of_batches.add_batch_loss(
                self, "indexer_loss", own, [number], parts_of_batches.mean
            )
        update_or_hold(self, [ops.stop_gradient(total), number])

    def move(self, statistics):
        """Counts a training step; see `OnlineKMeans.move`."""
        total, number = statistics
        self.training_steps.assign_add(1.0)
        self.indexer_loss.assign(parts_of_batches.mean([total], [number]))

    def make_cache(self, batch_size, max_length, positions=None):
        """Returns an empty cache with room for `max_length` tokens.

        A dict of `"keys"` `[B, H, P, D + 1]`, a key and whether it is that of a token,
        of `"values"` `[B, H, P, E + 2]`, a value, its bias and whether it is that of a
        token, and of `"index"` `[B, 1, P, indexer_dim]`, the keys of the indexer. With
        shifted keys, a key stands one row after its own value.
        """
        sizes = {
            "keys": (self.num_key_heads, self.key_dim + 1),
            "values": (self.num_key_heads, self.value_dim + 2),
            "index": (1, self.indexer_dim),
        }
        num_places = max_length + self.key_shift
        return {
            name: ops.zeros((batch_size, heads, num_places, size), self.compute_dtype)
            for name, (heads, size) in sizes.items()
        }

    def fill_cache(self, cache, inputs):
        empty = self.restart_cache(cache)
        return self._remembered(empty, 0, inputs, self._index(inputs))

    def restart_cache(self, cache):
        return {name: ops.zeros_like(x) for name, x in cache.items()}

    def max_positions(self, cache):
        return cache["keys"].shape[2] - self.key_shift

    def step(self, cache, index, inputs):
        new = self._index(inputs)
        cache = self._remembered(cache, index, inputs, new)
        num_places = cache["keys"].shape[2]
        query = index + numbers(inputs.query.shape[2])[:, None]
        real = (cache["keys"][:, :1, :, -1] > 0) & (cache["values"][:, :1, :, -1] > 0)
        visible = ops.logical_and(real, numbers(num_places) <= query)
        scores = new._replace(key=cache["index"][:, 0]).scores()
        chosen = best_blocks(scores, visible, self.num_selected)
        exists = chosen < num_places
        chosen = ops.where(exists, chosen, 0)
        shape = (*ops.shape(new.key)[:1], self.num_key_heads, *ops.shape(chosen)[1:])
        places = ops.broadcast_to(chosen[:, None], shape)
        keys, values = (tensors.gather(cache[x], places) for x in ("keys", "values"))
        output = rows.attend_to_rows(
            self,
            inputs.query[:, :, :, None],
            ops.concatenate([keys[..., :-1], values], axis=-1),
            exists[:, None, :, None],
            (chosen - query)[:, None, :, None],
        )
        return output[:, :, :, 0], cache

    def _remembered(self, cache, index, inputs, own):
        """Returns the cache with tokens from position `index` on, and their `Index`."""
        new = rows.of_inputs(self, inputs)
        mask = ops.ones_like(new[..., :1])
        if inputs.key_mask is not None:
            mask = mask * ops.cast(inputs.key_mask, mask.dtype)[..., None]
        keys = ops.concatenate([new[..., : self.key_dim], mask], axis=-1)
        place = index + self.key_shift
        written = {
            "keys": (place, keys),
            "values": (index, new[..., self.key_dim :]),
            "index": (place, own.key[:, None]),
        }
        return {
            name: ops.slice_update(cache[name], (0, 0, first, 0), x)
            for name, (first, x) in written.items()
        }


def _settings(sizes):
    return {"num_selected": sizes.attention_window, "warm_up_steps": 300}


PATTERNS = {"indexed": Pattern(IndexedHeads, _settings, refuses=("entmax_alpha",))}

"""A few latent vectors read very long inputs, and other queries read the latents."""

import dataclasses

import keras
from keras import ops

from routing_tf import layers
from routing_tf.layers.caches import next_token
from routing_tf.layers.caches.next_token import NotCast
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.configs import serialize
from routing_tf.layers.support.keras_internals import mask_of
from routing_tf.layers.support.keras_internals import set_mask_of
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.parts.blocks import read_behind
from routing_tf.zoo.parts.blocks import transformer_block

__all__ = ["PerceiverBackbone"]

NORM_EPSILON = 1e-6
LATENT_STDDEV = 0.02


def first_latent(perceiver, inputs, cache):
    """Checks the inputs after a cache; returns the place of the first latent."""
    length, index = inputs.shape[1], cache.cache_index
    rows = cache.cache["readings"][0]["rows"]
    sequences = rows.shape[0], inputs.shape[0]
    if None not in sequences and sequences[0] != sequences[1]:
        raise ValueError(
            "`cache` must be made for as many sequences as `inputs` has. Received: "
            f"inputs.shape={tuple(inputs.shape)} and a cache for {sequences[0]}. "
            "Pass this number to `make_cache` as `batch_size`"
        )
    max_length = rows.shape[2]
    first = max(max_length - perceiver.num_latents, 0)
    if cache.starts_anew and not first < length <= max_length:
        raise ValueError(
            "The first call with a cache must reach the first latent, and not go "
            f"beyond the last. Received: {length} inputs with latents at places "
            f"{first} to {max_length - 1}. Make a cache with another `max_length`"
        )
    is_known = isinstance(index, int) and not cache.starts_anew
    if is_known and not first < index <= max_length - length:
        raise ValueError(
            "`cache_index` must be the number of inputs that the cache was fed, "
            f"more than {first}, and the cache must have room for `inputs`. "
            f"Received: cache_index={index} with {length} inputs, and a cache for "
            f"{max_length}. Make a cache with a larger `max_length`"
        )
    if is_known:
        next_token.check(cache.cache["next"], index)
    return first


class _LastQueries(layers.FullHeads):
    """Heads of queries at the last positions of the keys, under a causal mask."""

    def attend(self, inputs, training=None):
        inputs = dataclasses.replace(inputs, use_causal_mask=True)
        return super().attend(inputs, training=training)


@keras.saving.register_keras_serializable("routing_tf")
class PerceiverBackbone(ConfiguredLayer, keras.Model):
    """A transformer of a few latent vectors, which read inputs of any length.

    Learned latents attend to all inputs, at a cost linear in their number, and then to
    each other in `num_layers` blocks; `num_cross_attentions` times. Perceiver returns
    the latents. With `output_dim`, other queries attend to them in the end, and there
    is an output for each query (Perceiver IO).

    With `causal=True` the latents are the last `num_latents` inputs, each of which
    attends to all inputs up to itself, and then to latents up to itself (Perceiver AR).
    So no later input influences an output, except with expert choice in `heads`, while
    all earlier ones are read.

    Nothing here knows positions: add them to the inputs and to the output queries. All
    parts normalise what they read first; the outputs are not normalised.

    Args:
        num_latents: number of latent vectors.
        latent_dim: size of a latent vector, a multiple of the numbers of heads; with
            `causal=True` also the size of an input.
        num_layers: number of blocks after each reading of the inputs. Defaults to 6.
        num_heads: number of heads of full attention among the latents. Defaults to 8.
        num_cross_heads: number of heads that read inputs or latents. Defaults to 1.
        num_cross_attentions: how often the latents read the inputs. Defaults to 1.
        share_weights: whether all readings but the first have the same weights, and the
            blocks after each reading, too, as in Perceiver. Defaults to True.
        causal: whether the latents are the last inputs. Defaults to False.
        heads: list of head groups instead of `num_heads` full ones, such as
            `[layers.RoutedHeads(4, 8, 32), layers.LocalHeads(4, (32,))]`, of which each
            block gets its own copies; None (the default) for full attention. Those
            without a `dtype` take that of the model.
        output_dim: size of a query that reads the latents, and of its output; None (the
            default) to return the latents.
        num_outputs: number of learned queries that read the latents; None (the default)
            if calls give `output_queries`.
        intermediate_dim: inner size of the feed-forward parts; None (the default) for
            `4 * latent_dim`.
        activation: that of `layers.FeedForward`. Defaults to `"sigmoid_gelu"`, which
            is close to the GELU of the papers.
        dropout: rate of dropped outputs of each part while training, in [0, 1).
            Defaults to 0.0.
        **kwargs: arguments of `keras.Model`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        output_queries: `<float>[batch, outputs, output_dim]`, queries that read the
            latents; None (the default) for the learned ones.
        mask: `<bool>[batch, length]`, True for real inputs; None for no padding.
            Defaults to the Keras mask of `inputs`. Padding is not read, but takes the
            places of latents in a causal model: put it before the inputs there.
        training: whether dropout is on, and centroids move.
        cache: what `make_cache` of a causal model or an earlier call returned; None
            (the default) for none.
        cache_index: number of inputs that the cache was fed, an integer or a scalar
            tensor; None (the default) for 0, which starts the cache anew.

    Returns:
        `<float>[batch, num_latents, latent_dim]`, or with `output_dim`
        `<float>[batch, outputs, output_dim]`. Causal models return
        `min(num_latents, length)` latents, which keep their mask; with a cache, a pair:
        the outputs of those inputs that are latents, and the cache with the inputs.

    Raises:
        ValueError: if heads do not divide `latent_dim`, or a causal model has an
            `output_dim`, whose queries would read later inputs; when called, if causal
            inputs are not of the size `latent_dim`, `output_queries` are missing, or
            given and unknown to the model, or the first call with a cache does not
            reach the latents.

    Example:

    ```python
    import numpy as np
    from routing_tf import zoo

    pixels = np.random.default_rng(0).normal(size=(2, 1024, 5)).astype("float32")
    perceiver = zoo.PerceiverBackbone(16, 32, num_layers=2, output_dim=8)
    queries = np.zeros((2, 3, 8), "float32")
    assert perceiver(pixels, output_queries=queries).shape == (2, 3, 8)
    ```

    Reference: Jaegle et al., "Perceiver" (https://arxiv.org/abs/2103.03206) and
    "Perceiver IO" (https://arxiv.org/abs/2107.14795); Hawthorne et al.,
    "General-purpose, long-context autoregressive modeling with Perceiver AR"
    (https://arxiv.org/abs/2202.07765), without its rotary positions and its dropout of
    earlier inputs. Tested only against NumPy code of this repository.
    """

    num_latents = Argument(check_positive_integer)
    latent_dim = Argument(check_positive_integer)
    num_layers = Argument(check_positive_integer)
    num_heads = Argument(check_positive_integer)
    num_cross_heads = Argument(check_positive_integer)
    num_cross_attentions = Argument(check_positive_integer)
    share_weights = Argument(check_flag)
    causal = Argument(check_flag)
    output_dim = Argument(check_optional_integer)
    num_outputs = Argument(check_optional_integer)
    intermediate_dim = Argument(check_optional_integer)
    dropout = Argument(check_rate)

    def __init__(
        self,
        num_latents,
        latent_dim,
        num_layers=6,
        num_heads=8,
        num_cross_heads=1,
        num_cross_attentions=1,
        share_weights=True,
        causal=False,
        heads=None,
        output_dim=None,
        num_outputs=None,
        intermediate_dim=None,
        activation="sigmoid_gelu",
        dropout=0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_latents = num_latents
        self.latent_dim = latent_dim
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.num_cross_heads = num_cross_heads
        self.num_cross_attentions = num_cross_attentions
        self.share_weights = share_weights
        self.causal = causal
        # Configs, of which each block makes its own heads.
        if heads is not None:
            heads = _checked_heads(heads)
            for group in heads:
                group.follow_dtype(self.dtype_policy)
            heads = [serialize(group) for group in heads]
        self.heads = heads
        self.output_dim = output_dim
        self.num_outputs = num_outputs
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.dropout = dropout
        self._check_outputs()
        self._make_layers()

    def _check_outputs(self):
        if self.causal and self.output_dim is not None:
            raise ValueError(
                "`output_dim` must be None for a causal model, because its queries "
                f"would read all inputs. Received: output_dim={self.output_dim}, "
                "causal=True. Leave one of them out"
            )
        if self.num_outputs is not None and self.output_dim is None:
            raise ValueError(
                "`num_outputs` learned queries need a size. Received: num_outputs="
                f"{self.num_outputs}, output_dim=None. Set `output_dim`"
            )

    def _make_layers(self):
        readings = rounds = self.num_cross_attentions
        if self.share_weights:
            readings, rounds = min(readings, 2), 1
        self.input_norms = [self._norm(f"input_norm_{i}") for i in range(readings)]
        self.reading_blocks = [
            self._block(f"reading_{i}", self._reading_heads(), reads_memory=True)
            for i in range(readings)
        ]
        self.blocks = [
            self._block(f"block_{i}", self._heads(), use_causal_mask=self.causal)
            for i in range(rounds * self.num_layers)
        ]
        if self.output_dim is not None:
            self.latent_norm = self._norm("latent_norm")
            self.output_block = self._block(
                "output", self._reading_heads(), reads_memory=True
            )

    def _norm(self, name):
        return keras.layers.LayerNormalization(
            epsilon=NORM_EPSILON, name=name, dtype=self.dtype_policy
        )

    def _block(self, name, head_groups, **options):
        return transformer_block(
            head_groups,
            self.latent_dim,
            self.intermediate_dim or 4 * self.latent_dim,
            self.activation,
            norm_position="pre",
            dropout=self.dropout,
            name=name,
            dtype=self.dtype_policy,
            **options,
        )

    def _reading_heads(self):
        kind = _LastQueries if self.causal else layers.FullHeads
        return [kind(self.num_cross_heads, name="reading_heads")]

    def _heads(self):
        if self.heads is None:
            return [layers.FullHeads(self.num_heads, name="heads")]
        return [deserialize(config) for config in self.heads]

    def build(self, inputs_shape, output_queries_shape=None):
        refusals.tokens_shape(self, inputs_shape)
        if self.causal and inputs_shape[-1] != self.latent_dim:
            raise ValueError(
                "The inputs of a causal model are its latents, of the size "
                f"`latent_dim`. Received: shape={tuple(inputs_shape)}, latent_dim="
                f"{self.latent_dim}. Project them to this size"
            )
        self.input_dim = inputs_shape[-1]
        latents_shape = (None, self.num_latents, self.latent_dim)
        if not self.causal:
            self.latents = self._add_queries("latents", *latents_shape[1:])
        for norm, block in zip(self.input_norms, self.reading_blocks, strict=True):
            norm.build(inputs_shape)
            block.build(latents_shape, inputs_shape)
        for block in self.blocks:
            block.build(latents_shape)
        if self.output_dim is not None:
            self.latent_norm.build(latents_shape)
            self.output_block.build((None, None, self.output_dim), latents_shape)
        if self.num_outputs is not None:
            self.learned_queries = self._add_queries(
                "output_queries", self.num_outputs, self.output_dim
            )

    def _add_queries(self, name, *shape):
        initializer = keras.initializers.TruncatedNormal(stddev=LATENT_STDDEV)
        return self.add_weight(name=name, shape=shape, initializer=initializer)

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **NotCast.wrap(kwargs, args))

    def call(
        self,
        inputs,
        output_queries=None,
        mask=None,
        training=None,
        cache=None,
        cache_index=None,
    ):
        refusals.tokens_shape(self, inputs.shape, self.input_dim)
        mask = mask_of(inputs) if mask is None else mask
        if cache is not None:
            self._check_queries(output_queries)
            if training:
                raise ValueError(
                    "`cache` needs a model that is not in training. Received: "
                    "training=True. Leave one of the two out"
                )
            return self._step(inputs, mask, NotCast.of(cache, cache_index))
        if self.causal:
            latents = inputs[:, -self.num_latents :]
            real = None if mask is None else mask[:, -self.num_latents :]
        else:
            latents, real = self._for_each(self.latents, inputs), None
        for index in range(self.num_cross_attentions):
            place = min(index, len(self.reading_blocks) - 1)
            latents = self.reading_blocks[place](
                latents,
                memory=self.input_norms[place](inputs),
                padding_mask=real,
                memory_mask=mask,
                training=training,
            )
            for block in self._blocks_of_round(index):
                latents = block(latents, padding_mask=real, training=training)
        return self._outputs(latents, output_queries, training)

    def make_cache(self, batch_size, max_length):
        """Makes an empty cache, for calls of a causal model that continue after others.

        Its latents are the last `num_latents` of `max_length` inputs. The first call
        must reach the first of them, and later ones may have any number of inputs.
        Outputs are those of one pass over `max_length` inputs.

        Args:
            batch_size: number of sequences.
            max_length: number of inputs of a sequence in the end.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.

        Raises:
            ValueError: if the model is not causal or not built.
        """
        refusals.check_built(self, "make_cache")
        batch_size = check_positive_integer("batch_size", batch_size)
        max_length = check_positive_integer("max_length", max_length)
        self._check_causal()
        readings = [
            block.cross_attention.head_groups[0].make_cache(batch_size, max_length)
            for block in self.reading_blocks
        ]
        size = (batch_size, min(self.num_latents, max_length))
        blocks = [
            [block.make_cache(*size) for block in self._blocks_of_round(index)]
            for index in range(self.num_cross_attentions)
        ]
        known = next_token.first(batch_size)
        return {"readings": readings, "blocks": blocks, "next": known}

    def _check_causal(self):
        if not self.causal:
            raise ValueError(
                "A cache needs a causal model. Received: causal=False. Make one with "
                "`causal=True`"
            )

    def _step(self, inputs, mask, cache):
        """Does what `call` does after the inputs of a cache."""
        static_length("inputs", inputs)
        self._check_causal()
        first, starts = first_latent(self, inputs, cache), cache.starts_anew
        readings, after = list(cache.cache["readings"]), []
        place, skipped = (0, first) if starts else (cache.cache_index - first, 0)
        latents = inputs[:, skipped:]
        real = None if mask is None else mask[:, skipped:]
        for index in range(self.num_cross_attentions):
            number = min(index, len(self.reading_blocks) - 1)
            latents, readings[number] = read_behind(
                self.reading_blocks[number],
                latents,
                self.input_norms[number](inputs),
                mask,
                readings[number],
                None if starts else cache.cache_index,
            )
            caches = []
            blocks = self._blocks_of_round(index)
            for block, own in zip(blocks, cache.cache["blocks"][index]):
                options = {"padding_mask": real, "cache": own, "cache_index": place}
                latents, own = block(latents, **options)
                caches.append(own)
            after.append(caches)
        if real is not None:
            set_mask_of(latents, real)
        start = 0 if starts else cache.cache_index
        known = next_token.after(cache.cache["next"], start, inputs.shape[1], mask)
        return latents, {"readings": readings, "blocks": after, "next": known}

    def _for_each(self, weight, inputs):
        """Returns a weight, once for each sequence of `inputs`."""
        weight = ops.cast(ops.convert_to_tensor(weight), self.compute_dtype)
        return ops.broadcast_to(weight, (ops.shape(inputs)[0], *weight.shape))

    def _blocks_of_round(self, index):
        start = 0 if self.share_weights else index * self.num_layers
        return self.blocks[start : start + self.num_layers]

    def _outputs(self, latents, queries, training):
        """Returns what queries read in the latents, or the latents."""
        self._check_queries(queries)
        if self.output_dim is None:
            return latents
        if queries is None:
            queries = self._for_each(self.learned_queries, latents)
        memory = self.latent_norm(latents)
        return self.output_block(queries, memory=memory, training=training)

    def _check_queries(self, queries):
        if queries is None:
            is_right = self.output_dim is None or self.num_outputs is not None
        else:
            is_right = queries.shape[-1] == self.output_dim
        if not is_right:
            shape = None if queries is None else tuple(queries.shape)
            raise ValueError(
                "`output_queries` must be of the size `output_dim`, and given unless "
                f"there are learned ones. Received: shape={shape}, output_dim="
                f"{self.output_dim}, num_outputs={self.num_outputs}"
            )

    def compute_output_shape(self, inputs_shape, output_queries_shape=None):
        batch, length = inputs_shape[:2]
        if output_queries_shape is not None:
            return tuple(output_queries_shape)
        if self.output_dim is not None:
            return (batch, self.num_outputs, self.output_dim)
        if self.causal and length is None:
            return (batch, None, self.latent_dim)
        number = min(self.num_latents, length) if self.causal else self.num_latents
        return (batch, number, self.latent_dim)

    def compute_mask(self, inputs, mask=None):
        if mask is None or not self.causal:
            return None
        return mask[:, -self.num_latents :]


def _checked_heads(heads):
    """Returns a list of head groups, from their configs, too."""
    groups = heads if isinstance(heads, (list, tuple)) else []
    is_config = (isinstance(group, (dict, layers.HeadGroup)) for group in groups)
    groups = [deserialize(group) for group in groups] if all(is_config) else []
    if groups and all(isinstance(group, layers.HeadGroup) for group in groups):
        return groups
    raise ValueError(
        "`heads` must be a list of head groups, such as [layers.RoutedHeads(4, 8, "
        f"32)], or None. Received: heads={heads!r}"
    )

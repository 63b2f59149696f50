"""Attention and feed-forward with their residual connections."""

import inspect

import keras
from keras import ops

from routing_tf.layers.attention.rematerialization import call_and_forget
from routing_tf.layers.attention.rematerialization import computes_again
from routing_tf.layers.caches.next_token import NotCast
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.keras_internals import OwnLosses
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.layers.support.keras_internals import mask_of
from routing_tf.layers.support.masks import check_fit
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_rate

LAYER_NORM_EPSILON = 1e-6
# The steps before and after a sublayer, as letters.
STEPS = {"pre": ("n", "da"), "post": ("", "dan")}

# Number of rows that TensorFlow sums up fast on a CPU.
ROWS_AT_ONCE = 64


class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` with a gradient of its own.

    The gradient that TensorFlow derives keeps a tensor of the size of the input, and
    takes more passes over it. Arguments and weights are those of Keras' layer, for the
    last axis, with a scale and an offset.

    Call arguments:
        inputs: `<float>[..., dim]`.

    Returns:
        `<float>[..., dim]`.
    """

    def call(self, inputs):
        # Half precision would lose too much.
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        inputs, scale, offset = (
            ops.cast(x, dtype) for x in (inputs, self.gamma, self.beta)
        )
        return ops.cast(self._normalized(inputs, scale, offset), self.compute_dtype)

    def _normalized(self, inputs, scale, offset):
        @stated_gradient
        def normalized(inputs, scale, offset):
            average = _mean(inputs)
            variance = _mean(ops.square(inputs - average))
            slope = ops.rsqrt(variance + self.epsilon)

            def gradient(upstream):
                unit = (inputs - average) * slope
                along = upstream * unit
                of_scale, of_offset = (_sum_of_rows(x) for x in (along, upstream))
                along = unit * _mean(along * scale)
                upstream = upstream * scale
                of_inputs = slope * (upstream - _mean(upstream) - along)
                return of_inputs, of_scale, of_offset

            return (inputs - average) * slope * scale + offset, gradient

        return normalized(inputs, scale, offset)


def _mean(x):
    return ops.mean(x, axis=-1, keepdims=True)


def _sum_of_rows(x):
    """Sums over all axes except the last one."""
    rows = ops.reshape(x, (-1, x.shape[-1]))
    number = length_of(rows, 0)
    if is_known(number) and number % ROWS_AT_ONCE == 0:
        rows = ops.sum(ops.reshape(rows, (-1, ROWS_AT_ONCE, x.shape[-1])), axis=1)
    return ops.sum(rows, axis=0)


@keras.saving.register_keras_serializable("routing_tf")
class SublayerSteps(ConfiguredLayer):
    """Dropout, residual addition and layer normalization, in the order of a string.

    Args:
        steps: letters, applied from left to right: `d` dropout, `a` add the residual,
            `n` layer normalization. Empty: the input is returned.
        dropout: rate of the dropout steps, in [0, 1). Defaults to 0.0.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        residual: tensor of the same shape, for the step `a`.
        training: whether dropout is on.

    Returns:
        `<float>[batch, length, dim]`.

    Raises:
        ValueError: when called, if the steps add a residual and none is given.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import SublayerSteps

    x = np.ones((2, 5, 16), "float32")
    assert SublayerSteps("dan", dropout=0.1)(x, residual=x).shape == (2, 5, 16)
    ```

    Reference: `layer_preprocess` and `layer_postprocess` of tensor2tensor.
    """

    dropout = Argument(check_rate)

    def __init__(self, steps, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        unknown = sorted(set(steps) - set("dan"))
        if unknown:
            raise ValueError(
                "`steps` must consist of the letters d (dropout), a (add the residual) "
                f"and n (normalize). Received: steps={steps!r}"
            )
        self.supports_masking = True
        self.steps = steps
        self.dropout = dropout
        self.dropout_layer = keras.layers.Dropout(dropout, dtype=self.dtype_policy)
        self.norms = [
            LayerNormalization(
                epsilon=LAYER_NORM_EPSILON, name=f"norm_{i}", dtype=self.dtype_policy
            )
            for i in range(steps.count("n"))
        ]

    def build(self, inputs_shape, residual_shape=None):
        for norm in self.norms:
            norm.build(inputs_shape)

    def call(self, inputs, residual=None, training=None):
        if "a" in self.steps and residual is None:
            raise ValueError(
                "`residual` must be given where the steps add it. "
                f"Received: residual=None with steps={self.steps!r}"
            )
        norms = iter(self.norms)
        for step in self.steps:
            if step == "d":
                inputs = self.dropout_layer(inputs, training=training)
            elif step == "a":
                inputs = inputs + residual
            else:
                inputs = next(norms)(inputs)
        return inputs

    def compute_output_shape(self, inputs_shape, residual_shape=None):
        return inputs_shape


@keras.saving.register_keras_serializable("routing_tf")
class TransformerBlock(ConfiguredLayer, OwnLosses):
    """Self-attention, cross-attention and feed-forward, each with a residual.

    Args:
        attention: a `MixedAttention` or `RoutingAttention` layer; None for only
            cross-attention.
        feed_forward: a `FeedForward` layer, or another one that maps
            `[batch, length, dim]` to itself; None for only attention. If its call takes
            a `mask`, it gets the padding mask. If it has a method
            `make_cache(batch_size)`, its cache is part of the block's, and its call
            takes a `cache` and returns it second.
        cross_attention: a `MixedAttention` or `RoutingAttention` layer that attends to
            `memory`, such as the output of an encoder; None (the default) for none.
        norm_position: `"pre"` normalizes the input of each part, `"post"` the sum of
            its output and the residual, as the release does. Defaults to `"post"`.
        dropout: rate of dropout on the output of each part, in [0, 1). Defaults to 0.0.
        use_causal_mask: whether a token sees only tokens up to itself. Defaults to
            True.
        remat: whether training recomputes the activations of the block for the
            gradients instead of storing them: less memory, more time. Results are the
            same, and centroids move once. Defaults to False.
        remat_feed_forward: whether it recomputes only the activations of the
            feed-forward part, which are most of a block's activations besides those of
            attention, and take little time. Defaults to False.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`; or, for positions on two axes,
            `<float>[batch, height, width, dim]`.
        memory: `<float>[batch, memory length, memory dim]`, with `cross_attention`.
        padding_mask: `<bool>[batch, length]`, True for real tokens; or None.
        memory_mask: `<bool>[batch, memory length]`, the same for `memory`; or None.
        training: whether dropout is on and centroids move.
        cache: result of `make_cache` or of an earlier call; None (the default) for
            none. The memory is in the cache and is not passed again.
        cache_index: position of the first token, see `MixedAttention`.
        routing_scope: the tokens that compete in expert choice, see `MixedAttention`.
        segment_ids: `<int32>[batch, length]`, for packed documents, see
            `MixedAttention`; None (the default) for one document in each row.
        memory_segment_ids: `<int32>[batch, memory length]`, the same for `memory`.

    Returns:
        Tensor of the shape of `inputs`; with a cache, a pair: this tensor, and the
        cache with the tokens of `inputs`.

    Raises:
        ValueError: when called, if only one of the memory and `cross_attention` is
            given, or only one of the segments of `inputs` and of the memory.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    block = layers.TransformerBlock(
        layers.MixedAttention([layers.LocalHeads(2, block_shape=(8,))], key_dim=8),
        layers.FeedForward(32),
        norm_position="pre",
    )
    assert block(np.ones((2, 24, 16), "float32")).shape == (2, 24, 16)
    ```

    Reference: `transformer_decoder_layers` of the release.
    """

    norm_position = Argument(check_choice, tuple(STEPS))
    use_causal_mask = Argument(check_flag)
    remat = Argument(check_flag)
    remat_feed_forward = Argument(check_flag)

    def __init__(
        self,
        attention,
        feed_forward,
        cross_attention=None,
        norm_position="post",
        dropout=0.0,
        use_causal_mask=True,
        remat=False,
        remat_feed_forward=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        declare_call_argument(self, "routing_scope", "segment_ids")
        self.supports_masking = True
        self.attention = _layer("attention", attention)
        self.feed_forward = _layer("feed_forward", feed_forward)
        self.cross_attention = _layer("cross_attention", cross_attention)
        self.norm_position = norm_position
        self.dropout = dropout
        self.use_causal_mask = use_causal_mask
        self.remat = remat
        self.remat_feed_forward = remat_feed_forward
        for part in self.parts:
            for side, letters in zip(("input", "output"), STEPS[norm_position]):
                name, dtype = f"{part}_{side}", self.dtype_policy
                steps = SublayerSteps(letters, dropout, name=name, dtype=dtype)
                setattr(self, name, steps)
        if remat:
            computes_again(self, True)

    @property
    def parts(self):
        """Names of the parts in their order: the attributes that hold them."""
        names = ("attention", "cross_attention", "feed_forward")
        return [name for name in names if getattr(self, name) is not None]

    def build(self, inputs_shape, memory_shape=None):
        for name in self.parts:
            shapes = [inputs_shape]
            if name == "cross_attention":
                shapes.append(memory_shape or inputs_shape)
            getattr(self, f"{name}_input").build(inputs_shape)
            if not getattr(self, name).built:
                getattr(self, name).build(*shapes)
            getattr(self, f"{name}_output").build(inputs_shape)

    def make_cache(self, batch_size, max_length, memory=None, memory_mask=None):
        """Makes an empty cache, for calls that continue after earlier tokens.

        Args:
            batch_size: number of sequences.
            max_length: number of tokens a sequence may have, see `MixedAttention`.
            memory: as in a call; None (the default) without `cross_attention`.
            memory_mask: as in a call; None (the default) for no padding.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.

        Raises:
            ValueError: if tokens see later ones, only one of the memory and
                `cross_attention` is given, or `MixedAttention.make_cache` refuses.
        """
        if not self.use_causal_mask:
            raise ValueError(
                "A cache needs a block in which tokens see no later ones. Received: "
                "use_causal_mask=False"
            )
        self._check_memory(memory)
        cache = {}
        if self.attention is not None:
            cache["attention"] = self.attention.make_cache(batch_size, max_length)
        if self.cross_attention is not None:
            cache["cross_attention"] = self.cross_attention.make_cache(
                batch_size, max_length, value=memory, value_mask=memory_mask
            )
        if hasattr(self.feed_forward, "make_cache"):
            cache["feed_forward"] = self.feed_forward.make_cache(batch_size)
        return cache

    def __call__(self, *args, **kwargs):
        check_fit([kwargs.get(x) for x in ("segment_ids", "memory_segment_ids")])
        return super().__call__(*args, **NotCast.wrap(kwargs, args))

    def call(
        self,
        inputs,
        memory=None,
        padding_mask=None,
        memory_mask=None,
        training=None,
        cache=None,
        cache_index=None,
        routing_scope=None,
        segment_ids=None,
        memory_segment_ids=None,
    ):
        cache = NotCast.of(cache, cache_index)
        masks = {"padding_mask": padding_mask, "memory_mask": memory_mask}
        masks["segments"] = self._segments(segment_ids, memory_segment_ids, cache)
        if cache is not None:
            return self._call_parts(inputs, **masks, training=False, cache=cache)
        self._check_memory(memory)
        # By name: when gradients recompute everything, no outer call passes it on.
        options = {"training": training, "routing_scope": routing_scope}
        if not (self.remat and training):
            options["forgets"] = self.remat_feed_forward and training
            return self._call_parts(inputs, memory, **masks, **options)[0]
        tensors = [inputs] if memory is None else [inputs, memory]
        # Keras masks do not reach the tensors inside.
        for name, tensor in zip(("padding_mask", "memory_mask"), tensors):
            if masks[name] is None:
                masks[name] = mask_of(tensor)

        def call_parts(*values):
            return self._call_parts(*values, **masks, **options)[0]

        return call_and_forget(self, call_parts, tensors)

    def _call_parts(
        self,
        x,
        memory=None,
        padding_mask=None,
        memory_mask=None,
        segments=None,
        training=None,
        routing_scope=None,
        cache=None,
        forgets=False,
    ):
        """Returns the output, and a dict of the caches of the parts that have one.

        `segments` are the `segment_ids` of each attention by its name. With `forgets`
        gradients recompute the activations of the feed-forward part.
        """
        options = {
            "attention": {
                "use_causal_mask": self.use_causal_mask,
                "routing_scope": routing_scope,
            },
            "cross_attention": {
                "value": memory,
                "value_mask": memory_mask,
                "self_attention": False,
            },
        }
        caches = {}
        for name in self.parts:
            if name == "feed_forward":
                if cache is None or name not in cache.cache:
                    x = self._feed_forward(x, padding_mask, training, forgets)
                else:
                    x, caches[name] = self._step_forward(x, padding_mask, cache)
                continue
            y = getattr(self, f"{name}_input")(x, training=training)
            own = options[name]
            if cache is not None:
                index = cache.cache_index
                own = {"cache": cache.cache[name], "cache_index": index}
            y = getattr(self, name)(
                y,
                query_mask=padding_mask,
                training=training,
                segment_ids=segments.get(name),
                **own,
            )
            if cache is not None:
                y, caches[name] = y
            x = getattr(self, f"{name}_output")(y, residual=x, training=training)
        return x, caches

    def _feed_forward(self, x, padding_mask, training, forgets):
        masks = self._mask_to_feed(x, padding_mask)
        first, inner, last = (
            self.feed_forward_input,
            self.feed_forward,
            self.feed_forward_output,
        )

        def call(x):
            y = inner(first(x, training=training), training=training, **masks)
            return last(y, residual=x, training=training)

        if not forgets:
            return call(x)
        return call_and_forget(self, call, [x], parts=[first, inner, last])

    def _step_forward(self, x, padding_mask, cache):
        """Does what `_feed_forward` does, of a layer with a cache, and returns both."""
        before = cache.cache["feed_forward"]
        if cache.starts_anew:
            before = keras.tree.map_structure(ops.zeros_like, before)
        y = self.feed_forward_input(x)
        masks = self._mask_to_feed(x, padding_mask)
        y, after = self.feed_forward(y, cache=before, **masks)
        return self.feed_forward_output(y, residual=x), after

    def _mask_to_feed(self, x, padding_mask):
        """Returns the call argument with the mask, if the feed-forward layer has it."""
        if "mask" not in inspect.signature(self.feed_forward.call).parameters:
            return {}
        return {"mask": mask_of(x) if padding_mask is None else padding_mask}

    def _segments(self, segment_ids, memory_segment_ids, cache):
        """Returns the `segment_ids` of each attention by its name."""
        if segment_ids is None and memory_segment_ids is None:
            return {}
        pair = segment_ids, memory_segment_ids
        has_memory = self.cross_attention is not None
        if cache is None and any(x is None for x in pair[: 1 + has_memory]):
            raise ValueError(
                "`segment_ids` and `memory_segment_ids` must both be given to a block "
                "with `cross_attention`. Received: segment_ids="
                f"{_shape_of(segment_ids)}, memory_segment_ids="
                f"{_shape_of(memory_segment_ids)}. Pass the ids of both sequences"
            )
        return {"attention": segment_ids, "cross_attention": pair}

    def _check_memory(self, memory):
        if (memory is None) != (self.cross_attention is None):
            raise ValueError(
                "`memory` must be given to a block with `cross_attention`, and to no "
                f"other. Received: memory={None if memory is None else memory.shape}, "
                f"cross_attention={self.cross_attention!r}"
            )

    def compute_output_shape(self, inputs_shape, memory_shape=None):
        return inputs_shape


def _layer(name, value):
    """Returns the layer that a layer or its config stands for, or None for None."""
    layer = deserialize(value)
    if layer is None or isinstance(layer, keras.layers.Layer):
        return layer
    raise ValueError(
        f"`{name}` must be a layer, its config, or None. Received: {name}={value!r}"
    )


def _shape_of(x):
    return None if x is None else f"a tensor of shape {tuple(x.shape)}"

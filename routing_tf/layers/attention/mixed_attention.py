"""Multi-head attention whose heads may follow different patterns."""

import math

import keras

from routing_tf.layers.attention import arguments
from routing_tf.layers.attention import from_keras
from routing_tf.layers.attention import stepping
from routing_tf.layers.attention.projection import ProjectionConfig
from routing_tf.layers.attention.projections import Projections
from routing_tf.layers.attention.rematerialization import computes_again
from routing_tf.layers.attention.rematerialization import train_and_forget
from routing_tf.layers.caches.next_token import NotCast
from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.support.backends import are_stated
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.layers.support.masks import check_fit
from routing_tf.layers.support.validation import check_block_shape
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_optional_number
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer

#: What training may compute again, see `MixedAttention`.
REMATS = (False, True, "weights")


@keras.saving.register_keras_serializable("routing_tf")
class MixedAttention(Projections):
    """Projects a sequence, lets groups of heads attend side by side, and projects back.

    Queries, keys and values are split over the head groups, and the outputs of the
    groups are concatenated in the same order.

    Positions lie on one axis (text) or two (images). Two axes form one sequence, block
    after block; "earlier" means earlier in this sequence.

    Args:
        head_groups: list of `HeadGroup` layers such as `RoutedHeads` or `LocalHeads`.
            Those without a `dtype` of their own have that of this layer.
        key_dim: size of a query or key of one head.
        value_dim: size of a value of one head; None (the default) for `key_dim`.
        output_dim: size of the output; None (the default) for the size of the query.
        block_shape: tuple, length of a block along each axis of the positions, which
            sets their order; inputs are padded to a multiple and cut again. None (the
            default): on one axis, the order of the input; on two axes, the blocks of
            the head groups.
        kernel_initializer: initializer of all projections. Defaults to
            `"glorot_uniform"`.
        remat: what training recomputes for the gradients instead of storing it, with
            the same results. False (the default): nothing. `"weights"`: the attention
            weights, which saves most of the memory and costs little time. True:
            everything between the projections, which costs more time. `"weights"` means
            True for heads with relative positions, a token bias, a soft cap or dropout,
            and for heads without one softmax over the keys of a query.
        num_key_value_heads: total number of heads of keys and values (grouped queries,
            as in `keras.layers.GroupQueryAttention`). Each serves the same number of
            adjacent query heads of a group, as if it were repeated for them. It must
            divide the number of heads, and the quotient must divide the heads of each
            group. Caches of full, local, sliding, strided, fixed, routed,
            cluster-strided and indexed heads contain only key heads; those of other
            heads contain keys and values for all queries. In routed and cluster-strided
            heads, clusters belong to a key head; all its queries choose among them and
            move them. None (the default): as many as heads, the only number for heads
            that share queries and keys.
        logit_soft_cap: a positive number c, for logits `c * tanh(logits / c)` in all
            head groups without their own `logit_soft_cap`, before the bias and masks
            are added; relative positions are part of the logits. None (the default) for
            the settings of the groups.
        qk_norm: whether all head groups normalise each query and key, each group with
            its own learned scales, see `HeadGroup`. Defaults to False, for the settings
            of the groups.
        projection_config: rarely changed settings of the projections, a
            `ProjectionConfig` or a dict of some of its arguments; None (the default)
            for its defaults.
        **kwargs: arguments of `ProjectionConfig`, such as `use_bias` and `use_gate`,
            which take precedence over those in `projection_config`; and those of
            `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        query: `<float>[batch, length, dim]`; for positions on two axes, here and below,
            `height, width` instead of `length`.
        value: `<float>[batch, memory length, memory dim]`; None (the default) for
            `query`.
        key: None (the default), or `value` once more, as in calls of
            `keras.layers.MultiHeadAttention`: keys are made from `value`.
        query_mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
            Inputs at padding must be finite. Defaults to the Keras mask of `query`.
            This argument and all that follow must be passed by name.
        value_mask: `<bool>[batch, memory length]`, the same for `value`; in
            self-attention, `query_mask` is used.
        token_bias: `<float>[batch, memory length]`, added to the logits of each key.
        training: whether dropout is on and centroids move.
        use_causal_mask: whether a token sees only tokens up to itself.
        cache: what `make_cache` or an earlier call returned; None (the default) for
            none. With a cache self-attention is causal, and expert choice has the
            routing scope `"prefix"`. A cache with a memory has its mask and bias, and
            `value` and what belongs to it is not read again.
        cache_index: position of the first token of `query`, which is the number of
            tokens that the cache was fed: an integer or a scalar tensor; None (the
            default) for 0. Another number is refused; where it or the cache is traced,
            as in a compiled function, it gives wrong outputs. A call takes any number
            of tokens, as `[batch, length, dim]` (on two axes of positions: in the
            blocked order), and each token is fed once; outputs are those of one pass.
            The integer 0 starts the cache anew, on two axes with all positions. Padding
            is not remembered: where it is the end of all rows, the next call may begin
            in its place.
        attention_mask: `<bool>[batch, 1, memory length]`, the same as `value_mask`, as
            calls of `keras.layers.MultiHeadAttention` have it for padding, with two
            axes of length 1, too, or none (unless the batch is as large as the query is
            long); not for positions on two axes, nor with a cache. Any other is
            refused: sparse patterns never build the matrix it masks.
        return_attention_scores: whether to return the dense map of attention weights
            too. Its memory grows with the square of the length: for short inputs.
        mask: where Keras puts the mask of `query` if `query` is the only tensor; the
            same as `query_mask`.
        self_attention: whether `value` is the sequence of `query` (True) or another
            one (False), which decides how clustered and causal heads attend. If True,
            a `value` of the same shape may be given and is not read. None (the
            default): True without a `value` or if it is the very tensor `query`, and
            False for any other tensor, be it a copy; the first one of the same shape
            and dtype gives a warning.
        routing_scope: `"full"` or `"prefix"`, the tokens that compete in expert choice
            under a causal mask, see `RoutedHeads`; None (the default) for what the
            heads were made with. Blocks and models pass it on, like `training`.
        segment_ids: `<int32>[batch, length]`, for packed documents; None (the default)
            for one document in each row. A segment is a run of tokens with one id, and
            no token sees another segment. In attention to another sequence, a pair, of
            `query` and of `value`, where equal ids see each other. 0 is padding if no
            mask is given. With a cache, the ids of its new tokens: it restarts with
            each segment; the last one goes on where a call begins in the place of
            padding with the id 0.

    Returns:
        `<float>[batch, length, output_dim]`; with `return_attention_scores=True` also
        the map `<float>[batch, heads, length, memory length]`. With a cache, a pair:
        the output, and the cache with the tokens of `query`.

    The layer propagates the mask of `query`. `enable_lora` adapts projections.
    `quantize` of a model changes them as it does `Dense` layers.

    Raises:
        ValueError: when built, if another layer has built a group; when called, if a
            dense `attention_mask` or a `key_mask` is given, `key` is another tensor
            than `value`, `use_causal_mask=True` and `value` has another length than
            `query`, or a length is unknown while TensorFlow traces positions on two
            axes, random heads or a call with a cache; with a cache also while training,
            with attention scores, or in a Functional model.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    attention = layers.MixedAttention(
        [
            layers.RoutedHeads(2, num_clusters=4, attention_window=16),
            layers.LocalHeads(2, block_shape=(16,)),
        ],
        key_dim=8,
    )
    x = np.random.normal(size=(2, 64, 32)).astype("float32")
    assert attention(x, use_causal_mask=True).shape == (2, 64, 32)
    ```

    Reference: paper, section 5; `multihead_attention_nd` of the release.
    """

    key_dim = Argument(check_positive_integer)
    value_dim = Argument(check_optional_integer)
    output_dim = Argument(check_optional_integer)
    kernel_initializer = Argument(initializer)
    remat = Argument(check_choice, REMATS)
    num_key_value_heads = Argument(check_optional_integer)
    logit_soft_cap = Argument(check_optional_number)
    qk_norm = Argument(check_flag)

    def __init__(
        self,
        head_groups,
        key_dim,
        value_dim=None,
        output_dim=None,
        block_shape=None,
        kernel_initializer="glorot_uniform",
        remat=False,
        *,
        num_key_value_heads=None,
        logit_soft_cap=None,
        qk_norm=False,
        projection_config=None,
        **kwargs,
    ):
        given = ProjectionConfig.given_as("projection_config", projection_config)
        projection_config, kwargs = ProjectionConfig.taken_from({**given, **kwargs})
        super().__init__(**arguments.refuse_keras_arguments(kwargs))
        declare_call_argument(self, "routing_scope")
        self.supports_masking = True
        self._has_warned = False
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.output_dim = output_dim
        self.kernel_initializer = kernel_initializer
        self.use_bias = projection_config.use_bias
        self.use_gate = projection_config.use_gate
        self.bias_initializer = projection_config.bias_initializer
        self.output_initializer = projection_config.output_initializer
        self.kernel_regularizer = projection_config.kernel_regularizer
        self.bias_regularizer = projection_config.bias_regularizer
        self.kernel_constraint = projection_config.kernel_constraint
        self.bias_constraint = projection_config.bias_constraint
        self.shared_head_projection = projection_config.shared_head_projection
        self.project_shared_keys = projection_config.project_shared_keys
        self.remat = remat or False
        self.logit_soft_cap = logit_soft_cap
        self.qk_norm = qk_norm
        self.head_groups = arguments.check_head_groups(head_groups)
        self.block_shape = block_shape
        if block_shape is not None:
            self.block_shape = check_block_shape("block_shape", block_shape)
        blocks = arguments.blocks_on_two_axes(self.head_groups, self.block_shape)
        self._ordering_blocks = self.block_shape or blocks
        self.num_key_value_heads = num_key_value_heads
        queries_per_key = arguments.queries_per_key(
            self.num_key_value_heads, self.head_groups
        )
        for group in self.head_groups:
            group.follow_dtype(self.dtype_policy)
            group.set_sizes(self.key_dim, self.size_of_value)
            group.num_key_value_heads = group.num_heads // queries_per_key
            if group.logit_soft_cap is None:
                group.set_soft_cap(self.logit_soft_cap)
            if self.qk_norm:
                group.set_qk_norm(True)
            if self.remat:
                by_weights = group.has_one_softmax and self.remat == "weights"
                computes_again(group, "weights" if by_weights else True)
        arguments.warn_of_other_dtypes(self)

    def build(self, query_shape, value_shape=None):
        dim = query_shape[-1]
        memory_dim = dim if value_shape is None else value_shape[-1]
        self.input_spec = keras.layers.InputSpec(axes={-1: dim})
        self.size_of_output = self.output_dim or dim
        self.build_heads(dim, memory_dim)

    def make_cache(
        self, batch_size, max_length, value=None, value_mask=None, token_bias=None
    ):
        """Makes an empty cache, for calls that continue after earlier tokens.

        A call returns a new cache, and the old one stays valid for the earlier tokens.

        Args:
            batch_size: number of sequences.
            max_length: largest number of tokens of a sequence; for positions on two
                axes, a tuple of their lengths. Heads whose cache does not grow with it
                can go beyond it; for others, a `cache_index` beyond it is refused, and
                gives wrong outputs if it is traced.
            value: `<float>[batch, memory length, memory dim]`, another sequence, to
                which at most `max_length` queries attend; None (the default) for
                self-attention.
            value_mask: `<bool>[batch, memory length]`, True for real tokens; None (the
                default) for no padding.
            token_bias: `<float>[batch, memory length]`, added to the logits of its
                keys; None (the default) for no bias.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.

        Raises:
            ValueError: if some heads let later tokens decide who is a member, or there
                is a `value` and the layer is not built.

        Example:

        ```python
        import numpy as np
        from routing_tf import layers

        attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=8)
        x = np.random.normal(size=(1, 20, 16)).astype("float32")
        cache = attention.make_cache(batch_size=1, max_length=20)
        first, cache = attention(x[:, :12], cache=cache, cache_index=0)
        more, cache = attention(x[:, 12:], cache=cache, cache_index=12)
        ```
        """
        memory = {"value": value, "value_mask": value_mask, "token_bias": token_bias}
        return stepping.make_cache(self, batch_size, max_length, **memory)

    @classmethod
    def from_keras(cls, layer, head_groups, **kwargs):
        """Makes a built layer with the weights and the name of a layer of Keras.

        With `FullHeads` it computes the same; `RoutedHeads` need training.

        Args:
            layer: `keras.layers.MultiHeadAttention` or
                `keras.layers.GroupQueryAttention`, built. Its weights, with adapters
                added, are copied; its dropout is that of the head groups.
            head_groups: list of `HeadGroup` layers with as many heads.
            **kwargs: other arguments of `MixedAttention`, which take precedence.

        Raises:
            ValueError: if `layer` is quantized, attends along other axes, or makes keys
                and values from two sequences, or the head groups share queries and
                keys, or see beyond its window.

        Example:

        ```python
        import keras
        import numpy as np
        from routing_tf import layers

        x = np.random.normal(size=(1, 10, 16)).astype("float32")
        dense = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8)
        expected = dense(x, x, use_causal_mask=True)
        full = layers.MixedAttention.from_keras(dense, [layers.FullHeads(2)])
        np.testing.assert_allclose(full(x, use_causal_mask=True), expected, atol=1e-5)
        ```
        """
        return from_keras.from_keras(cls, layer, head_groups, **kwargs)

    @property
    def projection_config(self):
        """The settings of the projections, a `ProjectionConfig`."""
        names = ProjectionConfig.names()
        return ProjectionConfig(**{name: getattr(self, name) for name in names})

    def __call__(self, query, value=None, key=None, *others, **kwargs):
        if others or key is not None:
            arguments.check_by_position(key, others)
        if "key_mask" in kwargs:
            arguments.refuse_key_mask(kwargs.pop("key_mask"))
        if kwargs.get("segment_ids") is not None:
            check_fit(kwargs["segment_ids"])
        # Before Keras builds the layer from their shapes.
        arguments.check_axes("query", query)
        if value is not None:
            arguments.check_axes("value", value)
        if key is not None:
            arguments.check_key(query, value, key)
        self_attention = kwargs.get("self_attention")
        if value is not None or self_attention is not None:
            asks = self_attention is None and kwargs.get("cache") is None
            asks = asks and not self._has_warned
            if asks and arguments.looks_like_copy(query, value):
                self._has_warned = True
                arguments.warn_of_copy(self, query.shape)
            # Keras converts each argument on its own: the same tensor becomes two.
            value = arguments.other_sequence(query, value, self_attention)
        kwargs = NotCast.wrap(kwargs, (query, value))
        try:
            return super().__call__(query, value, **kwargs)
        except Exception as error:
            arguments.refuse_symbolic_sizes(error, self, query, value)
            raise

    def call(
        self,
        query,
        value=None,
        key=None,
        *,
        query_mask=None,
        value_mask=None,
        token_bias=None,
        training=None,
        use_causal_mask=False,
        cache=None,
        cache_index=None,
        attention_mask=None,
        return_attention_scores=False,
        mask=None,
        self_attention=None,
        routing_scope=None,
        segment_ids=None,
    ):
        if routing_scope is not None:
            check_choice("routing_scope", routing_scope, (None, *ROUTING_SCOPES))
        if cache is not None:
            cache = NotCast.of(cache, cache_index)
        query_mask = mask if query_mask is None else query_mask
        if value is not None or self_attention is not None:
            value = arguments.other_sequence(query, value, self_attention)
        if attention_mask is not None:
            own = query_mask if value is None and value_mask is None else value_mask
            value_mask = arguments.with_mask_of_keys(attention_mask, query, cache, own)
        masks = {
            "query_mask": query_mask,
            "value_mask": value_mask,
            "token_bias": token_bias,
            "segment_ids": segment_ids,
        }
        if cache is not None:
            if training or return_attention_scores or value is not None:
                arguments.check_cache(
                    cache.cache, value, training, return_attention_scores
                )
            return stepping.call_with_cache(self, query, masks, cache)
        positions, inputs = self.head_inputs(
            query,
            value,
            **masks,
            shows_weights=return_attention_scores,
            use_causal_mask=use_causal_mask,
            routing_scope=routing_scope,
        )
        attend = self._attend_again if self.remat and training else None
        outputs = [
            attend(group, own) if attend else group(inputs=own, training=training)
            for group, own in zip(self.head_groups, inputs, strict=True)
        ]
        outputs = self.joined(positions, outputs)
        if not return_attention_scores:
            output = self.combined(outputs, query)
            has_axes = len(positions.lengths) > 1
            return positions.unflatten(output) if has_axes else output
        size = self.size_of_value
        output = positions.unflatten(self.combined(outputs[..., :size], query))
        return output, outputs[..., size:]

    def _attend_again(self, group, inputs):
        """Attends in training with what gradients compute again, see `remat`."""
        forgets_weights = self.remat == "weights" and are_stated()
        if forgets_weights and group.has_softmax_alone(inputs, True):
            return group(inputs=inputs, training=True)
        return train_and_forget(group, inputs)

    def compute_output_shape(self, query_shape, value_shape=None):
        return (*query_shape[:-1], self.output_dim or query_shape[-1])

    def compute_output_spec(
        self,
        query,
        value=None,
        *args,
        return_attention_scores=False,
        segment_ids=None,
        **kwargs,
    ):
        arguments.check_segment_ids(
            segment_ids, value is not None, len(query.shape) - 2
        )
        for name, x in (("query", query), ("value", value)):
            if x is not None and None not in x.shape[1:]:
                self.positions_of(name, x)
        shape = self.compute_output_shape(query.shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        memory = query if value is None else value
        axes = (x.shape[1:-1] for x in (query, memory))
        lengths = (None if None in shape else math.prod(shape) for shape in axes)
        shape = (query.shape[0], self.num_heads, *lengths)
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)

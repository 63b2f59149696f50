"""Multi-head attention whose heads may each follow another pattern."""

import math
import warnings
from functools import partial

import keras
import numpy as np
from keras import ops

from routing_tf.layers.decoding import memories
from routing_tf.layers.decoding.untouched import Untouched
from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.heads.head_group import HeadInputs
from routing_tf.layers.heads.local import check_block_shape
from routing_tf.layers.heads.routed import use_routing_scope
from routing_tf.layers.initializers import fresh
from routing_tf.layers.lengths import length_of
from routing_tf.layers.low_rank import LowRankAdaptation
from routing_tf.layers.parts import split
from routing_tf.layers.positions import Positions
from routing_tf.layers.rematerialization import call_and_forget
from routing_tf.layers.serialization import deserialize
from routing_tf.layers.serialization import serialize
from routing_tf.layers.validation import check_positive_integer
from routing_tf.layers.validation import constraint
from routing_tf.layers.validation import initializer
from routing_tf.layers.validation import regularizer
from routing_tf.layers.validation import static_length


@keras.saving.register_keras_serializable("routing_tf")
class MixedAttention(LowRankAdaptation):
    """Projects a sequence, lets groups of heads attend side by side, and projects back.

    Queries, keys and values are split over the head groups in the order given; the
    outputs of the groups are concatenated in that order.

    Positions lie on one axis (text) or two (images). On two axes they are put into one
    sequence, block after block, and "earlier" means earlier in this blocked order.

    Args:
        head_groups: list of `HeadGroup` layers such as `RoutedHeads` or `LocalHeads`,
            which have dtype policies of their own.
        key_dim: size of a query or key of one head.
        value_dim: size of a value of one head; None (the default) for `key_dim`.
        output_dim: size of the output; None (the default) for the size of the query.
        shared_head_projection: whether the output of every head passes through one
            more `(value_dim, value_dim)` matrix, the same for all heads (the release).
            Defaults to False.
        project_shared_keys: whether the key projection also has columns for heads
            that share the query projection and never read them (the release).
            Defaults to False.
        block_shape: tuple, length of a block along each axis of the positions, which
            sets their order; inputs are padded to a multiple and cut again. None (the
            default): on one axis the order as it is, on two the blocks of the head
            groups that have such blocks.
        kernel_initializer: initializer of all projections. Defaults to
            `"glorot_uniform"`.
        remat: whether training keeps nothing of what the heads do between the
            projections, matrices of attention weights above all, and computes it
            again for the gradients: less memory, some more time, the same results.
            Defaults to False.
        use_bias: whether all projections have biases. Defaults to False.
        bias_initializer: initializer of the biases. Defaults to `"zeros"`.
        kernel_regularizer: regularizer of the kernels of all projections; None (the
            default) for none.
        bias_regularizer: the same for the biases.
        kernel_constraint: constraint on these kernels; None (the default) for none.
        bias_constraint: the same for the biases.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        query: `<float>[batch, length, dim]`; for positions on two axes, here and below,
            `height, width` in place of `length`.
        value: `<float>[batch, memory length, memory dim]`; None (the default) for
            `query`.
        key: None (the default), or `value` once more, as calls of
            `keras.layers.MultiHeadAttention` have it: keys are made from `value`.
        query_mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
            What stands at padding must be finite.
            Filled from the Keras mask of `query`. This and all that follows goes by
            name.
        value_mask: `<bool>[batch, memory length]`, likewise for `value`; in
            self-attention `query_mask` serves.
        token_bias: `<float>[batch, memory length]`, added to the logits of each key.
        training: whether dropout is on and centroids move.
        use_causal_mask: whether a token sees only tokens up to itself.
        cache: what `make_cache` or an earlier call returned; None (the default) for
            none. With a cache self-attention is causal, and expert choice has the
            routing scope `"prefix"`. A cache with a memory has its mask and bias, and
            `value` and what belongs to it is not read again.
        cache_index: position of the first token of `query`, an integer or a tensor;
            None (the default) for 0. Tokens follow each other; the newest may be fed
            again and is replaced. At the integer 0 a sequence is computed in one
            parallel pass and starts the cache anew; else tokens go one by one, as
            `[batch, length, dim]` (on two axes of positions: in the blocked order).
            Padding is not remembered.
        attention_mask: refused; sparse patterns never build the matrix it masks.
        return_attention_scores: whether to return the dense map of attention weights
            too. Its memory grows with the square of the length: for short inputs.
        mask: where Keras puts the mask of `query` if `query` is the only tensor; the
            same as `query_mask`.
        self_attention: whether `value` is the sequence of `query` (True) or another
            one (False), which decides how clustered and causal heads attend. If True,
            a `value` of the same shape may be given and is not read. None (the
            default): True without a `value` or if it is the very tensor `query`, and
            False for any other tensor, be it a copy.

    Returns:
        `<float>[batch, length, output_dim]`; with `return_attention_scores=True` also
        the map `<float>[batch, heads, length, memory length]`. With a cache a pair: the
        output, and the cache with the tokens of `query`.

    The Keras mask of `query` is passed on. `enable_lora` adapts projections; `quantize`
    is for `Dense` layers, and leaves the projections here as they are.

    Raises:
        ValueError: if a size is not a positive integer, or `head_groups` is empty,
            holds one group twice, something else than head groups, or groups with
            blocks of different shapes on two axes; when built, if another layer has
            built a group; when called, if a dense `attention_mask` is given, `value` or
            a mask does not fit, `key` is another tensor than `value`, masks go by
            position, positions have other axes than the blocks, `use_causal_mask=True`
            and `value` has another length than `query`, or a length is unknown while
            TensorFlow traces positions on two axes, random heads or a call with a
            cache; or if a cache is given while training, with attention scores, for
            attention to another sequence without its memory, for another number of
            sequences, or without room for the tokens.

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

    def __init__(
        self,
        head_groups,
        key_dim,
        value_dim=None,
        output_dim=None,
        shared_head_projection=False,
        project_shared_keys=False,
        block_shape=None,
        kernel_initializer="glorot_uniform",
        remat=False,
        use_bias=False,
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.remat = remat
        key_dim = check_positive_integer("key_dim", key_dim)
        if value_dim is not None:
            value_dim = check_positive_integer("value_dim", value_dim)
        if output_dim is not None:
            output_dim = check_positive_integer("output_dim", output_dim)
        self.head_groups = _check_head_groups(head_groups)
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.output_dim = output_dim
        self.shared_head_projection = shared_head_projection
        self.project_shared_keys = project_shared_keys
        self.block_shape = block_shape
        if block_shape is not None:
            self.block_shape = check_block_shape("block_shape", block_shape)
        self._blocks_of_groups = _shared_block_shape(self.head_groups, self.block_shape)
        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)
        self.kernel_regularizer = regularizer("kernel_regularizer", kernel_regularizer)
        self.kernel_constraint = constraint("kernel_constraint", kernel_constraint)
        self.use_bias = use_bias
        self.bias_initializer = initializer("bias_initializer", bias_initializer)
        self.bias_regularizer = regularizer("bias_regularizer", bias_regularizer)
        self.bias_constraint = constraint("bias_constraint", bias_constraint)
        self._warn_of_other_dtypes()
        for group in self.head_groups:
            group.set_sizes(key_dim, value_dim or key_dim)

    def _warn_of_other_dtypes(self):
        others = [
            f"{group.name!r} in {group.compute_dtype}"
            for group in self.head_groups
            if group.compute_dtype != self.compute_dtype
        ]
        if others:
            warnings.warn(
                f"Head groups do not compute in the {self.compute_dtype} of the layer "
                f"{self.name!r}: {', '.join(others)}. Pass them the same `dtype`",
                stacklevel=3,
            )

    @property
    def num_heads(self):
        """Number of heads in all groups."""
        return sum(group.num_heads for group in self.head_groups)

    def build(self, query_shape, value_shape=None):
        dim = query_shape[-1]
        memory_dim = dim if value_shape is None else value_shape[-1]
        value_dim = self.value_dim or self.key_dim
        # Heads that share the query projection can do so only on inputs of its size.
        self._own_keys = [
            group.needs_keys or memory_dim != dim or self.project_shared_keys
            for group in self.head_groups
        ]
        self._shares = [
            not group.needs_keys and memory_dim == dim for group in self.head_groups
        ]
        key_heads = sum(
            group.num_heads
            for group, own in zip(self.head_groups, self._own_keys, strict=True)
            if own
        )
        heads = self.num_heads
        self.query_kernel = self._kernel("query", (dim, heads * self.key_dim))
        self.key_kernel = None
        if key_heads:
            self.key_kernel = self._kernel(
                "key", (memory_dim, key_heads * self.key_dim)
            )
        self.value_kernel = self._kernel("value", (memory_dim, heads * value_dim))
        if self.shared_head_projection:
            self.head_kernel = self._kernel("head", (value_dim, value_dim))
        self.input_spec = keras.layers.InputSpec(axes={-1: dim})
        output_dim = self.output_dim or dim
        self.output_kernel = self._kernel("output", (heads * value_dim, output_dim))
        for name in ("query", "key", "value", "output"):
            setattr(self, f"{name}_bias", self._bias(name))
        self._build_head_groups(value_dim)

    def _kernel(self, name, shape):
        return self.add_weight(
            name=f"{name}_kernel",
            shape=shape,
            initializer=fresh(self.kernel_initializer),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )

    def _bias(self, name):
        """Makes the bias that goes with a kernel; returns None where there is none."""
        kernel = getattr(self, f"{name}_kernel")
        if not self.use_bias or kernel is None:
            return None
        return self.add_weight(
            name=f"{name}_bias",
            shape=kernel.shape[1:],
            initializer=fresh(self.bias_initializer),
            regularizer=self.bias_regularizer,
            constraint=self.bias_constraint,
        )

    def _projections(self, *names):
        """Returns pairs of a kernel and its bias, or None, for each name."""
        return [(self.adapted(name), getattr(self, f"{name}_bias")) for name in names]

    def _build_head_groups(self, value_dim):
        for group in self.head_groups:
            if group.built:
                raise ValueError(
                    "`head_groups` must be the layer's own: a group has weights and "
                    f"centroids. Received: {group.name!r}, built by another layer"
                )
            start = (None, group.num_heads, None)
            key_shape = (*start, self.key_dim)
            group.build(key_shape, key_shape, (*start, value_dim))

    def make_cache(
        self, batch_size, max_length, value=None, value_mask=None, token_bias=None
    ):
        """Makes an empty cache, for calls that go token by token.

        Args:
            batch_size: number of sequences.
            max_length: number of tokens a sequence may have; for positions on two axes
                a tuple of their lengths. Local, routed and hashed heads remember as
                many tokens as they can see and may go on behind it. All others have
                room for `max_length` tokens; a `cache_index` behind it is refused if it
                is an integer, and if it is a tensor outputs are wrong.
            value: `<float>[batch, memory length, memory dim]`, the sequence that is
                attended to by at most `max_length` queries, whose keys and values are
                then computed only once; None (the default) for self-attention.
            value_mask: `<bool>[batch, memory length]`, True for real tokens; None (the
                default) for no padding.
            token_bias: `<float>[batch, memory length]`, added to the logits of its
                keys; None (the default) for no bias.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.

        Raises:
            ValueError: if a length is not a positive integer, or some heads let later
                tokens decide who is a member, as a `Compatibility` option can have it,
                or there is a `value` and the layer is not built.

        Example:

        ```python
        import numpy as np
        from routing_tf import layers

        attention = layers.RoutingAttention(
            num_heads=2, key_dim=8, num_clusters=4, attention_window=16
        )
        x = np.random.normal(size=(1, 20, 16)).astype("float32")
        cache = attention.make_cache(batch_size=1, max_length=20)
        y, cache = attention(x[:, :19], cache=cache, cache_index=0)
        last, cache = attention(x[:, 19:], cache=cache, cache_index=19)
        ```
        """
        lengths = max_length if isinstance(max_length, (tuple, list)) else (max_length,)
        lengths = [check_positive_integer("max_length", length) for length in lengths]
        order = self._positions(
            "max_length", f"max_length={max_length!r}", tuple(lengths)
        )
        length = order.num_positions
        if value is None:
            caches = [
                group.make_cache(batch_size, length, order.grid)
                for group in self.head_groups
            ]
            return {"tokens": caches}
        if not self.built:
            raise ValueError(
                "The layer must be built before `value` is put into a cache. Received: "
                f"value.shape={tuple(value.shape)} for {self.name!r}. Call it once, or "
                "`build` it"
            )
        value = ops.convert_to_tensor(value, self.compute_dtype)
        self._check_value(value, None)
        inputs = self._memory_inputs(order, value, value_mask, token_bias)
        caches = [
            group.make_memory(group_inputs, length)
            for group, group_inputs in zip(self.head_groups, inputs, strict=True)
        ]
        return {"memory": caches}

    def __call__(self, query, value=None, key=None, *others, **kwargs):
        _check_by_position(key, others)
        # Before Keras builds the layer from their shapes.
        _check_axes("query", query)
        if value is not None:
            _check_axes("value", value)
        _check_key(query, value, key)
        # Keras converts each argument on its own: the same tensor becomes two.
        value = _other_sequence(query, value, kwargs.get("self_attention"))
        return super().__call__(query, value, **Untouched.wrap(kwargs))

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
    ):
        _refuse_attention_mask(attention_mask)
        query_mask = mask if query_mask is None else query_mask
        value = _other_sequence(query, value, self_attention)
        if cache is not None:
            _check_cache(cache.cache, value, training, return_attention_scores)
            masks = {"query_mask": query_mask, "value_mask": value_mask}
            return self._call_with_cache(
                query, {**masks, "token_bias": token_bias}, cache
            )
        order, arguments = self._head_arguments(
            query, value, query_mask, value_mask, token_bias, return_attention_scores
        )
        options = {"use_causal_mask": use_causal_mask, "training": training}
        attend = _attend_and_forget if self.remat and training else _attend
        outputs = [
            attend(group, own, options)
            for group, own in zip(self.head_groups, arguments, strict=True)
        ]
        outputs = self._join(order, outputs)
        if not return_attention_scores:
            return order.unflatten(self._combine(outputs))
        size = self.value_dim or self.key_dim
        combined = order.unflatten(self._combine(outputs[..., :size]))
        return combined, outputs[..., size:]

    def _call_with_cache(self, query, masks, cache):
        """Attends with tokens that follow those in a cache.

        Args:
            query: as in a call.
            masks: dict of `query_mask`, `value_mask` and `token_bias`, as in a call.
            cache: cache and index, as `Untouched`.
        """
        cache, index = cache.cache, cache.cache_index
        index = 0 if index is None else index
        if isinstance(index, np.integer):
            index = int(index)
        self._check_room(query, cache, index)
        starts = isinstance(index, int) and index == 0
        if "memory" in cache:
            if starts:
                cache = {"memory": [memories.restart(each) for each in cache["memory"]]}
        elif starts and self._are_positions(query):
            return self._start(query, masks, cache)
        if len(query.shape) != 3:
            raise ValueError(
                "`query` must be (batch, length, dim) where tokens go one by one, on "
                "two axes of positions in their blocked order. Received: query.shape="
                f"{tuple(query.shape)} with cache_index={index}"
            )
        if query.shape[1] == 1:
            return self._step(query, masks, cache, index)
        return self._steps(query, masks, cache, ops.cast(index, "int32"))

    def _are_positions(self, query):
        """Whether positions lie as in a call, and are not a part of a sequence."""
        block_shape = self.block_shape or self._blocks_of_groups
        return block_shape is None or len(block_shape) == len(query.shape) - 2

    def _check_room(self, query, cache, index):
        """Refuses tokens that do not fit a cache, as far as sizes are known."""
        rows = keras.tree.flatten(cache)[0].shape[0]
        if None not in (rows, query.shape[0]) and rows != query.shape[0]:
            raise ValueError(
                "`cache` must be one for as many sequences as `query` has. Received: "
                f"query.shape={tuple(query.shape)} and a cache for {rows}. Pass this "
                "number to `make_cache` as `batch_size`"
            )
        known = isinstance(index, int) and None not in query.shape[1:-1]
        if "memory" in cache or not known:
            return
        end = index + math.prod(query.shape[1:-1])
        for group, group_cache in zip(self.head_groups, cache["tokens"], strict=True):
            room = group.max_positions(group_cache)
            if index < 0 or room is not None and end > room:
                raise ValueError(
                    "`cache_index` must be at least 0, and the cache have room for "
                    f"`query`. Received: cache_index={index} with "
                    f"query.shape={tuple(query.shape)} and room for {room} tokens. "
                    "Make a cache with a larger `max_length`: only local, routed and "
                    "hashed heads go on behind it"
                )

    def _start(self, query, masks, cache):
        """Attends with a whole sequence at once."""
        static_length("query", query)
        order, arguments = self._head_arguments(query, None, **masks)
        inputs = [
            group.inputs(**own, use_causal_mask=True, adds_losses=False)
            for group, own in zip(self.head_groups, arguments, strict=True)
        ]
        groups = list(zip(self.head_groups, inputs, strict=True))
        with use_routing_scope(self, "prefix"):
            outputs = [
                group.attend(group.shifted(own), training=False)
                for group, own in groups
            ]
        caches = [
            group.fill_cache(group_cache, own)
            for (group, own), group_cache in zip(groups, cache["tokens"], strict=True)
        ]
        output = order.unflatten(self._combine(self._join(order, outputs)))
        return output, {"tokens": caches}

    def _steps(self, query, masks, cache, index):
        """Attends with one token after the other."""
        length = static_length("query", query)
        tokens = {
            name: None if x is None else ops.convert_to_tensor(x)
            for name, x in {"query": query, **masks}.items()
        }

        def step(place, cache, outputs):
            token = {
                name: None if x is None else ops.take(x, place[None], axis=1)
                for name, x in tokens.items()
            }
            query = token.pop("query")
            output, cache = self._step(query, token, cache, index + place)
            return place + 1, cache, ops.slice_update(outputs, (0, place, 0), output)

        batch, size = ops.shape(query)[0], self.output_kernel.shape[-1]
        outputs = ops.zeros((batch, length, size), self.compute_dtype)
        start = ops.zeros((), "int32")
        _, cache, outputs = ops.while_loop(
            lambda place, cache, outputs: place < length, step, (start, cache, outputs)
        )
        return outputs, cache

    def _step(self, query, masks, cache, index):
        """Attends with one token."""
        (kind,) = cache
        index = ops.cast(index, "int32")
        order = Positions((1,), None)
        if kind == "tokens":
            _, arguments = self._head_arguments(query, None, **masks, order=order)
            inputs = [
                group.inputs(**own, use_causal_mask=True, adds_losses=False)
                for group, own in zip(self.head_groups, arguments, strict=True)
            ]
        else:
            mask = order.sequence("query_mask", masks["query_mask"], query.shape[0])
            mask = None if mask is None else ops.cast(mask, "bool")[:, None]
            inputs = [
                HeadInputs(
                    ops.cast(own, group.compute_dtype),
                    None,
                    None,
                    query_mask=mask,
                    adds_losses=False,
                )
                for group, own in zip(
                    self.head_groups, self._queries(query), strict=True
                )
            ]
        steps = [
            (group.step if kind == "tokens" else group.read_memory)(
                group_cache, index, group_inputs
            )
            for group, group_cache, group_inputs in zip(
                self.head_groups, cache[kind], inputs, strict=True
            )
        ]
        output = self._combine(self._join(order, [output for output, _ in steps]))
        return output, {kind: [cache for _, cache in steps]}

    def _queries(self, query):
        """Returns the queries of each group, from a multiplication of their own."""
        return self._scaled_queries(_fused(query, self._projections("query"))[0])

    def _scaled_queries(self, queries):
        queries = self._split_heads(queries, self.num_heads)
        return self._split_groups(queries * ops.cast(self.key_dim**-0.5, queries.dtype))

    def _memory_inputs(self, order, value, value_mask, token_bias):
        """Returns the `HeadInputs` of each group for a memory alone."""
        memory_order = self._order("value", value)
        masks = {
            "value_mask": memory_order.sequence(
                "value_mask", value_mask, value.shape[0], fill=True
            ),
            "token_bias": memory_order.sequence(
                "token_bias", token_bias, value.shape[0]
            ),
        }
        _, keys, values = self._project(None, memory_order.flatten(value))
        return [
            group.inputs(
                None,
                memory_order.arrange(key),
                memory_order.arrange(own_value),
                is_cross_attention=True,
                grid=order.grid,
                memory_grid=memory_order.grid,
                **masks,
            )
            for group, key, own_value in zip(
                self.head_groups, keys, values, strict=True
            )
        ]

    def _head_arguments(
        self,
        query,
        value,
        query_mask,
        value_mask,
        token_bias,
        return_attention_scores=False,
        order=None,
    ):
        """Returns the order of the query, and call arguments for each head group."""
        batch = query.shape[0]
        order = memory_order = order or self._order("query", query)
        query = order.flatten(query)
        if value is None:
            value_mask = query_mask if value_mask is None else value_mask
        else:
            self._check_value(value, batch)
            memory_order = self._order("value", value)
            value = memory_order.flatten(value)
        queries, keys, values = self._project(query, value)
        if return_attention_scores:
            values = _append_identity(values)
        masks = {
            "query_mask": order.sequence("query_mask", query_mask, batch, fill=True),
            "value_mask": memory_order.sequence(
                "value_mask", value_mask, batch, fill=True
            ),
            "token_bias": memory_order.sequence("token_bias", token_bias, batch),
        }
        return order, [
            {
                "query": order.arrange(group_query),
                "key": memory_order.arrange(group_key),
                "value": memory_order.arrange(group_value),
                "is_cross_attention": value is not None,
                "grid": order.grid,
                "memory_grid": memory_order.grid,
                **masks,
            }
            for group_query, group_key, group_value in zip(
                queries, keys, values, strict=True
            )
        ]

    def _join(self, order, outputs):
        outputs = [ops.cast(output, self.compute_dtype) for output in outputs]
        return order.restore(ops.concatenate(outputs, axis=1))

    def _order(self, name, x):
        """The order in which the positions of `x` become a sequence."""
        _check_axes(name, x)
        axes = range(1, len(x.shape) - 1)
        find = length_of if len(axes) == 1 else partial(static_length, name)
        lengths = tuple(find(x, axis) for axis in axes)
        return self._positions(name, f"{name}.shape={tuple(x.shape)}", lengths)

    def _positions(self, name, received, lengths):
        block_shape = self.block_shape or self._blocks_of_groups
        if block_shape is not None and len(block_shape) != len(lengths):
            raise ValueError(
                f"`{name}` must have an axis of positions for each entry of the "
                f"blocks. Received: {received} with blocks of {block_shape}. Pass "
                "(batch, length, dim) for blocks with one entry, (batch, height, "
                "width, dim) for two."
            )
        return Positions(lengths, block_shape)

    def _project(self, query, value):
        """Returns queries, keys and values, each as a list with a tensor per group."""
        memory = query if value is None else value
        shared_keys = value is not None and any(self._shares)
        of_memory = ["value"]
        if self.key_kernel is not None:
            of_memory.append("key")
        if shared_keys:
            of_memory.append("query")
        if value is None:
            queries, *rest = _fused(query, self._projections("query", *of_memory))
            queries = self._scaled_queries(queries)
        else:
            queries = None if query is None else self._queries(query)
            rest = _fused(memory, self._projections(*of_memory))
        values = self._split_heads(rest.pop(0), self.num_heads)
        own_keys = rest.pop(0) if self.key_kernel is not None else None
        query_keys = rest.pop(0) if shared_keys else None
        return (
            queries,
            self._keys(own_keys, query_keys),
            self._split_groups(values),
        )

    def _keys(self, own_keys, query_keys):
        """Returns the keys of each group, None where the queries serve as keys."""
        own = query = None
        if own_keys is not None:
            own = self._split_heads(own_keys, own_keys.shape[-1] // self.key_dim)
        if query_keys is not None:
            # Shared heads see scaled queries; keys of the same make match them.
            query = self._split_heads(query_keys, self.num_heads)
            query *= ops.cast(self.key_dim**-0.5, query.dtype)
        counts = [
            group.num_heads if has_own else 0
            for group, has_own in zip(self.head_groups, self._own_keys, strict=True)
        ]
        parts = iter([] if own is None else split(own, [n for n in counts if n], 1))
        own_keys = [next(parts) if count else None for count in counts]
        shared_keys = [None] * len(counts)
        if query is not None:
            shared_keys = self._split_groups(query)
        return [
            shared_key if shares else own_key
            for shared_key, own_key, shares in zip(
                shared_keys, own_keys, self._shares, strict=True
            )
        ]

    def _split_heads(self, x, heads):
        batch, length, size = ops.shape(x)
        x = ops.reshape(x, (batch, length, heads, size // heads))
        return ops.transpose(x, (0, 2, 1, 3))

    def _split_groups(self, x):
        return split(x, [group.num_heads for group in self.head_groups], axis=1)

    def _combine(self, x):
        if self.shared_head_projection:
            x = ops.matmul(x, ops.cast(self.adapted("head"), x.dtype))
        batch, heads, length, size = ops.shape(x)
        x = ops.transpose(x, (0, 2, 1, 3))
        x = ops.reshape(x, (batch, length, heads * size))
        return _fused(x, self._projections("output"))[0]

    def _check_value(self, value, batch):
        if None not in (batch, value.shape[0]) and batch != value.shape[0]:
            raise ValueError(
                "`query` and `value` must have the same batch size. Received: "
                f"{batch} and {value.shape[0]}"
            )
        expected = self.value_kernel.shape[0]
        if value.shape[-1] != expected:
            raise ValueError(
                "`value` must have the depth that the layer was built with, "
                f"{expected}. Received: value.shape={tuple(value.shape)}. Use a layer "
                "of its own for a memory of another depth."
            )

    def get_config(self):
        return {
            **super().get_config(),
            "head_groups": [serialize(group) for group in self.head_groups],
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "output_dim": self.output_dim,
            "shared_head_projection": self.shared_head_projection,
            "project_shared_keys": self.project_shared_keys,
            "block_shape": self.block_shape,
            "remat": self.remat,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
        }

    def compute_mask(self, query, previous_mask=None):
        return previous_mask

    def compute_output_shape(self, query_shape, value_shape=None):
        return (*query_shape[:-1], self.output_dim or query_shape[-1])

    def compute_output_spec(
        self, query, value=None, *args, return_attention_scores=False, **kwargs
    ):
        for name, x in (("query", query), ("value", value)):
            if x is not None and None not in x.shape[1:]:
                self._order(name, x)
        shape = self.compute_output_shape(query.shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        memory = query if value is None else value
        axes = (x.shape[1:-1] for x in (query, memory))
        lengths = (None if None in shape else math.prod(shape) for shape in axes)
        shape = (query.shape[0], self.num_heads, *lengths)
        return output, keras.KerasTensor(shape, dtype=self.compute_dtype)


def _check_axes(name, x):
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) not in (3, 4) or 0 in shape[1:]:
        received = f"{name}={x!r}" if shape is None else f"{name}.shape={tuple(shape)}"
        raise ValueError(
            f"`{name}` must be (batch, length, dim) or (batch, height, width, dim), "
            f"with at least one position. Received: {received}"
        )


def _check_by_position(key, others):
    """Refuses masks where there is no place for them: calls of old pass them so."""
    if others or getattr(key, "dtype", None) is not None and _is_boolean(key):
        raise ValueError(
            "`query_mask`, `value_mask` and all that follows `key` go by name. "
            "Received: a mask or more than three arguments by position. Pass "
            "`attention(query, value, query_mask=..., value_mask=...)`"
        )


def _is_boolean(x):
    return keras.backend.standardize_dtype(x.dtype) == "bool"


def _check_key(query, value, key):
    if key is None or key is (query if value is None else value):
        return
    raise ValueError(
        "`key` must be the very tensor `value`, or None: keys are made from `value`. "
        f"Received: key of shape {getattr(key, 'shape', None)} that is another tensor. "
        "Leave it out"
    )


def _other_sequence(query, value, self_attention):
    """Returns what is attended to; None if it is the query's own sequence."""
    if self_attention is None:
        self_attention = value is None or value is query
    if not self_attention:
        return query if value is None else value
    pairs = () if value is None else zip(query.shape, value.shape)
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise ValueError(
            "`value` must have the shape of `query` with `self_attention=True`. "
            f"Received: query.shape={tuple(query.shape)}, "
            f"value.shape={tuple(value.shape)}. Leave `value` or `self_attention` out"
        )
    return None


def _check_head_groups(head_groups):
    if not isinstance(head_groups, (list, tuple)):
        raise ValueError(
            "`head_groups` must be a list of head groups. Received: "
            f"head_groups={head_groups!r}"
        )
    groups = []
    for group in head_groups:
        group = deserialize(group)
        if not isinstance(group, HeadGroup):
            raise ValueError(
                "`head_groups` must hold head groups such as `RoutedHeads` or "
                f"`LocalHeads`. Received: {group!r}"
            )
        groups.append(group)
    if len({id(group) for group in groups}) < len(groups):
        raise ValueError(
            "`head_groups` must not hold one group twice. Received: "
            f"{[group.name for group in groups]}. Make a group for each place"
        )
    if not groups:
        raise ValueError(
            "`head_groups` must name at least one head group. Received: head_groups=[]"
        )
    return groups


def _shared_block_shape(head_groups, block_shape):
    """The one shape of all blocks on two axes; None if there are none."""
    shapes = {tuple(getattr(group, "block_shape", ())) for group in head_groups}
    shapes = {shape for shape in shapes if len(shape) > 1}
    if block_shape is not None and (shapes or len(block_shape) > 1):
        shapes.add(block_shape)
    if len(shapes) > 1:
        raise ValueError(
            "A `block_shape` on two axes sets the order of the positions, so all head "
            f"groups and the layer must have the same. Received: {sorted(shapes)}"
        )
    return shapes.pop() if shapes else None


def _refuse_attention_mask(attention_mask):
    if attention_mask is not None:
        raise ValueError(
            "A dense `attention_mask` of shape (batch, length, memory length) is not "
            "supported: sparse heads never build the matrix it would mask. Received: "
            f"attention_mask.shape={tuple(attention_mask.shape)}. Use `query_mask` and "
            "`value_mask` for padding and `use_causal_mask=True` for causality."
        )


def _check_cache(cache, value, training, return_attention_scores):
    if training or return_attention_scores:
        raise ValueError(
            "`cache` must be None while training and with attention scores. Received: "
            f"training={training}, return_attention_scores={return_attention_scores}"
        )
    if value is not None and "memory" not in cache:
        raise ValueError(
            "`cache` must hold the memory for attention to another sequence. Received: "
            f"value.shape={tuple(value.shape)} and a cache for self-attention. Make it "
            "with `make_cache(batch_size, max_length, value=value)`"
        )


def _fused(x, projections):
    """Returns several projections of `x`, from one multiplication.

    Args:
        x: `<float>[batch, length, dim]`.
        projections: list of pairs, a kernel and a bias; all biases are None or none is.
    """
    kernels, biases = zip(*projections, strict=True)
    product = ops.matmul(x, _joined(kernels, x.dtype))
    if biases[0] is not None:
        product += _joined(biases, x.dtype)
    return split(product, [kernel.shape[1] for kernel in kernels], axis=-1)


def _joined(weights, dtype):
    weights = [ops.cast(ops.convert_to_tensor(weight), dtype) for weight in weights]
    return weights[0] if len(weights) == 1 else ops.concatenate(weights, axis=-1)


def _attend(group, arguments, options):
    return group(**arguments, **options)


def _attend_and_forget(group, arguments, options):
    """Attends so that the gradients compute all of it again."""
    names = ("query", "key", "value", "token_bias")
    names = [name for name in names if arguments[name] is not None]

    def attend(*tensors):
        differentiated = dict(zip(names, tensors, strict=True))
        return group(**{**arguments, **differentiated}, **options)

    return call_and_forget(group, attend, [arguments[name] for name in names])


def _append_identity(values):
    """Appends an identity matrix to values, so that its average is the map itself."""
    extended = []
    for value in values:
        length = length_of(value, 2)
        identity = ops.broadcast_to(
            ops.eye(length, dtype=value.dtype), (*ops.shape(value)[:3], length)
        )
        extended.append(ops.concatenate([value, identity], axis=-1))
    return extended

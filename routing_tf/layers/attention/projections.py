"""Input, query, key, value and output projections of attention layers."""

import dataclasses
from functools import partial

from keras import ops

from routing_tf.layers.attention import arguments
from routing_tf.layers.attention.projection import LowRankAdaptation
from routing_tf.layers.attention.projection import Projection
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.head_inputs import HeadInputs
from routing_tf.layers.support.masks import Segments
from routing_tf.layers.support.positions import Positions
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import split_axis
from routing_tf.layers.support.validation import static_length

# What Keras quantizes; the matrix that all heads share is small.
QUANTIZABLE = ("query", "key", "value", "output", "gate")


class Projections(LowRankAdaptation):
    """A layer that puts sequences in order and projects them for groups of heads.

    Subclasses have the arguments of `MixedAttention` as attributes, and call
    `build_heads` when they know `size_of_output`, the size of an output.

    Letters: B batch, L length, M memory length, H heads, D size of a query and key.
    """

    @property
    def num_heads(self):
        """Number of heads of all groups."""
        return sum(group.num_heads for group in self.head_groups)

    @property
    def size_of_value(self):
        """Size of a value of one head."""
        return self.value_dim or self.key_dim

    @property
    def quantized_projections(self):
        """The projections that Keras has quantized."""
        names = (f"{name}_projection" for name in QUANTIZABLE)
        projections = (getattr(self, name, None) for name in names)
        return [x for x in projections if x is not None and x.quantization_mode]

    def build_heads(self, dim, memory_dim):
        """Makes projections of tokens of these sizes, and builds the head groups."""
        self.build_projections(dim, memory_dim)
        for group in self.head_groups:
            arguments.check_not_built(group)
            start = (None, group.num_heads, None)
            key_shape = (*start, self.key_dim)
            group.input_dim = dim
            group.build(key_shape, key_shape, (*start, self.size_of_value))

    def build_projections(self, dim, memory_dim):
        """Makes kernels and biases, for tokens of the sizes `dim` and `memory_dim`."""
        # Heads can share the query projection only for inputs of its size.
        self._shares_queries = [
            not group.needs_keys and memory_dim == dim for group in self.head_groups
        ]
        self._has_keys = [
            self.project_shared_keys or not shares for shares in self._shares_queries
        ]
        groups = zip(self.head_groups, self._has_keys, strict=True)
        # Numbers of heads of each group.
        self._counts = {
            "query": [group.num_heads for group in self.head_groups],
            "key": [has * group.num_key_value_heads for group, has in groups],
            "value": [group.num_key_value_heads for group in self.head_groups],
        }
        self.memory_dim = memory_dim
        self._add_weights(self.kernel_shapes(dim, memory_dim))

    def _add_weights(self, shapes):
        self.query_projection = self._projection("query", shapes)
        self.key_projection = self._projection("key", shapes)
        self.value_projection = self._projection("value", shapes)
        self.output_projection = self._projection("output", shapes)
        self.gate_projection = self._projection("gate", shapes)
        self.query_kernel = self._kernel("query", shapes)
        self.key_kernel = self._kernel("key", shapes)
        self.value_kernel = self._kernel("value", shapes)
        self.head_kernel = self._kernel("head", shapes)
        self.output_kernel = self._kernel("output", shapes)
        self.gate_kernel = self._kernel("gate", shapes)
        self.query_bias = self._bias("query", shapes)
        self.key_bias = self._bias("key", shapes)
        self.value_bias = self._bias("value", shapes)
        self.output_bias = self._bias("output", shapes)
        self.gate_bias = self._bias("gate", shapes)
        for name in QUANTIZABLE:
            projection = getattr(self, f"{name}_projection")
            if projection is not None:
                kernel = getattr(self, f"{name}_kernel")
                projection.read(kernel, getattr(self, f"{name}_bias"))

    def kernel_shapes(self, dim, memory_dim):
        """Returns the shapes of the kernels by name; None where there is none."""
        heads, value_dim = self.num_heads, self.size_of_value
        key_heads, value_heads = (sum(self._counts[name]) for name in ("key", "value"))
        return {
            "query": (dim, heads * self.key_dim),
            "key": (memory_dim, key_heads * self.key_dim) if key_heads else None,
            "value": (memory_dim, value_heads * value_dim),
            "head": (value_dim, value_dim) if self.shared_head_projection else None,
            "output": (heads * value_dim, self.size_of_output),
            "gate": (dim, heads * value_dim) if self.use_gate else None,
        }

    def projected(self, query, value=None):
        """Projects a sequence, or two sequences in cross-attention.

        `query` is `<float>[B, L, dim]`, None for only a memory; `value`
        `<float>[B, M, memory dim]`, None for `query`. Returns a list with queries, keys
        and values of each group, `<float>[B, H, L, D]`, the last two with the number of
        key heads for H; keys are None where the queries serve as keys.
        """
        is_cross = value is not None
        names = ["value"]
        if self.key_projection is not None:
            names.append("key")
        if any(self._shares_queries) or not is_cross:
            names.append("query")
        memory = value if is_cross else query
        nothing = [None] * len(self.head_groups)
        projections = self._projections(memory, names)
        values, keys, queries = (
            projections.get(name, nothing) for name in ("value", "key", "query")
        )
        if is_cross:
            # In cross-attention, heads with one projection make keys scaled as queries
            # are.
            shared, queries = queries, self.queries(query)
        else:
            shared = [None] * len(values)
        keys = [
            of_query if shares else own
            for of_query, own, shares in zip(
                shared, keys, self._shares_queries, strict=True
            )
        ]
        return list(zip(queries, keys, values, strict=True))

    def queries(self, query):
        """Returns the queries of each group, as in `projected`; None for None."""
        if query is None:
            return [None] * len(self.head_groups)
        return self._projections(query, ["query"])["query"]

    def combined(self, x, query):
        """Projects the outputs of all heads back, through gates if there are any.

        Args:
            x: `<float>[B, H, L, value size]`.
            query: `<float>[B, *lengths, dim]`, L tokens in the order of `x`.
        """
        if self.shared_head_projection:
            x = ops.matmul(x, ops.cast(self.adapted("head"), x.dtype))
        batch, heads, length, size = ops.shape(x)
        x = ops.transpose(x, (0, 2, 1, 3))
        x = ops.reshape(x, (batch, length, heads * size))
        if self.use_gate:
            gate = self.product(ops.cast(query, x.dtype), ["gate"])
            x = x * ops.reshape(ops.sigmoid(gate), (batch, length, heads * size))
        return self.product(x, ["output"])

    def head_inputs(
        self,
        query,
        value=None,
        query_mask=None,
        value_mask=None,
        token_bias=None,
        segment_ids=None,
        positions=None,
        shows_weights=False,
        **options,
    ):
        """Returns the inputs of the head groups.

        Args:
            query: as in a call; None if there is only a memory.
            value: as in a call; None (the default) for self-attention.
            query_mask: as in a call.
            value_mask: as in a call.
            token_bias: as in a call.
            segment_ids: as in a call.
            positions: `Positions` of the query; None (the default) for those of its
                shape.
            shows_weights: whether an identity matrix follows the values, whose average
                is the map of weights. Defaults to False.
            **options: fields of `HeadInputs`, the same for all groups.

        Returns:
            `Positions` of the query, and a list with the `HeadInputs` of each group.
        """
        batch = (value if query is None else query).shape[0]
        positions = memory_positions = positions or self.positions_of("query", query)
        if value is not None:
            arguments.check_value(value, batch, self.memory_dim)
            memory_positions = self.positions_of("value", value)
            value = memory_positions.flatten(value)
        if segment_ids is not None:
            ids = arguments.check_segment_ids(
                segment_ids, value is not None, len(positions.lengths)
            )
            options["segments"] = self._segments(
                query, ids, positions, memory_positions
            )
            query_mask, value_mask = arguments.masks_of_ids(ids, query_mask, value_mask)
        if value is None:
            value_mask = query_mask if value_mask is None else value_mask
        if query is not None and len(positions.lengths) > 1:
            query = positions.flatten(query)
        projected = self.projected(query, value)
        if shows_weights:
            projected = [(*rest, _with_identity(value)) for *rest, value in projected]
        if self._ordering_blocks is not None:
            orders = positions, memory_positions, memory_positions
            projected = [
                [order.arrange(x) for order, x in zip(orders, own, strict=True)]
                for own in projected
            ]
        if query_mask is not None or self._ordering_blocks is not None:
            query_mask = positions.sequence("query_mask", query_mask, batch, fill=True)
        if value_mask is not None or self._ordering_blocks is not None:
            value_mask = memory_positions.sequence(
                "value_mask", value_mask, batch, fill=True
            )
        if token_bias is not None:
            token_bias = memory_positions.sequence("token_bias", token_bias, batch)
        shared = HeadInputs.of(
            query_mask=query_mask,
            value_mask=value_mask,
            token_bias=token_bias,
            is_cross_attention=value is not None,
            source=query,
            positions=positions,
            memory_positions=memory_positions,
            **options,
        )
        return positions, [
            group.prepared(
                dataclasses.replace(shared, query=own[0], key=own[1], value=own[2])
            )
            for group, own in zip(self.head_groups, projected, strict=True)
        ]

    def _segments(self, query, ids, positions, memory_positions):
        """Returns the `Segments` of the ids of query and value, which may be None."""
        batch = ops.shape(query)[0]
        pairs = zip(ids, (positions, memory_positions), strict=True)
        ids = [own.sequence("segment_ids", x, query.shape[0]) for x, own in pairs]
        return Segments.of_ids(
            *(
                None if x is None else ops.broadcast_to(x, (batch, ops.shape(x)[1]))
                for x in ids
            )
        )

    def joined(self, positions, outputs):
        """Returns the outputs of all head groups side by side, in order of position."""
        outputs = [ops.cast(output, self.compute_dtype) for output in outputs]
        joined = outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=1)
        return joined if positions.block_shape is None else positions.restore(joined)

    def positions_of(self, name, x):
        """Returns the `Positions` of `x`; `name` names it in messages."""
        if len(x.shape) == 3 and self._ordering_blocks is None:
            return Positions((length_of(x, 1),))
        find = length_of if len(x.shape) == 3 else partial(static_length, name)
        lengths = tuple(find(x, axis) for axis in range(1, len(x.shape) - 1))
        return self.positions(name, f"{name}.shape={tuple(x.shape)}", lengths)

    def positions(self, name, received, lengths):
        """Returns `Positions` of these lengths; messages have `name` and `received`."""
        if not self.fits_blocks(len(lengths)):
            arguments.refuse_axes(name, received, self._ordering_blocks)
        return Positions(lengths, self._ordering_blocks)

    def fits_blocks(self, num_axes):
        """Returns whether the blocks, if any, have this number of axes."""
        return self._ordering_blocks is None or len(self._ordering_blocks) == num_axes

    def _projection(self, name, shapes):
        """Makes the layer that Keras quantizes; None without a shape."""
        shape = shapes[name]
        if shape is None:
            return None
        projection = Projection(
            self,
            f"{name}_kernel",
            shape[1],
            name=f"{name}_projection",
            dtype=self.dtype_policy,
        )
        projection.build((None, shape[0]))
        return projection

    def _kernel(self, name, shapes):
        """Makes a kernel; None without a shape, or where the projection has its own."""
        projection = getattr(self, f"{name}_projection", None)
        has_own = projection is not None and projection.has_own_kernel
        return self._weight(name, "kernel", None if has_own else shapes[name])

    def _bias(self, name, shapes):
        """Makes a bias; None without a shape, or without `use_bias`."""
        has_bias = self.use_bias and shapes[name] is not None
        return self._weight(name, "bias", shapes[name][1:] if has_bias else None)

    def _weight(self, name, kind, shape):
        """Makes the kernel or the bias of a projection; None without a shape."""
        if shape is None:
            return None
        initializer = getattr(self, f"{kind}_initializer")
        if (name, kind) == ("output", "kernel"):
            initializer = self.output_initializer or initializer
        return self.add_weight(
            name=f"{name}_{kind}",
            shape=shape,
            initializer=cloned(initializer),
            regularizer=getattr(self, f"{kind}_regularizer"),
            constraint=getattr(self, f"{kind}_constraint"),
        )

    def _projections(self, x, names):
        """Returns for each name a list with the queries, keys or values of the groups.

        Each is `<float>[B, H, L, D]`, or None. Queries are scaled.
        """
        product, size = self.product(x, names), self.value_dim or self.key_dim
        if size == self.key_dim or names[0] != "value":
            return self._of_groups(product, x, names, self.key_dim)
        # Values come first.
        width = size * sum(self._counts["value"])
        sizes = [width, product.shape[-1] - width]
        parts = split_axis(product, sizes if sizes[1] else sizes[:1], axis=-1)
        found = self._of_groups(parts[0], x, names[:1], size)
        if len(parts) > 1:
            found |= self._of_groups(parts[1], x, names[1:], self.key_dim)
        return found

    def _of_groups(self, x, inputs, names, size):
        """Cuts `<float>[B, L, heads of all names * size]` into those of the groups."""
        heads = [count for name in names for count in self._counts[name]]
        # In ONNX files, products have no shape where lengths are unknown.
        batch, length = ops.shape(inputs)[:2]
        x = ops.reshape(x, (batch, length, sum(heads), size))
        # Heads of one size are transposed together.
        x = ops.transpose(x, (0, 2, 1, 3))
        parts = iter(split_axis(x, [count for count in heads if count], axis=1))
        return {
            name: [next(parts) if count else None for count in self._counts[name]]
            for name in names
        }

    def product(self, x, names):
        """Returns several projections of `x`, side by side, in one multiplication."""
        if any(getattr(self, f"{name}_projection").quantization_mode for name in names):
            return self._product_apart(x, names)
        weights = {"kernel": [], "bias": []}
        for name in names:
            kernel = getattr(self, f"{name}_kernel")
            kernel = self.adapted(name) if self.lora_enabled else kernel
            bias = getattr(self, f"{name}_bias") if self.use_bias else None
            for kind, weight in (("kernel", kernel), ("bias", bias)):
                if weight is not None:
                    weight = ops.convert_to_tensor(weight)
                    # Scaling the kernel is cheaper than scaling queries. TensorFlow
                    # 2.21 with oneDNN would also fuse scaled queries with a product and
                    # a mask after it, with wrong results if the mask is broadcast.
                    if name == "query":
                        weight = weight * self.key_dim**-0.5
                    weights[kind].append(ops.cast(weight, x.dtype))
        kernel, *bias = (
            own[0] if len(own) == 1 else ops.concatenate(own, axis=-1)
            for own in weights.values()
            if own
        )
        product = ops.matmul(x, kernel)
        return product + bias[0] if bias else product

    def _product_apart(self, x, names):
        """Returns what `product` does, each projection by itself."""
        products = []
        for name in names:
            product = getattr(self, f"{name}_projection")(x)
            if name == "query":
                product = product * self.key_dim**-0.5
            products.append(ops.cast(product, self.compute_dtype))
        return products[0] if len(products) == 1 else ops.concatenate(products, axis=-1)


def _with_identity(value):
    length = length_of(value, 2)
    identity = ops.broadcast_to(
        ops.eye(length, dtype=value.dtype), (*ops.shape(value)[:3], length)
    )
    return ops.concatenate([value, identity], axis=-1)

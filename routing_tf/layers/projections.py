"""Projections to queries, keys and values of all heads, and of their output."""

import keras
from keras import ops

from routing_tf.layers.axes import split_axis
from routing_tf.layers.initializers import cloned
from routing_tf.layers.low_rank import LowRankAdaptation
from routing_tf.layers.projection import Projection

DTypePolicyMap = keras.dtype_policies.DTypePolicyMap

# What Keras quantizes; the matrix that all heads share is small.
QUANTIZABLE = ("query", "key", "value", "output", "gate")


class Projections(LowRankAdaptation):
    """A layer that projects sequences for groups of heads.

    Subclasses have the arguments of `MixedAttention` as attributes, and call
    `build_projections`.

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
        return [x for x in projections if x is not None and x.can_be_adapted]

    def build_projections(self, dim, memory_dim):
        """Makes kernels and biases, for tokens of the sizes `dim` and `memory_dim`."""
        heads, value_dim = self.num_heads, self.size_of_value
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
        key_heads, value_heads = (sum(self._counts[name]) for name in ("key", "value"))
        shapes = {
            "query": (dim, heads * self.key_dim),
            "key": (memory_dim, key_heads * self.key_dim) if key_heads else None,
            "value": (memory_dim, value_heads * value_dim),
            "head": (value_dim, value_dim) if self.shared_head_projection else None,
            "output": (heads * value_dim, self.output_dim or dim),
            "gate": (dim, heads * value_dim) if self.use_gate else None,
        }
        self.memory_dim, self.size_of_output = memory_dim, shapes["output"][1]
        for name in QUANTIZABLE:
            setattr(self, f"{name}_projection", self._projection(name, shapes[name]))
        for name, shape in shapes.items():
            if shape is not None and self._has_own_kernel(name):
                shape = None
            setattr(self, f"{name}_kernel", self._weight(name, "kernel", shape))
        for name in QUANTIZABLE:
            has_bias = self.use_bias and shapes[name] is not None
            shape = shapes[name][1:] if has_bias else None
            setattr(self, f"{name}_bias", self._weight(name, "bias", shape))
            projection = getattr(self, f"{name}_projection")
            if projection is not None:
                kernel, bias = (
                    getattr(self, f"{name}_{kind}") for kind in ("kernel", "bias")
                )
                projection.read(kernel, bias)

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
            gate = self._product(ops.cast(query, x.dtype), ["gate"])
            x = x * ops.reshape(ops.sigmoid(gate), (batch, length, heads * size))
        return self._product(x, ["output"])

    def get_config(self):
        config = super().get_config()
        policies = {
            projection.path: projection.dtype_policy
            for projection in self.quantized_projections
        }
        if not policies or isinstance(self.dtype_policy, DTypePolicyMap):
            return config
        policies = DTypePolicyMap(self.dtype_policy, policies)
        return {**config, "dtype": keras.dtype_policies.serialize(policies)}

    def _projection(self, name, shape):
        """Makes the layer that Keras quantizes; None without a shape."""
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

    def _has_own_kernel(self, name):
        """Whether a projection multiplies by another kernel than that of the layer."""
        projection = getattr(self, f"{name}_projection", None)
        return projection is not None and projection.has_own_kernel

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
        counts, size_of_value = self._counts, self.size_of_value
        # Heads of one size are transposed together.
        runs = [[name] for name in names]
        if size_of_value == self.key_dim:
            runs = [names]
        sizes = [size_of_value if "value" in run else self.key_dim for run in runs]
        heads = [[count for name in run for count in counts[name]] for run in runs]
        products = split_axis(
            self._product(x, names),
            [size * sum(own) for size, own in zip(sizes, heads, strict=True)],
            axis=-1,
        )
        parts = iter(
            part
            for product, size, counts in zip(products, sizes, heads, strict=True)
            for part in _in_heads(product, ops.shape(x)[:2], size, counts)
        )
        return {name: [next(parts) for _ in counts[name]] for name in names}

    def _product(self, x, names):
        """Returns several projections of `x`, side by side, in one multiplication."""
        projections = [getattr(self, f"{name}_projection") for name in names]
        if any(each in self.quantized_projections for each in projections):
            products = [
                self._scaled(name, projection(x))
                for name, projection in zip(names, projections, strict=True)
            ]
            return _side_by_side(products, self.compute_dtype)
        kernels = [self._scaled(name, self.adapted(name)) for name in names]
        product = ops.matmul(x, _side_by_side(kernels, x.dtype))
        if self.use_bias:
            biases = [
                self._scaled(name, getattr(self, f"{name}_bias")) for name in names
            ]
            product = product + _side_by_side(biases, x.dtype)
        return product

    def _scaled(self, name, weight):
        """Scales the kernel of the queries, which is cheaper than scaling queries.

        TensorFlow 2.21 with oneDNN would also fuse scaled queries with a product and a
        mask after it, with wrong results if the mask is broadcast.
        """
        return weight * self.key_dim**-0.5 if name == "query" else weight


def _in_heads(x, batch_and_length, size, counts):
    """Cuts `<float>[B, L, H * D]` into parts of these numbers of heads.

    Parts are `[B, heads, L, D]`; a part without heads is None.
    """
    x = ops.reshape(x, (*batch_and_length, sum(counts), size))
    x = ops.transpose(x, (0, 2, 1, 3))
    parts = iter(split_axis(x, [count for count in counts if count], axis=1))
    return [next(parts) if count else None for count in counts]


def _side_by_side(weights, dtype):
    weights = [ops.cast(ops.convert_to_tensor(weight), dtype) for weight in weights]
    return weights[0] if len(weights) == 1 else ops.concatenate(weights, axis=-1)

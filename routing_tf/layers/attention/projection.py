"""One projection of an attention layer: its settings, quantization and LoRA."""

import dataclasses
import weakref

import keras
from keras import ops

from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import Settings
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.configs import setting
from routing_tf.layers.support.keras_internals import adding_weights
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.keras_internals import own_weights
from routing_tf.layers.support.tensors import split_axis
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import constraint
from routing_tf.layers.support.validation import initializer
from routing_tf.layers.support.validation import regularizer


class Projection(keras.layers.Dense):
    """The projection to queries, keys or values, of outputs, or of gates.

    Its kernel and bias are weights of the attention layer, which multiplies by several
    kernels at once. After `quantize` it multiplies on its own, by a kernel of its own.

    Args:
        attention: the attention layer.
        kernel_name: name of its attribute that holds the kernel.
        units: number of columns of the kernel.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def __init__(self, attention, kernel_name, units, **kwargs):
        super().__init__(units, **kwargs)
        self.kernel_name = kernel_name
        # Otherwise it would be a layer inside this one.
        self._attention = weakref.ref(attention)

    @property
    def has_own_kernel(self):
        """Whether it needs no kernel of the attention layer."""
        return self.quantization_mode not in (None, "float8")

    def build(self, inputs_shape):
        self.bias = None
        if self.quantization_mode is not None:
            shape = (inputs_shape[-1], self.units)
            config = self.quantization_config
            self.quantized_build(shape, self.quantization_mode, config)

    def read(self, kernel, bias):
        """Takes the weights of the attention layer, which keeps and saves them."""
        # Set in the usual way, Keras would track them twice.
        object.__setattr__(self, "bias", bias)
        if kernel is not None:
            object.__setattr__(self, "_kernel", kernel)

    def __delattr__(self, name):
        if name != "_kernel":
            super().__delattr__(name)
            return
        object.__delattr__(self, name)
        attention = self._attention()
        delattr(attention, self.kernel_name)
        setattr(attention, self.kernel_name, None)

    @property
    def can_be_adapted(self):
        """Whether `enable_lora` may be called."""
        return self.quantization_mode is not None

    def quantize(self, mode=None, type_check=True, config=None):
        attention = self._attention()
        if attention.lora_enabled:
            raise ValueError(
                "A layer with adapters cannot be quantized. Received: "
                f"{attention.path!r} after `enable_lora`. Save and load the model "
                "first, which adds the adapters to the kernels"
            )
        # Of subclasses of `Dense` Keras quantizes none.
        super().quantize(mode, type_check=False, config=config)

    def enable_lora(self, *args, **kwargs):
        if not self.can_be_adapted:
            raise ValueError(
                "A projection cannot be adapted on its own, before it is quantized. "
                f"Received: {self.path!r}. Call `enable_lora` of its attention layer"
            )
        super().enable_lora(*args, **kwargs)

    @property
    def variable_serialization_spec(self):
        kept = ["bias"] if self.has_own_kernel else ["bias", "kernel"]
        return {
            mode: [name for name in names if name not in kept]
            for mode, names in super().variable_serialization_spec.items()
        }


@dataclasses.dataclass(frozen=True, eq=False)  # objects of Keras do not compare
class ProjectionConfig(Settings):
    """Settings of the projections to queries, keys and values, and back.

    `MixedAttention` and `RoutingAttention` take them by name and have an attribute for
    each. Their configs hold them together, as `projection_config`.

    Args:
        use_bias: whether projections have biases. Defaults to False.
        use_gate: whether a gate, the sigmoid of one more projection of the query,
            multiplies the outputs of the heads before the last projection. Defaults to
            False.
        bias_initializer: initializer of the biases. Defaults to `"zeros"`.
        output_initializer: initializer of the kernel of the last projection; None (the
            default) for the layer's `kernel_initializer`.
        kernel_regularizer: regularizer of each kernel. Defaults to None.
        bias_regularizer: regularizer of each bias. Defaults to None.
        kernel_constraint: constraint on each kernel. Defaults to None.
        bias_constraint: constraint on each bias. Defaults to None.
        shared_head_projection: whether one more `(value_dim, value_dim)` matrix, the
            same for all heads, multiplies the output of each head (the release).
            Defaults to False.
        project_shared_keys: whether the key projection also has columns for heads that
            share the query projection and do not read them (the release). Defaults to
            False.
    """

    use_bias: bool = setting(False, check_flag)
    use_gate: bool = setting(False, check_flag)
    bias_initializer: object = setting("zeros", initializer)
    output_initializer: object = setting(None, initializer)
    kernel_regularizer: object = setting(None, regularizer)
    bias_regularizer: object = setting(None, regularizer)
    kernel_constraint: object = setting(None, constraint)
    bias_constraint: object = setting(None, constraint)
    shared_head_projection: bool = setting(False, check_flag)
    project_shared_keys: bool = setting(False, check_flag)


class LowRankAdaptation(ConfiguredLayer):
    """A layer whose projections can be adapted by products of two narrow matrices.

    Subclasses store their projections as matrices `<name>_kernel`, and use the kernel
    that `adapted` returns for a name. A saved layer contains the sums of kernels and
    adapters, in the form of a layer without adapters.

    Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models"
    (https://arxiv.org/abs/2106.09685); `enable_lora` of `keras.layers.Dense`.
    """

    lora_enabled = False

    #: Layers that multiply by kernels which Keras has quantized.
    quantized_projections = ()

    def enable_lora(
        self,
        rank,
        lora_alpha=None,
        a_initializer="he_uniform",
        b_initializer="zeros",
        projections=("query", "value"),
    ):
        """Freezes the layer and adds trainable matrices of low rank to projections.

        A projection is then `kernel + (lora_alpha / rank) * a @ b`. `lora_kernel_a`
        contains the matrices `a`, one below the other, and `lora_kernel_b` the matrices
        `b`, side by side.

        Args:
            rank: number of columns of `a` and of rows of `b`.
            lora_alpha: scale of the added product, times `rank`; None (the default) for
                `rank`.
            a_initializer: initializer of each `a`. Defaults to `"he_uniform"`.
            b_initializer: initializer of each `b`. Defaults to `"zeros"`, which leaves
                outputs unchanged.
            projections: names of the projections that are adapted. Defaults to queries
                and values, and so to keys in heads that share the projection of the
                queries.

        Raises:
            ValueError: if a projection is unknown, named twice or has a constraint, or
                the layer is not built or is adapted already.
        """
        check_positive_integer("rank", rank)
        kernels = self._kernels_to_adapt(projections)
        a_initializer = initializer("a_initializer", a_initializer)
        b_initializer = initializer("b_initializer", b_initializer)
        for weight in own_weights(self):
            weight.trainable = False
        for layer in layers_inside(self):
            layer.trainable = False
        rows, columns = zip(*(kernel.shape for kernel in kernels), strict=True)
        with adding_weights(self):
            self.lora_kernel_a = self._lora_weight(
                "a", [(size, rank) for size in rows], a_initializer, axis=0
            )
            self.lora_kernel_b = self._lora_weight(
                "b", [(rank, size) for size in columns], b_initializer, axis=1
            )
        self.lora_projections = tuple(projections)
        self.lora_rank = rank
        self.lora_alpha = rank if lora_alpha is None else lora_alpha
        self.lora_enabled = True

    def adapted(self, name):
        """Returns the kernel of a projection, including its adapter."""
        kernel = getattr(self, f"{name}_kernel")
        if not self.lora_enabled or name not in self.lora_projections:
            return kernel
        place = self.lora_projections.index(name)
        kernels = [getattr(self, f"{each}_kernel") for each in self.lora_projections]
        rows, columns = zip(*(each.shape for each in kernels), strict=True)
        a = split_axis(ops.convert_to_tensor(self.lora_kernel_a), rows, axis=0)
        b = split_axis(ops.convert_to_tensor(self.lora_kernel_b), columns, axis=1)
        product = ops.matmul(a[place], b[place])
        return ops.add(kernel, self.lora_alpha / self.lora_rank * product)

    def save_own_variables(self, store):
        if not self.lora_enabled:
            return super().save_own_variables(store)
        sums = {
            id(getattr(self, f"{name}_kernel")): self.adapted(name)
            for name in self.lora_projections
        }
        for place, weight in enumerate(self._own_weights()):
            store[str(place)] = ops.cast(sums.get(id(weight), weight), weight.dtype)

    def load_own_variables(self, store):
        if not self.lora_enabled:
            return super().load_own_variables(store)
        weights = self._own_weights()
        if len(store.keys()) != len(weights):
            raise ValueError(
                f"The weights of {self.name!r} must be those of a layer like it. "
                f"Received: {len(store.keys())} weights for {len(weights)}"
            )
        for place, weight in enumerate(weights):
            weight.assign(store[str(place)])
        # The kernels include what was trained, so adapters start from zero.
        self.lora_kernel_b.assign(ops.zeros(self.lora_kernel_b.shape))

    def _own_weights(self):
        """All weights of the layer itself, except those of its adapters, as saved."""
        weights = own_weights(self)
        if not self.lora_enabled:
            return weights
        adapters = {id(self.lora_kernel_a), id(self.lora_kernel_b)}
        return [weight for weight in weights if id(weight) not in adapters]

    def _kernels_to_adapt(self, projections):
        if not self.built or self.lora_enabled:
            state = "one that is adapted" if self.built else "one that is not built"
            raise ValueError(
                "LoRA must be enabled once, on a layer that is built. Received: "
                f"{self.name!r}, {state}"
            )
        if self.quantized_projections:
            raise ValueError(
                "LoRA of a layer must be enabled before it is quantized. Received: "
                f"{self.name!r}, which is quantized. Call `enable_lora` of its "
                "projections, such as `query_projection`"
            )
        kernels = {name: getattr(self, f"{name}_kernel", None) for name in projections}
        unknown = [name for name, kernel in kernels.items() if kernel is None]
        if len(kernels) < len(projections):
            raise ValueError(
                "`projections` must name each projection once. Received: "
                f"projections={projections!r}"
            )
        if unknown or not kernels:
            raise ValueError(
                "`projections` must name projections of the layer, such as query, key, "
                f"value or output. Received: projections={projections!r}; "
                f"{self.name!r} has no {unknown}"
            )
        fixed = [name for name, kernel in kernels.items() if kernel.constraint]
        if fixed:
            raise ValueError(
                "Projections with a constraint cannot be adapted. Received: "
                f"projections={projections!r}, of which {fixed} have one"
            )
        return list(kernels.values())

    def _lora_weight(self, name, shapes, make, axis):
        """Adds the matrices of all projections as one weight, float32 as in Keras."""

        def initial(shape, dtype=None):
            parts = [cloned(make)(own, dtype) for own in shapes]
            return ops.concatenate(parts, axis=axis)

        shape = list(shapes[0])
        shape[axis] = sum(own[axis] for own in shapes)
        return self.add_weight(
            name=f"lora_kernel_{name}",
            shape=shape,
            initializer=initial,
            dtype="float32",
        )

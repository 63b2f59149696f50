"""One projection of an attention layer, for `quantize` of Keras."""

import weakref

import keras


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

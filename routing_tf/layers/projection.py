"""One projection of an attention layer, for `quantize` of Keras."""

import keras


class Projection(keras.layers.Dense):
    """The projection to queries, keys or values, of outputs, or of gates.

    Its kernel and bias are weights of the attention layer, which multiplies by several
    kernels at once. After `quantize` it multiplies on its own, by a kernel of its own.

    Args:
        units: number of columns of the kernel.
        let_go: function without arguments that is called when Keras deletes the kernel
            of the attention layer.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def __init__(self, units, let_go, **kwargs):
        super().__init__(units, **kwargs)
        self._let_go = let_go

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
        self._let_go()

    def quantize(self, mode=None, type_check=True, config=None):
        # Of subclasses of `Dense` Keras quantizes none.
        super().quantize(mode, type_check=False, config=config)

    def enable_lora(self, *args, **kwargs):
        if self.quantization_mode is None:
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

"""One vector for each block of keys or values, from a small network."""

from keras import ops

from routing_tf.layers.support.blocks import break_into_blocks
from routing_tf.layers.support.blocks import memory_windows
from routing_tf.layers.support.initializers import cloned
from routing_tf.layers.support.serialization import ConfiguredLayer


class BlockCompression(ConfiguredLayer):
    """Maps overlapping blocks of vectors to one vector each.

    A vector for its place in the block, one for each head, is added to each vector;
    those of a block, side by side, pass through a network with one hidden layer (ReLU),
    the same for all heads. Padding counts as zeros.

    Letters: B batch, H heads, C blocks, S vectors of a block, D dim.

    Args:
        block_length: length of a block, in tokens.
        stride: distance of the starts of consecutive blocks, in tokens; the length of a
            block is a multiple of it.
        hidden_dim: size of the hidden layer; None (the default) for four times that of
            a vector.
        kernel_initializer: initializer of the network. Defaults to `"glorot_uniform"`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        blocks: `<float>[B, H, C, S, D]`.
        mask: `<bool>[B, 1, C, S]`, True for real tokens.

    Returns:
        `<float>[B, H, C, D]`.

    Reference: Yuan et al. (2025), "Native Sparse Attention", equation 7.
    """

    def __init__(
        self,
        block_length,
        stride,
        hidden_dim=None,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.block_length = block_length
        self.stride = stride
        self.hidden_dim = hidden_dim
        self.kernel_initializer = kernel_initializer

    def build(self, shape):
        _, heads, _, dim = shape
        joined, hidden = self.block_length * dim, self.hidden_dim or 4 * dim
        places = (heads, 1, self.block_length, dim)
        self.places = self.add_weight(places, "zeros", name="places")
        self.hidden_kernel = self.add_weight(
            (joined, hidden), cloned(self.kernel_initializer), name="hidden_kernel"
        )
        self.hidden_bias = self.add_weight((hidden,), "zeros", name="hidden_bias")
        self.output_kernel = self.add_weight(
            (hidden, dim), cloned(self.kernel_initializer), name="output_kernel"
        )
        self.output_bias = self.add_weight((dim,), "zeros", name="output_bias")

    def blocks_of(self, x):
        """Cuts into overlapping blocks `[B, heads, C, S, ...]`, one for each stride."""
        parts = break_into_blocks(x, self.stride, axis=2)
        after = self.block_length // self.stride - 1
        return memory_windows(parts, before=(0,), after=(after,), axis=2)

    def call(self, blocks, mask):
        places, first, first_bias, last, last_bias = (
            ops.cast(ops.convert_to_tensor(weight), blocks.dtype)
            for weight in (
                self.places,
                self.hidden_kernel,
                self.hidden_bias,
                self.output_kernel,
                self.output_bias,
            )
        )
        blocks = ops.where(mask[..., None], blocks + places, 0)
        *shape, slots, dim = ops.shape(blocks)
        joined = ops.reshape(blocks, (*shape, slots * dim))
        hidden = ops.relu(ops.matmul(joined, first) + first_bias)
        return ops.matmul(hidden, last) + last_bias

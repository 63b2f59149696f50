"""Embeddings of images: channels of pixels, rows and columns."""

import math

import keras
from keras import ops

from routing_tf.layers.blocks.embeddings import GridEmbedding
from routing_tf.layers.blocks.embeddings import TokenEmbedding
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.positions import Positions
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_block_shape
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import initializer


@keras.saving.register_keras_serializable("routing_tf")
class SubpixelEmbedding(ConfiguredLayer):
    """Turns images into the input sequence of a causal model of their sub-pixels.

    A sub-pixel is one channel of a pixel. Each place gets the embedding of the previous
    sub-pixel's value (0 at the first place), from the table of the channel that is
    predicted there, plus learned vectors of its row and column. With
    `coordinate_embeddings`, one table serves all channels, and the learned vectors are
    those of row, column and channel.

    Args:
        vocabulary_size: rows of the table of each channel.
        embedding_dim: size of a vector.
        block_shape: tuple of two, rows of a block and tokens in each, if sub-pixels are
            ordered block by block; None (the default) for row by row.
        position_embeddings: whether vectors of row and column are added. Defaults to
            True.
        embeddings_initializer: initializer of the tables of the channels. Defaults to
            `"uniform"`.
        coordinate_embeddings: whether all channels share one table of values, and
            positions have a `GridEmbedding` of row, column and channel instead of a
            `RowColumnEmbedding`. Vectors are then not scaled. Defaults to False.
        position_initializer: initializer of the tables of such a grid; None (the
            default) for `embeddings_initializer`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        images: `<int>[batch, height, width, channels]`.

    Returns:
        `<float>[batch, height * width * channels, embedding_dim]`; with `block_shape`
        `<float>[batch, height, width * channels, embedding_dim]`.

    Raises:
        ValueError: if `coordinate_embeddings` come without `position_embeddings`; when
            built, if blocks do not divide the image.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import SubpixelEmbedding

    images = np.zeros((2, 4, 4, 3), "int32")
    assert SubpixelEmbedding(256, 8)(images).shape == (2, 48, 8)
    blocks = SubpixelEmbedding(256, 8, block_shape=(2, 6))
    assert blocks(images).shape == (2, 4, 12, 8)
    ```

    Reference: `prepare_decoder` of the release's image model,
    `get_channel_embeddings`; for `coordinate_embeddings` Child et al. (2019), section
    5.1.
    """

    vocabulary_size = Argument(check_positive_integer)
    embedding_dim = Argument(check_positive_integer)
    embeddings_initializer = Argument(initializer)
    position_initializer = Argument(initializer)

    def __init__(
        self,
        vocabulary_size,
        embedding_dim,
        block_shape=None,
        position_embeddings=True,
        embeddings_initializer="uniform",
        coordinate_embeddings=False,
        position_initializer=None,
        **kwargs,
    ):
        # Values that come as floats would be cast to half precision.
        super().__init__(autocast=False, **kwargs)
        self.vocabulary_size = vocabulary_size
        self.embedding_dim = embedding_dim
        self.block_shape = block_shape
        if block_shape is not None:
            self.block_shape = check_block_shape("block_shape", block_shape)
            if len(self.block_shape) != 2:
                raise ValueError(
                    "`block_shape` must be a tuple of two: rows and tokens of a row. "
                    f"Received: block_shape={block_shape!r}"
                )
        self.position_embeddings = position_embeddings
        self.embeddings_initializer = embeddings_initializer
        if coordinate_embeddings and not position_embeddings:
            raise ValueError(
                "`coordinate_embeddings` need `position_embeddings`. Received: "
                f"coordinate_embeddings={coordinate_embeddings} with "
                f"position_embeddings={position_embeddings}. Leave one of the two out"
            )
        self.coordinate_embeddings = coordinate_embeddings
        self.position_initializer = position_initializer

    def build(self, images_shape):
        _check_rank("images", images_shape)
        _, height, width, channels = images_shape
        self.width, self.num_channels = width, channels
        self.order = Positions(
            self.lengths(images_shape), self.block_shape or self.lengths(images_shape)
        )
        if self.order.is_padded:
            raise ValueError(
                "`block_shape` must divide the rows and the tokens of a row. Received: "
                f"block_shape={self.block_shape} in {self.order.lengths}"
            )
        shared = self.coordinate_embeddings
        self.channel_embedding = TokenEmbedding(
            self.vocabulary_size * (1 if shared else channels),
            self.embedding_dim,
            embeddings_initializer=self.embeddings_initializer,
            scale=not shared,
            name="channel_embedding",
            dtype=self.dtype_policy,
        )
        self.channel_embedding.build(images_shape)
        self.position_embedding = None
        if shared:
            self.position_embedding = GridEmbedding(
                (height, width, channels),
                self.position_initializer or self.embeddings_initializer,
                name="position_embedding",
                dtype=self.dtype_policy,
            )
            self.position_embedding.build((None, None, self.embedding_dim))
        elif self.position_embeddings:
            self.position_embedding = RowColumnEmbedding(
                max_length=max(height, width, channels),
                name="position_embedding",
                dtype=self.dtype_policy,
            )
            dim = channels * self.embedding_dim
            self.position_embedding.build((None, height, width, dim))

    def call(self, images):
        _, height, width, channels = images.shape
        offsets = self._first_ids(numbers(channels))
        x = self.channel_embedding(self._shift(ops.cast(images, "int32")) + offsets)
        if self.coordinate_embeddings:
            size = height * width * channels
            x = ops.reshape(x, (-1, size, self.embedding_dim))
            x = self.position_embedding(x)
        elif self.position_embedding is not None:
            x = ops.reshape(x, (-1, height, width, channels * self.embedding_dim))
            x = self.position_embedding(x)
        return ops.reshape(x, (-1, *self.order.lengths, self.embedding_dim))

    def at(self, values, index):
        """Returns the input of the causal model at one place.

        Args:
            values: `<int>[batch]`, the previous sub-pixel in the order of the sequence;
                0 at the first place.
            index: `<int32>`, the place in this order.

        Returns:
            `<float>[batch, 1, embedding_dim]`.
        """
        places = ops.take(self._raster_places(), index, axis=0)
        channel = places % self.num_channels
        ids = ops.cast(values, "int32") + self._first_ids(channel)
        x = self.channel_embedding(ids[:, None])
        if self.position_embedding is None:
            return x
        if self.coordinate_embeddings:
            return self.position_embedding(x, offset=places)
        pixels = places // self.num_channels
        row, column = pixels // self.width, pixels % self.width
        vectors = self.position_embedding.vectors_at(row, column, x.dtype)
        vectors = ops.reshape(vectors, (self.num_channels, self.embedding_dim))
        return x + ops.take(vectors, channel, axis=0)

    def _first_ids(self, channels):
        """The row of the table at which the values of each channel start."""
        return (0 if self.coordinate_embeddings else self.vocabulary_size) * channels

    def _raster_places(self):
        """The place in raster order of each place of the sequence."""
        raster = numbers(math.prod(self.order.lengths))
        return self.order.arrange(raster, axis=0)

    def _shift(self, images):
        """Gives each sub-pixel the value of the previous one, and 0 to the first."""
        values = ops.reshape(images, (-1, math.prod(images.shape[1:])))
        values = tensors.shift_right(self.order.arrange(values, axis=1))
        return ops.reshape(self.order.restore(values, axis=1), ops.shape(images))

    def lengths(self, images_shape):
        """Returns the lengths of the axes of positions for a shape of images.

        They are the sequence, or rows by tokens of a row.
        """
        _, height, width, channels = images_shape
        if self.block_shape is None:
            return (height * width * channels,)
        return (height, width * channels)

    def compute_output_shape(self, images_shape):
        return (images_shape[0], *self.lengths(images_shape), self.embedding_dim)


@keras.saving.register_keras_serializable("routing_tf")
class RowColumnEmbedding(ConfiguredLayer):
    """Adds a learned vector of its row and one of its column to each position.

    Vectors are multiplied by the square root of their size.

    Args:
        max_length: largest number of rows and of columns.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, rows, columns, dim]`.

    Returns:
        `<float>[batch, rows, columns, dim]`.

    Raises:
        ValueError: when built, if the inputs have more rows or columns.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import RowColumnEmbedding

    x = np.zeros((2, 4, 6, 8), "float32")
    assert RowColumnEmbedding(max_length=6)(x).shape == (2, 4, 6, 8)
    ```

    Reference: `add_positional_embedding_nd` of the release.
    """

    max_length = Argument(check_positive_integer)

    def __init__(self, max_length, **kwargs):
        super().__init__(**kwargs)
        self.max_length = max_length

    def build(self, inputs_shape):
        _check_rank("inputs", inputs_shape)
        _, rows, columns, dim = inputs_shape
        if max(rows, columns) > self.max_length:
            raise ValueError(
                "`max_length` must be at least the number of rows and of columns. "
                f"Received: max_length={self.max_length}, {rows} rows, "
                f"{columns} columns"
            )
        # The axes that broadcast are the release's.
        self.row_embeddings = self.add_weight(
            name="row_embeddings",
            shape=(1, self.max_length, 1, dim),
            initializer=keras.initializers.RandomNormal(stddev=dim**-0.5),
        )
        self.column_embeddings = self.add_weight(
            name="column_embeddings",
            shape=(1, 1, self.max_length, dim),
            initializer=keras.initializers.RandomNormal(stddev=dim**-0.5),
        )

    def call(self, inputs):
        _, rows, columns, dim = inputs.shape
        row_vectors = ops.cast(self.row_embeddings[:, :rows], inputs.dtype)
        column_vectors = ops.cast(self.column_embeddings[:, :, :columns], inputs.dtype)
        return inputs + dim**0.5 * (row_vectors + column_vectors)

    def vectors_at(self, row, column, dtype):
        """Returns the vector that is added at one position, `<float>[dim]`."""
        row_vector = ops.take(self.row_embeddings[0, :, 0], row, axis=0)
        column_vector = ops.take(self.column_embeddings[0, 0], column, axis=0)
        vectors = ops.cast(row_vector, dtype) + ops.cast(column_vector, dtype)
        return self.row_embeddings.shape[-1] ** 0.5 * vectors

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


def _check_rank(name, shape):
    if len(shape) != 4:
        raise ValueError(
            f"`{name}` must have four axes: batch, height, width and channels. "
            f"Received: {name}.shape={tuple(shape)}"
        )

"""Token embeddings, sinusoidal positions and those on a grid."""

import math

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.keras_internals import build_at_init
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.layers.support.masks import Segments
from routing_tf.layers.support.masks import check_fit
from routing_tf.layers.support.tensors import dense_take
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import check_seed
from routing_tf.layers.support.validation import initializer


@keras.saving.register_keras_serializable("routing_tf")
class TokenEmbedding(ConfiguredLayer):
    """Looks up one learned vector for each token id.

    Unlike in `keras.layers.Embedding`, the gradient is dense on every backend, so
    adaptive optimizers see the same second moments on TensorFlow and JAX.

    Args:
        vocabulary_size: number of ids.
        embedding_dim: size of a vector.
        embeddings_initializer: initializer of the table. Defaults to `"uniform"`.
        scale: whether vectors are multiplied by the square root of `embedding_dim`.
            Defaults to False.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        token_ids: `<int>[batch, length]`.

    Returns:
        `<float>[batch, length, embedding_dim]`.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import TokenEmbedding

    assert TokenEmbedding(10, 4)(np.array([[1, 2, 1]])).shape == (1, 3, 4)
    ```

    Reference: `get_embeddings` of the release.
    """

    vocabulary_size = Argument(check_positive_integer)
    embedding_dim = Argument(check_positive_integer)
    embeddings_initializer = Argument(initializer)
    scale = Argument(check_flag)

    def __init__(
        self,
        vocabulary_size,
        embedding_dim,
        embeddings_initializer="uniform",
        scale=False,
        **kwargs,
    ):
        # Ids that come as floats would be cast to half precision.
        super().__init__(autocast=False, **kwargs)
        self.vocabulary_size = vocabulary_size
        self.embedding_dim = embedding_dim
        self.embeddings_initializer = embeddings_initializer
        self.scale = scale

    def build(self, token_ids_shape):
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.vocabulary_size, self.embedding_dim),
            initializer=self.embeddings_initializer,
        )

    def call(self, token_ids):
        table = ops.cast(self.embeddings, self.compute_dtype)
        embedded = dense_take(table, ops.cast(token_ids, "int32"))
        if self.scale:
            embedded = embedded * self.embedding_dim**0.5
        return embedded

    def compute_output_shape(self, token_ids_shape):
        return (*token_ids_shape, self.embedding_dim)


class _Places(ConfiguredLayer):
    """A layer that adds something to each position."""

    def __call__(self, inputs, offset=None, segment_ids=None, **kwargs):
        check_fit(segment_ids)
        if keras.backend.is_float_dtype(getattr(offset, "dtype", "int32")):
            # Keras would cast it to half precision.
            offset = ops.cast(offset, "int32")
        given = {"offset": offset, "segment_ids": segment_ids}
        # None would hide what an outer call says.
        given = {name: x for name, x in given.items() if x is not None}
        return super().__call__(inputs, **given, **kwargs)


@keras.saving.register_keras_serializable("routing_tf")
class TimingSignal(_Places):
    """Adds sines and cosines of the position to a sequence.

    Frequencies form a geometric series. Sines fill the first half of the channels and
    cosines the second half; an odd last channel stays unchanged.

    Args:
        min_timescale: the first frequency, in radians per token; together with
            `max_timescale` it sets the ratio of the frequencies. Defaults to 1.0.
        max_timescale: the last frequency is about `min_timescale**2 / max_timescale`,
            in radians per token. Defaults to 1.0e4.
        start_index: position of the first token, in tokens. Defaults to 0.
        restart: whether positions restart in each segment of packed documents.
            Defaults to False.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        offset: number of tokens before the first one of `inputs`, an integer or a
            tensor. Defaults to 0.
        segment_ids: `<int32>[batch, length]`, see `MixedAttention`, for `restart`; None
            (the default) for one document in each row.

    Returns:
        `<float>[batch, length, dim]`.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import TimingSignal

    assert TimingSignal()(np.zeros((1, 10, 16))).shape == (1, 10, 16)
    ```

    Reference: Vaswani et al. (2017), section 3.5; `get_timing_signal_1d` of the
    release.
    """

    restart = Argument(check_flag)

    def __init__(
        self,
        min_timescale=1.0,
        max_timescale=1.0e4,
        start_index=0,
        restart=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        declare_call_argument(self, "segment_ids")
        self.supports_masking = True
        self.restart = restart
        self.min_timescale = min_timescale
        self.max_timescale = max_timescale
        self.start_index = start_index
        build_at_init(self)

    def call(self, inputs, offset=0, segment_ids=None):
        positions = numbers(length_of(inputs, 1))
        if self.restart and segment_ids is not None:
            positions = Segments.of_ids(segment_ids).query_places[:, 0]
        signal = self._signal(positions, inputs.shape[-1], offset)
        return inputs + ops.cast(signal, inputs.dtype)

    def _signal(self, positions, channels, offset):
        """Returns the signal at positions `<int32>[..., length]`."""
        num_timescales = channels // 2
        step = math.log(self.max_timescale / self.min_timescale)
        step /= max(num_timescales - 1, 1)
        # float32 throughout, as the reference computes it: the phase of a distant
        # position shows the precision of the frequencies.
        steps = np.arange(num_timescales, dtype="float32")
        frequencies = np.float32(self.min_timescale) * np.exp(steps * np.float32(-step))
        library = np
        if not (isinstance(positions, np.ndarray) and is_known(offset)):
            library, offset = ops, ops.cast(offset, "float32")
            positions = ops.cast(positions, "float32")
            frequencies = ops.convert_to_tensor(frequencies)
        positions = positions + np.float32(self.start_index)
        phases = (positions + offset)[..., None] * frequencies
        waves = [library.sin(phases), library.cos(phases)]
        signal = library.concatenate(waves, axis=-1)
        padding = [(0, 0)] * (len(signal.shape) - 1) + [(0, channels % 2)]
        return library.pad(signal, padding)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


@keras.saving.register_keras_serializable("routing_tf")
class GridEmbedding(_Places):
    """Adds to each position the learned vectors of its coordinates on a grid.

    The sequence lies on the grid row by row. Each axis has one table of vectors, and
    the vectors of all axes are added. If the length is unknown in advance, positions
    beyond the grid count as its last row.

    Args:
        grid_shape: tuple of the lengths of the axes, such as rows, columns and channels
            of an image; neighbours lie along the last axis.
        embeddings_initializer: initializer of the tables. Defaults to `"uniform"`.
        restart: whether positions restart in each segment of packed documents.
            Defaults to False.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        offset: number of positions before the first one of `inputs`, an integer or a
            tensor. Defaults to 0.
        segment_ids: `<int32>[batch, length]`, see `MixedAttention`, for `restart`; None
            (the default) for one document in each row.

    Returns:
        `<float>[batch, length, dim]`.

    Raises:
        ValueError: when called, if `inputs` are longer than the grid.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import GridEmbedding

    x = np.zeros((1, 10, 16), "float32")
    assert GridEmbedding(grid_shape=(3, 4))(x).shape == (1, 10, 16)
    ```

    Reference: Child et al., "Generating Long Sequences with Sparse Transformers"
    (https://arxiv.org/abs/1904.10509), section 5.1.
    """

    embeddings_initializer = Argument(initializer)
    restart = Argument(check_flag)

    def __init__(
        self, grid_shape, embeddings_initializer="uniform", restart=False, **kwargs
    ):
        super().__init__(**kwargs)
        declare_call_argument(self, "segment_ids")
        self.supports_masking = True
        self.restart = restart
        if not isinstance(grid_shape, (tuple, list)) or not grid_shape:
            raise ValueError(
                "`grid_shape` must be a tuple of the lengths of the axes. Received: "
                f"grid_shape={grid_shape!r}"
            )
        self.grid_shape = tuple(
            check_positive_integer("grid_shape", length) for length in grid_shape
        )
        self.embeddings_initializer = embeddings_initializer

    def build(self, inputs_shape):
        self.tables = [
            self.add_weight(
                name=f"axis_{axis}_embeddings",
                shape=(length, inputs_shape[-1]),
                initializer=cloned(self.embeddings_initializer),
            )
            for axis, length in enumerate(self.grid_shape)
        ]

    def call(self, inputs, offset=0, segment_ids=None):
        length, size = length_of(inputs, 1), math.prod(self.grid_shape)
        if is_known(length, offset) and length + offset > size:
            raise ValueError(
                "`inputs` must not be longer than the grid of positions, which has one "
                f"embedding for each. Received: {length + offset} positions on a grid "
                f"of {self.grid_shape}, which has {size}. Shorten the sequences, or "
                "make the grid larger (in models: `max_sequence_length`)"
            )
        positions = numbers(length)
        if self.restart and segment_ids is not None:
            positions = Segments.of_ids(segment_ids).query_places[:, 0]
        positions = positions + (
            offset if is_known(offset) else ops.cast(offset, "int32")
        )
        for table, places in zip(self.tables, self._coordinates(positions)):
            inputs = inputs + ops.cast(dense_take(table, places), inputs.dtype)
        return inputs

    def _coordinates(self, positions):
        """The places of positions along each axis, from the first axis on."""
        found, width = [], math.prod(self.grid_shape)
        for axis, length in enumerate(self.grid_shape):
            width //= length
            places = positions // width
            lib = np if isinstance(places, np.ndarray) else ops
            found.append(
                lib.minimum(places, length - 1) if axis == 0 else places % length
            )
        return found

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


@keras.saving.register_keras_serializable("routing_tf")
class TokenDropout(ConfiguredLayer):
    """Replaces random token ids, or elements, by 0 while training.

    Unlike in `keras.layers.Dropout`, the others are not scaled.

    Args:
        rate: share of entries replaced, in [0, 1).
        seed: integer seed of the draws; None (the default) for a random one.
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Call arguments:
        token_ids: `<int>[batch, length]`, or a tensor of any shape and type.
        training: whether entries are replaced.

    Returns:
        Tensor of the shape and type of `token_ids`.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import TokenDropout

    ids = np.ones((2, 5), "int32")
    assert np.array_equal(TokenDropout(0.5)(ids, training=False), ids)
    ```

    Reference: `target_dropout` and `input_dropout` of the release.
    """

    rate = Argument(check_rate)
    seed = Argument(check_seed)

    def __init__(self, rate, seed=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.rate = rate
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(self.seed)

    def call(self, token_ids, training=None):
        if not training or not self.rate:
            return token_ids
        draws = keras.random.uniform(ops.shape(token_ids), seed=self.seed_generator)
        return ops.where(draws < self.rate, ops.zeros_like(token_ids), token_ids)

    def compute_output_spec(self, token_ids, training=None):
        return keras.KerasTensor(token_ids.shape, dtype=token_ids.dtype)

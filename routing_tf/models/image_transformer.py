"""The image model: a transformer over the channels of all pixels, one after another."""

import math

import keras
import keras_hub
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf.files import safe_loading
from routing_tf.files.progress import progress
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.models import initializers
from routing_tf.models import stack
from routing_tf.models import steps
from routing_tf.models.preset_backbone import PresetBackbone
from routing_tf.models.preset_backbone import hyperparameters_of_kind
from routing_tf.models.presets import preset_description
from routing_tf.models.presets import preset_names
from routing_tf.models.presets import release
from routing_tf.models.routing_transformer import final_norm
from routing_tf.models.saved_model import Exportable


@keras.saving.register_keras_serializable("routing_tf")
class RoutingImageTransformer(Exportable, PresetBackbone):
    """A causal transformer over the sub-pixels of an image: its channel values.

    Sub-pixels follow each other row by row, or block by block with two-dimensional
    local blocks. Each is predicted from those before it, as one of `vocabulary_size`
    intensities; the shift by one is inside the model.

    Called with `images` `<int>[batch, height, width, channels]`, or a dict with them,
    it returns logits of the same sub-pixels,
    `<float>[batch, height, width, channels, vocabulary_size]`. The dict may contain
    `labels` `<int>[batch]`, which a model with `num_classes` needs and others ignore,
    and `padding_mask`, a `<bool>` of the shape of `images`, False for sub-pixels that
    nothing may see. Compiled calls do not notice values out of range. `losses` contains
    the clustering losses. With `routing="expert_choice"`, logits may depend on later
    sub-pixels, see `RoutingTransformerCausalLM`.

    Args:
        hyperparameters: `Hyperparameters` with an `image_height`, or a dict of its
            fields.
        dtype: dtype policy of computations; None (the default) for the global policy
            of Keras. Weights of the clustering stay float32.
        **kwargs: arguments of `keras_hub.models.Backbone`, such as `name`.

    Raises:
        ValueError: if a hyperparameter is invalid or belongs to another kind of model,
            or rectangular blocks do not divide the image; when called, if the images
            have another shape, or labels are missing.

    Example:

    ```python
    import numpy as np
    from routing_tf import models

    model = models.RoutingImageTransformer.from_preset("digits_small")
    images = np.zeros((2, 8, 8, 1), "int32")
    logits = model({"images": images, "labels": np.array([3, 7])})
    assert logits.shape == (2, 8, 8, 1, 17)
    ```

    Reference: paper, section 5.3; `SparseImagetransformer` of the release.
    """

    kind = "image"
    presets = {
        name: {"metadata": {"description": preset_description(name)}}
        for name in preset_names("image")
    }

    def __init__(self, hyperparameters, dtype=None, **kwargs):
        h = hyperparameters_of_kind("image", hyperparameters)
        self.hyperparameters = h
        self.image_shape = (h.image_height, h.image_width, h.num_channels)
        # === Layers ===
        policy = keras.dtype_policies.get(dtype)
        block_shape = None if h.local_block_width is None else h.local_block_shape
        self.embedding = layers.SubpixelEmbedding(
            h.channel_vocabulary_size or h.vocabulary_size,
            h.hidden_dim,
            block_shape=block_shape,
            position_embeddings=h.position_embeddings,
            embeddings_initializer=initializers.of_embeddings(h, h.hidden_dim),
            coordinate_embeddings=h.coordinate_embeddings,
            position_initializer=initializers.of_embeddings(
                h, h.hidden_dim, num_summed=len(self.image_shape)
            ),
            name="embedding",
            dtype=policy,
        )
        self.class_embedding = None
        if h.num_classes is not None:
            self.class_embedding = layers.TokenEmbedding(
                h.num_classes,
                h.hidden_dim,
                embeddings_initializer=initializers.of_embeddings(h, h.hidden_dim),
                name="class_embedding",
                dtype=policy,
            )
        self.input_dropout = stack.dropout(
            h.residual_dropout if h.drops_inputs else 0.0, "input_dropout", policy
        )
        self.blocks = [
            stack.decoder_block(h, index, policy) for index in range(h.num_layers)
        ]
        self.final_norm = final_norm(h, "final_norm", policy)
        self.logits_dense = keras.layers.Dense(
            h.vocabulary_size,
            kernel_initializer=initializers.of_logits(h),
            name="logits",
            dtype=policy,
        )
        # === Functional model ===
        inputs = {
            "images": keras.Input(self.image_shape, dtype="int32", name="images"),
            "padding_mask": keras.Input(
                self.image_shape, dtype="bool", name="padding_mask"
            ),
        }
        # Hidden sub-pixels must not be visible through the shift either.
        hidden = ops.logical_not(inputs["padding_mask"])
        x = self.embedding(ops.where(hidden, 0, inputs["images"]))
        lengths = x.shape[1:-1]
        if self.class_embedding is not None:
            inputs["labels"] = keras.Input((), dtype="int32", name="labels")
        x = self._with_class(x, inputs.get("labels"))
        mask = ops.reshape(inputs["padding_mask"], (-1, *lengths))
        x = self.input_dropout(x)
        for block in self.blocks:
            x = block(x, padding_mask=mask)
        if self.final_norm is not None:
            x = self.final_norm(x)
        logits = self.logits_dense(x)
        super().__init__(
            inputs=inputs,
            outputs=ops.reshape(logits, (-1, *self.image_shape, h.vocabulary_size)),
            dtype=dtype,
            **kwargs,
        )
        declare_call_argument(self, "routing_scope")
        self.input_spec = None  # `call` fills in what may be left out

    @classmethod
    def from_release_checkpoint(cls, prefix, preset=None, hparams=None):
        """Builds a model with the weights of a checkpoint of the original release.

        For the arguments, see `RoutingTransformerCausalLM.from_release_checkpoint`.
        """
        return release().load_checkpoint(cls, prefix, preset, hparams)

    def call(self, inputs, training=None, mask=None):
        return super().call(self._complete(inputs), training=training, mask=mask)

    def _complete(self, inputs):
        """Returns all inputs; `padding_mask` and the dict itself are optional."""
        if not isinstance(inputs, dict):
            inputs = {"images": inputs}
        needed = ["images"] if self.class_embedding is None else ["images", "labels"]
        if any(inputs.get(name) is None for name in needed):
            raise ValueError(
                f"Inputs must contain {' and '.join(f'`{name}`' for name in needed)}. "
                f"Received: inputs with {sorted(inputs)}. `labels` are for models with "
                "`num_classes`"
            )
        images = ops.convert_to_tensor(inputs["images"])
        if tuple(images.shape[1:]) != self.image_shape or _is_float(images):
            height, width, channels = self.image_shape
            raise ValueError(
                f"`images` must be integers and have the shape (batch, {height}, "
                f"{width}, {channels}). Received: images of shape "
                f"{tuple(images.shape)} and type {images.dtype}"
            )
        mask = inputs.get("padding_mask")
        if mask is None:
            mask = ops.ones_like(images, dtype="bool")
        complete = {"images": images, "padding_mask": mask}
        if self.class_embedding is not None:
            labels = ops.reshape(inputs["labels"], (-1,))
            if _is_float(labels) or labels.shape[0] != images.shape[0]:
                raise ValueError(
                    "`labels` must contain an integer for each image. Received: labels "
                    f"of shape {tuple(labels.shape)} and type {labels.dtype} for "
                    f"images of shape {tuple(images.shape)}"
                )
            complete["labels"] = labels
        return complete

    @property
    def num_subpixels(self):
        """Number of sub-pixels of an image."""
        return math.prod(self.image_shape)

    def places(self):
        """Returns the place of each sub-pixel in the sequence of the model.

        The array is `<int>[height, width, channels]`.
        """
        raster = np.arange(self.num_subpixels)
        seen = ops.convert_to_numpy(self.embedding.order.arrange(raster, axis=0))
        return np.argsort(seen).reshape(self.image_shape)

    def generate(
        self,
        num_images=None,
        labels=None,
        images=None,
        num_given_rows=0,
        sampler=None,
        verbose=True,
    ):
        """Samples images, or completes those whose first rows are given.

        Each step computes one sub-pixel with a cache, in the routing scope `"prefix"`.
        With settings of the release that have no cache, each step computes the whole
        image.

        Args:
            num_images: number of images; None for the number of `labels` or `images`,
                or 1 without them.
            labels: `<int>[num_images]`, the class of each image, for a model with
                `num_classes`.
            images: `<int>[num_images, height, width, channels]`, whose first rows are
                kept; None to sample from scratch.
            num_given_rows: number of rows of `images` that are kept.
            sampler: a keras_hub sampler that draws from a distribution, or its name;
                None for a random sampler at temperature 1.
            verbose: whether to show progress on standard error.

        Returns:
            NumPy array `<int32>[num_images, height, width, channels]`.
        """
        images, labels = self._canvas(num_images, labels, images, num_given_rows)
        draw = steps.drawing(self, keras_hub.samplers.get(sampler or "random"))
        decoder = steps.ImageSteps(self)
        rows = decoder.rows_of(images)
        given = np.zeros((1, *self.image_shape), "int32")
        given[:, :num_given_rows] = 1
        is_given = decoder.rows_of(given) == 1
        is_given[:, 0] = True  # what rows start with
        state = decoder.begin(len(images), labels)
        prompts = np.where(is_given, rows, -1)
        found = steps.stream(decoder, draw, prompts, state, rows.shape[1])
        number = int(np.sum(~is_given))
        for place, values in progress(found, "sub-pixel", number, verbose):
            rows[:, place] = values
        return ops.convert_to_numpy(decoder.images_of(rows))

    def make_cache(self, batch_size):
        """Returns an empty cache for `call_with_cache`, with the batch on axis 0."""
        safe_loading.check_memory(self.hyperparameters, self.num_subpixels)
        lengths = self.embedding.order.lengths
        return [block.make_cache(batch_size, lengths) for block in self.blocks]

    def start_cache(self, images, cache, num_given, labels=None):
        """Computes the first sub-pixels of images in one parallel pass.

        Args:
            images: `<int>[batch, height, width, channels]`.
            cache: as returned by `make_cache`.
            num_given: number of given sub-pixels, in the order of `places`.
            labels: `<int>[batch]`, for a model with `num_classes`.

        Returns:
            Logits `<float>[batch, height, width, channels, vocabulary_size]`, and the
            cache.
        """
        order = self.embedding.order
        given = order.restore(ops.arange(self.num_subpixels) < num_given, axis=0)
        mask = ops.reshape(given, (1, *order.lengths))
        given = ops.reshape(given, self.image_shape)
        x = self._with_class(self.embedding(ops.where(given, images, 0)), labels)
        mask = ops.broadcast_to(mask, ops.shape(x)[:-1])
        x, cache = self._through_blocks(x, cache, 0, mask)
        shape = (-1, *self.image_shape, self.hyperparameters.vocabulary_size)
        return ops.reshape(self.logits_dense(x), shape), cache

    def call_with_cache(self, values, cache, cache_index, labels=None):
        """Computes the logits of one sub-pixel of each image, in the scope `"prefix"`.

        Args:
            values: `<int>[batch]`, the previous sub-pixel in the order of `places`, or
                0.
            cache: as returned by `make_cache`, `start_cache` or this method.
            cache_index: place of the sub-pixel, an integer or a tensor.
            labels: `<int>[batch]`, for a model with `num_classes`.

        Returns:
            `<float>[batch, vocabulary_size]`, and the cache with this place.
        """
        cache_index = ops.cast(cache_index, "int32")
        x = self._with_class(self.embedding.at(values, cache_index), labels)
        x, cache = self._through_blocks(x, cache, cache_index)
        return self.logits_dense(x)[:, 0], cache

    def _with_class(self, x, labels):
        if self.class_embedding is None:
            return x
        vectors = self.class_embedding(labels)
        shape = (-1, *[1] * (len(x.shape) - 2), x.shape[-1])
        # In this order: with no rows, TensorFlow takes the second summand for biases.
        return ops.reshape(vectors, shape) + x

    def _through_blocks(self, x, cache, cache_index, padding_mask=None):
        caches = []
        for block, block_cache in zip(self.blocks, cache, strict=True):
            x, block_cache = block(
                x, padding_mask=padding_mask, cache=block_cache, cache_index=cache_index
            )
            caches.append(block_cache)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, caches

    def _canvas(self, num_images, labels, images, num_given_rows):
        """Checks arguments of `generate`; returns the images to fill, and labels."""
        h = self.hyperparameters
        if (h.num_classes is None) != (labels is None):
            raise ValueError(
                "`labels` must be given to a model with `num_classes`, and to no "
                f"other. Received: labels={labels!r}"
            )
        if labels is not None:
            labels = _integers("labels", labels, h.num_classes).reshape(-1)
        if images is not None:
            images = _integers("images", images, h.vocabulary_size)
        sizes = {
            name: len(value)
            for name, value in (("labels", labels), ("images", images))
            if value is not None
        }
        if num_images is None:
            num_images = next(iter(sizes.values()), 1)
        num_images = check_positive_integer("num_images", num_images)
        if any(size != num_images for size in sizes.values()):
            raise ValueError(
                "`num_images` must equal the numbers of labels and images. Received: "
                f"num_images={num_images}, {sizes}"
            )
        num_given_rows = check_non_negative_integer("num_given_rows", num_given_rows)
        if num_given_rows > self.image_shape[0] or (num_given_rows and images is None):
            raise ValueError(
                "`num_given_rows` must be at most the height, and needs `images`. "
                f"Received: num_given_rows={num_given_rows}, "
                f"images={None if images is None else np.shape(images)}"
            )
        canvas = np.zeros((num_images, *self.image_shape), "int32")
        if images is not None:
            self._complete({"images": images, "labels": labels})
        if num_given_rows:
            canvas[:, :num_given_rows] = images[:, :num_given_rows]
        return canvas, labels


def _is_float(x):
    return "float" in keras.backend.standardize_dtype(x.dtype)


def _integers(name, values, limit):
    """Returns values as an array, which must be integers below a limit."""
    values = np.asarray(values)
    whole = np.issubdtype(values.dtype, np.integer)
    if not whole or values.size and not 0 <= values.min() <= values.max() < limit:
        raise ValueError(
            f"`{name}` must be integers in the range [0, {limit}). Received: "
            f"{name}={values.tolist() if values.size < 20 else values!r}"
        )
    return values.astype("int32")

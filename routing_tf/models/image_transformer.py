"""The image model: a transformer over the channels of all pixels, one after another."""

import math

import keras
import keras_hub
import numpy as np
import tqdm
from keras import ops

from routing_tf import layers
from routing_tf.layers import blocks
from routing_tf.layers.transformer_block import LAYER_NORM_EPSILON
from routing_tf.models import stack
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.presets import preset_description
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.presets import preset_names
from routing_tf.models.routing_transformer import refuse_changes

MODEL_ARGUMENTS = ("dtype", "name", "trainable")


@keras.saving.register_keras_serializable("routing_tf")
class RoutingImageTransformer(keras_hub.models.Backbone):
    """A causal transformer over the sub-pixels of an image: its channel values.

    Sub-pixels follow each other row by row, or block by block with two-dimensional
    local blocks. Each is predicted from those before it, as one of `vocabulary_size`
    intensities; the shift by one is inside the model.

    Called with integers `images` `<int>[batch, height, width, channels]`, or a dict of
    them, it returns logits of the same sub-pixels,
    `<float>[batch, height, width, channels, vocabulary_size]`. The dict may hold
    `labels` `<int>[batch]`, which a model with `num_classes` needs, and `padding_mask`,
    a `<bool>` of the shape of `images`, False for sub-pixels that nothing may see.
    `losses` holds the clustering losses. With `routing="expert_choice"` logits may
    depend on later sub-pixels, see `RoutingTransformerCausalLM`.

    Args:
        hyperparameters: `Hyperparameters` with an `image_height`, or a dict of its
            fields.
        dtype: dtype policy of computations; None (the default) for the global policy
            of Keras. Weights of the clustering stay float32.
        **kwargs: arguments of `keras_hub.models.Backbone`, such as `name`.

    Raises:
        ValueError: if a hyperparameter is not valid or is none of an image model, or
            rectangular blocks do not divide the image; when called, if the images
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

    presets = {
        name: {"metadata": {"description": preset_description(name)}}
        for name in preset_names("image")
    }

    def __init__(self, hyperparameters, dtype=None, **kwargs):
        if isinstance(hyperparameters, dict):
            hyperparameters = Hyperparameters().replace(**hyperparameters)
        h = hyperparameters
        if h.kind != "image":
            raise ValueError(
                "`hyperparameters` must be those of an image model, with an "
                f"`image_height`. Received: image_height={h.image_height}"
            )
        super().__init__(dtype=dtype, **kwargs)
        self.hyperparameters = h
        self.image_shape = (h.image_height, h.image_width, h.num_channels)
        self._order = blocks.BlockedOrder(_lengths(h), h.local_block_shape)
        if h.local_block_width is not None and self._order.is_padded:
            raise ValueError(
                "`local_block_length` and `local_block_width` must divide the rows and "
                f"the tokens of a row. Received: blocks of {h.local_block_shape} in "
                f"{_lengths(h)}"
            )
        self._make_layers(h, keras.dtype_policies.get(dtype))
        self.build()

    def _make_layers(self, h, policy):
        self.channel_embedding = layers.TokenEmbedding(
            (h.channel_vocabulary_size or h.vocabulary_size) * h.num_channels,
            h.hidden_dim,
            embeddings_initializer=stack.initializer(h),
            scale=True,
            name="channel_embedding",
            dtype=policy,
        )
        self.position_embedding = self.class_embedding = self.final_norm = None
        if h.position_embeddings:
            self.position_embedding = layers.RowColumnEmbedding(
                max_length=max(self.image_shape),
                name="position_embedding",
                dtype=policy,
            )
        if h.num_classes is not None:
            self.class_embedding = layers.TokenEmbedding(
                h.num_classes,
                h.hidden_dim,
                embeddings_initializer=stack.initializer(h),
                name="class_embedding",
                dtype=policy,
            )
        self.input_dropout = stack.dropout(h.residual_dropout, "input_dropout", policy)
        self.blocks = [
            stack.decoder_block(h, index, policy) for index in range(h.num_layers)
        ]
        if h.norm_position == "pre":
            self.final_norm = keras.layers.LayerNormalization(
                epsilon=LAYER_NORM_EPSILON, name="final_norm", dtype=policy
            )
        self.logits_dense = keras.layers.Dense(
            h.vocabulary_size,
            kernel_initializer=stack.initializer(h),
            name="logits",
            dtype=policy,
        )

    def build(self, inputs_shape=None):
        height, width, channels = self.image_shape
        h = self.hyperparameters
        hidden = (None, *_lengths(h), h.hidden_dim)
        self.channel_embedding.build((None, *self.image_shape))
        if self.position_embedding is not None:
            self.position_embedding.build((None, height, width, channels * hidden[-1]))
        if self.class_embedding is not None:
            self.class_embedding.build((None,))
        for block in self.blocks:
            block.build(hidden)
        if self.final_norm is not None:
            self.final_norm.build(hidden)
        self.logits_dense.build(hidden)
        self.built = True

    def call(self, inputs, training=None):
        images, labels, mask = self._unpack(inputs)
        x = self._embed(self._shift(images))
        if self.class_embedding is not None:
            vectors = self.class_embedding(ops.reshape(labels, (-1,)))
            x += ops.reshape(vectors, (-1, *[1] * len(x.shape[1:-1]), x.shape[-1]))
        if mask is not None:
            mask = ops.reshape(mask, (-1, *x.shape[1:-1]))
        x = self.input_dropout(x, training=training)
        for block in self.blocks:
            x = block(x, padding_mask=mask, training=training)
        if self.final_norm is not None:
            x = self.final_norm(x)
        logits = self.logits_dense(x)
        return ops.reshape(logits, (-1, *self.image_shape, logits.shape[-1]))

    def _unpack(self, inputs):
        if not isinstance(inputs, dict):
            inputs = {"images": inputs}
        images, labels = inputs["images"], inputs.get("labels")
        if tuple(images.shape[1:]) != self.image_shape:
            height, width, channels = self.image_shape
            raise ValueError(
                f"`images` must have the shape (batch, {height}, {width}, {channels}). "
                f"Received: images.shape={tuple(images.shape)}"
            )
        if self.class_embedding is not None and labels is None:
            raise ValueError(
                "`labels` must be given to a model with `num_classes`. Received: "
                f"inputs with {sorted(inputs)}"
            )
        return ops.cast(images, "int32"), labels, inputs.get("padding_mask")

    def _shift(self, images):
        """Puts at each sub-pixel the value of the one before it, 0 at the first."""
        values = ops.reshape(images, (-1, self.num_subpixels))
        values = blocks.shift_right(self._arrange(values))
        return ops.reshape(self._restore(values), (-1, *self.image_shape))

    def _arrange(self, x):
        """From raster order to the order in which the model sees the sub-pixels."""
        if len(self._order.lengths) == 1:
            return x
        return self._order.arrange(x, axis=1)

    def _restore(self, x):
        if len(self._order.lengths) == 1:
            return x
        return self._order.restore(x, axis=1)

    def _embed(self, values):
        """Embeds values with the rows of the channel that they are to predict."""
        height, width, channels = self.image_shape
        rows = self.channel_embedding.vocabulary_size // channels
        x = self.channel_embedding(values + rows * np.arange(channels, dtype="int32"))
        if self.position_embedding is not None:
            x = ops.reshape(x, (-1, height, width, channels * x.shape[-1]))
            x = self.position_embedding(x)
        h = self.hyperparameters
        return ops.reshape(x, (-1, *_lengths(h), h.hidden_dim))

    @property
    def num_subpixels(self):
        """Number of sub-pixels of an image."""
        return math.prod(self.image_shape)

    def places(self):
        """Returns the place of each sub-pixel in the order in which the model sees it.

        Returns:
            NumPy array `<int>[height, width, channels]` of 0 to `num_subpixels` - 1.
        """
        raster = np.arange(self.num_subpixels)[None]
        seen = ops.convert_to_numpy(self._arrange(raster))[0]
        return np.argsort(seen).reshape(self.image_shape)

    def symbolic_inputs(self):
        """Returns Keras inputs of all entries that a call with a dict may have."""
        inputs = {
            "images": keras.Input(self.image_shape, dtype="int32", name="images"),
            "padding_mask": keras.Input(
                self.image_shape, dtype="bool", name="padding_mask"
            ),
        }
        if self.class_embedding is not None:
            inputs["labels"] = keras.Input((), dtype="int32", name="labels")
        return inputs

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

        Every sub-pixel recomputes the model on all before it; later ones are padding.

        Args:
            num_images: number of images; None for as many as `labels` or `images`,
                else 1.
            labels: `<int>[num_images]`, the class of each image, for a model with
                `num_classes`.
            images: `<int>[num_images, height, width, channels]`, whose first rows are
                kept; None to sample from scratch.
            num_given_rows: number of rows of `images` that are kept.
            sampler: a keras_hub sampler with a distribution, such as
                `keras_hub.samplers.RandomSampler(temperature=0.9, seed=1)`; None for
                a random sampler at temperature 1.
            verbose: whether a progress bar is shown on stderr.

        Returns:
            NumPy array `<int32>[num_images, height, width, channels]`.

        Raises:
            ValueError: if the numbers of images, labels or rows do not fit.
        """
        images = self._canvas(num_images, labels, images, num_given_rows)
        places = self.places()
        given = np.broadcast_to(
            np.arange(len(places))[:, None, None] < num_given_rows, places.shape
        )
        sampler = sampler or keras_hub.samplers.RandomSampler()
        step = self._stepper()
        order = sorted(np.ndindex(places.shape), key=lambda place: places[place])
        wanted = [place for place in order if not given[place]]
        for place in tqdm.tqdm(wanted, unit="sub-pixel", disable=not verbose):
            visible = np.broadcast_to(places <= places[place], images.shape)
            inputs = {"images": images, "padding_mask": visible}
            if self.class_embedding is not None:
                inputs["labels"] = np.asarray(labels, "int32")
            logits = step.predict_on_batch(inputs)[(slice(None), *place)]
            chosen = sampler.get_next_token(sampler.compute_probabilities(logits))
            images[(slice(None), *place)] = ops.convert_to_numpy(chosen)
        return images

    def _canvas(self, num_images, labels, images, num_given_rows):
        """Checks the arguments of `generate`; returns the images to fill."""
        sizes = {
            name: len(value)
            for name, value in (("labels", labels), ("images", images))
            if value is not None
        }
        if num_images is None:
            num_images = next(iter(sizes.values()), 1)
        if any(size != num_images for size in sizes.values()) or num_images < 1:
            raise ValueError(
                "`num_images` must be positive and equal the numbers of labels and "
                f"images. Received: num_images={num_images}, {sizes}"
            )
        if (self.class_embedding is None) != (labels is None):
            raise ValueError(
                "`labels` must be given to a model with `num_classes`, and to no "
                f"other. Received: labels={labels!r}"
            )
        if not 0 <= num_given_rows <= self.image_shape[0] or (
            num_given_rows and images is None
        ):
            raise ValueError(
                "`num_given_rows` must be at most the height, and needs `images`. "
                f"Received: num_given_rows={num_given_rows}, "
                f"images={None if images is None else np.shape(images)}"
            )
        canvas = np.zeros((num_images, *self.image_shape), "int32")
        if num_given_rows:
            self._unpack({"images": np.asarray(images), "labels": labels})
            canvas[:, :num_given_rows] = np.asarray(images)[:, :num_given_rows]
        return canvas

    def _stepper(self):
        """The model as one of several inputs, which Keras compiles once."""
        if getattr(self, "_sampling_model", None) is None:
            inputs = self.symbolic_inputs()
            model = keras.Model(inputs, self(inputs))
            model.compile(optimizer=None)
            # Not tracked: it has no weights of its own.
            object.__setattr__(self, "_sampling_model", model)
        return self._sampling_model

    def get_config(self):
        return {
            **super().get_config(),
            "hyperparameters": self.hyperparameters.to_dict(),
        }

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """Builds the model of a preset; see `RoutingTransformer.from_preset`.

        Args:
            preset: one of the names in `RoutingImageTransformer.presets`, or a preset
                directory.
            load_weights: whether keras_hub loads the weights of its preset. Defaults
                to True.
            **kwargs: changes of hyperparameters, and `dtype`, `name` and `trainable`
                of the model.

        Raises:
            ValueError: if a hyperparameter is unknown (the message lists the valid
                names) or not valid, or is to change in a saved model.
        """
        if preset not in cls.presets:
            refuse_changes(preset, kwargs)
            return super().from_preset(preset, load_weights=load_weights, **kwargs)
        own = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        return cls(preset_hyperparameters(preset).replace(**kwargs), **own)


def _lengths(hyperparameters):
    """Lengths of the axes of positions: a sequence, or rows by tokens of a row."""
    h = hyperparameters
    if h.local_block_width is None:
        return (h.max_sequence_length,)
    return (h.image_height, h.image_width * h.num_channels)

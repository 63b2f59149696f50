"""The image model: a transformer over the channels of all pixels, one after another."""

import math

import keras
import keras_hub
import numpy as np
import tqdm
from keras import ops

from routing_tf import layers
from routing_tf.models import checkpoints
from routing_tf.models import stack
from routing_tf.models.presets import preset_description
from routing_tf.models.presets import preset_names
from routing_tf.models.routing_transformer import PresetBackbone
from routing_tf.models.routing_transformer import final_norm
from routing_tf.models.routing_transformer import hyperparameters_of_kind


@keras.saving.register_keras_serializable("routing_tf")
class RoutingImageTransformer(PresetBackbone):
    """A causal transformer over the sub-pixels of an image: its channel values.

    Sub-pixels follow each other row by row, or block by block with two-dimensional
    local blocks. Each is predicted from those before it, as one of `vocabulary_size`
    intensities; the shift by one is inside the model.

    Called with integers `images` `<int>[batch, height, width, channels]`, or a dict of
    them, it returns logits of the same sub-pixels,
    `<float>[batch, height, width, channels, vocabulary_size]`. The dict may hold
    `labels` `<int>[batch]`, which a model with `num_classes` needs and others ignore,
    and `padding_mask`, a `<bool>` of the shape of `images`, False for sub-pixels that
    nothing may see. Values out of range are not noticed in a compiled call.
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
            embeddings_initializer=stack.initializer(h),
            name="embedding",
            dtype=policy,
        )
        self.class_embedding = None
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
        self.final_norm = final_norm(h, "final_norm", policy)
        self.logits_dense = keras.layers.Dense(
            h.vocabulary_size,
            kernel_initializer=stack.initializer(h),
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
        # What may not be seen must not be seen through the shift either.
        hidden = ops.logical_not(inputs["padding_mask"])
        x = self.embedding(ops.where(hidden, 0, inputs["images"]))
        lengths = x.shape[1:-1]
        if self.class_embedding is not None:
            inputs["labels"] = keras.Input((), dtype="int32", name="labels")
            vectors = self.class_embedding(inputs["labels"])
            x += ops.reshape(vectors, (-1, *[1] * len(lengths), h.hidden_dim))
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
        self.input_spec = None  # `call` fills in what may be left out

    @classmethod
    def from_release_checkpoint(cls, prefix, preset=None, hparams=None):
        """Builds a model with the weights of a checkpoint of the original release.

        See `RoutingTransformerCausalLM.from_release_checkpoint`.

        Args:
            prefix: path of the TF1 checkpoint without `.index`.
            preset: name of the set of the release that was trained, such as
                `"cifar10_local_cluster"`; None (the default) if `hparams` tells all.
            hparams: dict of the release's hyperparameters or the path of its
                `hparams.json`; None (the default) for the preset's.

        Returns:
            The model.

        Raises:
            ValueError: as there.
        """
        return checkpoints.load(cls, prefix, preset, hparams)

    def call(self, inputs, training=None, mask=None):
        return super().call(self._complete(inputs), training=training, mask=mask)

    def _complete(self, inputs):
        """Returns all inputs; `padding_mask` may be left out, as may be a dict."""
        if not isinstance(inputs, dict):
            inputs = {"images": inputs}
        needed = ["images"] if self.class_embedding is None else ["images", "labels"]
        if any(inputs.get(name) is None for name in needed):
            raise ValueError(
                f"Inputs must hold {' and '.join(f'`{name}`' for name in needed)}. "
                f"Received: inputs with {sorted(inputs)}. `labels` are for models with "
                "`num_classes`"
            )
        images = ops.convert_to_tensor(inputs["images"])
        if tuple(images.shape[1:]) != self.image_shape or _is_float(images):
            height, width, channels = self.image_shape
            raise ValueError(
                "`images` must hold integers and have the shape (batch, "
                f"{height}, {width}, {channels}). Received: images of shape "
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
                    "`labels` must hold an integer for each image. Received: labels of "
                    f"shape {tuple(labels.shape)} and type {labels.dtype} for images "
                    f"of shape {tuple(images.shape)}"
                )
            complete["labels"] = labels
        return complete

    @property
    def num_subpixels(self):
        """Number of sub-pixels of an image."""
        return math.prod(self.image_shape)

    def places(self):
        """Returns the place of each sub-pixel in the order in which the model sees it.

        Returns:
            NumPy array `<int>[height, width, channels]` of 0 to `num_subpixels` - 1.
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

        Every sub-pixel recomputes the model on all before it; later ones are padding.
        Expert choice has the routing scope `"prefix"`.

        Args:
            num_images: number of images; None for as many as `labels` or `images`,
                else 1.
            labels: `<int>[num_images]`, the class of each image, for a model with
                `num_classes`.
            images: `<int>[num_images, height, width, channels]`, whose first rows are
                kept; None to sample from scratch.
            num_given_rows: number of rows of `images` that are kept.
            sampler: a keras_hub sampler that draws from a distribution, or its name,
                such as `"greedy"` or
                `keras_hub.samplers.RandomSampler(temperature=0.9, seed=1)`; None for
                a random sampler at temperature 1.
            verbose: whether a progress bar is shown on stderr.

        Returns:
            NumPy array `<int32>[num_images, height, width, channels]`.

        Raises:
            ValueError: if the numbers of images, labels or rows do not fit, values are
                out of range, or the sampler draws whole sequences.
        """
        images, labels = self._canvas(num_images, labels, images, num_given_rows)
        sampler = _check_sampler(sampler)
        places = self.places()
        given = np.broadcast_to(
            np.arange(len(places))[:, None, None] < num_given_rows, places.shape
        )
        step = self._sampling_step()
        order = sorted(np.ndindex(places.shape), key=lambda place: places[place])
        wanted = [place for place in order if not given[place]]
        for place in tqdm.tqdm(wanted, unit="sub-pixel", disable=not verbose):
            visible = np.broadcast_to(places <= places[place], images.shape)
            inputs = {"images": images, "padding_mask": visible}
            if labels is not None:
                inputs["labels"] = labels
            with layers.use_routing_scope(self, "prefix"):
                logits = step.predict_on_batch(inputs)[(slice(None), *place)]
            chosen = sampler.get_next_token(sampler.compute_probabilities(logits))
            images[(slice(None), *place)] = ops.convert_to_numpy(chosen)
        return images

    def _sampling_step(self):
        """The model, compiled once and apart from what it is trained with."""
        if getattr(self, "_step", None) is None:
            step = keras.Model(self.input, self.output)
            step.compile(optimizer=None)
            # No layer of the model: it would be saved with it.
            object.__setattr__(self, "_step", step)
        return self._step

    def _canvas(self, num_images, labels, images, num_given_rows):
        """Checks what `generate` is given; returns the images to fill, and labels."""
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
        if any(size != num_images for size in sizes.values()) or num_images < 1:
            raise ValueError(
                "`num_images` must be positive and equal the numbers of labels and "
                f"images. Received: num_images={num_images}, {sizes}"
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
            self._complete({"images": images, "labels": labels})
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


def _check_sampler(sampler):
    if sampler is None:
        return keras_hub.samplers.RandomSampler()
    sampler = keras_hub.samplers.get(sampler)
    base = keras_hub.samplers.Sampler
    if type(sampler).get_next_token is base.get_next_token:
        raise ValueError(
            "`sampler` must draw one value after the other, such as greedy, random, "
            f"top_k or top_p. Received: sampler={sampler!r}"
        )
    return sampler

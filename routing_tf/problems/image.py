"""Images of integer intensities, as targets of an image model."""

import math

import numpy as np
import tensorflow as tf

from routing_tf.problems.arguments import integer_at_least
from routing_tf.problems.prepared import PreparedProblem
from routing_tf.problems.sources import Source
from routing_tf.problems.windows import Tokens
from routing_tf.problems.windows import Windows
from routing_tf.problems.windows import read_windows

# Number of values of a split that estimate the distribution of its positions.
HISTOGRAM_VALUES = 50_000_000
VALUES_AT_ONCE = 1 << 22


class ImageProblem(PreparedProblem):
    """Images with labels; a window is one image, a token one channel of a pixel.

    Your own problem returns images and labels from `load_split`: arrays
    `<int>[number, height, width, channels]` of 0 to `vocabulary_size` - 1, and
    `<int>[number]`. A problem of tensorflow-datasets names a `builder`, whose examples
    have an "image" and optionally a "label".

    Batches are `(inputs, targets, weights)`: `inputs` has "images", the targets
    themselves, "labels" and "padding_mask"; `targets` is
    `<int32>[batch, height, width, channels]` and `weights` float32 of that shape.

    Args:
        data_dir: string, the folder with the data, for problems that need one.
        sequence_length: integer or a string of digits, height times width times
            channels. Defaults to that.
        **options: `train_split` and `eval_split`, see `Problem`.

    Attributes:
        image_shape: tuple, height, width and channels.
        num_classes: integer, the number of labels.

    Raises:
        ValueError: if `sequence_length` is another number.

    Example:
    ```python
    import numpy as np
    from routing_tf import problems


    class Checkers(problems.ImageProblem):
        image_shape, vocabulary_size, num_classes = (4, 4, 1), 2, 1

        def load_split(self, split):
            board = np.indices(self.image_shape).sum(axis=0) % 2
            return np.stack([board] * 8), np.zeros(8, "int32")


    inputs, targets, weights = next(iter(Checkers().dataset("train", batch_size=2)))
    targets.shape  # (2, 4, 4, 1)
    ```
    """

    kind = "image"
    metric_name = "bits per dimension"
    lengths = {}
    vocabulary_size = 256
    image_shape = None
    num_classes = None

    def __init__(self, data_dir=None, sequence_length=None, **options):
        super().__init__(data_dir, **options)
        self._labels = {}
        if self.image_shape is not None:
            self.set_shape(self.image_shape, sequence_length)

    def set_shape(self, image_shape, sequence_length=None):
        """Sets the shape of the images.

        Args:
            image_shape: tuple, height, width and channels.
            sequence_length: integer or a string of digits, which must be their
                product. Defaults to that.

        Raises:
            ValueError: if `sequence_length` is another number.
        """
        self.image_shape = image_shape
        self.sequence_length = math.prod(image_shape)
        given = sequence_length or self.sequence_length
        if integer_at_least(1, "sequence_length", given) != self.sequence_length:
            raise ValueError(
                "`sequence_length` must be height * width * channels of the images, "
                f"{self.sequence_length}. Received: sequence_length={sequence_length}. "
                "Leave it out, and use hyperparameters of an image model: "
                f"{self.default_hparams_set}"
            )

    def make_source(self, raw_dir):
        if self.builder is not None:
            return super().make_source(raw_dir)

        def examples(split):
            images, labels = self.load_split(split)
            for image, label in zip(images, labels, strict=True):
                yield {"image": image, "label": label}

        return Source(examples)

    def dtypes(self):
        values = np.min_scalar_type(self.vocabulary_size - 1).name
        return {"images": (values, self.image_shape), "labels": "int32"}

    def parts(self, split, state):
        start = state or 0
        for number, example in enumerate(self.examples(split, start), start):
            image = example["image"]
            if image.shape != self.image_shape:
                raise ValueError(
                    f"Images of {self.name} must have the shape {self.image_shape}. "
                    f"Received: image {number} of the split {split!r}, of shape "
                    f"{image.shape}"
                )
            label = example.get("label", 0)
            self._check_values(image, self.vocabulary_size, "intensities", number)
            self._check_values(np.asarray(label), self.num_classes, "labels", number)
            yield {"images": image, "labels": [label]}, number + 1

    def _check_values(self, values, limit, kind, number):
        if limit is None:
            return
        least, greatest = values.min(), values.max()
        if values.dtype.kind not in "iu" or least < 0 or greatest >= limit:
            raise ValueError(
                f"The {kind} of {self.name} must be integers of 0 to {limit - 1}. "
                f"Received: {least} to {greatest}, of the dtype {values.dtype}, for "
                f"image {number}"
            )

    def tokens_of(self, split, arrays):
        with tf.device("cpu"):
            self._labels[split] = tf.constant(arrays["labels"], tf.int32)
        return Tokens(arrays["images"].reshape(-1))

    def images(self, split):
        """Returns all images of a split, `[number, height, width, channels]`."""
        return self.ids(split).reshape(-1, *self.image_shape)

    def labels(self, split):
        """Returns the labels of a split, a NumPy array `[number]`."""
        self.images(split)
        return np.asarray(self._labels[split])

    def arrays(self, split):
        return [*super().arrays(split), self.labels(split)]

    def windows(self, split):
        starts = np.arange(0, self.num_tokens(split), self.sequence_length)
        given = np.stack([starts, np.full_like(starts, self.sequence_length)], axis=1)
        return Windows(self.num_tokens(split), self.sequence_length, given)

    def read(self, split, starts, lengths):
        batch = read_windows(self.ids(split), starts, lengths, self.sequence_length)
        inputs, targets, weights = (
            tf.nest.map_structure(self._to_images, part) for part in batch
        )
        inputs = {
            "images": targets,
            "labels": tf.gather(self._labels[split], starts // self.sequence_length),
            "padding_mask": inputs["padding_mask"],
        }
        return inputs, targets, weights

    def _to_images(self, x):
        return tf.reshape(x, (-1, *self.image_shape))

    def fit_hyperparameters(self, hyperparameters):
        """Returns hyperparameters of a model of such images.

        Height, width and channels are those of the images. A model that is conditioned
        on classes has the number of classes of the problem, and none if there is only
        one.

        Args:
            hyperparameters: `Hyperparameters`; those of texts are returned unchanged.

        Returns:
            `Hyperparameters`.
        """
        h = hyperparameters
        if h.kind != "image":
            return h
        classes = h.num_classes
        if classes not in (None, self.num_classes):
            classes = self.num_classes if self.num_classes > 1 else None
        height, width, channels = self.image_shape
        return h.replace(
            image_height=height,
            image_width=width,
            num_channels=channels,
            max_sequence_length=self.sequence_length,
            num_classes=classes,
        )

    def check_hyperparameters(self, hyperparameters):
        h = hyperparameters
        shape = (h.image_height, h.image_width, h.num_channels)
        if h.kind != "image" or shape != self.image_shape:
            raise ValueError(
                f"The problem {self.name!r} needs an image model of (height, width, "
                f"channels) {self.image_shape}. Received: hyperparameters of kind "
                f"{h.kind!r} with {shape}. Use those of an image model, such as "
                f"{self.default_hparams_set}, with {self._hyperparameters()}"
            )
        if h.num_classes not in (None, self.num_classes):
            raise ValueError(
                f"`num_classes` must be none or that of the problem {self.name!r}, "
                f"{self.num_classes}. Received: num_classes={h.num_classes}"
            )

    def _hyperparameters(self):
        """The hyperparameters of a model of such images, as `--hparams` takes them."""
        height, width, channels = self.image_shape
        classes = self.num_classes if self.num_classes > 1 else "none"
        return (
            f"image_height={height},image_width={width},num_channels={channels},"
            f"max_sequence_length={self.sequence_length},num_classes={classes}"
        )

    def describe_split(self, split):
        return f"{self.num_windows(split):,} images"

    def describe(self, *splits):
        sizes = ", ".join(
            f"{split} {self.num_windows(split):,}" for split in self._of_use(splits)
        )
        height, width, channels = self.image_shape
        return (
            f"{self.name}: images: {sizes}; {height} x {width} x {channels} with "
            f"{self.vocabulary_size} intensities"
        )

    def baseline(self, split):
        try:
            images = self.images(self.train_split)
        except ValueError:  # only the split to score exists
            return None
        number = len(self._sample(self.train_split))
        of = "" if number == len(images) else f"{number:,} of "
        return (
            f"to beat: {self.histogram_bits(split):.4f} {self.metric_name} by the "
            f"histogram of each position of {of}the training images"
        )

    def histogram_bits(self, split):
        """Returns the bits per dimension of the histogram of each position in training.

        Each intensity counts once more than it occurs.
        """
        train, scored = self._histogram(self.train_split), self._histogram(split)
        probabilities = (train + 1) / (train + 1).sum(axis=-1, keepdims=True)
        return float(-(scored * np.log2(probabilities)).sum() / scored.sum())

    def _sample(self, split):
        """The numbers of the images of the histograms."""
        number = len(self.images(split))
        count = min(number, max(1, HISTOGRAM_VALUES // self.sequence_length))
        return np.arange(count) * number // count

    def _histogram(self, split):
        """How often each position has each intensity, `(positions, intensities)`."""
        images = self.images(split).reshape(-1, self.sequence_length)
        num_counts = self.sequence_length * self.vocabulary_size
        counts = np.zeros(num_counts, "int64")
        first = np.arange(self.sequence_length) * self.vocabulary_size
        chosen = self._sample(split)
        num_parts = 1 + len(chosen) * self.sequence_length // VALUES_AT_ONCE
        for part in np.array_split(chosen, num_parts):
            places = (first + images[part]).reshape(-1)
            counts += np.bincount(places, minlength=num_counts)
        return counts.reshape(self.sequence_length, self.vocabulary_size)


def picture(images, num_columns, vocabulary_size, scale=8):
    """Arranges images in a grid, as the bytes of a PNG file.

    `images` are `<int>[number, height, width, channels]`, of 1 or 3 channels, and
    values of 0 to `vocabulary_size` - 1, the brightest. Each pixel becomes `scale` x
    `scale`.
    """
    number, height, width, channels = images.shape
    if not number or channels not in (1, 3) or vocabulary_size < 2:
        raise ValueError(
            "`images` must be at least one image of 1 or 3 channels, with at least two "
            f"intensities. Received: images.shape={images.shape}, "
            f"vocabulary_size={vocabulary_size}"
        )
    num_rows = -(-number // num_columns)
    pixels = np.full((num_rows * num_columns, height + 1, width + 1, channels), 128)
    scaled = images.astype("int64") * 255 // (vocabulary_size - 1)
    pixels[:number, :height, :width] = scaled
    pixels = pixels.reshape(num_rows, num_columns, *pixels.shape[1:]).swapaxes(1, 2)
    pixels = pixels.reshape(num_rows * (height + 1), -1, channels)[:-1, :-1]
    pixels = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    return tf.io.encode_png(pixels.astype("uint8")).numpy()

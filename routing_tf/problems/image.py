"""Images of integer intensities, as targets of an image model."""

import math

import numpy as np
import tensorflow as tf

from routing_tf.problems.problem import SPLITS
from routing_tf.problems.problem import Problem
from routing_tf.problems.problem import read_windows
from routing_tf.problems.registry import register


class ImageProblem(Problem):
    """Images with labels; a window is one image, a token one channel of a pixel.

    A subclass says in `load_images` which images each split has. Batches are
    `(inputs, targets, weights)`: `inputs` has "images", the targets themselves,
    "labels" and "padding_mask"; `targets` is int32 `(batch, height, width, channels)`
    and `weights` float32 of that shape.

    Args:
        data_dir: string, the folder with the data, for problems that need one.
        sequence_length: integer or a string of digits, height times width times
            channels. Defaults to that.

    Attributes:
        image_shape: tuple, height, width and channels.
        num_classes: integer, the number of labels.

    Raises:
        ValueError: if `sequence_length` is another number.

    Example:
    ```python
    import numpy as np
    from routing_tf.problems import image


    class Checkers(image.ImageProblem):
        image_shape, vocabulary_size, num_classes = (4, 4, 1), 2, 1

        def load_images(self):
            board = np.indices(self.image_shape).sum(axis=0) % 2
            split = np.stack([board] * 8), np.zeros(8, "int32")
            return {"train": split, "validation": split, "test": split}


    inputs, targets, weights = next(iter(Checkers().dataset("train", batch_size=2)))
    targets.shape  # (2, 4, 4, 1)
    ```
    """

    metric_name = "bits per dimension"
    image_shape = None
    num_classes = None

    def __init__(self, data_dir=None, sequence_length=None):
        tokens = math.prod(self.image_shape)
        super().__init__(data_dir, sequence_length or tokens)
        if self.sequence_length != tokens:
            raise ValueError(
                "`sequence_length` must be height * width * channels of the images, "
                f"{tokens}. Received: sequence_length={self.sequence_length}. Leave it "
                "out, and take hyperparameters of an image model: "
                f"{self.default_hparams_set}"
            )

    def load_images(self):
        """Reads the images; to be written by subclasses.

        Returns:
            A dictionary from split to images `(number, height, width, channels)` of
            0 to `vocabulary_size` - 1 and labels `(number,)`, NumPy arrays of any
            integer type.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define load_images(), which returns images "
            f"and labels of the splits {SPLITS}."
        )

    def load(self):
        splits = self.load_images()
        with tf.device("cpu"):
            self._labels = {
                split: tf.constant(labels, tf.int32)
                for split, (_, labels) in splits.items()
            }
        return {split: images.reshape(-1) for split, (images, _) in splits.items()}

    def images(self, split):
        """Returns all images of a split, `(number, height, width, channels)`."""
        return self.ids(split).reshape(-1, *self.image_shape)

    def labels(self, split):
        """Returns the labels of a split, a NumPy array of shape `(number,)`."""
        self.images(split)
        return np.asarray(self._labels[split])

    def training_windows(self, seed, epoch):
        """The images of one epoch of training, in the order of that epoch."""
        numbers = tf.random.experimental.stateless_shuffle(
            tf.range(self.num_windows("train"), dtype=tf.int64),
            tf.stack([seed, epoch]),
            alg="philox",
        )
        length = tf.constant(self.sequence_length, tf.int64)
        return numbers * length, tf.fill(tf.shape(numbers), length)

    def read(self, split, starts, lengths):
        batch = read_windows(self._ids[split], starts, lengths, self.sequence_length)
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

    def check_hyperparameters(self, hyperparameters):
        h = hyperparameters
        shape = (h.image_height, h.image_width, h.num_channels)
        if h.kind != "image" or shape != self.image_shape:
            raise ValueError(
                f"The problem {self.name!r} needs an image model of (height, width, "
                f"channels) {self.image_shape}. Received: hyperparameters of kind "
                f"{h.kind!r} with {shape}. Take {self.default_hparams_set}, or pass "
                "image_height, image_width and num_channels"
            )
        if h.num_classes not in (None, self.num_classes):
            raise ValueError(
                f"`num_classes` must be none or that of the problem {self.name!r}, "
                f"{self.num_classes}. Received: num_classes={h.num_classes}"
            )

    def describe(self):
        sizes = ", ".join(f"{split} {self.num_windows(split):,}" for split in SPLITS)
        height, width, channels = self.image_shape
        return (
            f"{self.name}: images: {sizes}; {height} x {width} x {channels} with "
            f"{self.vocabulary_size} intensities"
        )

    def baseline(self, split):
        return (
            f"to beat: {self.histogram_bits(split):.4f} {self.metric_name} by the "
            "histogram of each position of the training images"
        )

    def histogram_bits(self, split):
        """How well the histogram of each position of the training images does.

        Each intensity has been seen once more than it was, so that none is
        impossible.

        Args:
            split: string, the split to score.

        Returns:
            Bits per dimension.
        """
        places = np.arange(self.sequence_length)
        counts = np.ones((self.sequence_length, self.vocabulary_size))
        for image in self.images("train").reshape(-1, self.sequence_length):
            counts[places, image] += 1
        probabilities = counts / counts.sum(axis=-1, keepdims=True)
        scored = self.images(split).reshape(-1, self.sequence_length)
        return float(-np.log2(probabilities[places, scored]).mean())


@register("digits")
class Digits(ImageProblem):
    """Handwritten digits of 8 x 8 pixels that scikit-learn brings along.

    1,797 images with intensities 0 to 16 and the digit as label, shuffled once: 80
    percent train, 10 validate, 10 test. Nothing is downloaded.

    Args:
        data_dir: not used.
        sequence_length: integer, 64 or left out.

    Raises:
        ValueError: if `sequence_length` is another number; when loaded, if
            scikit-learn is not installed.

    Example:
    ```python
    from routing_tf import problems

    digits = problems.get("digits")
    digits.images("test").shape  # (180, 8, 8, 1)
    ```

    Reference: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI
    Machine Learning Repository (1998).
    """

    image_shape = (8, 8, 1)
    vocabulary_size = 17
    num_classes = 10
    default_hparams_set = "digits_small"

    def load_images(self):
        try:
            from sklearn import datasets
        except ImportError as error:
            raise ValueError(
                "The problem digits needs scikit-learn; install it with "
                f"`pip install 'routing-tf[digits]'`. Received: {error}"
            ) from error
        data = datasets.load_digits()
        images = data.images.astype("uint8")[..., None]
        order = np.random.default_rng(0).permutation(len(images))
        held_out = len(images) // 10 + 1
        parts = {
            "train": order[: -2 * held_out],
            "validation": order[-2 * held_out : -held_out],
            "test": order[-held_out:],
        }
        return {
            split: (images[rows], data.target[rows]) for split, rows in parts.items()
        }


def picture(images, num_columns, vocabulary_size, scale=8):
    """Arranges images in a grid, as a PNG file.

    Args:
        images: `<int>[number, height, width, channels]` of 0 to `vocabulary_size` - 1,
            with 1 or 3 channels.
        num_columns: number of images in a row.
        vocabulary_size: number of intensities, at least 2; the last is the brightest.
        scale: pixels of the picture for each pixel of an image. Defaults to 8.

    Returns:
        The bytes of the file.

    Raises:
        ValueError: if there are not 1 or 3 channels, no images, or one intensity.
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

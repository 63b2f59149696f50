"""Tests of problems of images."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf import problems
from routing_tf.problems import image


class Numbered(image.ImageProblem):
    """Image n of a split holds the number n, and has the label n % 4."""

    image_shape, vocabulary_size, num_classes = (2, 3, 1), 50, 4
    sizes = {"train": 23, "validation": 5, "test": 4}

    def load(self):
        splits = {}
        for split, size in self.sizes.items():
            numbers = np.arange(size, dtype="uint8")
            images = np.broadcast_to(numbers[:, None, None, None], (size, 2, 3, 1))
            splits[split] = images, numbers % 4
        return splits


def numbers(dataset):
    """The numbers of the images in each batch; -1 for what fills up the last."""
    found = []
    for inputs, targets, weights in dataset.as_numpy_iterator():
        np.testing.assert_array_equal(inputs["images"], targets)
        real = weights[:, 0, 0, 0] == 1
        np.testing.assert_array_equal(weights == 1, inputs["padding_mask"])
        labels = targets[real][:, 0, 0, 0] % 4
        np.testing.assert_array_equal(inputs["labels"][real], labels)
        found.append(np.where(real, targets[:, 0, 0, 0], -1).tolist())
    return found


def test_shapes():
    inputs, targets, weights = Numbered().dataset("train", batch_size=3).element_spec
    for spec in (inputs["images"], inputs["padding_mask"], targets, weights):
        assert spec.shape == (3, 2, 3, 1)
    assert inputs["labels"].shape == (3,)


def test_held_out_images_come_once_and_in_order():
    batches = numbers(Numbered().dataset("validation", batch_size=3))
    assert batches == [[0, 1, 2], [3, 4, -1]]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, y: (x / 50.0, y), r"0\.0.*float64"),
        (lambda x, y: (x + 40, y), "Received: (40|50).* 50"),
        (lambda x, y: (x, y + 3), r" 3\. Received: 4 .*4"),
        (lambda x, y: (x, y[1:]), r"zip\(\)"),
    ],
)
def test_other_images_and_labels_are_refused(change, message):
    class Changed(Numbered):
        def load(self):
            return {split: change(*data) for split, data in super().load().items()}

    with pytest.raises(ValueError, match=message):
        Changed().prepare()


def test_digits():
    digits = problems.get("digits")
    sizes = [len(digits.images(split)) for split in ("train", "validation", "test")]
    assert sizes == [1437, 180, 180]
    assert "train 1,437" in digits.describe() and "17 intensities" in digits.describe()
    images = np.concatenate([digits.images(split) for split in ("train", "test")])
    assert images.min() == 0 and images.max() == 16
    labels = digits.labels("train")
    assert set(labels) == set(range(10))
    # Zeros are dark in the middle, ones are not.
    middle = digits.images("train")[:, 3:5, 3:5].mean(axis=(1, 2, 3))
    assert middle[labels == 0].mean() < 4 < 10 < middle[labels == 1].mean()


def test_histogram_of_each_position():
    problem = Numbered()
    # Each of 50 intensities is counted once more than it was seen.
    bits = np.log2(23 + 50) - np.log2(2)
    np.testing.assert_allclose(problem.histogram_bits("validation"), bits, rtol=1e-6)
    uniform = np.log2(17)
    assert 0.4 * uniform < problems.get("digits").histogram_bits("test") < uniform


def test_picture():
    images = np.arange(5)[:, None, None, None] * np.ones((5, 2, 3, 1), "int64")
    png = image.picture(images, num_columns=3, vocabulary_size=5, scale=2)
    pixels = tf.io.decode_png(png).numpy()[::2, ::2, 0]
    assert pixels.shape == (5, 11)
    np.testing.assert_array_equal(pixels[:2, 4:7], 63)
    np.testing.assert_array_equal(pixels[3:, :3], 191)
    np.testing.assert_array_equal(pixels[:, 3], 128)
    assert image.picture(images.astype("uint8"), 3, 5, scale=2) == png
    with pytest.raises(ValueError, match="vocabulary_size=1"):
        image.picture(images, 3, 1)
    with pytest.raises(ValueError, match=r"images.shape=\(0, 2, 3, 1\)"):
        image.picture(images[:0], 3, 5)


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r"`pip install 'routing-tf\[digits\]'`"):
        problems.get("digits").prepare()


@pytest.mark.parametrize(
    "message, settings",
    [
        ("'digits'.*Received: .*'text'", models.preset_hyperparameters("byte_tiny")),
        (r"Received: .*\(28, 28, 1\)", models.preset_hyperparameters("mnist_local1d")),
        (
            "num_classes=3",
            models.preset_hyperparameters("digits_small").replace(num_classes=3),
        ),
    ],
)
def test_refuses_models_that_do_not_fit(message, settings):
    with pytest.raises(ValueError, match=message):
        problems.get("digits").check_hyperparameters(settings)


@pytest.mark.parametrize("name", ["digits_small", "cifar10_local_cluster"])
def test_what_follows_from_the_images(name):
    settings = models.preset_hyperparameters(name)
    fitting = Numbered().fit_hyperparameters(settings)
    shape = (fitting.image_height, fitting.image_width, fitting.num_channels)
    assert shape == (2, 3, 1) and fitting.max_sequence_length == 6
    # The preset for CIFAR-10 is not conditioned on classes.
    assert fitting.num_classes == (4 if name == "digits_small" else None)
    Numbered().check_hyperparameters(fitting)
    assert Numbered().fit_hyperparameters(fitting) == fitting
    assert fitting.num_layers == settings.num_layers
    text = models.preset_hyperparameters("byte_tiny")
    assert Numbered().fit_hyperparameters(text) is text


def test_a_single_class_is_none():
    problem = Numbered()
    problem.num_classes = 1
    settings = models.preset_hyperparameters("digits_small")
    assert problem.fit_hyperparameters(settings).num_classes is None

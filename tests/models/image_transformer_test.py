"""Tests of the image model."""

import json

import keras_hub
import numpy as np
import pytest

from routing_tf import models
from tests.models import small_models
from tests.models.small_models import FURTHER
from tests.models.small_models import output

SETTINGS = {
    "vocabulary_size": 11,
    "max_sequence_length": 48,
    "image_height": 4,
    "image_width": 4,
    "num_channels": 3,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 12,
    "num_local_heads": 2,
    "local_block_length": 8,
    "num_routed_heads": 0,
    "num_clusters": 2,
    "attention_window": 12,
    "max_relative_position": 10,
}
RECTANGLES = {
    "local_block_length": 2,
    "local_block_width": 6,
    "local_relative_positions": False,
}
LAYOUTS = pytest.mark.parametrize("layout", [{}, RECTANGLES], ids=["rows", "blocks"])


def image_model(seed=0, **changes):
    """Returns a small model with the same values on every backend."""
    settings = models.Hyperparameters(**{**SETTINGS, **changes})
    model = models.RoutingImageTransformer(settings)
    small_models.randomize(model, seed)
    return model


def random_images(number=2, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 11, (number, 4, 4, 3)).astype("int32")


def places_by_hand(layout):
    """The place of row y and token x of a row, from the rule."""
    y, x = np.indices((4, 12))
    if not layout:
        return (y * 12 + x).reshape(4, 4, 3)
    block = (y // 2) * 2 + x // 6
    return (block * 12 + (y % 2) * 6 + x % 6).reshape(4, 4, 3)


@LAYOUTS
def test_order_of_the_subpixels(layout):
    model = image_model(**layout)
    np.testing.assert_array_equal(model.places(), places_by_hand(layout))


@LAYOUTS
def test_later_subpixels_have_no_influence(layout):
    model = image_model(num_local_heads=1, num_strided_heads=1, **layout)
    places, changed_at = places_by_hand(layout), (0, 13, 30, 46)
    image, other = random_images(number=1, seed=0), random_images(number=1, seed=1)
    changed = [np.where(places >= place, other, image) for place in changed_at]
    first, *rest = output(model, {"images": np.concatenate([image, *changed])})
    for place, second in zip(changed_at, rest, strict=True):
        # A sub-pixel's own value is what its logits are to predict.
        seen = places <= place
        np.testing.assert_array_equal(first[seen], second[seen])
        assert np.abs(first - second)[~seen].max() > 1e-3


def test_every_earlier_subpixel_has_influence():
    model = image_model(local_block_length=48, num_layers=1)
    image = random_images(number=1).reshape(1, 48)
    # One sub-pixel of each image is another one, and none of the last image.
    images = (image + np.eye(48, dtype="int32")) % 11
    images[-1] = image
    logits = output(model, {"images": images.reshape(48, 4, 4, 3)})
    logits = logits.reshape(48, 48, -1)
    for place in range(47):
        assert np.abs(logits[place] - logits[-1])[place + 1 :].max() > 1e-6


@LAYOUTS
def test_masked_subpixels_have_no_influence_on_routing(layout):
    model = image_model(num_local_heads=1, num_routed_heads=1, **layout)
    places, place = places_by_hand(layout), 30
    images, others = random_images(seed=0), random_images(seed=1)
    changed = np.where(places >= place, others, images)
    mask = np.broadcast_to(places <= place, images.shape)
    first, second = (
        output(model, {"images": x, "padding_mask": mask}) for x in (images, changed)
    )
    seen = places <= place
    np.testing.assert_allclose(first[:, seen], second[:, seen], rtol=0, atol=1e-5)


def test_a_masked_subpixel_is_seen_by_none():
    model = image_model()
    images = random_images()
    changed, mask = images.copy(), np.ones(images.shape, "bool")
    changed[:, 1, 1, 1] += 1
    mask[:, 1, 1, 1] = False
    first, second = (
        output(model, {"images": x % 11, "padding_mask": mask})
        for x in (images, changed)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.usefixtures("compiled")  # many steps of one small function
class TestGenerate:
    greedy = keras_hub.samplers.GreedySampler()

    @FURTHER
    def test_routed_heads_see_nothing_of_what_is_not_there_yet(self):
        model = image_model(num_local_heads=1, num_routed_heads=1)
        images = model.generate(
            images=random_images(), num_given_rows=3, sampler=self.greedy, verbose=False
        )
        places = model.places()
        for place in (36, 41, 47):
            mask = np.broadcast_to(places <= place, images.shape)
            logits = output(model, {"images": images, "padding_mask": mask})
            here = places == place
            np.testing.assert_array_equal(logits.argmax(-1)[:, here], images[:, here])

    @pytest.mark.parametrize("layout", [{}, pytest.param(RECTANGLES, marks=FURTHER)])
    def test_given_rows_stay(self, layout):
        model = image_model(**layout)
        given = random_images()
        images = model.generate(
            images=given, num_given_rows=2, sampler=self.greedy, verbose=False
        )
        np.testing.assert_array_equal(images[:, :2], given[:, :2])
        logits = output(model, {"images": images})
        np.testing.assert_array_equal(logits.argmax(axis=-1)[:, 2:], images[:, 2:])

    @pytest.mark.parametrize(
        "message, options",
        [
            ("num_images=3", {"num_images": 3, "images": random_images()}),
            ("num_images=0", {"num_images": 0}),
            ("num_images=2.0", {"num_images": 2.0}),
            ("num_given_rows=1.5", {"images": random_images(), "num_given_rows": 1.5}),
            ("images of shape", {"images": random_images()[:, 1:]}),
            ("num_given_rows=1, images=None", {"num_given_rows": 1}),
            ("num_given_rows=5", {"images": random_images(), "num_given_rows": 5}),
            (r"labels=\[1\]", {"labels": [1]}),
            ("images=", {"images": random_images() + 5, "num_given_rows": 1}),
            ("images=", {"images": random_images() / 2, "num_given_rows": 1}),
            ("sampler=.*Beam", {"sampler": keras_hub.samplers.BeamSampler()}),
        ],
    )
    def test_refusals(self, message, options):
        with pytest.raises(ValueError, match=f"Received: .*{message}"):
            image_model().generate(verbose=False, **options)

    def test_labels_must_be_classes(self):
        model = image_model(num_classes=3)
        for labels in ([0, 3], [-1, 0], [0.5, 1.0]):
            with pytest.raises(ValueError, match=r"`labels`.*\[0, 3\).*labels="):
                model.generate(labels=labels, verbose=False)
        with pytest.raises(ValueError, match="labels=None"):
            model.generate(2, verbose=False)


@pytest.mark.parametrize(
    "changes",
    [{"num_classes": 3}, pytest.param(RECTANGLES, marks=FURTHER)],
)
def test_saving_and_loading(changes, tmp_path):
    model = image_model(num_local_heads=1, num_routed_heads=1, **changes)
    inputs = {"images": random_images(), "labels": np.array([0, 2])}
    expected = output(model, inputs)
    for loaded in small_models.saved(model, tmp_path):
        np.testing.assert_array_equal(output(loaded, inputs), expected)
    assert json.loads(json.dumps(model.get_config()))


def test_no_images():
    model = image_model(num_classes=3)
    inputs = {"images": random_images()[:0], "labels": np.zeros((0,), "int32")}
    assert output(model, inputs).shape[0] == 0


@pytest.mark.parametrize(
    "message, settings",
    [
        (r"block_shape=\(3, 6\)", {**SETTINGS, **RECTANGLES, "local_block_length": 3}),
        ("kind='text'", {}),
    ],
)
def test_refuses_wrong_settings(message, settings):
    with pytest.raises(ValueError, match=f"Received: .*{message}"):
        models.RoutingImageTransformer(models.Hyperparameters(**settings))


def test_refuses_wrong_inputs():
    model = image_model(num_classes=2)
    labels = np.zeros(2, "int32")
    with pytest.raises(ValueError, match=r"`images`.*Received: .*\(2, 4, 4, 1\)"):
        model({"images": np.zeros((2, 4, 4, 1), "int32"), "labels": labels})
    with pytest.raises(ValueError, match="`images`.*Received: .*float32"):
        images = random_images().astype("float32")
        model({"images": images, "labels": labels})
    with pytest.raises(ValueError, match=r"`labels`.*Received: .*\(1,\)"):
        model({"images": random_images(), "labels": labels[:1]})
    for missing in (random_images(), {"labels": labels}):
        with pytest.raises(ValueError, match=r"`images`.*\['(images|labels)'\]"):
            model(missing)

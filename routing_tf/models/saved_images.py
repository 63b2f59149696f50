"""The functions of SavedModels of image models."""

import keras
import tensorflow as tf

from routing_tf.models import signatures
from routing_tf.models import steps

_MAX_INTENSITIES = 256


class ImageModel:
    """The computations of an image model's saved functions."""

    def __init__(self, model, routing_scope):
        self.model = model
        self.routing_scope = routing_scope
        self.steps = steps.ImageSteps(model)

    def score(self, images, **labels):
        """Returns the log-likelihoods of sub-pixels."""
        labels = self._checked(labels)
        size = self.model.hyperparameters.vocabulary_size
        targets = signatures.in_range("`images`", tf.cast(images, tf.int32), size)
        inputs = {"images": targets, **labels}
        logits = self.model(inputs, routing_scope=self.routing_scope)
        nats = keras.losses.sparse_categorical_crossentropy(
            targets, tf.cast(logits, tf.float32), from_logits=True
        )
        sums = tf.reduce_sum(nats, axis=[1, 2, 3])
        return {"log_likelihood": -sums, "log_likelihoods": -nats}

    def generate(self, num_images, *settings, **labels):
        """Returns `<uint8>[num_images, height, width, channels]`."""
        settings = signatures.Settings(*settings)
        settings.check()
        length = self.model.num_subpixels + 1
        values, _ = steps.continue_rows(
            self.steps,
            signatures.SettingsSampler(settings, length),
            tf.zeros((num_images, length), tf.int32),
            tf.broadcast_to(tf.range(length) < 1, (num_images, length)),
            self.steps.begin(num_images, **self._checked(labels)),
            reads=False,
        )
        return {"images": tf.cast(self.steps.images_of(values), tf.uint8)}

    def _checked(self, labels):
        size = self.model.hyperparameters.num_classes
        return {
            name: signatures.in_range(f"`{name}`", values, size)
            for name, values in labels.items()
        }


def image_functions(model, routing_scope):
    """Returns the functions of a model of images by their names."""
    h = model.hyperparameters
    if h.vocabulary_size > _MAX_INTENSITIES:
        raise ValueError(
            f"Images must have at most {_MAX_INTENSITIES} intensities to be exported. "
            f"Received: vocabulary_size={h.vocabulary_size}"
        )
    image = ImageModel(model, routing_scope)
    t, k, p, s = signatures.Settings.defaults()

    def score(images):
        return image.score(images)

    def score_of_class(images, labels):
        return image.score(images, labels=labels)

    def generate(num_images, temperature=t, top_k=k, top_p=p, seed=s):
        return image.generate(num_images, temperature, top_k, top_p, seed)

    def generate_of_class(labels, temperature=t, top_k=k, top_p=p, seed=s):
        number = tf.shape(labels)[0]
        return image.generate(number, temperature, top_k, top_p, seed, labels=labels)

    images = tf.TensorSpec((None, *model.image_shape), tf.uint8, "images")
    specs = signatures.Settings.specs()
    if h.num_classes is None:
        number = tf.TensorSpec((), tf.int32, "num_images")
        return {
            "score": signatures.function(score, images),
            "generate": signatures.function(generate, number, *specs),
        }
    labels = tf.TensorSpec((None,), tf.int32, "labels")
    return {
        "score": signatures.function(score_of_class, images, labels),
        "generate": signatures.function(generate_of_class, labels, *specs),
    }

"""Pictures of images that a model samples or completes."""

import numpy as np

from routing_tf.problems import image

COLUMNS = 10


def sample_grid(model, sampler, labels, num_samples):
    """Samples images.

    Args:
        model: a `RoutingImageTransformer`.
        sampler: a keras_hub sampler.
        labels: list of classes; None for a model without classes.
        num_samples: number of images, of each class if there are any.

    Returns:
        A PNG file as bytes: a column for each class; without classes up to ten
        columns.

    Raises:
        ValueError: if the labels do not fit the model, or the sampler does not.
    """
    levels = model.hyperparameters.vocabulary_size
    if labels is None:
        images = model.generate(num_samples, sampler=sampler)
        return image.picture(images, min(COLUMNS, num_samples), levels)
    images = model.generate(labels=list(labels) * num_samples, sampler=sampler)
    return image.picture(images, len(labels), levels)


def completion_grid(model, sampler, images, labels, num_given_rows, num_samples):
    """Completes images whose first rows are given.

    Args:
        model: a `RoutingImageTransformer`.
        sampler: a keras_hub sampler.
        images: `<int>[number, height, width, channels]`.
        labels: `<int>[number]`, their classes.
        num_given_rows: number of rows that are given.
        num_samples: number of completions of each image.

    Returns:
        A PNG file as bytes: a column for each image, with what is given, on grey, the
        completions, and the true image.

    Raises:
        ValueError: if the images do not fit the model, or the sampler does not.
    """
    h = model.hyperparameters
    options = {}
    if h.num_classes is not None:
        options["labels"] = np.tile(labels, num_samples)
    completed = model.generate(
        images=np.tile(images, (num_samples, 1, 1, 1)),
        num_given_rows=num_given_rows,
        sampler=sampler,
        **options,
    )
    given = np.array(images)
    given[:, num_given_rows:] = h.vocabulary_size // 2
    rows = np.concatenate([given, completed, images])
    return image.picture(rows, len(images), h.vocabulary_size)

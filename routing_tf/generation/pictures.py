"""Pictures of images that a model samples or completes."""

import numpy as np

from routing_tf.problems import image

COLUMNS = 10
DEFAULT_LABELS = 10


def sample_grid(model, sampler, labels, num_samples):
    """Samples images: `num_samples` of each class in `labels`.

    Without classes `labels` is None. Returns a PNG file as bytes: a column for each
    class; without classes up to ten columns.
    """
    levels = model.hyperparameters.vocabulary_size
    if labels is None:
        images = model.generate(num_samples, sampler=sampler)
        return image.picture(images, min(COLUMNS, num_samples), levels)
    images = model.generate(labels=list(labels) * num_samples, sampler=sampler)
    return image.picture(images, len(labels), levels)


def completion_grid(model, sampler, images, labels, num_given_rows, num_samples):
    """Completes images `<int>[number, height, width, channels]` from their first rows.

    Returns a PNG file as bytes: a column for each image, with the given rows on grey,
    its `num_samples` completions, and the true image.
    """
    levels = model.hyperparameters.vocabulary_size
    completed = complete(model, sampler, images, labels, num_given_rows, num_samples)
    given = np.array(images)
    given[:, num_given_rows:] = levels // 2
    rows = np.concatenate([given, completed, images])
    return image.picture(rows, len(images), levels)


def complete(model, sampler, images, labels, num_given_rows, num_samples=1):
    """Returns the completions of images; `labels` are for a model with classes."""
    if model.hyperparameters.num_classes is None:
        labels = None
    return model.generate(
        labels=None if labels is None else np.tile(labels, num_samples),
        images=np.tile(images, (num_samples, 1, 1, 1)),
        num_given_rows=num_given_rows,
        sampler=sampler,
    )


def labels_to_sample(labels, num_classes):
    """Returns the classes to sample, as integers.

    `labels` are strings; None for all classes, at most `DEFAULT_LABELS`.
    """
    if labels is None:
        return list(range(min(DEFAULT_LABELS, num_classes)))
    numbers = [int(x) if x.strip().isdecimal() else -1 for x in labels]
    if not numbers or not all(0 <= number < num_classes for number in numbers):
        raise ValueError(
            f"`--labels` must be integers in the range [0, {num_classes}), separated "
            f"by commas. Received: --labels={','.join(labels)}"
        )
    return numbers

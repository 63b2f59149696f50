"""Pictures that the flags of `generate` ask for."""

import pathlib
import sys

from routing_tf import commands
from routing_tf.choices import DEFAULT_LABELS
from routing_tf.generation import pictures


def generate_images(model, sampler, options):
    """Samples or completes images.

    Args:
        model: a `RoutingImageTransformer`.
        sampler: the sampler.
        options: the parsed flags.

    Raises:
        ValueError: if the flags do not fit the model, or there is no data to complete.
    """
    path = options.output_file
    if path is None or pathlib.Path(path).suffix.lower() != ".png":
        raise ValueError(
            "`--output_file` must be the path of a .png for a model of images. "
            f"Received: --output_file={path}"
        )
    if options.num_given_rows:
        commands.refuse(
            options, ["labels"], "--num_given_rows; images have their own labels"
        )
        _, problem = commands.open_run(options)
        picture = pictures.completion_grid(
            model,
            sampler,
            problem.images(options.split)[: options.num_images],
            problem.labels(options.split)[: options.num_images],
            options.num_given_rows,
            options.num_samples,
        )
    else:
        commands.refuse(options, commands.COMPLETION_FLAGS, "no --num_given_rows")
        labels = read_labels(options, model.hyperparameters.num_classes)
        picture = pictures.sample_grid(model, sampler, labels, options.num_samples)
    pathlib.Path(path).write_bytes(picture)
    print(f"wrote {path}", file=sys.stderr)


def read_labels(options, num_classes):
    """Returns the classes to sample; None for a model without classes.

    Args:
        options: the parsed flags.
        num_classes: number of classes of the model, or None.

    Raises:
        ValueError: if the model has none of these classes.
    """
    if num_classes is None:
        commands.refuse(options, ["labels"], "a model without classes")
        return None
    if options.labels is None:
        return list(range(min(DEFAULT_LABELS, num_classes)))
    labels = [int(x) if x.strip().isdecimal() else -1 for x in options.labels]
    if not labels or not all(0 <= label < num_classes for label in labels):
        raise ValueError(
            f"`--labels` must be integers in the range [0, {num_classes}), separated "
            f"by commas. Received: --labels={','.join(options.labels)}"
        )
    return labels

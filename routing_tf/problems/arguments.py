"""Checks of the arguments of problems, which may come as strings."""

import operator

from routing_tf.files.names import SPLITS
from routing_tf.layers.support.validation import check_choice


def check_split(split, name="split"):
    """Raises a `ValueError` if there is no such split."""
    check_choice(name, split, SPLITS)


def check_worker(worker, num_workers):
    """Returns a worker's number; raises a `ValueError` if there is no such worker."""
    num_workers = integer_at_least(1, "num_workers", num_workers)
    worker = integer_at_least(0, "worker", worker)
    if worker >= num_workers:
        raise ValueError(
            "`worker` must be less than `num_workers`. Received: "
            f"worker={worker}, num_workers={num_workers}"
        )
    return worker


def integer_at_least(minimum, name, value):
    """Returns an integer argument as an `int`, also if it came as a string."""
    kind = "positive" if minimum == 1 else "non-negative"
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number < minimum:
        raise ValueError(f"`{name}` must be a {kind} integer. Received: {name}={value}")
    return number


def check_lengths(problem, hyperparameters):
    """Raises a `ValueError` if a length of a problem exceeds that of a model."""
    for name, largest in problem.lengths.items():
        length = getattr(problem, name)
        limit, largest = limit_of(hyperparameters, largest)
        if length > limit:
            raise ValueError(
                f"`{name}` of the problem must not exceed the model's `{largest}`. "
                f"Received: {length} and {limit}. Leave {name} out, or pass the "
                f"hyperparameter {largest}"
            )


def limit_of(hyperparameters, name):
    """Returns the largest length that a model has under a name, and what sets it."""
    limits = {name: getattr(hyperparameters, name)}
    if name == "max_sequence_length" and hyperparameters.truncate_length is not None:
        limits["truncate_length"] = hyperparameters.truncate_length
    setting = min(limits, key=limits.get)
    return limits[setting], setting


def shortest_window(length, longest, kind):
    """Returns `min_training_length` as an `int`; None for windows that are not cut.

    Raises a `ValueError` if it is no length of windows of a text.
    """
    if length is None:
        return None
    if kind != "text":
        raise ValueError(
            "`min_training_length` is only for texts; images and pairs are not cut. "
            f"Received: min_training_length={length}"
        )
    length = integer_at_least(1, "min_training_length", length)
    if length > longest:
        raise ValueError(
            "`min_training_length` must not exceed `sequence_length`. Received: "
            f"min_training_length={length}, sequence_length={longest}"
        )
    return length


def boolean(name, value):
    """Returns a boolean argument, which may come as the string "true" or "false"."""
    choices = {"true": True, "false": False}
    found = choices.get(str(value).lower())
    if found is None:
        raise ValueError(f"`{name}` must be true or false. Received: {name}={value!r}")
    return found

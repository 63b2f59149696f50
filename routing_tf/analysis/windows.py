"""Held-out data for the analyses."""

import numpy as np
import tensorflow as tf

from routing_tf.files.progress import progress
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.training import evaluation


def complete_windows(problem, split, num_windows, length=None):
    """Reads complete windows of a split, evenly spaced.

    There are `num_windows`, or fewer if the split has fewer, as a dict of NumPy
    arrays. `length` is the number of tokens to keep of each, only for texts.

    Raises:
        ValueError: if the split has no such window, or a number is not positive.

    Example:

    ```python
    from routing_tf import problems
    from routing_tf.analysis.windows import complete_windows

    problem = problems.get("python_source", sequence_length=256)
    windows = complete_windows(problem, "test", num_windows=3, length=64)
    assert windows["token_ids"].shape == (3, 64)
    ```
    """
    check_positive_integer("num_windows", num_windows)
    problem.prepare(split)
    starts, lengths = problem.evaluation_windows(split)
    complete = np.flatnonzero(lengths == problem.sequence_length)
    if not len(complete):
        raise ValueError(
            f"The split must have a complete window. Received: {split!r} of "
            f"{problem.name!r} with windows of {problem.sequence_length:,} ids"
        )
    num_windows = min(num_windows, len(complete))
    rows = complete[np.arange(num_windows) * len(complete) // num_windows]
    with tf.device("cpu"):
        inputs, _, _ = problem.read(
            split, tf.constant(starts[rows]), tf.constant(lengths[rows])
        )
    inputs = {name: np.asarray(array) for name, array in inputs.items()}
    if length is not None:
        check_positive_integer("length", length)
        inputs = {name: array[:, :length] for name, array in inputs.items()}
    return inputs


def batches_to_score(lm, problem, split, num_examples=None, verbose=True):
    """Reads `num_examples` (None: all) windows of a split to score, evenly spaced.

    Returns their number, and an iterable of batches of inputs, targets and weights
    `<float64>`, NumPy arrays.
    """
    problem.prepare(split)
    count = len(problem.evaluation_windows(split)[0])
    if num_examples is not None:
        count = min(count, num_examples)
    # No larger than needed, because padding windows cost as much as others.
    batch_size = min(evaluation.batch_size_of(lm.hyperparameters, problem), count)
    dataset = problem.dataset(
        split, batch_size, num_examples=num_examples, training=False
    )
    batches = (
        (inputs, targets, weights.astype("float64"))
        for inputs, targets, weights in dataset.as_numpy_iterator()
    )
    return count, progress(batches, "batch", -(-count // batch_size), verbose)


def rows_of(windows, rows):
    """Returns some of the windows, a dict of NumPy arrays."""
    return {name: array[rows] for name, array in windows.items()}


def text_window(lm, text, length=None):
    """Returns the inputs of a model for a text, a batch of one with a leading id 0.

    `length` is the largest number of tokens to keep, including the id 0.
    """
    preprocessor = getattr(lm, "preprocessor", None)
    if preprocessor is None:
        kind = "images" if lm.hyperparameters.kind == "image" else "ids"
        raise ValueError(
            f"`text` must be given to a model that takes texts. Received: one of {kind}"
        )
    ids = np.asarray(preprocessor.tokenizer.tokenize(text), "int32")
    if not len(ids):
        raise ValueError(f"`text` must not be empty. Received: text={text!r}")
    token_ids = np.concatenate([[0], ids]).astype("int32")[None, :length]
    return {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids, "bool")}

"""What a task is: sequences, where they are answered, and what others reach.

Letters: B sequences, L tokens, P places.
"""

import dataclasses
import typing
from collections.abc import Callable

import numpy as np


class Examples(typing.NamedTuple):
    """Some sequences.

    Args:
        tokens: NumPy array `<int32>[B, L]`.
        positions: NumPy array `<int32>[B, P]`, where an answer is asked for.
        labels: NumPy array `<int32>[B, P]`, the right answers.
        weights: NumPy array `<float32>[B, P]`, 1 for answers that count, else 0.
    """

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, tokens, positions, labels, weights=None):
        """Makes examples of arrays of any number types; all count without weights."""
        if weights is None:
            weights = np.ones(np.shape(labels))
        found = (np.asarray(x, "int32") for x in (tokens, positions, labels))
        return cls(*found, np.asarray(weights, "float32"))

    @classmethod
    def joined(cls, parts):
        """Returns the examples of several parts, one after the other."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts)))

    def rows(self, index):
        """Returns some of the sequences: those of a slice, or of an array of ids."""
        return Examples(*(array[index] for array in self))


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure of others, as their source has it.

    Args:
        system: what was measured.
        score: the figure in words.
        source: where it stands, and by which settings.
    """

    system: str
    score: str
    source: str


@dataclasses.dataclass(frozen=True)
class Task:
    """A task at one size.

    Args:
        name: what `--only` calls it.
        make: function of a NumPy generator, a number of sequences, the `length` of each
            and `is_training`, which returns `Examples`.
        length: tokens of a training sequence.
        vocabulary: number of different tokens.
        source: whose definition this is.
        hyperparameters: dict of those of the model and its training that are not
            `settings.COMMON`.
        batch_size: sequences of a training step. Defaults to 128.
        train_rows: number of training sequences, which come again and again in another
            order; None (the default) for new ones in each step.
        test_rows: number of held-out sequences. Defaults to 1,000.
        score: one of `SCORES`. Defaults to `"accuracy"`.
        readout: how answers are read off the hidden states, one of
            `network.READOUTS`. Defaults to `"dense"`.
        num_labels: number of different answers; None (the default) for `vocabulary`.
        contexts: lengths, beyond that of training, at which it is scored token by
            token, in the memory of a cache. Defaults to none.
        context_rows: number of sequences of each of these lengths. Defaults to 16.
        published: tuple of `Published`. Defaults to none.
        peers: the budget of the peers, in words.
    """

    name: str
    make: Callable
    length: int
    vocabulary: int
    source: str
    hyperparameters: dict = dataclasses.field(default_factory=dict)
    batch_size: int = 128
    train_rows: int | None = None
    test_rows: int = 1000
    score: str = "accuracy"
    readout: str = "dense"
    num_labels: int | None = None
    contexts: tuple = ()
    context_rows: int = 16
    published: tuple = ()
    peers: str = ""

    def examples(self, number, seed, step=0, is_training=True, length=None):
        """Makes sequences; equal ones for equal arguments."""
        generator = np.random.default_rng([seed, step])
        return self.make(generator, number, length or self.length, is_training)


def _by_sequence(right, weights):
    """Share of the answers of each sequence that are right."""
    return (right * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)


def accuracy(predicted, examples):
    """Returns the share of right answers: of each sequence, then the mean of these."""
    right = predicted == examples.labels
    return float(_by_sequence(right, examples.weights).mean())


def whole_accuracy(predicted, examples):
    """Returns the share of sequences all of whose answers are right."""
    right = predicted == examples.labels
    return float((_by_sequence(right, examples.weights) == 1).mean())


def class_accuracy(predicted, examples):
    """Returns the mean over classes of the share of their labels that is found.

    As the macro average of torchmetrics: a class that is answered somewhere and is
    nowhere right counts as 0.
    """
    counts = examples.weights > 0
    labels, predicted = examples.labels[counts], predicted[counts]
    classes = np.union1d(labels, predicted)
    found = [
        (predicted[labels == each] == each).mean() if (labels == each).any() else 0.0
        for each in classes
    ]
    return float(np.mean(found))


SCORES = {
    "accuracy": accuracy,
    "class accuracy": class_accuracy,
    "whole answers": whole_accuracy,
}


def draw_distinct(generator, number, count, choices):
    """Draws indices without replacement, all equally likely, in the order of drawing.

    Args:
        generator: a NumPy generator.
        number: number of rows.
        count: number of indices in a row.
        choices: number of indices to draw from.

    Returns:
        NumPy array `<int>[number, count]`.
    """
    found = np.zeros((number, count), "int64")
    for place in range(count):
        drawn = generator.integers(choices - place, size=number)
        # The n-th of those that are left: each smaller one that is taken moves it on.
        for taken in np.sort(found[:, :place], axis=1).T:
            drawn += drawn >= taken
        found[:, place] = drawn
    return found


def draw_by_weights(generator, number, count, log_weights):
    """Draws indices without replacement, by weights, in the order of drawing.

    As `draw_distinct`, with `log_weights` `<float>[choices]`, or
    `<float>[number, choices]`.
    """
    # The largest of weights with Gumbel noise are such a draw.
    noise = generator.gumbel(size=(number, log_weights.shape[-1]))
    return np.argsort(-(log_weights + noise), axis=1)[:, :count]

"""What a task is: sequences, where they are answered, and what others reach.

Letters: B sequences, L tokens, P places.
"""

import dataclasses
import typing
from collections.abc import Callable

import numpy as np


class Examples(typing.NamedTuple):
    """Some sequences, as NumPy arrays.

    Args:
        tokens: `<int32>[B, L]`.
        positions: `<int32>[B, P]`, where an answer is asked for.
        labels: `<int32>[B, P]`, the right answers.
        weights: `<float32>[B, P]`, 1 for answers that count, else 0.
    """

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, tokens, positions, labels, weights=1):
        """Makes examples; positions and weights may be the same for all."""
        found = [
            tokens,
            *(np.broadcast_to(x, np.shape(labels)) for x in (positions, labels)),
        ]
        weights = np.broadcast_to(weights, np.shape(labels)).astype("float32")
        return cls(*(np.asarray(x, "int32") for x in found), weights)

    def rows(self, index):
        """Returns some of the sequences: those of a slice, or of an array of ids."""
        return Examples(*(array[index] for array in self))


@dataclasses.dataclass(frozen=True)
class Task:
    """A task at one size.

    Args:
        name: what `--only` calls it.
        make: function of a NumPy generator, a number of sequences, the length of each
            and whether they are for training, which returns `Examples`.
        length: tokens of a training sequence.
        vocabulary: number of different tokens.
        hyperparameters: those that are not `settings.COMMON`, as `"name=value,..."`.
        batch_size: sequences of a training step.
        train_rows: number of training sequences, which come again in another order;
            None for new ones in each step.
        test_rows: number of held-out sequences.
        score: one of `SCORES`.
        readout: how answers are read off hidden states, see `network.Network`.
        num_labels: number of different answers; None for `vocabulary`.
        contexts: longer sequences that are scored, too, token by token with a cache.
        published: what others reach, see `published`.
    """

    name: str
    make: Callable
    length: int
    vocabulary: int
    hyperparameters: str = ""
    batch_size: int = 128
    train_rows: int | None = None
    test_rows: int = 1000
    score: str = "accuracy"
    readout: str = "dense"
    num_labels: int | None = None
    contexts: tuple = ()
    published: tuple = ()

    @property
    def is_of_encoders(self):
        """Whether models see later tokens, too."""
        return self.readout == "mean"

    def examples(self, number, seed, step=0, is_training=True, length=None):
        """Makes sequences; equal ones for equal arguments."""
        generator = np.random.default_rng([seed, step])
        return self.make(generator, number, length or self.length, is_training)


def published(scores, source):
    """Returns triples of strings, of scores as `"system: score; system: score"`."""
    items = (item.strip().split(": ") for item in scores.split(";"))
    return tuple((system, score, source) for system, score in items)


def accuracy(predicted, examples):
    """Returns the share of right answers: of each sequence, then the mean of these."""
    right = (predicted == examples.labels) * examples.weights
    return float((right.sum(axis=1) / examples.weights.sum(axis=1)).mean())


def whole_accuracy(predicted, examples):
    """Returns the share of sequences all of whose answers are right."""
    wrong = (predicted != examples.labels) * examples.weights
    return float((~wrong.any(axis=1)).mean())


def class_accuracy(predicted, examples):
    """Returns the mean over classes of the share of their labels that is found.

    As the macro average of torchmetrics: a class that is answered somewhere and is
    nowhere right counts as 0.
    """
    counts = examples.weights > 0
    labels, predicted = examples.labels[counts], predicted[counts]
    classes = np.union1d(labels, predicted)
    right = [np.sum((labels == each) & (predicted == each)) for each in classes]
    there = [max(1, np.sum(labels == each)) for each in classes]
    return float(np.mean(np.divide(right, there)))


SCORES = {
    "accuracy": accuracy,
    "class accuracy": class_accuracy,
    "whole answers": whole_accuracy,
}


def draw_distinct(generator, number, count, choices):
    """Draws indices below `choices` without replacement, `<int>[number, count]`."""
    found = np.zeros((number, count), "int64")
    for place in range(count):
        drawn = generator.integers(choices - place, size=number)
        # The n-th of those that are left: each smaller one that is taken moves it on.
        for taken in np.sort(found[:, :place], axis=1).T:
            drawn += drawn >= taken
        found[:, place] = drawn
    return found


def draw_by_weights(generator, number, count, log_weights):
    """As `draw_distinct`, by weights `<float>[choices]` or `[number, choices]`."""
    # The largest of weights with Gumbel noise are such a draw.
    noise = generator.gumbel(size=(number, log_weights.shape[-1]))
    return np.argsort(-(log_weights + noise), axis=1)[:, :count]

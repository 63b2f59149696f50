"""ListOps of the Long Range Arena: the value of a nested expression, by an encoder.

The public table has known faults: its untrained accuracy is 17 %, the share of the most
frequent value; its local attention looks at every 41st token rather than at neighbours,
and a part of the data could not be solved when the table was made.

Reference: google-research/long-range-arena (arXiv 2011.04006), `data/listops.py`; the
model and training of mlpen/Nystromformer, `LRA/code/lra_config.py`.
"""

import functools
import statistics

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Published
from benchmarks.tasks.task import Task

ARENA = "Long Range Arena (arXiv 2011.04006)"
DEPTH, MOST_ARGUMENTS, DIGIT_SHARE = 10, 10, 0.75
# Ids: 0 padding, 1 to 10 the digits, then operators, and what closes an expression.
OPERATORS = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}
FIRST_OPERATOR, CLOSE = 11, 15
VOCABULARY = 16


class TooLong(Exception):
    """An expression has more tokens than are wanted."""


def listops(generator, number, length, is_training=True, *, shortest):
    """Makes expressions whose value is asked for, with padding behind them.

    Args:
        generator: a NumPy generator.
        number: number of expressions.
        length: tokens of a sequence; expressions have fewer.
        is_training: has no influence. Defaults to True.
        shortest: expressions have more tokens.

    Returns:
        `Examples`; the position of the answer has no meaning.
    """
    tokens, labels = np.zeros((number, length), "int32"), np.zeros((number, 1))
    for row in range(number):
        found = []
        while len(found) <= shortest:
            found = []
            try:
                labels[row] = _expression(generator, found, length)
            except TooLong:
                found = []
        tokens[row, : len(found)] = found
    return Examples.of(tokens, np.zeros((number, 1)), labels)


def _expression(generator, tokens, length, depth=1):
    """Adds the tokens of an expression, and returns its value."""
    # A digit alone is never long enough.
    is_digit = depth == DEPTH or (depth > 1 and generator.random() < DIGIT_SHARE)
    if len(tokens) + 2 >= length:
        raise TooLong
    if is_digit:
        digit = int(generator.integers(10))
        tokens.append(1 + digit)
        return digit
    index = int(generator.integers(len(OPERATORS)))
    tokens.append(FIRST_OPERATOR + index)
    values = [
        _expression(generator, tokens, length, depth + 1)
        for _ in range(generator.integers(2, MOST_ARGUMENTS + 1))
    ]
    tokens.append(CLOSE)
    return list(OPERATORS.values())[index](values)


_SCORES = {
    "Transformer": ".3637",
    "Reformer": ".3727",
    "Sinkhorn": ".3367",
    "Sparse Transformer": ".1707",
    "Longformer": ".3563",
    "BigBird": ".3605",
    "local attention (every 41st token)": ".1582",
    "Luna-256": ".3725",
    "S4": ".5960",
}


def _task(shortest, length, published=()):
    return Task(
        name=f"listops_{length}",
        make=functools.partial(listops, shortest=shortest),
        length=length,
        vocabulary=VOCABULARY,
        source=ARENA,
        hyperparameters={
            "num_local_only_layers": 0,
            "num_local_heads": 1,
            "key_dim": 32,
            "feed_forward": "relu",
            "intermediate_dim": 128,
            "attention_window": max(32, length // 16),
            "local_block_length": max(16, length // 32),
            "num_clusters": 16,
            "learning_rate": 1e-4,
            "warmup_steps": 1000,
            "train_steps": 5000,
        },
        batch_size=32,
        train_rows=96_000,
        test_rows=2000,
        readout="mean",
        num_labels=10,
        published=published,
        peers="the table's own models; 5,000 steps of 32 in later papers",
    )


TASKS = [
    _task(32, 256),
    _task(
        500,
        2000,
        tuple(
            Published(*item, f"{ARENA}, S4 and Luna papers") for item in _SCORES.items()
        ),
    ),
]

"""ListOps of the Long Range Arena: the value of a nested expression, by an encoder.

The public table has known faults: untrained models reach 17 %, the share of the most
frequent value; by our reading of the code, its local attention looks at every 41st
token rather than at neighbours; and the data could not be solved when it was made.

Reference: google-research/long-range-arena (arXiv 2011.04006), `data/listops.py`; the
model and training of mlpen/Nystromformer, `LRA/code/lra_config.py`.
"""

import functools
import statistics

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import published

DEPTH, MOST_ARGUMENTS, DIGIT_SHARE = 10, 10, 0.75
# Ids: 0 padding, 1 to 10 the digits, then MIN, MAX, MED, SM, and the closing bracket.
OPERATORS = (min, max, lambda x: int(statistics.median(x)), lambda x: sum(x) % 10)
FIRST_OPERATOR, CLOSE, VOCABULARY = 11, 15, 16
ARENA = "Long Range Arena (arXiv 2011.04006), and the papers of Luna and S4"
PUBLISHED = published(
    "Transformer: .3637; Reformer: .3727; Sinkhorn: .3367; Sparse Transformer: .1707; "
    "Longformer: .3563; BigBird: .3605; local attention: .1582; "
    "Luna-256: .3725; S4: .5960",
    ARENA,
)


class TooLong(Exception):
    """An expression has more tokens than are wanted."""


def listops(generator, number, length, is_training=True, *, shortest):
    """Makes expressions whose value is asked for, with padding after them.

    They have more than `shortest` and fewer than `length` tokens. The position of the
    answer has no meaning.
    """
    tokens, labels = np.zeros((number, length), "int32"), np.zeros((number, 1))
    for row in range(number):
        found = []
        while not shortest < len(found) < length:
            found = []
            try:
                labels[row] = expression(generator, found, length)
            except TooLong:
                found = []
        tokens[row, : len(found)] = found
    return Examples.of(tokens, 0, labels)


def expression(generator, tokens, length, depth=1):
    """Adds the tokens of an expression to a list, and returns its value."""
    if len(tokens) + 2 >= length:
        raise TooLong
    # A digit alone is never long enough.
    if depth == DEPTH or (depth > 1 and generator.random() < DIGIT_SHARE):
        digit = int(generator.integers(10))
        tokens.append(1 + digit)
        return digit
    index = int(generator.integers(len(OPERATORS)))
    tokens.append(FIRST_OPERATOR + index)
    values = [
        expression(generator, tokens, length, depth + 1)
        for _ in range(generator.integers(2, MOST_ARGUMENTS + 1))
    ]
    tokens.append(CLOSE)
    return OPERATORS[index](values)


def _task(shortest, length, peers=()):
    return Task(
        f"listops_{length}",
        functools.partial(listops, shortest=shortest),
        length,
        VOCABULARY,
        f"attention_window={max(32, length // 16)},num_clusters=16,"
        f"local_block_length={max(16, length // 32)},num_local_only_layers=0,"
        "num_local_heads=1,key_dim=32,feed_forward=relu,intermediate_dim=128,"
        "learning_rate=0.0001,warmup_steps=1000,train_steps=5000",
        batch_size=32,
        train_rows=96_000,
        test_rows=2000,
        readout="mean",
        num_labels=10,
        published=peers,
    )


TASKS = [_task(32, 256), _task(500, 2000, PUBLISHED)]

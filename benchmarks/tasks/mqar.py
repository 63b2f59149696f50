"""Multi-query associative recall (MQAR), and two variants.

Reference: `multiquery_ar`, `forgetting_mqar` and `compositional_mqar` of
HazyResearch/zoology.
"""

import functools
import math

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import draw_by_weights
from benchmarks.tasks.task import draw_distinct
from benchmarks.tasks.task import published

VOCABULARY = 8192
POWER = 0.01  # of the law of the gaps
CELLS = ((64, 4), (128, 8), (256, 16))
SQUARES = ((64, 4), (128, 9), (256, 16), (256, 25), (256, 36))
FIGURE_2 = (
    "Zoology (arXiv 2312.04927), Figure 2: width 64 to 512, 100,000 rows, at most 64 "
    "passes, best of 4 learning rates"
)
SWEEP = (
    "Based (arXiv 2402.18668), Figure 2, read off the picture (within .02): width 128, "
    "trained on up to 256 tokens and 64 pairs, mean over tests of 64 to 1,024 tokens"
)
# The cells of the figure have fillers of 0, the tests of the sweep random ones.
PUBLISHED = {
    False: published("full attention: 1.00", FIGURE_2),
    True: published(
        "sliding window of 16: .145; sliding window of 32: .31; sliding window of 64: "
        ".515; sliding window of 128: .655; sliding window of 1,024: 1.0",
        SWEEP,
    ),
}


def check_sizes(length, pairs, vocabulary, synonyms=1, updates=0):
    """Raises a `ValueError` if there is no room for pairs, or too few tokens."""
    if pairs < 1 or length % 2 or 4 * pairs + 2 * updates > length:
        raise ValueError(
            "A size must be an even length and at least one pair, with four tokens of "
            f"the length for each. Received: {length}x{pairs}. Write for example 128x8"
        )
    if vocabulary <= length:
        raise ValueError(
            "`vocabulary` must be larger than the length. Received: vocabulary="
            f"{vocabulary} for {length} tokens. Write --vocabulary={2 * length}"
        )
    if synonyms < 1 or (vocabulary // 2 - 1) // synonyms < pairs:
        raise ValueError(
            "`synonyms` must be at least 1, and leave a key for each pair. Received: "
            f"synonyms={synonyms} with a vocabulary of {vocabulary} for {pairs} pairs. "
            f"Write for example --vocabulary={2 * synonyms * length}"
        )


def mqar(
    generator,
    number,
    length,
    is_training=True,
    *,
    pairs,
    updates=0,
    vocabulary=VOCABULARY,
    random_fillers=True,
    synonyms=1,
):
    """Makes sequences: pairs of key and value, then fillers with each key once more.

    Keys are of the lower half of the vocabulary, 0 excluded, values of the upper one,
    and no two of a sequence are alike. The places where keys come again are even, and
    drawn without replacement by a power law of the distance to the pairs.

    Args:
        generator: a NumPy generator.
        number: number of sequences.
        length: tokens of a sequence.
        is_training: has no influence.
        pairs: pairs of a sequence.
        updates: number of keys that get another value after the pairs, which is then
            the right answer.
        vocabulary: number of tokens there are.
        random_fillers: whether fillers are any tokens, keys and values too, or 0.
        synonyms: number of tokens that are one key; one comes first, another again.

    Returns:
        `Examples`.

    Raises:
        ValueError: see `check_sizes`.
    """
    check_sizes(length, pairs, vocabulary, synonyms, updates)
    half, end, start = vocabulary // 2, 2 * pairs, 2 * (pairs + updates)
    num_values, num_keys = vocabulary - half, (half - 1) // synonyms
    keys = 1 + synonyms * draw_distinct(generator, number, pairs, num_keys)
    values = draw_distinct(generator, number, pairs, num_values)
    positions = start + 2 * _gaps(generator, number, pairs, (length - start) // 2)
    tokens = _fillers(generator, number, length, vocabulary if random_fillers else 1)
    first = generator.integers(synonyms, size=keys.shape)
    again = first + generator.integers(min(1, synonyms - 1), synonyms, keys.shape)
    tokens[:, 0:end:2], tokens[:, 1:end:2] = keys + first, half + values
    if updates:
        changed = draw_distinct(generator, number, updates, pairs)
        new = np.take_along_axis(values, changed, axis=1)
        new = (new + generator.integers(1, num_values, new.shape)) % num_values
        tokens[:, end:start:2] = np.take_along_axis(keys, changed, axis=1)
        tokens[:, end + 1 : start : 2] = half + new
        np.put_along_axis(values, changed, new, axis=1)
    return _queried(tokens, positions, keys + again % synonyms, half + values)


def compositional(
    generator, number, length, is_training=True, *, pairs, vocabulary=VOCABULARY
):
    """Makes sequences whose keys are all pairs of a first and a second part.

    As `mqar`, which see for the arguments; `pairs` is a square, a key takes two tokens,
    and only both together tell its value, which is asked for at the second one.
    """
    root, third, start = math.isqrt(pairs), vocabulary // 3, 3 * pairs
    firsts = 1 + draw_distinct(generator, number, root, third - 1)
    seconds = third + draw_distinct(generator, number, root, third)
    order = draw_distinct(generator, number, pairs, pairs)
    firsts = np.take_along_axis(firsts, order // root, axis=1)
    seconds = np.take_along_axis(seconds, order % root, axis=1)
    num_values = vocabulary - 2 * third
    values = 2 * third + draw_distinct(generator, number, pairs, num_values)
    places = start + 3 * _gaps(generator, number, pairs, (length - start) // 3)
    tokens = _fillers(generator, number, length, vocabulary)
    for offset, part in enumerate((firsts, seconds, values)):
        tokens[:, offset:start:3] = part
    np.put_along_axis(tokens, places, firsts, axis=1)
    return _queried(tokens, places + 1, seconds, values)


def _gaps(generator, number, count, space):
    law = (POWER - 1) * np.log(np.arange(1, space + 1))
    return draw_by_weights(generator, number, count, law)


def _fillers(generator, number, length, vocabulary):
    return generator.integers(vocabulary, size=(number, length))


def _queried(tokens, positions, keys, values):
    np.put_along_axis(tokens, positions, keys, axis=1)
    order = np.argsort(positions, axis=1)
    found = (np.take_along_axis(x, order, axis=1) for x in (positions, values))
    return Examples.of(tokens, *found)


def _task(name, function, length, pairs, peers=(), **settings):
    return Task(
        f"{name}_{length}x{pairs}{'_random' * settings.get('random_fillers', False)}",
        functools.partial(function, pairs=pairs, **settings),
        length,
        VOCABULARY,
        f"attention_window={length // 4},local_block_length={length // 8},"
        "num_clusters=8",
        train_rows=100_000,
        test_rows=3000,
        readout="tied",
        published=peers,
    )


TASKS = [
    *(
        _task("mqar", mqar, *cell, PUBLISHED[is_random], random_fillers=is_random)
        for is_random in (False, True)
        for cell in CELLS
    ),
    *(_task("forgetting", mqar, *cell, updates=cell[1] // 2) for cell in CELLS),
    *(_task("compositional", compositional, *cell) for cell in SQUARES),
]

"""Selective copying and induction heads, the two tasks of the Mamba paper.

Reference: arXiv 2312.00752, sections 4.1.1 and 4.1.2; `copying.py` of
state-spaces/s4.
"""

import functools

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Published
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import draw_distinct

MAMBA = "Mamba (arXiv 2312.00752)"
CONTENT, LETTERS = 16, 16  # tokens to copy, and how many different tokens there are


def selective_copying(
    generator, number, length, is_training=True, *, content=CONTENT, letters=LETTERS
):
    """Makes content at random places among blanks, then as many signs to tell it.

    Args:
        generator: a NumPy generator.
        number: number of sequences.
        length: tokens of a sequence, twice the content included.
        is_training: has no influence. Defaults to True.
        content: number of tokens to copy. Defaults to 16.
        letters: number of tokens: the blank 0, the content, and the last one, which
            asks for the content in order. Defaults to 16.

    Returns:
        `Examples`.
    """
    labels = generator.integers(1, letters - 1, size=(number, content))
    before = length - content
    places = np.sort(draw_distinct(generator, number, content, before))
    tokens = np.zeros((number, length), "int32")
    np.put_along_axis(tokens, places, labels, axis=1)
    tokens[:, before:] = letters - 1
    positions = np.broadcast_to(np.arange(before, length), labels.shape)
    return Examples.of(tokens, positions, labels)


def induction(generator, number, length, is_training=True, *, letters=LETTERS):
    """Makes random letters in which a sign comes twice, at last at the end.

    The letter that followed the sign when it came first is to be told. It comes at any
    place but the last two.

    Args:
        generator: a NumPy generator.
        number: number of sequences.
        length: tokens of a sequence.
        is_training: has no influence. Defaults to True.
        letters: number of letters beside the sign, which is the last token. Defaults to
            16.

    Returns:
        `Examples`.
    """
    tokens = generator.integers(letters, size=(number, length), dtype="int32")
    places = generator.integers(length - 2, size=(number, 1))
    np.put_along_axis(tokens, places, letters, axis=1)
    tokens[:, -1] = letters
    labels = np.take_along_axis(tokens, places + 1, axis=1)
    return Examples.of(tokens, np.full((number, 1), length - 1), labels)


def _published(*scores):
    source = f"{MAMBA}, Table 1: 4,096 + 16 tokens, 400,000 steps of 64, width 64"
    return tuple(Published(system, score, source) for system, score in scores)


_TABLE_1 = _published(
    ("S4 without gate", ".183"),
    ("S6 without gate", ".970"),
    ("H3 with S4", ".570"),
    ("H3 with Hyena", ".301"),
    ("H3 with S6", ".997"),
    ("Mamba with S4", ".564"),
    ("Mamba with Hyena", ".284"),
    ("Mamba", ".998"),
)


def _copying(noise, published=()):
    length = noise + 2 * CONTENT
    return Task(
        name=f"selective_copying_{noise}",
        make=selective_copying,
        length=length,
        vocabulary=LETTERS,
        source=MAMBA,
        hyperparameters={
            "num_local_only_layers": 0,
            "num_local_heads": 1,
            "key_dim": 32,
            "feed_forward": "geglu",
            "intermediate_dim": 128,
            "attention_window": max(32, noise // 8),
            "local_block_length": max(16, noise // 16),
            "num_clusters": 16,
            "learning_rate": 1e-3,
            "train_steps": 400_000,
        },
        batch_size=64,
        published=published,
        peers="4,096 + 16 tokens, 400,000 steps of 64, width 64, learning rate 1e-4",
    )


TASKS = [
    *(_copying(noise) for noise in (256, 1024)),
    _copying(4096, _TABLE_1),
    Task(
        name="induction_256",
        make=functools.partial(induction),
        length=256,
        vocabulary=LETTERS + 1,
        source=MAMBA,
        hyperparameters={
            "attention_window": 32,
            "local_block_length": 16,
            "num_clusters": 16,
            "train_steps": 25 * 8192,
        },
        batch_size=8,
        contexts=tuple(2**power for power in range(6, 21)),
        published=(
            Published(
                "Mamba", "1.00 to 2^20 tokens", f"{MAMBA}, Table 11: width 64, 2 layers"
            ),
            Published(
                "full attention",
                "no more beyond about twice the trained length, with absolute, rotary "
                "or xPos positions; out of memory beyond 2^14",
                f"{MAMBA}, Table 11",
            ),
        ),
        peers="204,800 steps of 8, width 64",
    ),
]

"""Selective copying and induction heads, the two tasks of the Mamba paper.

Both take a NumPy generator, a number of sequences and their length, and return
`Examples`.

Reference: arXiv 2312.00752, sections 4.1.1 and 4.1.2; `copying.py` of
state-spaces/s4.
"""

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import draw_distinct
from benchmarks.tasks.task import published

CONTENT, LETTERS = 16, 16  # tokens to copy, and how many different tokens there are
MAMBA = "Mamba (arXiv 2312.00752), Table"
COPIED = published(
    "S4 without gate: .183; S6 without gate: .970; H3 with S4: .570; H3 with Hyena: "
    ".301; H3 with S6: .997; Mamba with S4: .564; Mamba with Hyena: .284; Mamba: .998",
    f"{MAMBA} 1: width 64, 4,096 + 16 tokens, 400,000 steps of 64",
)
INDUCED = published(
    "Mamba: 1.00 up to 1,048,576 tokens; full attention: fails beyond about 512 tokens "
    "with absolute, rotary and xPos positions, too large beyond 16,384",
    f"{MAMBA} 11; Mamba has width 64 and 204,800 steps of 8",
)


def selective_copying(
    generator, number, length, is_training=True, content=CONTENT, letters=LETTERS
):
    """Makes content at random places among blanks, then as many signs to tell it.

    The blank is 0, the sign the last of the letters, and all between are content. The
    length includes twice the content.
    """
    labels = generator.integers(1, letters - 1, size=(number, content))
    before = length - content
    places = np.sort(draw_distinct(generator, number, content, before))
    tokens = np.zeros((number, length), "int32")
    np.put_along_axis(tokens, places, labels, axis=1)
    tokens[:, before:] = letters - 1
    return Examples.of(tokens, np.arange(before, length), labels)


def induction(generator, number, length, is_training=True, letters=LETTERS):
    """Makes random letters in which a sign comes twice, at last at the end.

    The letter that followed the sign when it came first is to be told. It comes at any
    place but the last two; its id is that of no letter.
    """
    tokens = generator.integers(letters, size=(number, length), dtype="int32")
    places = generator.integers(length - 2, size=(number, 1))
    np.put_along_axis(tokens, places, letters, axis=1)
    tokens[:, -1] = letters
    labels = np.take_along_axis(tokens, places + 1, axis=1)
    return Examples.of(tokens, length - 1, labels)


def _copying(noise):
    return Task(
        f"selective_copying_{noise}",
        selective_copying,
        noise + 2 * CONTENT,
        LETTERS,
        f"attention_window={max(32, noise // 8)},num_clusters=16,"
        f"local_block_length={max(16, noise // 16)},num_local_only_layers=0,"
        "num_local_heads=1,key_dim=32,feed_forward=geglu,intermediate_dim=128,"
        "learning_rate=0.001,train_steps=400000",
        batch_size=64,
        published=COPIED if noise == 4096 else (),
    )


TASKS = [
    *map(_copying, (256, 1024, 4096)),
    Task(
        "induction_256",
        induction,
        256,
        LETTERS + 1,
        "attention_window=32,local_block_length=16,num_clusters=16,train_steps=204800",
        batch_size=8,
        contexts=tuple(2**power for power in range(6, 21)),
        published=INDUCED,
    ),
]

"""Needles in a haystack and a phone book, as tasks of bytes that models are trained on.

A text ends with a question; its answer is to be told byte by byte, and counts if all of
it is right, as a greedy decoder would have to write it. The instructions before the
texts of the originals are left out, since these models are trained on nothing else, and
names are of random syllables. All functions take a NumPy generator, a number of texts,
and the bytes of each, with its answer but for the last one, and return `Examples`.

Reference: NVIDIA/RULER (arXiv 2404.06654), `scripts/data/synthetic`;
sjelassi/transformers_ssm_copy (arXiv 2402.01032), `pretrained_exps`.
"""

import functools
import itertools
import string
import uuid

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import published

NOISE = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}. "
QUESTION = (
    "What are all the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text are "
)
CHAIN_QUESTION = (
    "Find all variables that are assigned the value {value} in the text above. They "
    "are: "
)
HOPS = 4
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
RAVEN = (
    "Raven (goombalab/raven), README: about 400M parameters trained on text; at 1K, "
    "2K, 4K, 8K, 16K and 32K tokens"
)
SINGLE_1 = published(
    "sliding window: .298 .110 .062 .034 .012 0; Gated DeltaNet: .992 1.00 .998 .920 "
    ".418 .221; Raven: .998 1.00 .998 .998 .994 .914; Transformer with rotary "
    "positions: 1.00 1.00 0 0 0 0",
    RAVEN,
)


def needles(generator, number, length, is_training=True, *, kind):
    """Makes texts in which one needle among others, or among noise, is asked for.

    The kind is `"single_1"`, a number among five sentences that come again and again;
    `"multikey_2"`, a number among numbers for other words; or `"multikey_3"`, an id
    among ids for other ids.
    """
    return _examples(lambda: _needle(generator, length, kind), number, length)


def _needle(generator, length, kind):
    names = "uuids" if kind == "multikey_3" else "numbers"

    def pair():
        if names == "uuids":
            return tuple(str(uuid.UUID(bytes=generator.bytes(16))) for _ in range(2))
        words = "-".join(_word(generator) for _ in range(2))
        return words, str(generator.integers(10**6, 10**7))

    def other():
        found = key
        while found == key:
            found, number = pair()
        return NEEDLE.format(kind=names, key=found, value=number)

    key, value = pair()
    needle = NEEDLE.format(kind=names, key=key, value=value)
    question = QUESTION.format(kind=names, key=key)
    make = _sentences() if kind == "single_1" else other
    text = _hidden(generator, [needle], make, length - len(question + value))
    return text + question, value


def tracking(generator, number, length, is_training=True):
    """Makes texts with a chain of variables; all that have its value are asked for.

    Names are five capitals; a variable is set to a number of five digits, and four more
    one to the other, in this order.
    """
    return _examples(lambda: _chain(generator, length), number, length)


def _chain(generator, length):
    letters = list(string.ascii_uppercase)
    names = []
    while len(set(names)) < HOPS + 1:
        names = ["".join(generator.choice(letters, 5)) for _ in range(HOPS + 1)]
    value = str(generator.integers(10**4, 10**5))
    chain = [f"VAR {names[0]} = {value}. "]
    chain += [f"VAR {new} = VAR {old}. " for old, new in zip(names, names[1:])]
    question, answer = CHAIN_QUESTION.format(value=value), " ".join(names)
    room = length - len(question + answer)
    return _hidden(generator, chain, _sentences(), room) + question, answer


def phonebook(generator, number, length, is_training=True):
    """Makes phone books; after two of the lines again, one more number is asked for.

    There are as many lines as fit; numbers have ten digits, the first from 6 to 9.
    """
    return _examples(lambda: _book(generator, length), number, length)


def _book(generator, length):
    names = set()

    def line():
        name = ""
        while not name or name in names:
            name = " ".join(_word(generator).title() for _ in range(2))
        names.add(name)
        return f"{name}: {generator.integers(6 * 10**9, 10**10)}\n"

    # The lines that come again, and the one asked for, have at most 26 bytes.
    lines = _filled(line, length - 3 * 26)
    chosen = generator.choice(len(lines), 3, replace=False)
    *shots, asked = (lines[index] for index in chosen)
    name, _, answer = asked.strip().rpartition(" ")
    return "".join([*lines, "\n", *shots, name, " "]), answer


def _word(generator):
    return "".join(generator.choice(SYLLABLES, 3))


def _sentences():
    """A function that returns the sentences of the noise, in turns."""
    return functools.partial(next, itertools.cycle(NOISE))


def _filled(make, room):
    """Pieces of text for as long as there is room."""
    pieces, piece = [], make()
    while (room := room - len(piece)) >= 0:
        pieces.append(piece)
        piece = make()
    return pieces


def _hidden(generator, pieces, make, room):
    """A text of so many bytes, with pieces between its sentences, in their order."""
    hay = _filled(make, room - len("".join(pieces)))
    places = np.sort(generator.integers(len(hay) + 1, size=len(pieces)))
    for place, piece in reversed(list(zip(places, pieces))):
        hay.insert(place, piece)
    return "".join(hay)


def _examples(make, number, length):
    """Texts and answers as bytes; blanks in front make up the length."""
    rows = [make() for _ in range(number)]
    sizes = np.array([[len(answer)] for _, answer in rows])
    texts = [(text + answer).rjust(length + 1) for text, answer in rows]
    tokens = np.array([np.frombuffer(text.encode(), "uint8") for text in texts])
    positions = np.arange(length - sizes.max(), length)
    labels = tokens[:, 1 + positions]
    return Examples.of(tokens[:, :-1], positions, labels, positions >= length - sizes)


def _task(name, make, length=1024, peers=()):
    return Task(
        f"{name}_{length}",
        make,
        length,
        256,
        "num_local_heads=2,num_routed_heads=2,hidden_dim=128,key_dim=32,"
        "feed_forward=geglu,intermediate_dim=256,attention_window=64,"
        "local_block_length=32,num_clusters=32,learning_rate=0.002,train_steps=5000",
        batch_size=8,
        test_rows=200,
        score="whole answers",
        contexts=tuple(2**n for n in range(9, 21) if 2**n > length),
        published=peers,
    )


TASKS = [
    _task(
        "needles_single_1", functools.partial(needles, kind="single_1"), 1024, SINGLE_1
    ),
    _task("needles_multikey_2", functools.partial(needles, kind="multikey_2")),
    _task("needles_multikey_3", functools.partial(needles, kind="multikey_3")),
    _task("needles_tracking", tracking),
    _task("phonebook", phonebook, 512),
]

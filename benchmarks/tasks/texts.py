"""Needles in a haystack and a phone book, as tasks of bytes that models are trained on.

A text ends with a question; its answer is to be told byte by byte, and counts if all of
it is right, as a greedy decoder would have to write it. The instructions before the
texts of the originals are left out: these models are trained on nothing else.

Reference: NVIDIA/RULER (arXiv 2404.06654), `scripts/data/synthetic`;
sjelassi/transformers_ssm_copy (arXiv 2402.01032), `pretrained_exps`.
"""

import functools
import string
import uuid

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Published
from benchmarks.tasks.task import Task

RULER = "RULER (arXiv 2404.06654)"
PHONEBOOK = "Repeat after me (arXiv 2402.01032)"
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


def _words(text):
    return text.split()


ADJECTIVES = _words(
    """
    able bold calm dark easy fair glad hazy idle just kind late mild neat open pale
    quick rare safe tall used vast warm young zesty angry brave clean dusty early
    fancy gentle
    """
)
NOUNS = _words(
    """
    apple bridge candle desert engine forest garden hammer island jacket kettle
    ladder marble needle orange pencil quarry rabbit saddle tunnel umbrella valley
    window yard zebra anchor basket cabin dragon eagle feather goose
    """
)
FIRST_NAMES = _words(
    """
    Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jack Kate Leo Mona Ned Olga Paul Quinn
    Rosa Sam Tina Udo Vera Will Xena Yann Zoe Anna Bob Cora Dirk Ella Fred Gail Hans
    Inga Jim Kira Lars Mary Nick
    """
)
LAST_NAMES = _words(
    """
    Adams Baker Clark Davis Evans Ford Green Hall Irwin Jones King Lewis Moore Nash
    Owen Price Quick Reed Smith Tate Unger Vance West Xu Young Zeller Abbot Brown
    Cook Dunn Ellis Frost Grant Hill Ives James Kemp Long Mills Neal
    """
)


def needles(generator, number, length, is_training=True, *, kind):
    """Makes texts in which one needle among others, or among noise, is asked for.

    Args:
        generator: a NumPy generator.
        number: number of texts.
        length: bytes of a text, its answer but for the last byte included.
        is_training: has no influence. Defaults to True.
        kind: `"single_1"`, a number among five sentences that come again and again;
            `"multikey_2"`, a number among numbers for other words; or `"multikey_3"`,
            an id among ids for other ids.

    Returns:
        `Examples`.
    """
    return _examples(lambda: _needle(generator, length, kind), number, length)


def _needle(generator, length, kind):
    names = "uuids" if kind == "multikey_3" else "numbers"
    key, value = _pair(generator, names)
    needle = NEEDLE.format(kind=names, key=key, value=value)
    question = QUESTION.format(kind=names, key=key)
    room = length - len(needle + question + value)

    def other():
        other_key = key
        while other_key == key:
            other_key, other_value = _pair(generator, names)
        return NEEDLE.format(kind=names, key=other_key, value=other_value)

    hay = _noise(room) if kind == "single_1" else _filled(other, room)
    return _hidden(generator, hay, [needle]) + question, value


def _pair(generator, names):
    if names == "uuids":
        return tuple(str(uuid.UUID(bytes=generator.bytes(16))) for _ in range(2))
    key = f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"
    return key, str(generator.integers(10**6, 10**7))


def tracking(generator, number, length, is_training=True):
    """Makes texts with a chain of variables; all that have its value are asked for.

    As `needles`, which see for the arguments. Names are five capitals; a variable is
    set to a number of five digits, and four more one to the other, in this order.
    """
    return _examples(lambda: _chain(generator, length), number, length)


def _chain(generator, length):
    names = set()
    while len(names) < HOPS + 1:
        letters = generator.choice(list(string.ascii_uppercase), 5)
        names.add("".join(letters))
    names = list(generator.permutation(sorted(names)))
    value = str(generator.integers(10**4, 10**5))
    chain = [f"VAR {names[0]} = {value}. "]
    chain += [f"VAR {new} = VAR {old}. " for old, new in zip(names, names[1:])]
    question, answer = CHAIN_QUESTION.format(value=value), " ".join(names)
    room = length - len("".join(chain) + question + answer)
    return _hidden(generator, _noise(room), chain) + question, answer


def phonebook(generator, number, length, is_training=True):
    """Makes phone books; after two of the lines again, one more number is asked for.

    As `needles`, which see for the arguments. There are as many lines as fit; numbers
    have ten digits, the first from 6 to 9.
    """
    return _examples(lambda: _book(generator, length), number, length)


def _book(generator, length):
    names = [f"{first} {last}: " for first in FIRST_NAMES for last in LAST_NAMES]
    order = iter(generator.permutation(len(names)))

    def line():
        number = generator.integers(6 * 10**9, 10**10)
        return f"{names[next(order)]}{number}\n"

    # The lines that come again, and the one asked for, have at most 26 bytes.
    lines = _filled(line, length - 3 * 26)
    chosen = generator.choice(len(lines), 3, replace=False)
    *shots, asked = (lines[index] for index in chosen)
    name, _, answer = asked.strip().rpartition(" ")
    return "".join([*lines, "\n", *shots, name, " "]), answer


def _filled(make, room):
    """Pieces of text for as long as there is room."""
    pieces, used = [], 0
    while True:
        piece = make()
        used += len(piece)
        if used > room:
            return pieces
        pieces.append(piece)


def _noise(room):
    sentences = iter(NOISE * (room // 16 + 1))
    return _filled(lambda: next(sentences), room)


def _hidden(generator, hay, pieces):
    """The hay with pieces between its sentences, in their order."""
    places = np.sort(generator.integers(len(hay) + 1, size=len(pieces)))
    parts, start = [], 0
    for place, piece in zip(places, pieces):
        parts += [*hay[start:place], piece]
        start = place
    return "".join(parts + hay[start:])


def _examples(make, number, length):
    """Texts and answers as bytes; blanks in front make up the length."""
    rows, longest = [], 0
    for _ in range(number):
        text, answer = make()
        if len(text + answer) > length + 1:
            raise ValueError(
                "`length` must have room for the needles and the question. Received: "
                f"length={length} for {len(text + answer)} bytes. Use longer texts"
            )
        rows.append(((text + answer).rjust(length + 1), len(answer)))
        longest = max(longest, len(answer))
    tokens = np.array([np.frombuffer(text.encode(), "uint8") for text, _ in rows])
    positions = np.arange(length - longest, length) * np.ones((number, 1), "int32")
    weights = positions >= np.array([[length - size] for _, size in rows])
    return Examples.of(tokens[:, :-1], positions, tokens[:, -longest:], weights)


def _task(name, make, length, source, published=(), longest=2**20):
    return Task(
        name=f"{name}_{length}",
        make=make,
        length=length,
        vocabulary=256,
        source=source,
        hyperparameters={
            "num_local_only_layers": 1,
            "num_local_heads": 2,
            "num_routed_heads": 2,
            "hidden_dim": 128,
            "key_dim": 32,
            "feed_forward": "geglu",
            "intermediate_dim": 256,
            "attention_window": 64,
            "local_block_length": 32,
            "num_clusters": 32,
            "learning_rate": 2e-3,
            "train_steps": 5000,
        },
        batch_size=8,
        test_rows=200,
        score="whole answers",
        contexts=tuple(2**n for n in range(9, 21) if length < 2**n <= longest),
        published=published,
    )


_RAVEN = "Raven (goombalab/raven, README): about 400M parameters, trained on text"
_PUBLISHED = tuple(
    Published(f"{system}, single 1 at 1K, 2K, 4K, 8K, 16K, 32K", scores, _RAVEN)
    for system, scores in {
        "sliding window": ".298 .110 .062 .034 .012 0",
        "Gated DeltaNet": ".992 1.00 1.00 .920 .418 .221",
        "Raven": ".998 1.00 .998 .998 .994 .914",
        "Transformer, rotary positions": "1.00 1.00 0 0 0 0",
    }.items()
)
TASKS = [
    *(
        _task(
            f"needles_{kind}",
            functools.partial(needles, kind=kind),
            1024,
            RULER,
            _PUBLISHED if kind == "single_1" else (),
        )
        for kind in ("single_1", "multikey_2", "multikey_3")
    ),
    _task("needles_tracking", tracking, 1024, RULER),
    # There are names for so long a book.
    _task("phonebook", phonebook, 512, PHONEBOOK, longest=2**15),
]

"""The six tasks of MAD: recall, noisy, fuzzy, copying, memorization, compression.

Regenerated data are equal to the authors' in law, not in bytes. Training answers for
every next token where the original does; held-out sequences are scored at the values
of keys that were seen before. All functions take a NumPy generator, a number of
sequences, their length and whether they are for training, and return `Examples`.

Reference: athms/mad-lab (arXiv 2403.17844), `mad/data/instances.py` and
`configs/tasks`.
"""

import functools

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import draw_by_weights
from benchmarks.tasks.task import published

MAP_SEED = 12345  # of what is to be memorized
MODEL = (
    "num_local_only_layers=0,num_local_heads=2,num_routed_heads=2,hidden_dim=128,"
    "key_dim=32,feed_forward=geglu,intermediate_dim=256,attention_window=32,"
    "local_block_length=16,optimizer=adamw,weight_decay=0.1,learning_rate=0.001"
)
RERUN = (
    "HassanJbara/lin-attn-bench, branch mad: mean over MAD's settings of this task, "
    "best of 6 runs of 200 passes each (20,000 steps of 128), width 128"
)
COLUMNS = ("compression", "fuzzy", "recall", "memorization", "noisy", "copying")
PEERS = (
    ("PaTH", ".419 .647 .999 .784 .999 .999"),
    ("Transformer, perhaps with a window of 128", ".432 .565 .905 .788 .897 .998"),
    ("MesaNet", ".347 .515 .999 .750 .999 .894"),
    ("RWKV7", ".462 .180 .999 .886 .999 .949"),
    ("Mamba", ".491 .123 .993 .896 .997 .887"),
    ("Gated DeltaNet", ".435 .286 .999 .552 .999 .997"),
    ("DeltaNet", ".396 .393 .999 .394 .999 .997"),
    ("GLA", ".408 .155 .918 .771 .931 .891"),
    ("GSA", ".397 .212 .769 .831 .821 .852"),
)


def recall(
    generator, number, length, is_training, *, vocabulary, num_noise=0, noise=0.0
):
    """Makes pairs of key and value; the last one repeats a key that was seen.

    The last value is asked for, and not among the tokens. Of the vocabulary half are
    keys and half are values, except for `num_noise` tokens; two of these replace each
    of a share `noise` of the pairs, except for at least one pair.
    """
    pairs, num_keys = (length + 1) // 2, (vocabulary - num_noise) // 2
    rows = np.arange(number)
    keys = generator.integers(num_keys, size=(number, pairs))
    is_noise = generator.random((number, pairs)) < noise
    is_noise[rows, generator.integers(pairs - 1, size=number)] = False
    is_noise[:, -1] = False
    seen = np.zeros((number, num_keys), "bool")
    is_known = np.zeros((number, pairs), "bool")
    for place in range(pairs):
        if place == pairs - 1:
            chances = np.where(seen, 0.0, -np.inf)
            keys[:, -1] = draw_by_weights(generator, number, 1, chances)[:, 0]
        is_known[:, place] = seen[rows, keys[:, place]] & ~is_noise[:, place]
        seen[rows, keys[:, place]] |= ~is_noise[:, place]
    values = num_keys + generator.integers(num_keys, size=(number, num_keys))
    tokens = np.stack([keys, np.take_along_axis(values, keys, axis=1)], axis=2)
    other = generator.integers(num_noise, size=tokens.shape) if num_noise else 0
    tokens = np.where(is_noise[..., None], 2 * num_keys + other, tokens)
    known = np.stack([np.zeros_like(is_known), is_known], axis=2)
    return _next_tokens(*(x.reshape(number, -1) for x in (tokens, known)), is_training)


def fuzzy(generator, number, length, is_training, *, vocabulary):
    """Makes pairs whose keys and values are one to three tokens, as `recall` does.

    Keys are three tokens in held-out sequences. One pair comes somewhere, and again at
    the end; padding goes before all.
    """
    found = [
        _fuzzy_row(generator, length, is_training, vocabulary) for _ in range(number)
    ]
    return _next_tokens(*(np.array(x) for x in zip(*found)), is_training)


def _fuzzy_row(generator, length, is_training, vocabulary, largest=3):
    pad = vocabulary - 1
    kinds = np.arange(pad // 2), np.arange(pad // 2, pad)

    def motif(kind):
        varies = is_training or kind == 1
        size = generator.integers(1, largest + 1) if varies else largest
        return tuple(generator.choice(kinds[kind], size, replace=False).tolist())

    probe, answer = motif(0), motif(1)
    end = length - len(probe + answer) - 2 * largest
    # Early enough for one more pair before it.
    place, values, tokens, known = generator.integers(end - 2 * largest), {}, [], []
    while len(tokens) < end:
        key = probe if len(tokens) >= place and probe not in values else motif(0)
        is_known = key in values
        value = values.setdefault(key, answer if key == probe else motif(1))
        tokens += key + value
        known += [False] * len(key) + [is_known] * len(value)
    tokens += probe + answer
    known += [False] * len(probe) + [True] * len(answer)
    padding = length + 1 - len(tokens)
    return [pad] * padding + tokens, [False] * padding + known


def _next_tokens(tokens, known, is_training):
    places = np.arange(tokens.shape[1] - 1)
    return Examples.of(
        tokens[:, :-1], places, tokens[:, 1:], known[:, 1:] | bool(is_training)
    )


def copying(generator, number, length, is_training, *, vocabulary, content):
    """Makes `content` tokens among blanks, none after the last, asked for in order."""
    blank, sign = vocabulary - 2, vocabulary - 1
    labels = generator.integers(blank, size=(number, content))
    num_blanks = length - 2 * content - 1
    before = generator.integers(content, size=(number, num_blanks, 1))
    places = (before <= np.arange(content)).sum(axis=1) + np.arange(content)
    tokens = np.full((number, length), blank)
    np.put_along_axis(tokens, places, labels, axis=1)
    tokens[:, length - content - 1] = sign
    return Examples.of(tokens, np.arange(length - content, length), labels)


def memorization(generator, number, length, is_training, *, vocabulary):
    """Makes keys of a fixed map, each followed by a token where its value is asked."""
    num_keys, sign = (vocabulary - 1) // 2, vocabulary - 1
    values = np.random.default_rng(MAP_SEED).permutation(np.arange(num_keys, sign))
    keys = generator.integers(num_keys, size=(number, length // 2))
    tokens = np.stack([keys, np.full_like(keys, sign)], axis=2).reshape(number, -1)
    return Examples.of(tokens, np.arange(1, length, 2), values[keys])


def compression(generator, number, length, is_training, *, vocabulary):
    """Makes random tokens, all to be told from the state at the end of the sequence."""
    tokens = generator.integers(vocabulary - 1, size=(number, length))
    tokens[:, -1] = vocabulary - 1
    return Examples.of(tokens, np.arange(length), tokens)


def _task(kind, function, name, length=128, vocabulary=16, rows=12_800, **settings):
    scores = "; ".join(f"{x}: {y.split()[COLUMNS.index(kind)]}" for x, y in PEERS)
    return Task(
        f"mad_{kind}{name}",
        functools.partial(function, vocabulary=vocabulary, **settings),
        # The last token of these is asked for alone.
        length - 1 if function is recall else length,
        vocabulary,
        f"{MODEL},num_clusters={max(4, length // 16)},train_steps={200 * rows // 128}",
        train_rows=rows,
        test_rows=1280,
        score="class accuracy",
        readout="sequence" if kind == "compression" else "dense",
        published=published(scores, RERUN),
    )


def _family(kind, function, base, changes):
    """The tasks of a kind: the baseline, and each change of it alone."""
    named = {"": {}}
    for name, values in changes.items():
        named |= {f"_{name[0]}{value}": {name: value} for value in values}
    return [_task(kind, function, name, **base | own) for name, own in named.items()]


_SIZES = {
    "vocabulary": (32, 64, 128),
    "length": (256, 512, 1024),
    "rows": (6400, 3200, 1600, 800),
}
_NOISY = {"vocabulary": 32, "num_noise": 16, "noise": 0.2}
_NOISES = {"vocabulary": (48, 80, 144), "noise": (0.4, 0.6, 0.8)}
_COPYING = {"length": 256, "content": 16}
_CONTENTS = {"length": (512, 1024), "content": (32, 64, 96)}
_MAP = {"vocabulary": 256, "length": 32, "rows": 256}
_MAPS = {"vocabulary": (512, 1024, 2048, 4096, 8192)}
_SHORT = {"length": (64, 128, 256)}
TASKS = [
    *_family("recall", recall, {}, _SIZES),
    *(  # not MAD's: here the last copy of a key is far away
        _task("recall", recall, f"_v{v}_l{length}", length, v)
        for v in (64, 128)
        for length in (256, 512)
    ),
    *_family("noisy", recall, _NOISY, _SIZES | _NOISES),
    *_family("fuzzy", fuzzy, {}, _SIZES),
    *_family("copying", copying, _COPYING, _SIZES | _CONTENTS),
    *_family("memorization", memorization, _MAP, _MAPS),
    *_family("compression", compression, {"length": 32}, _SIZES | _SHORT),
]

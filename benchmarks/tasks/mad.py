"""The six tasks of MAD: recall, noisy, fuzzy, copying, memorization, compression.

Regenerated data are equal to the authors' in law, not in bytes. Training answers for
every next token where the original does; held-out sequences are scored at the values
of keys that were seen before.

Reference: athms/mad-lab (arXiv 2403.17844), `mad/data/instances.py` and
`configs/tasks`.
"""

import functools

import numpy as np

from benchmarks.tasks.task import Examples
from benchmarks.tasks.task import Published
from benchmarks.tasks.task import Task
from benchmarks.tasks.task import draw_by_weights

MAP_SEED = 12345  # of what is to be memorized
MAD = "MAD (arXiv 2403.17844)"
RERUN = (
    "HassanJbara/lin-attn-bench, branch mad: mean over the settings of MAD, best of 6 "
    "runs of 20,000 steps each"
)
COLUMNS = ("compression", "fuzzy", "recall", "memorization", "noisy", "copying")
PEERS = {
    "PaTH": ".419 .647 .999 .784 .999 .999",
    "Transformer, perhaps local with a window of 128": ".432 .565 .905 .788 .897 .998",
    "MesaNet": ".347 .515 .999 .750 .999 .894",
    "RWKV7": ".462 .180 .999 .886 .999 .949",
    "Mamba": ".491 .123 .993 .896 .997 .887",
    "Gated DeltaNet": ".435 .286 .999 .552 .999 .997",
    "DeltaNet": ".396 .393 .999 .394 .999 .997",
    "GLA": ".408 .155 .918 .771 .931 .891",
    "GSA": ".397 .212 .769 .831 .821 .852",
}


def recall(
    generator, number, length, is_training, *, vocabulary, num_noise=0, noise=0.0
):
    """Makes pairs of key and value; the last one repeats a key that was seen.

    Args:
        generator: a NumPy generator.
        number: number of sequences.
        length: tokens of a sequence; the last value is asked for, and not among them.
        is_training: whether every next token is to be told, or only known values.
        vocabulary: number of tokens: keys, as many values, and noise.
        num_noise: number of tokens that are noise. Defaults to 0.
        noise: share of the pairs, but for one, in whose place is noise. Defaults to 0.

    Returns:
        `Examples` that are asked at all places.
    """
    pairs, num_keys = (length + 1) // 2, (vocabulary - num_noise) // 2
    keys = generator.integers(num_keys, size=(number, pairs))
    is_noise = generator.random((number, pairs)) < noise
    exception = generator.integers(pairs - 1, size=number)
    is_noise[np.arange(number), exception] = is_noise[:, -1] = False
    seen = np.zeros((number, num_keys), "bool")
    is_known = np.zeros((number, pairs), "bool")
    rows = np.arange(number)
    for place in range(pairs):
        if place == pairs - 1:
            chances = np.where(seen, 0.0, -np.inf)
            keys[:, -1] = draw_by_weights(generator, number, 1, chances)[:, 0]
        is_known[:, place] = seen[rows, keys[:, place]] & ~is_noise[:, place]
        seen[rows, keys[:, place]] |= ~is_noise[:, place]
    of_keys = num_keys + generator.integers(num_keys, size=(number, num_keys))
    values = np.take_along_axis(of_keys, keys, axis=1)
    tokens = np.stack([keys, values], axis=2)
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
    tokens, known = (np.array(x) for x in zip(*found))
    return _next_tokens(tokens, known, is_training)


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
        key = motif(0)
        if len(tokens) >= place and probe not in values:
            key = probe
        is_known = key in values
        value = values.setdefault(key, answer if key == probe else motif(1))
        tokens += key + value
        known += [False] * len(key) + [is_known] * len(value)
    tokens += probe + answer
    known += [False] * len(probe) + [True] * len(answer)
    padding = length + 1 - len(tokens)
    return [pad] * padding + tokens, [False] * padding + known


def _next_tokens(tokens, known, is_training):
    positions = np.broadcast_to(np.arange(tokens.shape[1] - 1), tokens[:, 1:].shape)
    weights = np.ones_like(known[:, 1:]) if is_training else known[:, 1:]
    return Examples.of(tokens[:, :-1], positions, tokens[:, 1:], weights)


def copying(generator, number, length, is_training, *, vocabulary, content):
    """Makes tokens among blanks, none behind the last one, that are asked in order.

    Args:
        generator: a NumPy generator.
        number: number of sequences.
        length: tokens of a sequence.
        is_training: has no influence.
        vocabulary: number of tokens, with a blank and a sign to copy.
        content: number of tokens to copy.

    Returns:
        `Examples`.
    """
    blank, sign = vocabulary - 2, vocabulary - 1
    labels = generator.integers(blank, size=(number, content))
    num_blanks = length - 2 * content - 1
    before = generator.integers(content, size=(number, num_blanks, 1))
    places = (before <= np.arange(content)).sum(axis=1) + np.arange(content)
    tokens = np.full((number, length), blank)
    np.put_along_axis(tokens, places, labels, axis=1)
    tokens[:, length - content - 1] = sign
    positions = np.broadcast_to(np.arange(length - content, length), labels.shape)
    return Examples.of(tokens, positions, labels)


def memorization(generator, number, length, is_training, *, vocabulary):
    """Makes keys of a fixed map, each followed by a token where its value is asked."""
    num_keys, sign = (vocabulary - 1) // 2, vocabulary - 1
    values = np.random.default_rng(MAP_SEED).permutation(np.arange(num_keys, sign))
    keys = generator.integers(num_keys, size=(number, length // 2))
    tokens = np.stack([keys, np.full_like(keys, sign)], axis=2).reshape(number, -1)
    positions = np.broadcast_to(np.arange(1, length, 2), keys.shape)
    return Examples.of(tokens, positions, values[keys])


def compression(generator, number, length, is_training, *, vocabulary):
    """Makes random tokens, all to be told from the state at the end of the sequence."""
    tokens = generator.integers(vocabulary - 1, size=(number, length))
    tokens[:, -1] = vocabulary - 1
    positions = np.broadcast_to(np.arange(length), tokens.shape)
    return Examples.of(tokens, positions, tokens)


def _published(column):
    place = COLUMNS.index(column)
    return tuple(
        Published(system, scores.split()[place], RERUN)
        for system, scores in PEERS.items()
    )


def _task(kind, function, name="", length=128, vocabulary=16, rows=12_800, **settings):
    # The last token of these is asked for alone.
    tokens = length - 1 if function is recall else length
    return Task(
        name=f"mad_{kind}{name}",
        make=functools.partial(function, vocabulary=vocabulary, **settings),
        length=tokens,
        vocabulary=vocabulary,
        source=MAD,
        hyperparameters={
            "num_local_only_layers": 0,
            "num_local_heads": 2,
            "num_routed_heads": 2,
            "hidden_dim": 128,
            "key_dim": 32,
            "feed_forward": "geglu",
            "intermediate_dim": 256,
            "attention_window": 32,
            "local_block_length": 16,
            "num_clusters": max(4, length // 16),
            "optimizer": "adamw",
            "weight_decay": 0.1,
            "learning_rate": 1e-3,
            "train_steps": 200 * rows // 128,
        },
        train_rows=rows,
        test_rows=1280,
        score="class accuracy",
        readout="sequence" if kind == "compression" else "dense",
        published=_published(kind),
        peers="20,000 steps of 128, best of 3 learning rates and 2 weight decays",
    )


def _family(kind, function, base, vocabularies, lengths, rows, more=()):
    """The tasks of a kind: the baseline, and each change of it alone."""
    changes = [("", {})]
    changes += [(f"_v{v}", {"vocabulary": v}) for v in vocabularies]
    changes += [(f"_l{length}", {"length": length}) for length in lengths]
    changes += [(f"_n{n}", {"rows": n}) for n in rows]
    changes += more
    return [_task(kind, function, name, **base | change) for name, change in changes]


_ROWS = (6400, 3200, 1600, 800)
_LONG = (256, 512, 1024)
# Not MAD's: at these distance counts, see the page of the tasks.
_FAR = [
    (f"_v{v}_l{length}", {"vocabulary": v, "length": length})
    for v in (64, 128)
    for length in (256, 512)
]
TASKS = [
    *_family("recall", recall, {}, (32, 64, 128), _LONG, _ROWS, _FAR),
    *_family(
        "noisy",
        recall,
        {"vocabulary": 32, "num_noise": 16, "noise": 0.2},
        (48, 80, 144),
        _LONG,
        _ROWS,
        [(f"_noise{noise}", {"noise": noise}) for noise in (0.4, 0.6, 0.8)],
    ),
    *_family("fuzzy", fuzzy, {}, (32, 64, 128), _LONG, _ROWS),
    *_family(
        "copying",
        copying,
        {"length": 256, "content": 16},
        (32, 64, 128),
        (512, 1024),
        _ROWS,
        [(f"_c{content}", {"content": content}) for content in (32, 64, 96)],
    ),
    *_family(
        "memorization",
        memorization,
        {"vocabulary": 256, "length": 32, "rows": 256},
        (512, 1024, 2048, 4096, 8192),
        (),
        (),
    ),
    *_family(
        "compression", compression, {"length": 32}, (32, 64, 128), (64, 128, 256), _ROWS
    ),
]

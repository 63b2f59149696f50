"""Scores of texts under models of keras_hub: how much worse is a changed model?"""

import hashlib
import json
import pathlib

import numpy as np
from keras import ops

from routing_tf.files.atomic import write_whole
from routing_tf.files.progress import progress
from routing_tf.models.score import Score
from routing_tf.models.score import influence_of_later_tokens
from routing_tf.retrofit import keras_hub_internals as internals

#: Name of the file of figures in a preset.
FIGURES = "evaluation.json"


def checked_length(lm, length=None, flag="length", default=None):
    """Returns a number of tokens that a model takes.

    None (the default) for `default`, or that of the preprocessor; at most that of
    learned positions.
    """
    longest = internals.longest_input(lm)
    if length is None:
        length = default or lm.preprocessor.sequence_length
        return min(length, longest or length)
    if longest is not None and length > longest:
        raise ValueError(
            f"`--{flag}` must be at most {longest}, the positions that the model has "
            f"learned. Received: --{flag}={length}"
        )
    return length


def windows_of(lm, texts, length):
    """Cuts texts into windows, `<int32>[number, length]`; ends are left out.

    Raises:
        ValueError: if no text has so many tokens.
    """
    rows = []
    for text in texts:
        ids = ids_of(lm, text)
        rows.extend(ids[: len(ids) // length * length].reshape(-1, length))
    if not rows:
        raise ValueError(
            f"`evaluate` must have a text of at least {length} tokens, the window. "
            f"Received: {len(texts)} shorter texts"
        )
    return np.stack(rows)


def nats(lm, row):
    """Returns the nats per token of a row of ids, after its first quarter."""
    first = max(len(row) // 4, 1)
    found = log_likelihoods(lm, row[None, :-1], row[None, 1:])
    return -float(np.mean(found[0, first - 1 :]))


def log_likelihoods(lm, ids, targets):
    """Returns those of the tokens after each id, `<float32>[rows, length]`."""
    logits = lm({"token_ids": ids, "padding_mask": np.ones_like(ids)}, training=False)
    logits = ops.cast(logits, "float32")
    chosen = ops.take_along_axis(logits, ops.expand_dims(targets, -1), axis=-1)
    found = chosen[..., 0] - ops.logsumexp(logits, axis=-1)
    return ops.convert_to_numpy(found)


def ids_of(lm, text):
    """Returns the ids of a text, without a leading one, `<int32>[length]`."""
    ids = lm.preprocessor.tokenizer(text)
    return np.asarray(ops.convert_to_numpy(ids), "int32")


def score(lm, text, length):
    """Returns the `Score` of all tokens of a text, in separate windows.

    Args:
        lm: a `CausalLM` with a preprocessor.
        text: the text, not empty.
        length: number of tokens of a window.
    """
    ids = ids_of(lm, text)
    scorer = HubScorer(lm)
    rows = [ids[start : start + length] for start in range(0, len(ids), length)]
    found = [scorer.score_row(row) for row in progress(rows, "window")]
    places = np.arange(len(ids))
    return Score(
        log_likelihoods=np.concatenate(found).astype("float64"),
        token_ids=ids,
        tokens=None,
        offsets=np.stack([places, places + 1], axis=-1),
        routing_scope="full",
        num_bytes=len(text.encode()),
        num_words=len(text.split()),
    )


def influence(lm, ids):
    """Returns how much later tokens move scores, see `influence_of_later_tokens`."""
    scorer = HubScorer(lm)
    inputs = scorer.inputs(ids)
    return influence_of_later_tokens(scorer, inputs, np.asarray(ids)[None])


class HubScorer:
    """Scores all tokens of windows, the first one after the id that starts a text.

    Args:
        lm: a `CausalLM` with a preprocessor. Where its tokenizer has no id that starts
            a text, the one that ends it stands there.

    Attributes:
        vocabulary_size: number of ids.
    """

    def __init__(self, lm):
        self._lm, tokenizer = lm, lm.preprocessor.tokenizer
        self.vocabulary_size = lm.backbone.vocabulary_size
        ids = (getattr(tokenizer, f"{x}_token_id", None) for x in ("start", "end"))
        self._start = next((x for x in ids if x is not None), 0)

    def inputs(self, ids):
        """Returns the inputs for a window of ids, `[length]`."""
        ids = np.concatenate([[self._start], ids[:-1]]).astype("int32")[None]
        return {"token_ids": ids, "padding_mask": np.ones_like(ids)}

    def score(self, inputs, targets):
        """Returns the log-likelihoods of targets, `<float32>[rows, length]`."""
        return log_likelihoods(self._lm, inputs["token_ids"], targets)

    def score_row(self, ids):
        """Returns the log-likelihoods of a window of ids, `<float32>[length]`."""
        return self.score(self.inputs(ids), ids[None])[0]


class Figures:
    """Nats per token of windows in a file, each written at once.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self._nats = json.loads(self._path.read_text()) if self._path.exists() else {}

    def add(self, model, row, function):
        """Writes what a function returns for a window, if it is not there yet."""
        nats = self._nats.setdefault(model, {})
        if _name(row) not in nats:
            nats[_name(row)] = function()
            write_whole(self._path, json.dumps(self._nats, indent=1))

    def mean(self, model, rows):
        """Returns the mean over windows."""
        return float(np.mean([self._nats[model][_name(row)] for row in rows]))


def _name(row):
    return hashlib.sha256(row.tobytes()).hexdigest()[:16]

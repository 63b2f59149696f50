"""Nats per token of texts: how much worse is a changed model?"""

import hashlib
import json
import pathlib

import numpy as np
from keras import ops

from routing_tf.files.atomic import write_whole

#: Name of the file of figures in a preset.
FIGURES = "evaluation.json"


def windows_of(tokenizer, texts, length):
    """Cuts texts into windows, `<int32>[number, length]`; ends are left out.

    Raises:
        ValueError: if no text has so many tokens.
    """
    rows = []
    for text in texts:
        ids = np.asarray(ops.convert_to_numpy(tokenizer(text)), "int32")
        rows.extend(ids[: len(ids) // length * length].reshape(-1, length))
    if not rows:
        raise ValueError(
            f"`evaluate` must have a text of at least {length} tokens, the window. "
            f"Received: {len(texts)} shorter texts"
        )
    return np.stack(rows)


def nats(lm, row):
    """Returns the nats per token of one window, after its first quarter.

    Args:
        lm: a `CausalLM`.
        row: ids, `<int32>[length]`.
    """
    logits = lm({"token_ids": row[None], "padding_mask": np.ones_like(row)[None]})
    first = max(len(row) // 4, 1)
    logits = ops.cast(logits[0, first - 1 : -1], "float32")
    chosen = ops.take_along_axis(logits, ops.expand_dims(row[first:], -1), axis=-1)
    losses = ops.logsumexp(logits, axis=-1) - chosen[:, 0]
    return float(ops.convert_to_numpy(ops.mean(losses)))


class Figures:
    """Nats per token of windows in a file, each written at once.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self._nats = json.loads(self._path.read_text()) if self._path.exists() else {}

    def add(self, model, row, function):
        """Writes what a function returns for a window, if it is not there yet.

        Args:
            model: what the model is called.
            row: ids, `<int32>[length]`.
            function: without arguments.
        """
        nats = self._nats.setdefault(model, {})
        if _name(row) not in nats:
            nats[_name(row)] = function()
            write_whole(self._path, json.dumps(self._nats, indent=1))

    def mean(self, model, rows):
        """Returns the mean over windows."""
        return float(np.mean([self._nats[model][_name(row)] for row in rows]))


def _name(row):
    return hashlib.sha256(row.tobytes()).hexdigest()[:16]

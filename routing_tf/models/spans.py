"""Texts to score and their spans, found by offsets or as sub-strings."""

import dataclasses

import numpy as np

from routing_tf.tokenizers.text_stream import token_offsets


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A text and its tokens, of which the first `num_kept` (None: all) are kept.

    `token_ids` are `<int32>[tokens]`, all of them; `offsets` are those of `Score`.
    Text and tokenizer are None if the input was ids.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    text: str | None = None
    tokenizer: object = None
    num_kept: int | None = None

    @property
    def kept_ids(self):
        """The ids that are kept."""
        return self.token_ids[: self.num_kept]

    def cut(self, limit):
        """Returns the sequence with at most `limit` tokens, of whole characters."""
        if len(self.token_ids) <= limit:
            return self
        offsets = self.offsets
        while limit and offsets[limit, 0] < offsets[limit - 1, 1]:
            limit -= 1  # back to the end of a character
        if not limit:
            raise ValueError(
                "`texts` must have a character that fits into the model's sequences. "
                f"Received: {self.text[:20]!r}, whose first has more tokens"
            )
        return dataclasses.replace(self, num_kept=limit)


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens `start` to `end`, which may be cut off."""

    start: int
    end: int
    misaligned_prefix_length: int | None = None


def read_sequences(lm, texts):
    """Returns whether `texts` is a single one, and the list of sequences."""
    if not isinstance(texts, (str, list, tuple, dict)) and not hasattr(texts, "shape"):
        raise ValueError(
            "`texts` must be a string, ids, or a list of them. Received: "
            f"{type(texts).__name__}"
        )
    single = isinstance(texts, str)
    texts = [texts] if single else texts
    if isinstance(texts, (list, tuple)) and any(isinstance(t, str) for t in texts):
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                "`texts` must be strings or ids, not both. Received: a list of "
                f"{sorted({type(text).__name__ for text in texts})}"
            )
        return single, [_sequence(lm, text) for text in texts]
    single, rows = _rows_of_ids(texts)
    sequences = []
    for row in rows:
        places = np.arange(len(row))
        sequences.append(Sequence(row, np.stack([places, places + 1], axis=-1)))
    return single, sequences


def _sequence(lm, text):
    if lm.preprocessor is None:
        raise ValueError(
            "Only a model with a preprocessor, which has the tokenizer, can score "
            "texts; without one, pass ids. Received: a string"
        )
    tokenizer = lm.preprocessor.tokenizer
    token_ids = _tokenize(tokenizer, text)
    offsets = np.zeros((0, 2), "int64")
    if len(token_ids):
        offsets = token_offsets(tokenizer, text, token_ids)
    return Sequence(token_ids, offsets, text, tokenizer)


def _tokenize(tokenizer, text):
    return np.asarray(tokenizer.tokenize(text)).astype("int32")


def _rows_of_ids(token_ids):
    """Returns whether the ids are a single sequence, and a list of arrays.

    These keep their type, so that no id is taken for another one.
    """
    mask = None
    if isinstance(token_ids, dict):
        _check_names(token_ids)
        mask, token_ids = token_ids.get("padding_mask"), token_ids["token_ids"]
    rows = [np.asarray(row) for row in token_ids]
    single = bool(rows) and all(row.ndim == 0 for row in rows)
    rows = [np.array(rows)] if single else rows
    if mask is not None:
        masks = np.asarray(mask).astype("bool")
        masks = [masks] if single else list(masks)
        if [keep.shape for keep in masks] != [row.shape for row in rows]:
            raise ValueError(
                "`padding_mask` must have the shape of `token_ids`. Received: shapes "
                f"{[keep.shape for keep in masks]} and {[row.shape for row in rows]}"
            )
        rows = [row[keep] for row, keep in zip(rows, masks, strict=True)]
    for row in rows:
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise ValueError(
                "`texts` must be strings or lists of ids, or a dict of `token_ids` and "
                f"`padding_mask`. Received: {row!r}"
            )
    return single, rows


def _check_names(inputs):
    others = set(inputs) - {"token_ids", "padding_mask"}
    if others or "token_ids" not in inputs:
        raise ValueError(
            "`texts` must be a dict of `token_ids` and `padding_mask` if it is a dict: "
            "each row is one document. Received: a dict of "
            f"{', '.join(map(str, inputs)) or 'nothing'}. Give each document a row, or "
            "score the places of packed rows by `score(token_ids=..., "
            "segment_ids=...)`"
        )


def spans_of(sequence, target):
    """Returns the span of one entry of `targets`, see `scoring.score`, or a list."""
    if isinstance(target, (list, tuple)) and not _is_pair(target):
        return [_span(sequence, each) for each in target]
    return _span(sequence, target)


def _is_pair(target):
    is_integer = [isinstance(value, (int, np.integer)) for value in target]
    return is_integer == [True, True]


def _span(sequence, target):
    if target is None:
        return Span(0, len(sequence.token_ids))
    if isinstance(target, str):
        return _substring(sequence, target)
    if isinstance(target, np.ndarray):
        target = tuple(target)
    if not isinstance(target, (list, tuple)) or not _is_pair(target):
        raise ValueError(
            "`targets` must be pairs (start, end), sub-strings, or lists of these for "
            f"each text. Received: {target!r}"
        )
    start, end = map(int, target)
    size = int(sequence.offsets[-1, 1])
    if not 0 <= start < end <= size:
        unit = "tokens" if sequence.text is None else "characters"
        raise ValueError(
            f"A span must be (start, end) with 0 <= start < end <= {size}, the number "
            f"of {unit} of its text. Received: {target!r}"
        )
    first = int(np.searchsorted(sequence.offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(sequence.offsets[:, 0], end, side="left"))
    if first >= len(sequence.kept_ids):
        raise ValueError(
            "A span must not be in the part that is cut off, the tokens after the "
            f"first {len(sequence.kept_ids)}. Received: {target!r}"
        )
    return Span(first, last)


def _substring(sequence, part):
    """Finds a sub-string by the release's rule."""
    if sequence.text is None:
        raise ValueError(
            "Sub-strings can only be found in texts; in ids, spans are pairs of "
            f"places. Received: {part!r}"
        )
    part_ids = _tokenize(sequence.tokenizer, part)
    kept_ids = sequence.kept_ids
    text = sequence.text[: sequence.offsets[len(kept_ids) - 1, 1]]
    for dropped in range(len(part_ids)):
        rest = part_ids[dropped:]
        for start in _places(rest, kept_ids)[::-1]:
            end = int(start) + len(rest)
            if _holds(text, part, sequence.offsets[start:end]):
                return Span(int(start), end, dropped)
    reason = "which is not in it"
    if part and part in text:
        reason = "which begins or ends inside a token; give offsets for the whole token"
    elif part and part in sequence.text:
        reason = f"which is after the first {len(kept_ids)} tokens, which are kept"
    raise ValueError(
        f"A sub-string must be found in its text. Received: {part!r}, {reason}"
    )


def _places(part, whole):
    """Returns the places at which one array occurs in another one."""
    count = max(0, len(whole) - len(part) + 1)
    places = np.flatnonzero(whole[:count] == part[0])
    for step in range(1, len(part)):
        places = places[whole[places + step] == part[step]]
    return places


def _holds(text, part, offsets):
    """Returns whether tokens end a place at which the text contains a sub-string."""
    first, last = offsets[0, 0], offsets[-1, 1]
    for end in range(last, offsets[-1, 0] - 1, -1):
        start = end - len(part)
        if start >= 0 and text.startswith(part, start):
            # The other tokens may only contain white space.
            rest = text[first:start] + text[end:last]
            if not rest.strip():
                return True
    return False

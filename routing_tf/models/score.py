"""Scores of targets and of spans of texts, and whether later tokens change them."""

import dataclasses
import math

import keras
import numpy as np
from keras import ops

from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.support.validation import check_choice
from routing_tf.models.compiled import compiled_once
from routing_tf.models.preprocessing import inputs_of
from routing_tf.tokenizers.text_stream import token_offsets

# Changes of a score, in nats, that rounding explains.
ROUNDING = 1e-5
# Places from which tokens are replaced, if there are as many.
NUM_CUTS = 4
MASKS = {
    "images": "padding_mask",
    "token_ids": "padding_mask",
    "decoder_token_ids": "decoder_padding_mask",
}


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


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """How well a model predicts a text, or a span of it.

    Args:
        log_likelihoods: NumPy array `<float64>[tokens]`, the natural logarithm of the
            probability of each token that is scored.
        token_ids: NumPy array `<int32>[tokens]`, the ids of these tokens.
        tokens: their names in the tokenizer's vocabulary; None if the input was ids.
        offsets: NumPy array `<int64>[tokens, 2]`, start and end of the characters of
            each token in the text; places of the tokens if the input was ids.
        routing_scope: `"full"` or `"prefix"`; see `score`.
        num_left_out: number of tokens of the text or span that were cut off and not
            scored.
        num_bytes: UTF-8 bytes of the text that these tokens stand for; None if the
            input was ids.
        num_words: number of words for `perplexity_per_word`: the given number, or that
            of `str.split` for the text of these tokens, which leaves out newlines even
            if they are tokens. None if the input was ids and no number was given.
        misaligned_prefix_length: number of tokens that were dropped from the start of a
            sub-string until it was found; None unless the span is a sub-string.
        num_unknown: number of tokens that stand for words which the vocabulary does not
            have. They tell less than the text does. 0 if the input was ids.
    """

    log_likelihoods: np.ndarray
    token_ids: np.ndarray
    tokens: tuple | None
    offsets: np.ndarray
    routing_scope: str
    num_left_out: int = 0
    num_bytes: int | None = None
    num_words: int | None = None
    misaligned_prefix_length: int | None = None
    num_unknown: int = 0

    @property
    def num_tokens(self):
        """Number of tokens that are scored."""
        return len(self.token_ids)

    @property
    def log_likelihood(self):
        """Natural logarithm of the probability of all these tokens."""
        return float(np.sum(self.log_likelihoods))

    @property
    def loss(self):
        """Mean negative log-likelihood of a token, in nats."""
        return -self.log_likelihood / self.num_tokens

    @property
    def perplexity(self):
        """Perplexity per token."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self):
        """Bits per byte of UTF-8; None if the input was ids, or has unknown words."""
        if self.num_bytes is None or self.num_unknown:
            return None
        return -self.log_likelihood / math.log(2) / self.num_bytes

    @property
    def perplexity_per_word(self):
        """Perplexity per word; None if there are none or their number is unknown."""
        return _exp(-self.log_likelihood / self.num_words) if self.num_words else None


def join(scores):
    """Returns the joint `Score` of several texts or spans of one routing scope.

    Offsets still refer to their own texts.
    """
    scopes = {score.routing_scope for score in scores}
    if len(scopes) != 1:
        raise ValueError(
            "`scores` must contain at least one score, all of the same routing scope. "
            f"Received: {len(scores)} scores of routing scopes {sorted(scopes)}"
        )

    def total(name):
        values = [getattr(score, name) for score in scores]
        return None if None in values else sum(values)

    tokens = [score.tokens for score in scores]
    return Score(
        log_likelihoods=np.concatenate([score.log_likelihoods for score in scores]),
        token_ids=np.concatenate([score.token_ids for score in scores]),
        tokens=None if None in tokens else sum(tokens, ()),
        offsets=np.concatenate([score.offsets for score in scores]),
        routing_scope=scores[0].routing_scope,
        num_left_out=total("num_left_out"),
        num_bytes=total("num_bytes"),
        num_words=total("num_words"),
        misaligned_prefix_length=total("misaligned_prefix_length"),
        num_unknown=total("num_unknown"),
    )


def _exp(value):
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def influence_of_later_tokens(scorer, inputs, targets, scores=None):
    """Replaces later tokens of a batch and compares the scores of earlier ones.

    Each row has a place of its own from which all its tokens are others. All calls have
    one shape, so the scorer compiles at most once.

    Args:
        scorer: a `TokenScorer`.
        inputs: dict of NumPy arrays, as for a call of the model.
        targets: NumPy array of the tokens to score.
        scores: those of the batch; None to compute them.

    Returns:
        The largest change of the score of an earlier token, in nats; None if no row has
        an earlier and a later token.
    """
    name = next(name for name in MASKS if name in inputs)
    tokens = np.asarray(inputs[name])
    real = np.asarray(inputs[MASKS[name]]).astype(bool)
    num_words = scorer.vocabulary_size
    rows = len(tokens)
    lengths = real.reshape(rows, -1).sum(axis=1)
    if num_words < 2 or lengths.max(initial=0) < 2:
        return None
    places = np.arange(targets.shape[1])
    if name == "images":  # each is seen at the next place
        places = scorer.model.places()
    places = np.broadcast_to(places, tokens.shape)
    if scores is None:
        scores = scorer.score(inputs, targets)
    generator, largest = np.random.default_rng(0), 0.0
    num_calls = -(-NUM_CUTS // rows)
    for call in range(num_calls):
        shares = (np.arange(rows) + (call + 0.5) / num_calls) / rows
        cuts = 1 + (shares * np.maximum(lengths - 1, 0)).astype(int)
        cuts = cuts.reshape(-1, *[1] * (tokens.ndim - 1))
        shifts = generator.integers(1, num_words, tokens.shape)
        others = ((tokens + shifts) % num_words).astype(tokens.dtype)
        replaced = np.where((places >= cuts) & real, others, tokens)
        changed = scorer.score({**inputs, name: replaced}, targets)
        is_earlier = (places < cuts) & real
        moved = np.abs(changed - scores)[is_earlier]
        largest = max(largest, float(moved.max(initial=0.0)))
    return largest


def influence_in_text(scorer, token_ids):
    """Does what `influence_of_later_tokens` does for the ids of a text."""
    length = scorer.hyperparameters.max_sequence_length
    targets = np.asarray(token_ids, "int32")[None, :length]
    inputs = {
        "token_ids": np.pad(targets[:, :-1], [(0, 0), (1, 0)]),
        "padding_mask": np.ones(targets.shape, bool),
    }
    return influence_of_later_tokens(scorer, inputs, targets)


class TokenScorer:
    """Negative log probabilities of targets, in nats, under a model of any kind.

    It shares the weights of the model, is compiled separately for each shape, and does
    not change how the model is compiled. `routing_scope` is that of the hyperparameters
    if it is None. `engine` says where the model is, see
    `routing_tf.training.engines.make`; None for one device.
    """

    def __init__(self, lm, routing_scope=None, engine=None):
        self.model = lm
        self.hyperparameters = lm.hyperparameters
        self.routing_scope = routing_scope or self.hyperparameters.routing_scope
        self._score = None
        if engine is not None and engine.num_devices > 1:
            self._score = engine.compile_scorer(lm, self._nats)

    @property
    def vocabulary_size(self):
        return self.hyperparameters.vocabulary_size

    def _nats(self, batch):
        inputs = inputs_of(self.model, batch)
        logits = self.model(inputs, training=False, routing_scope=self.routing_scope)
        return keras.losses.sparse_categorical_crossentropy(
            batch["targets"], ops.cast(logits, "float32"), from_logits=True
        )

    def score(self, inputs, targets):
        """Scores one batch; returns a NumPy array `<float32>` of the targets' shape.

        Inputs and targets are `[batch, length]`, or those of an image model.
        """
        batch = inputs_of(self.model, inputs)
        key = (self.routing_scope, *batch, *targets.shape)
        score = self._score or compiled_once(self.model, self._nats, key)
        return ops.convert_to_numpy(score({**batch, "targets": targets}))


def scope_of(hyperparameters, routing_scope=None):
    """Returns a known routing scope; that of the hyperparameters if None is given."""
    if routing_scope is None:
        routing_scope = hyperparameters.routing_scope
    check_choice("routing_scope", routing_scope, ROUTING_SCOPES)
    return routing_scope


def scope_to_score(hyperparameters, routing_scope=None):
    """Returns the result of `scope_of`, if its likelihoods are possible.

    Refuses `"prefix"` for a model that sees later tokens by a flaw of the release.
    """
    routing_scope = scope_of(hyperparameters, routing_scope)
    leak = hyperparameters.sees_later_tokens(routing_scope)
    if routing_scope == "prefix" and leak:
        raise ValueError(
            "The scope 'prefix' needs a model in which no output depends on later "
            "tokens. "
            f'Received: routing_scope="prefix" for a model with {leak}='
            f'{getattr(hyperparameters, leak)!r}. Use "full"'
        )
    return routing_scope

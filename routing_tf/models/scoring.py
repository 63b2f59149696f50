"""Log-likelihoods of texts under a language model: of all tokens, or of spans."""

import dataclasses
import functools
import math

import keras
import numpy as np
from keras import ops

from routing_tf.files.progress import progress
from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_positive_integer
from routing_tf.models.token_scorer import TokenScorer
from routing_tf.tokenizers.offsets import token_offsets

REDUCTIONS = ("none", "mean", "sum")
SCORING_MODES = ("logits", "loss")
TOO_LONG = ("refuse", "cut", "windows")

# Compiled models that are kept; lengths are powers of two unless padding matters.
_MAX_SCORERS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """How well a model predicts a text, or a span of it.

    Args:
        log_likelihoods: NumPy array `<float64>[tokens]`, the natural logarithm of the
            probability of each token that is scored.
        token_ids: NumPy array `<int32>[tokens]`, these tokens.
        tokens: their names in the tokenizer's vocabulary; None if the input was ids.
        offsets: NumPy array `<int64>[tokens, 2]`, start and end of the characters of
            each token in the text; its place if the input was ids.
        routing_scope: `"full"` or `"prefix"`; see `score`.
        num_left_out: tokens of the text or span that were cut off and not scored.
        num_bytes: UTF-8 bytes of the text that these tokens stand for; None if the
            input was ids.
        num_words: words to which `perplexity_per_word` refers: the given number, or
            that of `str.split` for the text that these tokens stand for, which leaves
            newlines out also where they are tokens. None if the input was ids and
            their number is not given.
        misaligned_prefix_length: tokens that were dropped from the start of a
            sub-string until it was found; None unless the span is a sub-string.
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
        """Bits per byte of UTF-8; None if the input was ids."""
        if self.num_bytes is None:
            return None
        return -self.log_likelihood / math.log(2) / self.num_bytes

    @property
    def perplexity_per_word(self):
        """Perplexity per word; None if there are none or their number is unknown."""
        return _exp(-self.log_likelihood / self.num_words) if self.num_words else None


def score(
    lm,
    texts,
    targets=None,
    reduction="none",
    routing_scope=None,
    batch_size=None,
    too_long="refuse",
    num_words=None,
    verbose=True,
):
    """Scores texts, or spans of them.

    Each text is a sequence of its own behind an id 0: its first token is scored too,
    no end id is added, and no other text of the batch has any influence on it.

    A span of characters has all tokens with a character in it, so a span that ends
    inside of a token has the whole token. A token that holds a part of a character has
    that character. Of subwords, the one that ends a word has also the single space
    behind it that tensor2tensor leaves out, and where it has neither a space nor a
    character, the last character of the word. Words have all white space behind them,
    and the first one also that in front of it.

    A sub-string is found by the release's rule: it is encoded on its own and its
    leading tokens are dropped until the rest stands in the text; the number dropped is
    its `misaligned_prefix_length`. The last such place is taken. Unlike in the release
    a place counts only where the text has the whole sub-string.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        texts: a string or a list of strings; or ids of tokens without a leading id 0:
            `[length]`, `[batch, length]`, a list of lists, or a dict of `token_ids`
            and, where there is padding, `padding_mask`.
        targets: what is scored; None (the default) for all tokens. Else one entry for
            each text, or just the entry if `texts` is a single one. An entry is a
            pair (start, end) of offsets in characters (if the input is ids: in
            tokens), a sub-string, None for all, or a list of these.
        reduction: `"none"` for a `Score` of each text or span (the default), `"mean"`
            or `"sum"` for the mean or sum of the log-likelihoods of its tokens.
        routing_scope: `"full"`: as in the published evaluation. Where clusters choose
            their tokens (expert choice), later tokens take part in the choice, so
            likelihoods leak. `"prefix"`: in expert choice only the tokens up to each
            one compete, as in sampling, with the pairs of full attention and more. Of
            other heads both are the same. None (the default) for that of the
            hyperparameters, `"full"` unless they say otherwise.
        batch_size: sequences in one run; None (the default) for as many as make the
            model's `batch_tokens`. Where padding has influence, as with the release's
            settings, each sequence runs alone and without padding.
        too_long: what happens to texts longer than the model's `max_sequence_length`
            or `truncate_length`. `"refuse"` (the default): a `ValueError`. `"cut"`:
            only the first tokens are kept, up to the end of a character.
            `"windows"`: the text is cut into windows of that length, each scored as a
            sequence of its own.
        num_words: number of words of each text, such as the original token count by
            which the papers normalise, in WikiText-103 with newlines; None (the
            default) for the words between white space, without newlines. One number if
            `texts` is a single one. Only without `targets`.
        verbose: whether progress is shown on stderr if it takes long.

    Returns:
        A `Score`, or a number for the other reductions; for a list of spans a list of
        them, for several texts a list with an item for each text.

    Raises:
        ValueError: for arguments that do not fit, an empty text, a text that is too
            long, a span outside of its text or of what is kept of it, a sub-string that
            is not found, ids that the model does not have, or the scope `"prefix"`
            for a model that sees later tokens by a flaw of the release.

    Example:

    ```python
    from routing_tf import models
    from routing_tf.models import scoring
    from routing_tf.tokenizers import ByteTokenizer

    preprocessor = models.RoutingTransformerCausalLMPreprocessor(ByteTokenizer())
    lm = models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny", preprocessor=preprocessor
    )
    whole = scoring.score(lm, "the cat sat")
    print(whole.bits_per_byte, whole.perplexity_per_word)
    cat, sat = scoring.score(lm, "the cat sat", targets=[(4, 7), "sat"])
    assert cat.num_tokens == 3 and cat.offsets[0, 0] == 4
    ```

    Reference: `SparseTransformerWrapper` of the release's `routing_tf_api.py`.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    if routing_scope is None:
        routing_scope = lm.hyperparameters.routing_scope
    check_choice("routing_scope", routing_scope, ROUTING_SCOPES)
    check_choice("too_long", too_long, TOO_LONG)
    leak = lm.hyperparameters.sees_later_tokens(routing_scope)
    if routing_scope == "prefix" and leak:
        raise ValueError(
            "Prefixes can only be scored if no output depends on later tokens. "
            f'Received: routing_scope="prefix" for a model with {leak}='
            f"{getattr(lm.hyperparameters, leak)!r}"
        )
    single, sequences = _read(lm, texts)
    limit = _limit(lm.hyperparameters)
    for index, sequence in enumerate(sequences):
        _check_sequence(index, sequence, lm.hyperparameters, limit, too_long)
    if too_long == "cut":
        sequences = [sequence.cut(limit) for sequence in sequences]
    targets = _one_for_each(targets, sequences, single, "targets")
    counts = _one_for_each(num_words, sequences, single, "num_words")
    _check_counts(counts, targets, sequences)
    spans = [_spans(sequence, each) for sequence, each in zip(sequences, targets)]
    runs = _runs(sequences, spans, limit)
    if lm.hyperparameters.padding_has_influence:
        batches = [[run] for run in runs]  # unpadded: each depends on itself alone
        length = None
    else:
        length, batches = _batches(lm, runs, limit, batch_size)
    scorers = functools.partial(_scorer, lm, routing_scope)
    values = _log_likelihoods(scorers, sequences, batches, length, verbose)
    results = [
        _results(*each, routing_scope, reduction)
        for each in zip(sequences, spans, values, counts)
    ]
    return results[0] if single else results


def score_positions(
    lm,
    token_ids,
    padding_mask=None,
    scoring_mode="logits",
    layer_intercept_fn=None,
    target_ids=None,
    routing_scope=None,
):
    """Scores each position of a batch, as the `score` of keras_hub's language models.

    Unlike `score` it takes ids as the model itself does, with the leading id 0, and
    returns tensors, which have gradients.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        token_ids: `<int>[batch, length]`.
        padding_mask: `<bool>[batch, length]`, True for real tokens; None (the default)
            for no padding.
        scoring_mode: `"logits"` (the default), or `"loss"` for the negative
            log-likelihoods of `target_ids`.
        layer_intercept_fn: function of a tensor and an index that returns what goes on
            in its place: for -1 token embeddings, else the output of a block, counted
            from 0. None (the default) to change nothing.
        target_ids: `<int>[batch, length]`, the tokens that follow; needed for losses.
        routing_scope: see `score`.

    Returns:
        Logits `<float>[batch, length, vocabulary_size]`, or losses
        `<float>[batch, length]`.

    Raises:
        ValueError: if `scoring_mode` or `routing_scope` is unknown, or losses are to be
            computed without targets.

    Example:

    ```python
    import numpy as np
    from routing_tf import models
    from routing_tf.models import scoring

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    ids = np.array([[0, 101, 106, 34]])
    losses = scoring.score_positions(
        lm, ids, scoring_mode="loss", target_ids=np.roll(ids, -1, axis=1)
    )
    assert losses.shape == (1, 4)
    ```
    """
    check_choice("scoring_mode", scoring_mode, SCORING_MODES)
    if scoring_mode == "loss" and target_ids is None:
        raise ValueError(
            "`target_ids` must be given for losses. Received: target_ids=None with "
            'scoring_mode="loss". Pass the ids that follow, such as '
            "`keras.ops.roll(token_ids, -1, axis=1)`"
        )
    if routing_scope is None:
        routing_scope = lm.hyperparameters.routing_scope
    check_choice("routing_scope", routing_scope, ROUTING_SCOPES)
    token_ids = ops.convert_to_tensor(token_ids, "int32")
    if padding_mask is None:
        padding_mask = ops.ones_like(token_ids)
    padding_mask = ops.cast(padding_mask, "bool")
    hidden = lm.backbone.decode(
        token_ids,
        padding_mask,
        layer_intercept_fn=layer_intercept_fn,
        routing_scope=routing_scope,
    )
    logits = lm.logits_of(hidden)
    if scoring_mode == "logits":
        return logits
    target_ids = ops.convert_to_tensor(target_ids, "int32")
    return keras.losses.sparse_categorical_crossentropy(
        target_ids, ops.cast(logits, "float32"), from_logits=True
    )


def join(scores):
    """Returns the `Score` of several texts or spans together.

    Args:
        scores: list of `Score`, at least one, all of one routing scope. Offsets stay
            those in their own texts.

    Raises:
        ValueError: for no scores, or for those of different routing scopes.
    """
    scopes = {score.routing_scope for score in scores}
    if len(scopes) != 1:
        raise ValueError(
            "`scores` must be at least one, all of the same routing scope. Received: "
            f"{len(scores)} scores of routing scopes {sorted(scopes)}"
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
    )


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A text, or None, and its tokens; ids that were cut off are counted."""

    token_ids: np.ndarray
    offsets: np.ndarray
    text: str | None = None
    tokenizer: object = None
    num_kept: int | None = None

    @property
    def kept_ids(self):
        return self.token_ids[: self.num_kept]

    def cut(self, limit):
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
class _Span:
    """Tokens `start` to `end`; the latter may lie behind a cut."""

    start: int
    end: int
    misaligned_prefix_length: int | None = None


@dataclasses.dataclass(frozen=True)
class _Run:
    """Tokens `start` to `end` of a sequence."""

    index: int
    start: int
    end: int


def _exp(value):
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _limit(hyperparameters):
    """The largest number of tokens in one sequence."""
    limits = hyperparameters.max_sequence_length, hyperparameters.truncate_length
    return min(limit for limit in limits if limit is not None)


def _read(lm, texts):
    """Tells whether `texts` is a single one, and returns the sequences."""
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
        sequences.append(_Sequence(row, np.stack([places, places + 1], axis=-1)))
    return single, sequences


def _sequence(lm, text):
    if lm.preprocessor is None:
        raise ValueError(
            "Texts can only be scored by a model with a preprocessor, which has the "
            "tokenizer; without one pass ids. Received: a string"
        )
    tokenizer = lm.preprocessor.tokenizer
    token_ids = _tokenize(tokenizer, text)
    offsets = np.zeros((0, 2), "int64")
    if len(token_ids):
        offsets = token_offsets(tokenizer, text, token_ids)
    return _Sequence(token_ids, offsets, text, tokenizer)


def _tokenize(tokenizer, text):
    return np.asarray(tokenizer.tokenize(text)).astype("int32")


def _rows_of_ids(token_ids):
    """Tells whether the ids are a single sequence; returns a list of arrays."""
    mask = None
    if isinstance(token_ids, dict):
        mask = token_ids.get("padding_mask")
        token_ids = token_ids.get("token_ids", ())
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
                "`texts` must be strings or lists of ids, of which `token_ids` and "
                f"`padding_mask` may be a dict. Received: {row!r}"
            )
    return single, [row.astype("int32") for row in rows]


def _check_sequence(index, sequence, hyperparameters, limit, too_long):
    token_ids = sequence.token_ids
    if not len(token_ids):
        raise ValueError(
            f"`texts` must have at least one token each. Received: none in text {index}"
        )
    if not 0 <= token_ids.min() <= token_ids.max() < hyperparameters.vocabulary_size:
        raise ValueError(
            f"Ids must be from 0 to {hyperparameters.vocabulary_size - 1}, as the "
            f"model's `vocabulary_size` says. Received: {token_ids.min()} to "
            f"{token_ids.max()} in text {index}"
        )
    if too_long == "refuse" and len(token_ids) > limit:
        raise ValueError(
            f"`texts` must not be longer than the model's sequences, {limit} tokens. "
            f"Received: {len(token_ids)} tokens in text {index}. Shorten it, or pass "
            'too_long="cut" or too_long="windows"'
        )


def _one_for_each(values, sequences, single, name):
    """Returns a list with an entry for each sequence."""
    if values is None:
        return [None] * len(sequences)
    if single:
        return [values]
    is_list = isinstance(values, (list, tuple, np.ndarray))
    if not is_list or len(values) != len(sequences):
        length = len(values) if is_list else "no list"
        raise ValueError(
            f"`{name}` must be a list with one entry for each text. Received: "
            f"{length} for {len(sequences)} texts"
        )
    return list(values)


def _check_counts(counts, targets, sequences):
    for count, target, sequence in zip(counts, targets, sequences):
        if count is None:
            continue
        check_positive_integer("num_words", count)
        if target is not None or sequence.num_kept is not None:
            raise ValueError(
                "`num_words` counts the words of whole texts. Received: "
                f"num_words={count} for a part of a text"
            )


def _spans(sequence, target):
    """Returns the span of a target, or a list of spans."""
    if isinstance(target, (list, tuple)) and not _is_pair(target):
        return [_span(sequence, each) for each in target]
    return _span(sequence, target)


def _is_pair(target):
    is_integer = [isinstance(value, (int, np.integer)) for value in target]
    return is_integer == [True, True]


def _span(sequence, target):
    if target is None:
        return _Span(0, len(sequence.token_ids))
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
            f"A span must not lie in what is cut off, the tokens behind the first "
            f"{len(sequence.kept_ids)}. Received: {target!r}"
        )
    return _Span(first, last)


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
                return _Span(int(start), end, dropped)
    reason = "which is not in it"
    if part and part in text:
        reason = (
            "which begins or ends inside of a token; give offsets for the whole token"
        )
    elif part and part in sequence.text:
        reason = f"which lies behind the first {len(kept_ids)} tokens that are kept"
    raise ValueError(
        f"A sub-string must be found in its text. Received: {part!r}, {reason}"
    )


def _places(part, whole):
    """Returns the places at which one array stands in another one."""
    count = max(0, len(whole) - len(part) + 1)
    places = np.flatnonzero(whole[:count] == part[0])
    for step in range(1, len(part)):
        places = places[whole[places + step] == part[step]]
    return places


def _holds(text, part, offsets):
    """Tells whether tokens are the end of a place where the text has a sub-string."""
    first, last = offsets[0, 0], offsets[-1, 1]
    for end in range(last, offsets[-1, 0] - 1, -1):
        start = end - len(part)
        if start >= 0 and text.startswith(part, start):
            # Of the rest, tokens may only have white space.
            rest = text[first:start] + text[end:last]
            if not rest.strip():
                return True
    return False


def _runs(sequences, spans, limit):
    """Returns the runs that score all spans, each token of them once."""
    runs = []
    for index, (sequence, found) in enumerate(zip(sequences, spans)):
        length = len(sequence.kept_ids)
        wanted = np.zeros(length, "bool")
        for span in found if isinstance(found, list) else [found]:
            wanted[span.start : span.end] = True
        for start in range(0, length, limit):
            end = min(start + limit, length)
            if wanted[start:end].any():
                runs.append(_Run(index, start, end))
    return runs


def _batches(lm, runs, limit, batch_size):
    """Returns the length of the rows and batches of runs, all of the same size.

    Powers of two: a compiled model serves many calls.
    """
    longest = max((run.end - run.start for run in runs), default=1)
    length = min(limit, _power_of_two(longest))
    if batch_size is None:
        batch_size = max(1, lm.hyperparameters.batch_tokens // length)
    check_positive_integer("batch_size", batch_size)
    batch_size = min(batch_size, _power_of_two(len(runs)))
    batches = [runs[i : i + batch_size] for i in range(0, len(runs), batch_size)]
    # The last batch takes its last run more than once.
    return length, [batch + batch[-1:] * (batch_size - len(batch)) for batch in batches]


def _power_of_two(number):
    return 1 << max(0, number - 1).bit_length()


def _log_likelihoods(scorers, sequences, batches, length, verbose):
    """Returns an array for each sequence, with numbers where runs have scored it."""
    values = [np.full(len(sequence.kept_ids), np.nan) for sequence in sequences]
    for batch in progress(batches, "batch", verbose=verbose):
        lengths = np.array([run.end - run.start for run in batch])
        targets = np.zeros((len(batch), length or lengths[0]), "int32")
        for row, run in zip(targets, batch):
            row[: run.end - run.start] = sequences[run.index].token_ids[
                run.start : run.end
            ]
        mask = np.arange(targets.shape[1]) < lengths[:, None]
        token_ids = np.pad(targets[:, :-1], [(0, 0), (1, 0)]) * mask
        inputs = {"token_ids": token_ids, "padding_mask": mask}
        nats = scorers(targets.shape[1]).score(inputs, targets)
        if not np.isfinite(nats[mask]).all():
            raise ValueError(
                "The model's probabilities must be finite. Received: log-likelihoods "
                "that are not; check its weights"
            )
        for row, run in zip(nats, batch):
            scored = row[: run.end - run.start]
            values[run.index][run.start : run.end] = -scored.astype("float64")
    return values


def _results(sequence, found, values, num_words, routing_scope, reduction):
    """Returns the result of a span, or a list of the results of its spans."""

    def result(span):
        score = _score(sequence, span, values, num_words, routing_scope)
        if reduction == "none":
            return score
        return float(getattr(np, reduction)(score.log_likelihoods))

    return [*map(result, found)] if isinstance(found, list) else result(found)


def _score(sequence, span, values, num_words, routing_scope):
    end = min(span.end, len(values))
    token_ids = sequence.token_ids[span.start : end]
    offsets = sequence.offsets[span.start : end]
    tokens = num_bytes = None
    if sequence.text is not None:
        tokens = tuple(sequence.tokenizer.id_to_token(int(id)) for id in token_ids)
        text = sequence.text[offsets[0, 0] : offsets[-1, 1]]
        num_bytes = len(text.encode("utf-8"))
        num_words = len(text.split()) if num_words is None else num_words
    return Score(
        log_likelihoods=values[span.start : end],
        token_ids=token_ids,
        tokens=tokens,
        offsets=offsets,
        routing_scope=routing_scope,
        num_left_out=span.end - end,
        num_bytes=num_bytes,
        num_words=num_words,
        misaligned_prefix_length=span.misaligned_prefix_length,
    )


def _scorer(lm, routing_scope, length):
    """Returns the scorer of a model for rows of one length, which is compiled once.

    Each length has its own: TensorFlow would compile the second one for any length.
    """
    if getattr(lm, "_token_scorers", None) is None:
        # No layers of the model: they would be saved with it.
        object.__setattr__(lm, "_token_scorers", {})
    # What is compiled knows nothing of weights that LoRA or `quantize` add later.
    scorers, key = lm._token_scorers, (routing_scope, length, len(lm.weights))
    if key not in scorers:
        if len(scorers) == _MAX_SCORERS:
            del scorers[next(iter(scorers))]
        scorers[key] = TokenScorer(lm, routing_scope)
    return scorers[key]

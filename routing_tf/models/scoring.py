"""Log-likelihoods of texts under a language model: of all tokens, or of spans."""

import dataclasses

import keras
import numpy as np
from keras import ops

from routing_tf.files.progress import progress
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.models import preprocessing
from routing_tf.models.preprocessing import known_ids
from routing_tf.models.preprocessing import without_segment_ids
from routing_tf.models.score import Score
from routing_tf.models.score import TokenScorer
from routing_tf.models.score import join as join
from routing_tf.models.score import read_sequences
from routing_tf.models.score import scope_of
from routing_tf.models.score import scope_to_score
from routing_tf.models.score import spans_of
from routing_tf.models.steps import longest_input

REDUCTIONS = ("none", "mean", "sum")
SCORING_MODES = ("logits", "loss")
TOO_LONG = ("refuse", "cut", "windows")
# The arguments that `score_positions` alone has; most are those of keras_hub's `score`.
POSITION_ARGUMENTS = {
    "padding_mask",
    "segment_ids",
    "scoring_mode",
    "layer_intercept_fn",
    "target_ids",
}


def is_mask(x):
    """Returns whether an argument is an array of truth values."""
    return "bool" in str(getattr(x, "dtype", ""))


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

    [Causality and likelihoods](docs/causality.md) explains spans and routing scopes.

    Each text is a separate sequence with a leading id 0: its first token is scored too,
    no end id is added, and other texts of the batch have no influence on it.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        texts: a string or a list of strings; or ids of tokens without a leading id 0:
            `[length]`, `[batch, length]`, a list of lists, or a dict of `token_ids`
            and, if there is padding, `padding_mask`.
        targets: the parts to score; None (the default) for all tokens. Otherwise one
            entry for each text, or only the entry if `texts` is a single text. An entry
            is a pair (start, end) of offsets in characters (in tokens if the input is
            ids), a sub-string, None for all, or a list of these.
        reduction: `"none"` for a `Score` of each text or span (the default), `"mean"`
            or `"sum"` for the mean or sum of the log-likelihoods of its tokens.
        routing_scope: `"full"`, `"prefix"`, or None (the default) for that of the
            hyperparameters.
        batch_size: number of sequences in one run; None (the default) for as many as
            fill the model's `batch_tokens`. If padding has influence, as with the
            release's settings, each sequence runs alone and without padding.
        too_long: what happens to texts longer than the model's sequences: `"refuse"`
            (the default) raises a `ValueError`; `"cut"` keeps only their first tokens;
            `"windows"` scores windows of them as separate sequences.
        num_words: number of words of each text; None (the default) for the words
            between white space, without newlines. One number if `texts` is a single
            text. Only without `targets`.
        verbose: whether to show progress on standard error if it takes long.

    Returns:
        A `Score`, or a number for the other reductions; a list of them for a list of
        spans, and a list with one item for each text for several texts.

    Reference: `SparseTransformerWrapper` of the release's `routing_tf_api.py`.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("too_long", too_long, TOO_LONG)
    scorer = TokenScorer(lm, scope_to_score(lm.hyperparameters, routing_scope))
    single, sequences = read_sequences(lm, texts)
    limit = longest_input(lm.hyperparameters)
    sequences = [
        _checked(index, sequence, lm.hyperparameters, limit, too_long)
        for index, sequence in enumerate(sequences)
    ]
    if too_long == "cut":
        sequences = [sequence.cut(limit) for sequence in sequences]
    targets = _one_for_each(targets, sequences, single, "targets")
    counts = _one_for_each(num_words, sequences, single, "num_words")
    _check_counts(counts, targets, sequences)
    spans = [spans_of(*pair) for pair in zip(sequences, targets)]
    runs = _runs(sequences, spans, limit)
    if lm.hyperparameters.padding_has_influence:
        # Unpadded, so that each depends only on itself.
        batches = [(run.end - run.start, [run]) for run in runs]
    else:
        batches = _batches(lm, runs, limit, batch_size)
    values = [np.full(len(sequence.kept_ids), np.nan) for sequence in sequences]
    for length, batch in progress(batches, "batch", verbose=verbose):
        for run, nats in zip(batch, _nats(scorer, sequences, batch, length)):
            values[run.index][run.start : run.end] = -nats

    def result(span, *of_sequence):
        score = _score(span, *of_sequence, scorer.routing_scope)
        if reduction == "none":
            return score
        return float(getattr(np, reduction)(score.log_likelihoods))

    results = [
        [result(span, *rest) for span in found]
        if isinstance(found, list)
        else result(found, *rest)
        for found, *rest in zip(spans, sequences, values, counts)
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
    segment_ids=None,
):
    """Scores each position of a batch, like the `score` of keras_hub's language models.

    Unlike `score`, it takes ids with the leading id 0, as the model itself does, and
    returns tensors, which have gradients.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        token_ids: `<int>[batch, length]`.
        padding_mask: `<bool>[batch, length]`, True for real tokens; None (the default)
            for no padding.
        scoring_mode: `"logits"` (the default), or `"loss"` for the negative
            log-likelihoods of `target_ids`.
        layer_intercept_fn: function of a tensor and an index that returns the tensor to
            use instead: token embeddings for the index -1, otherwise the output of a
            block, counted from 0. None (the default) to change nothing.
        target_ids: `<int>[batch, length]`, the tokens that follow; needed for losses.
        routing_scope: see `score`.
        segment_ids: `<int>[batch, length]`, ids of packed documents; without a mask, 0
            is padding. None (the default) for one document in each row.

    Returns:
        Logits `<float>[batch, length, vocabulary_size]`, or losses
        `<float>[batch, length]`.
    """
    check_choice("scoring_mode", scoring_mode, SCORING_MODES)
    if scoring_mode == "loss" and target_ids is None:
        raise ValueError(
            "`target_ids` must be given for losses. Received: target_ids=None with "
            'scoring_mode="loss". Pass the ids that follow, such as '
            "`keras.ops.roll(token_ids, -1, axis=1)`"
        )
    if token_ids is None or preprocessing.has_texts(token_ids):
        raise ValueError(
            "`token_ids` must be ids, as the model itself takes them. Received: "
            f"{type(token_ids).__name__}. For texts, pass "
            '`lm.preprocessor(texts)[0]["token_ids"]`, or only the texts for a `Score`'
        )
    routing_scope = scope_of(lm.hyperparameters, routing_scope)
    token_ids = ops.convert_to_tensor(token_ids, "int32")
    if segment_ids is not None:
        segment_ids = without_segment_ids({"segment_ids": segment_ids})[1]
        segment_ids = ops.convert_to_tensor(segment_ids)
    if padding_mask is None:
        padding_mask = ops.ones_like(token_ids) if segment_ids is None else segment_ids
    padding_mask = ops.cast(padding_mask, "bool")
    hidden = lm.backbone.decode(
        token_ids,
        padding_mask,
        segment_ids=segment_ids,
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


@dataclasses.dataclass(frozen=True)
class _Run:
    """Tokens `start` to `end` of a sequence."""

    index: int
    start: int
    end: int


def _checked(index, sequence, hyperparameters, limit, too_long):
    """Returns a sequence with ids that the model has, `<int32>`."""
    ids = sequence.token_ids
    if not len(ids):
        raise ValueError(
            f"`texts` must have at least one token each. Received: none in text {index}"
        )
    size = hyperparameters.vocabulary_size
    ids = known_ids(ids, size, f"text {index}")
    if too_long == "refuse" and len(ids) > limit:
        raise ValueError(
            f"`texts` must not be longer than the model's sequences, {limit} tokens. "
            f"Received: {len(ids)} tokens in text {index}. Shorten it, or pass "
            'too_long="cut" or too_long="windows"'
        )
    return dataclasses.replace(sequence, token_ids=ids)


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


def _runs(sequences, spans, limit):
    """Returns the runs that score all spans, each of their tokens once."""
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
    """Returns batches of runs, all of one size, each with the length of its rows.

    Sizes are powers of two, so that a compiled model serves many calls.
    """
    longest = max((run.end - run.start for run in runs), default=1)
    length = min(limit, _power_of_two(longest))
    if batch_size is None:
        batch_size = max(1, lm.hyperparameters.batch_tokens // length)
    check_positive_integer("batch_size", batch_size)
    batch_size = min(batch_size, _power_of_two(len(runs)))
    batches = [runs[i : i + batch_size] for i in range(0, len(runs), batch_size)]
    # The last batch repeats its last run.
    return [
        (length, batch + batch[-1:] * (batch_size - len(batch))) for batch in batches
    ]


def _power_of_two(number):
    return 1 << max(0, number - 1).bit_length()


def _nats(scorer, sequences, batch, length):
    """Returns an array `<float64>` of the tokens of each run of a batch."""
    found = [sequences[run.index].token_ids[run.start : run.end] for run in batch]
    targets = np.stack([np.pad(ids, (0, length - len(ids))) for ids in found])
    mask = np.arange(length) < np.array([[len(ids)] for ids in found])
    token_ids = np.pad(targets[:, :-1], [(0, 0), (1, 0)]) * mask
    nats = scorer.score({"token_ids": token_ids, "padding_mask": mask}, targets)
    if not np.isfinite(nats[mask]).all():
        raise ValueError(
            "The model's probabilities must be finite. Received: log-likelihoods that "
            "are not finite; check its weights"
        )
    return [row[keep].astype("float64") for row, keep in zip(nats, mask)]


def _score(span, sequence, values, num_words, routing_scope):
    end = min(span.end, len(values))
    token_ids = sequence.token_ids[span.start : end]
    offsets = sequence.offsets[span.start : end]
    tokens, num_bytes, num_unknown = None, None, 0
    if sequence.text is not None:
        tokens = tuple(sequence.tokenizer.id_to_token(int(id)) for id in token_ids)
        text = sequence.text[offsets[0, 0] : offsets[-1, 1]]
        num_bytes = len(text.encode("utf-8"))
        num_words = len(text.split()) if num_words is None else num_words
        num_unknown = _num_unknown(sequence, token_ids, offsets)
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
        num_unknown=num_unknown,
    )


def _num_unknown(sequence, token_ids, offsets):
    """Counts unknown words; a text may have the name of their token as a word."""
    unknown = getattr(sequence.tokenizer, "unknown_token_id", None)
    if unknown is None:
        return 0
    name = sequence.tokenizer.id_to_token(unknown)
    places = offsets[token_ids == unknown]
    return sum(sequence.text[start:end].strip() != name for start, end in places)

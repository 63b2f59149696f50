"""Scores of a model: in one pass, in steps, as a SavedModel, and in both scopes."""

import contextlib
import dataclasses
import math
import tempfile

import keras
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.analysis.probe import recorded
from routing_tf.analysis.windows import batches_to_score
from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.heads.routed import TOKEN_CHOICE
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.models.compiled import compiled
from routing_tf.models.preprocessing import OF_TEXT
from routing_tf.models.score import TokenScorer

NEAR = 1e-5


@dataclasses.dataclass(frozen=True)
class DecodingComparison:
    """Scores of a model on the same windows in three ways that should agree.

    Args:
        one_pass: mean bits per token, all tokens at once in the scope `"prefix"`.
        steps: the same token by token, with a cache.
        exported: the same from a SavedModel; None if there is none.
        largest_difference: largest difference of two of them for one token, in bits.
        near_ties: number of decisions of routed heads between scores that differ by
            less than `NEAR`, which rounding may change.
        decisions: number of all decisions about clusters and their members.
        num_windows: number of windows.
    """

    one_pass: float
    steps: float
    exported: float | None
    largest_difference: float
    near_ties: int
    decisions: int
    num_windows: int


def compare_decoding(
    lm, problem, split, num_examples=None, with_export=None, verbose=True
):
    """Scores the same windows in one pass, token by token, and with a SavedModel.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        problem: the problem.
        split: `"train"`, `"validation"` or `"test"`.
        num_examples: number of windows, evenly spaced; None (the default) for all.
        with_export: whether to make a SavedModel, in a temporary folder, unless windows
            pack several documents; None (the default): only on the TensorFlow backend.
        verbose: whether to show progress on standard error. Defaults to True.

    Returns:
        `DecodingComparison`.

    Example:

    ```python
    from routing_tf import models
    from routing_tf import problems
    from routing_tf.analysis import compare_decoding

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    problem = problems.get("python_source", sequence_length=32)
    result = compare_decoding(lm, problem, "test", num_examples=2, with_export=False)
    print(f"{result.one_pass:.4f} {result.steps:.4f} {result.near_ties} near-ties")
    ```
    """
    _check_model(lm)
    if with_export is None:
        with_export = keras.backend.backend() == "tensorflow"
    # The functions of a SavedModel take one document in a row.
    with_export = with_export and not problem.segment_ids
    count, batches = batches_to_score(lm, problem, split, num_examples, verbose)
    ways = [TokenScorer(lm, "prefix").score, scorer_by_steps(lm)]
    near, decisions, nats, weights = 0, 0, [], []
    with contextlib.ExitStack() as stack:
        if with_export:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ways.append(_exported(lm, folder, problem.sequence_length))
        for inputs, targets, batch_weights in batches:
            nats.append(np.stack([way(inputs, targets) for way in ways], axis=-1))
            weights.append(batch_weights)
            found = count_near_ties(lm, inputs)
            near, decisions = near + found[0], decisions + found[1]
    bits = np.concatenate(nats).astype("float64") / math.log(2)
    weights = np.concatenate(weights)
    means = np.sum(bits * weights[..., None], axis=(0, 1)) / weights.sum()
    spread = (bits.max(axis=-1) - bits.min(axis=-1)) * (weights > 0)
    return DecodingComparison(
        one_pass=float(means[0]),
        steps=float(means[1]),
        exported=float(means[2]) if with_export else None,
        largest_difference=float(spread.max()),
        near_ties=near,
        decisions=decisions,
        num_windows=count,
    )


def _check_model(lm):
    h = lm.hyperparameters
    flaw = h.sees_later_tokens("prefix")
    if h.kind != "text" or flaw:
        raise ValueError(
            "Decoding must be compared in language models without an encoder in which "
            f"no later token decides who is a member. Received: kind={h.kind!r}, "
            f"{flaw or 'no such flaw'}"
        )


def scorer_by_steps(lm):
    """Returns the function that scores token by token."""

    def logits(token_ids, segment_ids=None):
        batch, length = ops.shape(token_ids)

        def at(x, place):
            return None if x is None else ops.take(x, place[None], axis=1)

        def step(place, cache, result):
            logits, _, cache = lm.call_with_cache(
                *(at(token_ids, place), cache, place),
                segment_ids=at(segment_ids, place),
            )
            logits = ops.cast(logits, result.dtype)
            return place + 1, cache, ops.slice_update(result, (0, place, 0), logits)

        shape = (batch, length, lm.hyperparameters.vocabulary_size)
        start = ops.zeros((), "int32"), lm.make_cache(batch, length), ops.zeros(shape)
        return ops.while_loop(lambda place, *_: place < length, step, start)[-1]

    call = compiled(lm, logits)

    def score(inputs, targets):
        names = [name for name in ("token_ids", *OF_TEXT) if name in inputs]
        ids = [ops.convert_to_tensor(inputs[name], "int32") for name in names]
        result = call(*ids)
        nats = keras.losses.sparse_categorical_crossentropy(
            targets, ops.cast(result, "float32"), from_logits=True
        )
        return ops.convert_to_numpy(nats)

    return score


def _exported(lm, folder, length):
    """Returns the function that scores with a SavedModel."""
    import tensorflow as tf

    lm.export(folder, routing_scope="prefix", max_length=length + 1)
    loaded = tf.saved_model.load(folder)

    def score(inputs, targets):
        mask = tf.ones(targets.shape, "bool")
        # With a preprocessor, the plain name scores texts.
        score_ids = getattr(loaded, "score_ids", loaded.score)
        result = score_ids(tf.cast(targets, "int32"), mask)
        return -result["log_likelihoods"].numpy()

    return score


def count_near_ties(lm, inputs):
    """Counts near-ties and all decisions of a model, see `DecodingComparison`."""
    near = decisions = 0
    for group, scores in _scores(lm, inputs):
        if isinstance(group, zoo.ThresholdHeads):
            gaps = np.abs(scores)
        elif group.routing in TOKEN_CHOICE:
            best = np.sort(scores, axis=-1)[..., -2:]
            gaps = best[..., 1:] - best[..., :-1]  # none with a single cluster
        else:
            gaps = gaps_of_members(scores, group.attention_window)
        near += int(np.sum(gaps < NEAR))
        decisions += gaps.size
    return near, decisions


def _scores(lm, inputs):
    """Returns pairs of a routed head group and NumPy scores `[B, H, L, K]`."""
    routed = layers.RoutedHeads, zoo.ThresholdHeads
    groups = [x for x in layers_inside(lm) if isinstance(x, routed)]
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(recorded([group], "scores")) for group in groups]
        lm(inputs, training=False, routing_scope="prefix")
    return [
        (group, ops.convert_to_numpy(scores))
        for group, own_calls in zip(groups, calls)
        for _, streams in own_calls
        for scores in streams
    ]


def gaps_of_members(scores, window):
    """Gaps `[tokens, B, H, K]` between the last member and the first other token."""
    gaps = []
    for length in range(window + 1, scores.shape[2] + 1):
        places = (length - window - 1, length - window)
        best = np.partition(scores[:, :, :length], places, axis=2)
        gaps.append(best[:, :, places[1]] - best[:, :, places[0]])
    return np.array(gaps)


@dataclasses.dataclass(frozen=True)
class ScopeComparison:
    """Scores of a model in the two routing scopes, on the same windows.

    Args:
        full: mean bits per token in the scope `"full"`.
        prefix: the same in the scope `"prefix"`.
        standard_error: standard error of their difference over the windows, which are
            paired; None for a single window.
        num_windows: number of windows.
    """

    full: float
    prefix: float
    standard_error: float | None
    num_windows: int

    @property
    def difference(self):
        """The gain from looking at later tokens: `prefix` minus `full`."""
        return self.prefix - self.full


def compare_scopes(lm, problem, split, num_examples=None, verbose=True):
    """Scores the same windows in both routing scopes.

    Args:
        lm: a `RoutingTransformerCausalLM` or `RoutingImageTransformer`.
        problem: the problem.
        split: `"train"`, `"validation"` or `"test"`.
        num_examples: number of windows, evenly spaced; None (the default) for all.
        verbose: whether to show progress on standard error. Defaults to True.

    Returns:
        `ScopeComparison`.

    Example:

    ```python
    from routing_tf import models, problems
    from routing_tf.analysis import compare_scopes

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    problem = problems.get("python_source", sequence_length=64)
    print(compare_scopes(lm, problem, "test", num_examples=2).difference)
    ```
    """
    scorers = [TokenScorer(lm, scope) for scope in ROUTING_SCOPES]
    _, batches = batches_to_score(lm, problem, split, num_examples, verbose)
    bits, tokens = [], []
    for inputs, targets, weights in batches:
        nats = [np.sum(_rows(s.score(inputs, targets) * weights), 1) for s in scorers]
        bits.append(np.stack(nats, axis=-1) / math.log(2))
        tokens.append(np.sum(_rows(weights), axis=1))
    return _compare(np.concatenate(bits), np.concatenate(tokens))


def _rows(x):
    return x.reshape(len(x), -1)


def _compare(bits, tokens):
    """Compares the bits `[windows, scopes]`, given numbers of tokens of windows."""
    bits, tokens = bits[tokens > 0], tokens[tokens > 0]
    full, prefix = bits.sum(axis=0) / tokens.sum()
    error = None
    if len(tokens) > 1:
        # Windows may differ in length, so the mean is a ratio of two sums.
        rest = bits[:, 1] - bits[:, 0] - (prefix - full) * tokens
        error = float(rest.std(ddof=1) * math.sqrt(len(tokens)) / tokens.sum())
    return ScopeComparison(float(full), float(prefix), error, len(tokens))

"""How well a language model predicts a text: in one pass, and from prefixes alone."""

import dataclasses
import math

import keras
import numpy as np

from routing_tf.models.token_scorer import TokenScorer


def batch_size_of(hyperparameters, problem):
    """Returns the number of windows that make `batch_tokens` tokens, at least 1."""
    return max(1, hyperparameters.batch_tokens // problem.sequence_length)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text in one pass.

    Args:
        nats: sum of the weighted negative log probabilities of the tokens.
        num_tokens: sum of their weights.
    """

    nats: float
    num_tokens: float

    @property
    def nats_per_token(self):
        """Mean negative log probability of a token."""
        return self.nats / self.num_tokens

    @property
    def bits(self):
        """The same in bits: for tokens that are bytes, the bits per byte."""
        return self.nats_per_token / math.log(2)


@dataclasses.dataclass(frozen=True)
class PrefixEvaluation:
    """How well a model predicts single tokens from the tokens before them alone.

    Args:
        bits: mean bits per token, each from a run on its prefix.
        standard_error: standard error of `bits`.
        one_pass_bits: mean bits of the same tokens in one pass over their windows.
        difference_error: standard error of `bits - one_pass_bits`, which is paired.
        num_positions: number of tokens.
    """

    bits: float
    standard_error: float
    one_pass_bits: float
    difference_error: float
    num_positions: int


def evaluate(lm, problem, split, num_examples=None, batch_size=None):
    """Scores a split in one pass over each window.

    Heads routed by expert choice see later tokens when they choose the members of a
    cluster: this is the published procedure (routing scope "full"), and
    `evaluate_prefixes` is the one that a sampler can reach.

    Args:
        lm: the language model, or a `TokenScorer` of it, which is compiled once.
        problem: the problem.
        split: `"validation"` or `"test"`.
        num_examples: number of windows, evenly spaced; None for all.
        batch_size: windows per batch; None for the model's `batch_tokens`.

    Returns:
        `Evaluation`.
    """
    scorer = _scorer(lm)
    if batch_size is None:
        batch_size = batch_size_of(scorer.hyperparameters, problem)
    dataset = problem.dataset(split, batch_size, num_examples=num_examples)
    nats = num_tokens = 0.0
    for inputs, targets, weights in dataset.as_numpy_iterator():
        weights = weights.astype("float64")
        nats += float(np.sum(scorer.score(inputs, targets) * weights))
        num_tokens += float(np.sum(weights))
    return Evaluation(nats, num_tokens)


def evaluate_prefixes(lm, problem, split, num_positions=64, seed=0, batch_size=None):
    """Scores single tokens of a split, each from its prefix alone.

    For each position the model runs on the window with everything behind the position
    as padding, so no later token takes part in routing. Positions are spread evenly
    over windows and over places inside them.

    Args:
        lm: the language model, or a `TokenScorer` of it.
        problem: the problem.
        split: `"validation"` or `"test"`.
        num_positions: number of positions, at least 2.
        seed: chooses the positions.
        batch_size: windows per batch; None for the model's `batch_tokens`.

    Returns:
        `PrefixEvaluation`.

    Raises:
        ValueError: for fewer than two positions, or if the model routes padding as
            the release does, so that padding is no way to cut a sequence.
    """
    scorer = _scorer(lm)
    hyperparameters = scorer.hyperparameters
    if num_positions < 2:
        raise ValueError(
            f"`num_positions` must be at least 2. Received: {num_positions}"
        )
    if hyperparameters.compatibility.padding_is_routed:
        raise ValueError(
            "Prefixes can only be scored if padding is not routed. Received: a model "
            "with compatibility.padding_is_routed=True"
        )
    if batch_size is None:
        batch_size = batch_size_of(hyperparameters, problem)
    inputs, targets, positions = _positions(
        problem, split, num_positions, seed, batch_size
    )
    prefixes = scorer.prefixes(inputs, scorer.places(targets.shape[1:]), positions)
    bits = _bits_at(scorer, prefixes, targets, positions, batch_size)
    one_pass = _bits_at(scorer, inputs, targets, positions, batch_size)
    return PrefixEvaluation(
        bits=float(bits.mean()),
        standard_error=_standard_error(bits),
        one_pass_bits=float(one_pass.mean()),
        difference_error=_standard_error(bits - one_pass),
        num_positions=num_positions,
    )


def _standard_error(values):
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _scorer(lm):
    return lm if isinstance(lm, TokenScorer) else TokenScorer(lm)


def _positions(problem, split, num_positions, seed, batch_size):
    """Inputs and targets of windows, one row and one position for each token."""
    batches = problem.dataset(split, batch_size, num_examples=num_positions)
    batches = list(batches.as_numpy_iterator())
    stack = keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *batches)
    inputs, targets, weights = stack
    axes = tuple(range(1, weights.ndim))
    rows = np.flatnonzero(weights.any(axis=axes))
    rows = rows[np.arange(num_positions) * len(rows) // num_positions]
    generator = np.random.default_rng(seed)
    # One position in each of `num_positions` equal shares of a window.
    shares = generator.permutation(num_positions) + generator.random(num_positions)
    lengths = inputs["padding_mask"][rows].sum(axis=axes)
    positions = (shares / num_positions * lengths).astype("int64")
    inputs = {name: array[rows] for name, array in inputs.items()}
    return inputs, targets[rows], positions


def _bits_at(scorer, inputs, targets, positions, batch_size):
    """Bits of one token per row, in batches of one static shape."""
    bits = []
    place_to_index = np.argsort(scorer.places(targets.shape[1:]), axis=None)
    for start in range(0, len(targets), batch_size):
        # The last batch takes rows of the one before once more.
        rows = np.minimum(np.arange(start, start + batch_size), len(targets) - 1)
        nats = scorer.score({k: v[rows] for k, v in inputs.items()}, targets[rows])
        nats = nats.reshape(batch_size, -1)
        chosen = nats[np.arange(batch_size), place_to_index[positions[rows]]]
        bits.append(chosen / math.log(2))
    return np.concatenate(bits)[: len(targets)].astype("float64")


def routes_by_later_tokens(hyperparameters):
    """Tells whether one pass lets later tokens take part in choosing members.

    Of random heads it is their number that does.
    """
    h = hyperparameters
    chosen = h.num_cluster_strided_heads
    if h.routing in ("expert_choice", "random"):
        chosen += h.num_routed_heads
    return chosen > 0 and h.num_local_only_layers < h.num_layers


def report(lm, problem, split, evaluation, num_positions=64, seed=0):
    """Says what the model scores, in lines for a reader.

    Args:
        lm: the language model, or a `TokenScorer` of it.
        problem: the problem.
        split: the split that was scored.
        evaluation: the `Evaluation` of the split or of a part of it.
        num_positions: number of tokens to score from their prefixes too, where that
            differs from one pass; 0 for none.
        seed: chooses these tokens.

    Yields:
        Lines of text.
    """
    scorer = _scorer(lm)
    hyperparameters = scorer.hyperparameters
    metric = problem.metric_name
    yield (
        f"{split}: {evaluation.num_tokens:,.0f} tokens scored, "
        f"{evaluation.nats_per_token:.4f} nats per token"
    )
    yield f'one pass (routing scope "full"): {evaluation.bits:.4f} {metric}'
    if not routes_by_later_tokens(hyperparameters):
        yield "  no head looks at later tokens: prefixes would give the same figure"
        return
    yield (
        "  every window in one run: later tokens take part in choosing the members of "
        "clusters, as in the published evaluation"
    )
    if not num_positions or hyperparameters.compatibility.padding_is_routed:
        return
    prefix = evaluate_prefixes(scorer, problem, split, num_positions, seed)
    yield (
        f"prefixes recomputed: {prefix.bits:.4f} +- {prefix.standard_error:.4f} "
        f"{metric} at {prefix.num_positions} positions"
    )
    yield (
        "  every token from those before it alone, as in sampling; one pass at the "
        f"same positions: {prefix.one_pass_bits:.4f}, so the difference is "
        f"{prefix.bits - prefix.one_pass_bits:+.4f} +- {prefix.difference_error:.4f} "
        "(standard errors)"
    )


def final_line(problem, evaluation):
    """Returns the last line of `train` and `evaluate`."""
    return f"held-out {problem.metric_name}: {evaluation.bits:.4f}"

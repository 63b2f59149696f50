"""How well a language model predicts held-out data."""

import dataclasses
import math

import numpy as np

from routing_tf.files import named_files
from routing_tf.models.token_scorer import TokenScorer


def batch_size_of(hyperparameters, problem):
    """Returns the number of windows that make `batch_tokens` tokens, at least 1.

    Of pairs of texts the longer of the two lengths counts.

    Args:
        hyperparameters: `Hyperparameters` of the model.
        problem: the problem.
    """
    return max(1, hyperparameters.batch_tokens // window_length(problem))


def window_length(problem):
    """Returns the length of a window; of pairs of texts that of the longer ones."""
    if problem.kind == "seq2seq":
        return max(problem.sequence_length, problem.input_length)
    return problem.sequence_length


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a model predicts held-out data.

    Args:
        nats: sum of the weighted negative log probabilities of the tokens.
        num_tokens: sum of their weights.
        routing_scope: `"full"` or `"prefix"`, see `RoutedHeads`.
    """

    nats: float
    num_tokens: float
    routing_scope: str = "full"

    @property
    def nats_per_token(self):
        """Mean negative log probability of a token."""
        return self.nats / self.num_tokens

    @property
    def bits(self):
        """The same in bits: for tokens that are bytes, the bits per byte."""
        return self.nats_per_token / math.log(2)


def evaluate(lm, problem, split, num_examples=None, batch_size=None, stops=None):
    """Scores a split, each window in one pass.

    Args:
        lm: a `TokenScorer`, which is compiled once and has a routing scope; or the
            language model, for that of its hyperparameters.
        problem: the problem.
        split: `"train"`, `"validation"` or `"test"`; each window counts once, also of
            the split that is trained on.
        num_examples: number of windows, evenly spaced; None for all.
        batch_size: windows per batch; None for the model's `batch_tokens`.
        stops: function without arguments that is asked before each batch whether to
            give up; None (the default) to go on to the end.

    Returns:
        `Evaluation`; None if it was given up.
    """
    scorer = lm if isinstance(lm, TokenScorer) else TokenScorer(lm)
    if batch_size is None:
        batch_size = batch_size_of(scorer.hyperparameters, problem)
    dataset = problem.dataset(
        split, batch_size, num_examples=num_examples, training=False
    )
    nats = num_tokens = 0.0
    for inputs, targets, weights in dataset.as_numpy_iterator():
        if stops is not None and stops():
            return None
        weights = weights.astype("float64")
        nats += float(np.sum(scorer.score(inputs, targets) * weights))
        num_tokens += float(np.sum(weights))
    return Evaluation(nats, num_tokens, scorer.routing_scope)


def report(problem, split, evaluation, hyperparameters):
    """Says what the model scores, in lines for a reader.

    Args:
        problem: the problem.
        split: the split that was scored.
        evaluation: the `Evaluation` of the split or of a part of it.
        hyperparameters: `Hyperparameters` of the model.

    Yields:
        Lines of text.
    """
    trained_on = ""
    if split == problem.train_split:
        trained_on = " (not held out: the split that is trained on)"
    yield (
        f"{split}{trained_on}: {evaluation.num_tokens:,.0f} tokens scored, "
        f"{evaluation.nats_per_token:.4f} nats per token, "
        f"{problem.metric(evaluation.nats_per_token, split):.4f} {problem.metric_name}"
    )
    yield describe_scope(hyperparameters, evaluation.routing_scope)


def describe_scope(hyperparameters, routing_scope):
    """Returns a line for a reader: how tokens were scored.

    Args:
        hyperparameters: `Hyperparameters` of the model.
        routing_scope: `"full"` or `"prefix"`.
    """
    line = f'routing scope "{routing_scope}": '
    if hyperparameters.sees_later_tokens(routing_scope):
        return (
            f"{line}WARNING: later tokens take part in choosing the members of "
            "clusters, so the figure leaks: sampling may not reach it"
        )
    if hyperparameters.sees_later_tokens("full"):
        return f"{line}every token from those before it alone, as in sampling"
    return f"{line}no head looks at later tokens, so both scopes are the same"


def final_line(problem, split, evaluation):
    """Returns the last line of `train` and `evaluate`.

    Args:
        problem: the problem.
        split: the split that was scored.
        evaluation: the `Evaluation` of it.
    """
    value = problem.metric(evaluation.nats_per_token, split)
    return f"held-out {problem.metric_name}: {value:.4f}"


def score_file(lm, path, routing_scope):
    """Scores one file; every token once.

    Args:
        lm: the language model.
        path: path of the file.
        routing_scope: `"full"`, `"prefix"` or None, see `score`.

    Returns:
        `scoring.Score`.

    Raises:
        ValueError: if it is no text in UTF-8, or cannot be scored.
    """
    try:
        content = named_files.read_file(path).decode("utf-8")
        return lm.score(content, routing_scope=routing_scope, too_long="windows")
    except ValueError as error:
        raise ValueError(f"{path} cannot be scored: {error}") from error


def describe_score(name, score):
    """Returns a line for a reader: what a text scores.

    Args:
        name: what was scored.
        score: its `scoring.Score`.
    """
    line = (
        f"{name}: {score.num_tokens:,} tokens, {score.bits_per_byte:.4f} bits per "
        f"byte, perplexity {score.perplexity:,.4f} per token"
    )
    if score.perplexity_per_word is None:
        return f"{line}; no words"
    per_word = f"{score.perplexity_per_word:.6g}"
    if math.isinf(score.perplexity_per_word):
        per_word = "more than 1e+308"
    return f"{line}, {per_word} per word ({score.num_words:,} words)"

"""How well a language model predicts held-out data."""

import dataclasses
import math

import numpy as np

from routing_tf.files import named_files
from routing_tf.models.score import ROUNDING
from routing_tf.models.score import TokenScorer
from routing_tf.models.score import influence_of_later_tokens

# Bytes of a word: more in the mean are those of a language written without spaces.
LONGEST_WORD = 64


def batch_size_of(hyperparameters, problem):
    """Returns the number of windows with `batch_tokens` tokens, at least 1."""
    return max(1, hyperparameters.batch_tokens // window_length(problem))


def window_length(problem):
    """Returns the length of a window; for pairs of texts, the longer length."""
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
        influence: largest change of a score in nats when later tokens were replaced, in
            the first batch; None (the default) if that was not tried.
    """

    nats: float
    num_tokens: float
    routing_scope: str = "full"
    influence: float | None = None

    @property
    def nats_per_token(self):
        """Mean negative log probability of a token."""
        return self.nats / self.num_tokens

    @property
    def bits(self):
        """The same in bits: for tokens that are bytes, the bits per byte."""
        return self.nats_per_token / math.log(2)


def evaluate(lm, problem, split, num_examples=None, batch_size=None, stops=None):
    """Scores a split, each window in one pass; None if it was stopped.

    `lm` is a language model, for the routing scope of its hyperparameters, or a
    `TokenScorer`, which has a scope and is compiled once. Each window counts once, also
    in the split that is trained on. `num_examples` is a number of evenly spaced
    windows; None for all. Before each batch, `stops()` says whether to stop. Whether
    later tokens influence scores is tried if the settings do not tell that they do.
    """
    scorer = lm if isinstance(lm, TokenScorer) else TokenScorer(lm)
    if batch_size is None:
        batch_size = batch_size_of(scorer.hyperparameters, problem)
    dataset = problem.dataset(
        split, batch_size, num_examples=num_examples, training=False
    )
    nats, num_tokens, influence = 0.0, 0.0, None
    leaks = scorer.hyperparameters.sees_later_tokens(scorer.routing_scope)
    for inputs, targets, weights in dataset.as_numpy_iterator():
        if stops is not None and stops():
            return None
        weights = weights.astype("float64")
        scores = scorer.score(inputs, targets)
        if influence is None and not leaks:
            influence = influence_of_later_tokens(scorer, inputs, targets, scores)
        nats += float(np.sum(scores * weights))
        num_tokens += float(np.sum(weights))
    return Evaluation(nats, num_tokens, scorer.routing_scope, influence)


def report(problem, split, evaluation, hyperparameters):
    """Yields lines for people: the scores of a model on a split or a part of it."""
    trained_on = ""
    if split == problem.train_split:
        trained_on = " (not held out: the split that is trained on)"
    yield (
        f"{split}{trained_on}: {evaluation.num_tokens:,.0f} tokens scored, "
        f"{evaluation.nats_per_token:.4f} nats per token, "
        f"{problem.metric(evaluation.nats_per_token, split):.4f} {problem.metric_name}"
    )
    scope, influence = evaluation.routing_scope, evaluation.influence
    yield describe_scope(hyperparameters, scope, influence)


def describe_scope(hyperparameters, routing_scope, influence):
    """Returns a line for people that says how tokens were scored.

    `influence` is as in `Evaluation`. What was not tried is not claimed.
    """
    line = f'routing scope "{routing_scope}": '
    if hyperparameters.sees_later_tokens(routing_scope):
        return (
            f"{line}WARNING: later tokens take part in choosing the members of "
            "clusters, so the score leaks: sampling may not reach it"
        )
    if influence is None or not influence <= ROUNDING:
        return line + describe_influence(influence)
    if hyperparameters.sees_later_tokens("full"):
        return f"{line}every token only from those before it, as in sampling"
    return describe_influence(influence)


def describe_influence(influence):
    """Returns a line for people: whether later tokens were found to move scores."""
    if influence is None:
        return "whether later tokens influence a score was not tried"
    if influence <= ROUNDING:
        return "strictly causal: no later token influences a score"
    return (
        "WARNING: other later tokens moved scores of earlier ones, by up to "
        f"{influence:.2g} nats, so the score leaks: sampling may not reach it. Do all "
        "layers follow the causal mask?"
    )


def final_line(problem, split, evaluation):
    """Returns the last line of `train` and `evaluate`."""
    value = problem.metric(evaluation.nats_per_token, split)
    return f"held-out {problem.metric_name}: {value:.4f}"


def score_files(paths, score):
    """Scores files of UTF-8 text that are not empty, and prints a line for each.

    Args:
        paths: list of paths, of `--texts`.
        score: function of a text that returns its `Score`.

    Returns:
        List of `Score`.
    """
    scores = []
    for path in paths:
        text = named_files.read_file(path, "texts").decode("utf-8")
        if not text:
            print(f"{path}: empty")
            continue
        try:
            scores.append(score(text))
        except ValueError as error:
            raise ValueError(f"{path} cannot be scored: {error}") from error
        print(describe_score(path, scores[-1]), flush=True)
    if not scores:
        raise ValueError(
            "`--texts` must name a file that is not empty. Received: "
            f"{', '.join(map(str, paths))}"
        )
    return scores


def describe_score(name, score, why_no_words=None):
    """Returns a line for people: the scores of a text.

    `why_no_words` says why there is no perplexity per word; None to find out.
    """
    line = f"{name}: {score.num_tokens:,} tokens"
    if score.num_unknown:
        share = score.num_unknown / score.num_tokens
        line += f", {share:.2%} of them words that the vocabulary does not have"
    if score.bits_per_byte is not None:
        line += f", {score.bits_per_byte:.4f} bits per byte"
    line += f", perplexity {_perplexity(score.perplexity)} per token"
    why_no_words = why_no_words or no_words(score)
    if why_no_words:
        return f"{line}; {why_no_words}"
    per_word = _perplexity(score.perplexity_per_word)
    return f"{line}, {per_word} per word ({score.num_words:,} words)"


def no_words(score):
    """Returns why a perplexity per word would say nothing; None where it does."""
    if not score.num_words:
        return "no words"
    if (score.num_bytes or 0) > LONGEST_WORD * score.num_words:
        return "no perplexity per word, as spaces do not part the words"
    return None


def final_line_of_texts(score):
    """Returns the last line of `evaluate --texts`."""
    if score.bits_per_byte is None:
        return f"held-out perplexity per token: {_perplexity(score.perplexity)}"
    return f"held-out bits per byte: {score.bits_per_byte:.4f}"


def _perplexity(value):
    if math.isinf(value):
        return "more than 1e+308"
    return f"{value:,.4f}" if value < 1e9 else f"{value:.4g}"

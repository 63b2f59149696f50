"""Scores of a model in the two routing scopes."""

import dataclasses
import math

import numpy as np

from routing_tf.analysis.windows import batches_to_score
from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.models.token_scorer import TokenScorer


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

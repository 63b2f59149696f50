"""Metrics of texts."""

import math


def perplexity(nats):
    """Returns the exponential; infinity if it is too large for a float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf

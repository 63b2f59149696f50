"""Divergences of attention distributions."""

import numpy as np

EPSILON = 1e-5


def jensen_shannon_divergence(a, b):
    """Returns the Jensen-Shannon divergence of two sets of distributions.

    Args:
        a: array `[batch, length]` of numbers of at least 0; rows are divided by their
            sums.
        b: the same.

    Returns:
        The mean over the batch, in nats, between 0 and about 0.6931. The smoothing of
        the release raises it for distributions over many places: two that are equal
        and uniform over 8,192 places have 0.08.

    Example:

    ```python
    import numpy as np
    from routing_tf.analysis import jensen_shannon_divergence

    a, b = np.eye(2)[:1], np.eye(2)[1:]
    assert 0.69 < jensen_shannon_divergence(a, b) < 0.70
    ```

    Reference: paper, section 5.4 and Table 6; `jensen_shannon_divergence` of the
    release.
    """
    a, b = (np.asarray(x) / np.sum(x, axis=-1, keepdims=True) for x in (a, b))
    middle = (a + b) / 2
    divergence = kl_divergence(a, middle) + kl_divergence(b, middle)
    return float(np.mean(divergence) / 2)


def kl_divergence(a, b):
    """Returns the Kullback-Leibler divergence of `b` from `a`, smoothed.

    Args:
        a: array `[batch, length]` of probabilities.
        b: the same.

    Returns:
        Array `[batch]`, in nats.

    Reference: `kl_divergence` of the release, which adds 1e-5 to divisor and quotient.
    """
    return -np.sum(a * np.log(b / (a + EPSILON) + EPSILON), axis=-1)

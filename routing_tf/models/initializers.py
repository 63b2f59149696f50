"""The initializers of a model's weights, from hyperparameters."""

import math

import keras


def of_kernels(hyperparameters, num_summed=1):
    """Returns the initializer of kernels.

    For the last kernels of `num_summed` parts that write into one sum, weights are
    divided by the square root of this number.
    """
    h = hyperparameters
    if h.initializer == "fan_in_normal":
        return keras.initializers.VarianceScaling(
            scale=h.initializer_gain**2 / num_summed,
            mode="fan_in",
            distribution="untruncated_normal",
        )
    return keras.initializers.VarianceScaling(
        scale=h.initializer_gain / num_summed, mode="fan_avg", distribution="uniform"
    )


def of_embeddings(hyperparameters, size, num_summed=1):
    """Returns the initializer of tables of vectors of a size.

    The vectors of `num_summed` tables are added up.
    """
    h = hyperparameters
    if h.initializer == "fan_in_normal":
        stddev = h.initializer_gain / math.sqrt(size * num_summed)
        return keras.initializers.RandomNormal(stddev=stddev)
    return of_kernels(h)


def of_logits(hyperparameters):
    """Returns the initializer of the kernel of the logits."""
    if hyperparameters.initializer == "fan_in_normal":
        return keras.initializers.Zeros()
    return of_kernels(hyperparameters)

"""Where the tokens of a mixture of experts go, and the losses that even them out."""

import typing

from keras import ops

from routing_tf.layers.support.tensors import largest

PLACES = ("by_token", "by_choice", "by_probability")


class Routes(typing.NamedTuple):
    """Where tokens go, `[batch, length, top_k]`: experts, most probable first.

    `weights` multiply their outputs; `places` count the tokens of the call that had
    chosen the expert before. `is_chosen` is False for padding and for second choices
    that were left out, and `is_placed` also where there was no place.
    """

    experts: typing.Any
    weights: typing.Any
    places: typing.Any
    is_chosen: typing.Any
    is_placed: typing.Any


def places_of(choices, probabilities, order):
    """Counts the choices of the same expert that come before each.

    The choices `<int32>[batch, length, top_k, num_experts]` are 1 for the expert, or
    all 0; `order` is one of `PLACES`, see `MixtureOfExperts`.
    """
    if order == "by_token":
        return _earlier(choices)
    if order == "by_choice":
        return _swapped(_earlier(_swapped(choices)))
    tokens = ops.argsort(-largest(probabilities, axis=-1), axis=1)
    choices = ops.take_along_axis(choices, tokens[..., None, None], axis=1)
    places = _swapped(_earlier(_swapped(choices)))
    back = ops.argsort(tokens, axis=1)
    return ops.take_along_axis(places, back[..., None], axis=1)


def _earlier(choices):
    """Counts the choices of the same expert before each, in the order of two axes.

    From `<int32>[batch, first axis, second axis, num_experts]`.
    """
    batch, first, second, experts = ops.shape(choices)
    ordered = ops.reshape(choices, (batch, first * second, experts))
    before = ops.cumsum(ordered, axis=1, dtype="int32") - ordered
    count = ops.sum(before * ordered, axis=-1)
    return ops.reshape(count, (batch, first, second))


def load_sums(routes, real, num_experts):
    """Counts the tokens whose first choice each expert is, `<float32>[num_experts]`."""
    first = ops.one_hot(routes.experts[..., 0], num_experts, dtype="float32")
    return ops.sum(first * real[..., None], axis=(0, 1))


def load_balance(own, counts):
    """Returns the load balancing loss of Switch, 1 if all experts are equal."""
    (probabilities,) = own
    tokens, first = counts
    squares = ops.square(ops.maximum(tokens, 1.0))
    return first.shape[0] * ops.sum(first * probabilities) / squares


def router_z_sum(logits, real):
    """Sums up the router z-loss of ST-MoE over tokens; `real` is as in `load_sums`."""
    return ops.sum(ops.logsumexp(logits, axis=-1) ** 2 * real)


def router_z(own, counts):
    """Computes the mean of `router_z_sum`; `counts` are those of `load_balance`."""
    return own[0] / ops.maximum(counts[0], 1.0)


def num_dropped(routes):
    """Counts the choices that found no place."""
    dropped = ops.logical_and(routes.is_chosen, ops.logical_not(routes.is_placed))
    return ops.sum(ops.cast(dropped, "float32"))


def _swapped(x):
    """Swaps axes 1 and 2."""
    return ops.swapaxes(x, 1, 2)

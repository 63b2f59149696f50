"""Losses of the global batch, however replicas and parts of a step share it."""

import typing

from keras import ops

from routing_tf.layers.support.open_lists import OpenLists
from routing_tf.layers.support.replicas import num_replicas
from routing_tf.layers.support.replicas import sum_over_replicas

_open = OpenLists()


class BatchLoss(typing.NamedTuple):
    """The share that one call has in a loss of the global batch.

    Args:
        layer: the layer that adds it; its `loss_names` has all names of its losses.
        name: name of the loss; None for a part of the clustering loss.
        own: list of sums over the tokens of the call, through which gradients flow.
        counts: list of tensors of fixed shapes, sums over the tokens of the call that
            need no gradients, such as the number of tokens.
        of: function of `own` and of the totals of `counts` over the global batch that
            returns a scalar. It is linear in `own`, so shares add up to the loss.
    """

    layer: typing.Any
    name: str | None
    own: list
    counts: list
    of: typing.Callable


def add_batch_loss(layer, name, own, counts, of):
    """Adds a loss of the global batch to a layer, inside its call.

    Keras averages the losses of replicas. They are scaled so that this mean is the loss
    of the global batch, wherever the padding is. Arguments are those of `BatchLoss`.
    """
    counts = [ops.stop_gradient(count) for count in counts]
    held = _open.innermost
    if held is not None:
        held.append(BatchLoss(layer, name, own, counts, of))
        return
    layer.add_loss(num_replicas() * of(own, sum_over_replicas(counts)))


def hold_losses():
    """Collects `BatchLoss`es instead of adding them to layers, inside the context.

    For those who add up the `counts` over parts of a batch, too. Returns a context
    manager that gives the list.
    """
    return _open.opened()


def mean(own, totals):
    """Returns sums over tokens divided by their numbers: `of` of a mean."""
    shares = zip(own, totals, strict=True)
    return sum(total / ops.maximum(number, 1.0) for total, number in shares)

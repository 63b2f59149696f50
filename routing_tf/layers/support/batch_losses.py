"""Losses of the global batch, however replicas and parts of a step share it."""

import typing

from keras import ops

from routing_tf.layers.support.open_lists import OpenLists
from routing_tf.layers.support.replicas import num_replicas
from routing_tf.layers.support.replicas import sum_over_replicas

_open = OpenLists()


class BatchLoss(typing.NamedTuple):
    """The share of one call in a loss of the global batch.

    `of` maps `own`, sums over the tokens of the call through which gradients flow, and
    the totals of `counts` over the global batch to a scalar. It is linear in `own`.
    """

    layer: typing.Any
    name: str | None
    own: list
    counts: list
    of: typing.Callable


def add_batch_loss(layer, name, own, counts, of):
    """Adds a loss of the global batch to a layer, inside its call; see `BatchLoss`.

    Keras averages the losses of replicas. They are scaled so that this mean is the loss
    of the global batch, wherever the padding is. `name` is one of the layer's
    `loss_names`; None for a part of the clustering loss.
    """
    counts = [ops.stop_gradient(count) for count in counts]
    held = _open.innermost
    if held is not None:
        held.append(BatchLoss(layer, name, own, counts, of))
        return
    replicas = num_replicas()
    if replicas > 1:
        counts = sum_over_replicas(counts)
    layer.add_loss(replicas * of(own, counts))


def hold_losses():
    """Collects `BatchLoss`es in a list instead of adding them, inside the context."""
    return _open.opened()


def mean(own, totals):
    """Returns sums over tokens divided by their numbers: `of` of a mean."""
    shares = zip(own, totals, strict=True)
    return sum(total / ops.maximum(number, 1.0) for total, number in shares)

"""Losses and updates of a whole batch, whose parts and replicas are computed apart."""

import contextlib
import threading
import typing

from keras import ops

from routing_tf.layers.support.replicas import num_replicas
from routing_tf.layers.support.replicas import sum_over_replicas


class OpenLists(threading.local):
    """Lists that are open, the innermost last: each thread has its own.

    A strategy runs each replica in a thread.
    """

    def __init__(self):
        self._lists = []

    @contextlib.contextmanager
    def opened(self):
        """Yields a new list, which is the innermost inside the context."""
        new = []
        self._lists.append(new)
        try:
            yield new
        finally:
            self._lists.pop()

    @property
    def innermost(self):
        """The innermost list; None if none is open."""
        return self._lists[-1] if self._lists else None


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


_held = OpenLists()


def hold_updates():
    """Collects the updates of centroids instead of making them, inside the context.

    For training loops that split a batch into parts: add up the statistics of
    `OnlineKMeans` over the parts and replicas; `move` then updates the centroids as the
    whole batch would. Open it inside the function that a strategy runs on each replica,
    or that `tf.function` or `jax.jit` compiles.

    Returns:
        A context manager that gives a list of pairs: a layer and its statistics, a flat
        list of float32 tensors of fixed shapes.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    kmeans = layers.OnlineKMeans(num_clusters=4)
    totals = None
    for part in np.random.normal(size=(2, 1, 3, 10, 6)).astype("float32"):
        with layers.hold_updates() as updates:
            kmeans(part, training=True)
        ((layer, statistics),) = updates
        totals = statistics if totals is None else map(sum, zip(totals, statistics))
    kmeans.move(list(totals))
    ```
    """
    return _held.opened()


def update_or_hold(layer, statistics):
    """Moves a layer by the statistics of one call, or passes them to `hold_updates`.

    The layer has a method `move`, as `OnlineKMeans` has.
    """
    updates = _held.innermost
    if updates is None:
        layer.move(sum_over_replicas(statistics))
    else:
        updates.append((layer, statistics))

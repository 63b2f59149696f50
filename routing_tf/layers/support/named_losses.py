"""Losses with names, which training logs apart from each other."""

import contextlib

from routing_tf.layers.support.open_lists import OpenLists

_open = OpenLists()


def add_named_loss(layer, name, loss):
    """Adds a loss to a layer, inside its call.

    Args:
        layer: the layer; its `loss_names` has all names of its losses.
        name: name of the loss; None for a part of the clustering loss.
        loss: scalar tensor.
    """
    layer.add_loss(loss)
    named = _open.innermost
    if named is not None and name is not None:
        named.append((loss, name))


@contextlib.contextmanager
def named_losses():
    """Tells the names of losses that are added inside the context.

    Yields:
        A function of a list of losses that returns the name of each, or None.
    """
    with _open.opened() as named:
        yield lambda losses: [
            next((name for known, name in named if known is loss), None)
            for loss in losses
        ]

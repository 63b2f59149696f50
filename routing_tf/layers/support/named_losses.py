"""Losses with names, which training logs apart from each other."""

import contextlib
import threading

# Each thread has its own losses: a strategy runs each replica in a thread.
_open = threading.local()


def add_named_loss(layer, name, loss):
    """Adds a loss to a layer, inside its call.

    Args:
        layer: the layer; its `loss_names` has all names of its losses.
        name: name of the loss; None for a part of the clustering loss.
        loss: scalar tensor.
    """
    layer.add_loss(loss)
    stack = _stack()
    if stack and name is not None:
        stack[-1].append((loss, name))


@contextlib.contextmanager
def named_losses():
    """Tells the names of losses that are added inside the context.

    Yields:
        A function of a list of losses that returns the name of each, or None.
    """
    stack, named = _stack(), []
    stack.append(named)

    def names_of(losses):
        return [
            next((name for known, name in named if known is loss), None)
            for loss in losses
        ]

    try:
        yield names_of
    finally:
        stack.pop()


def _stack():
    """The lists of the open contexts of this thread, outermost first."""
    if not hasattr(_open, "stack"):
        _open.stack = []
    return _open.stack

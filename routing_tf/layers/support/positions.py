"""Positions on one axis or two, put into one sequence and back."""

import math

from keras import ops

from routing_tf.layers.support.blocks import BlockedOrder
from routing_tf.layers.support.lengths import is_known


class Positions:
    """The positions of one input, put into a sequence and back.

    `order` is their `BlockedOrder`, None for raster order (no `block_shape`); `grid`
    is the number of blocks along each axis, None for positions on one axis.
    """

    def __init__(self, lengths, block_shape):
        self.lengths = lengths
        self.order = None if block_shape is None else BlockedOrder(lengths, block_shape)
        self.grid = None
        if len(lengths) > 1:
            self.grid = BlockedOrder(lengths, block_shape or lengths).grid

    @property
    def num_positions(self):
        """Number of positions of the sequence, including those that pad blocks."""
        return math.prod(self.lengths) if self.order is None else self.order.length

    def flatten(self, x):
        """From `[batch, *lengths, dim]` to `[batch, positions, dim]`."""
        if len(self.lengths) == 1:
            return x
        return ops.reshape(x, (ops.shape(x)[0], math.prod(self.lengths), x.shape[-1]))

    def unflatten(self, x):
        """Undoes `flatten`."""
        if len(self.lengths) == 1:
            return x
        return ops.reshape(x, (ops.shape(x)[0], *self.lengths, x.shape[-1]))

    def arrange(self, x):
        """Puts `[batch, heads, positions, ...]` into blocked order."""
        if x is None or self.order is None:
            return x
        return self.order.arrange(x, axis=2)

    def restore(self, x):
        """Undoes `arrange`."""
        return x if self.order is None else self.order.restore(x, axis=2)

    def sequence(self, name, x, batch=None, fill=False):
        """Puts a mask or bias `[batch, *lengths]` into the order of the sequence.

        Returns `[batch, length]`, or None for None, unless `fill` asks for a mask that
        hides the positions that pad blocks. `x` must have the batch size `batch` (None
        if unknown) or 1; messages call it `name`.
        """
        positions = math.prod(self.lengths)
        if x is None:
            if not fill or self.order is None or not self.order.is_padded:
                return None
            x = ops.ones((1, positions), "bool")
        else:
            x = ops.convert_to_tensor(x)
            self._check(name, tuple(x.shape), batch)
        x = ops.reshape(x, (ops.shape(x)[0], positions))
        return x if self.order is None else self.order.arrange(x, axis=1)

    def _check(self, name, shape, batch):
        fits = batch is None or shape[:1] in ((batch,), (1,), (None,))
        lengths = [n if is_known(n) else None for n in self.lengths]
        pairs = list(zip(shape[1:], lengths))
        fits = fits and len(shape) == 1 + len(lengths)
        if not fits or any(None not in pair and pair[0] != pair[1] for pair in pairs):
            raise ValueError(
                f"`{name}` must have an entry for each position. Received: "
                f"{name}.shape={shape} for positions {tuple(lengths)} in a batch of "
                f"{batch}"
            )

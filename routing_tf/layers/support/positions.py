"""Positions on one axis or two, put into one sequence and back."""

import dataclasses
import math

from keras import ops

from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import num_parts
from routing_tf.layers.support.tensors import pad_to_multiple


@dataclasses.dataclass(frozen=True)
class Positions:
    """Positions on axes of `lengths`: one axis (text) or two (images).

    With a `block_shape` they form a sequence block after block in raster order, and
    inside a block in raster order: the blocked order. It is the order in which a causal
    model sees them. None (the default): raster order.

    Example:

    ```python
    import numpy as np
    from keras import ops
    from routing_tf.layers.support.positions import Positions

    positions = Positions(lengths=(2, 4), block_shape=(2, 2))
    sequence = ops.convert_to_numpy(positions.arrange(np.arange(8), axis=0))
    assert sequence.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    ```

    Reference: `break_into_blocks_nd` and `put_back_blocks_nd` of the release.
    """

    lengths: tuple
    block_shape: tuple | None = None

    @property
    def grid(self):
        """Number of blocks along each axis; the last ones may be padded."""
        blocks = self.block_shape or self.lengths
        return tuple(num_parts(n, b) for n, b in zip(self.lengths, blocks, strict=True))

    @property
    def length(self):
        """Number of positions of the sequence, including those that pad blocks."""
        blocks = self.block_shape or self.lengths
        return math.prod(self.grid) * math.prod(blocks)

    @property
    def is_padded(self):
        """Whether blocks must be padded; True if the length is unknown."""
        return not is_known(*self.lengths) or self.length > math.prod(self.lengths)

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

    def arrange(self, x, axis=2):
        """Puts positions from raster order into the order of the sequence.

        From `[..., positions, ...]`, whose `axis` is counted from the front, to
        `[..., length, ...]`, zero (False) where blocks are padded; None for None.
        """
        if x is None or self.block_shape is None:
            return x
        before, after = _sides(x, axis)
        x = ops.reshape(x, (*before, *self.lengths, *after))
        for i, multiple in enumerate(self.block_shape):
            x = pad_to_multiple(x, multiple, axis + i)
        if len(self.lengths) > 1:
            pairs = zip(self.grid, self.block_shape, strict=True)
            x = ops.reshape(x, (*before, *(n for pair in pairs for n in pair), *after))
            x = ops.transpose(x, self._axes(axis, len(after)))
        return ops.reshape(x, (*before, self.length, *after))

    def restore(self, x, axis=2):
        """Undoes `arrange`, and drops the positions that padded blocks."""
        if self.block_shape is None:
            return x
        before, after = _sides(x, axis)
        x = ops.reshape(x, (*before, *self.grid, *self.block_shape, *after))
        if len(self.lengths) > 1:
            axes = self._axes(axis, len(after))
            x = ops.transpose(x, [axes.index(i) for i in range(len(axes))])
        whole = [g * b for g, b in zip(self.grid, self.block_shape, strict=True)]
        x = ops.reshape(x, (*before, *whole, *after))
        for i, length in enumerate(self.lengths):
            x = cut_axis(x, 0, length, axis + i)
        return ops.reshape(x, (*before, math.prod(self.lengths), *after))

    def _axes(self, axis, num_after):
        """Axes that bring the blocks to the front, followed by the slots."""
        rank = len(self.lengths)
        grid = [axis + 2 * i for i in range(rank)]
        slots = [axis + 2 * i + 1 for i in range(rank)]
        end = axis + 2 * rank
        return [*range(axis), *grid, *slots, *range(end, end + num_after)]

    def sequence(self, name, x, batch=None, fill=False):
        """Puts a mask or bias `[batch, *lengths]` into the order of the sequence.

        Returns `[batch, length]`, or None for None, unless `fill` asks for a mask that
        hides the positions that pad blocks. `x` must have the batch size `batch` (None
        if unknown) or 1; messages call it `name`.
        """
        positions = math.prod(self.lengths)
        if x is None:
            if not fill or self.block_shape is None or not self.is_padded:
                return None
            x = ops.ones((1, positions), "bool")
        else:
            x = ops.convert_to_tensor(x)
            self._check(name, tuple(x.shape), batch)
        return self.arrange(ops.reshape(x, (ops.shape(x)[0], positions)), axis=1)

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


def _sides(x, axis):
    shape = ops.shape(x)
    return shape[:axis], shape[axis + 1 :]

"""Axial attention: queries see their row or their column of a grid, or both."""

import keras
from keras import ops

from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import known_mask
from routing_tf.layers.support.tensors import cut_axis
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import is_integer
from routing_tf.zoo.parts.chosen_blocks import side_by_side
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.refusals import OneSequenceHeads

__all__ = ["AxialHeads"]


@keras.saving.register_keras_serializable("routing_tf")
class AxialHeads(OneSequenceHeads):
    """Heads whose queries see the keys along one axis of a grid, or along both.

    Along axis 0, a query sees its column; along axis 1, its row; with both
    (criss-cross), it sees both in one softmax. With a causal mask, it sees only
    positions that are not later in the order of the image, row by row: those before it
    in its row, those above it in its column, and itself. Blocks do not change this
    order inside a row or a column, so the rule also holds in `MixedAttention` with
    blocks. Of n positions in a square grid, a query sees about sqrt(n), or twice as
    many.

    Without a causal mask, two layers with heads of both axes, or of one axis each, let
    every position reach every other one. The Axial Transformer makes rows causal in the
    same way, but its columns see only the rows above, in a separate layer that is
    shifted by one row.

    Args:
        num_heads: number of heads in the group.
        axis: 0 for columns, 1 for rows; None (the default) for both.
        width: number of columns, for positions on one axis, which are then the rows one
            after the other; the last one may be incomplete. None (the default) for
            positions on two axes, whose shape has it.
        **kwargs: arguments of `HeadGroup`; relative positions are in rows along axis 0
            and in columns along axis 1, and are refused with both.

    Call arguments and Returns: as in `HeadGroup`.

    Raises:
        ValueError: if relative positions come with both axes; when called, if `width`
            is missing for positions on one axis or differs from that of positions on
            two, or if query and value are different sequences or differ in length.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    groups = [zoo.AxialHeads(1, axis) for axis in (0, 1)]
    attention = layers.MixedAttention(groups, key_dim=8)
    image = np.ones((1, 4, 6, 16))
    assert attention(image, use_causal_mask=True).shape == (1, 4, 6, 16)
    ```

    Reference: Ho et al., "Axial Attention in Multidimensional Transformers"
    (https://arxiv.org/abs/1912.12180), section 3; Huang et al., "CCNet: Criss-Cross
    Attention for Semantic Segmentation" (https://arxiv.org/abs/1811.11721), section
    3.2, tested only against NumPy code of this repository.
    """

    compares_by_products = True

    width = Argument(check_optional_integer)

    def __init__(self, num_heads, axis=None, width=None, **kwargs):
        super().__init__(num_heads, **kwargs)
        if axis is not None and not (is_integer(axis) and axis in (0, 1)):
            raise ValueError(
                "`axis` must be 0 for columns, 1 for rows, or None for both. Received: "
                f"axis={axis!r}"
            )
        self.axis = axis if axis is None else int(axis)
        self.width = width
        if axis is None and self.max_relative_position is not None:
            raise ValueError(
                "`max_relative_position` must be None with `axis=None`: rows and "
                "columns would need separate tables. Received: "
                f"max_relative_position={self.max_relative_position}. Use a group for "
                "each axis"
            )

    def attend(self, inputs, training=None):
        length = length_of(inputs.query, 2)
        positions, width = inputs.positions, self._width(inputs.positions)
        is_grid = positions is not None and len(positions.lengths) > 1

        def to_grid(x):
            """From `[B, H, length, ...]` to rows and columns; 0 after the end."""
            x = positions.restore(x) if is_grid else x
            return tensors.break_into_blocks(x, width, axis=2)

        real = to_grid(known_mask(inputs.value, inputs.value_mask))
        bias = None if inputs.token_bias is None else to_grid(inputs.token_bias)
        vectors = [to_grid(x) for x in (inputs.query, inputs.key, inputs.value)]
        is_cross = self.axis is None
        attend = self._attend_criss_cross if is_cross else self._attend_along
        output = attend(*vectors, real, bias, inputs.use_causal_mask, training)
        if not is_grid:
            return tensors.put_back_blocks(output, length, axis=2)
        batch, heads, rows, columns, size = ops.shape(output)
        output = ops.reshape(output, (batch, heads, rows * columns, size))
        return positions.arrange(output)

    def _attend_along(self, query, key, value, real, bias, use_causal_mask, training):
        """Attends along one axis; all are grids."""

        def in_lines(x):
            return ops.swapaxes(x, 2, 3) if self.axis == 0 else x

        query, key, value, real = map(in_lines, (query, key, value, real))
        output = self.dot_product(
            query,
            key,
            value,
            attention_mask=real[..., None, :],
            bias=None if bias is None else in_lines(bias)[..., None, :],
            use_causal_mask=use_causal_mask,
            training=training,
        )
        return in_lines(output)

    def _attend_criss_cross(
        self, query, key, value, real, bias, use_causal_mask, training
    ):
        """Attends along both axes in one softmax, with one product for each."""
        rows, columns = (numbers(length_of(query, axis)) for axis in (2, 3))
        near, above = columns >= 0, rows != rows[:, None]
        if use_causal_mask:
            near, above = columns <= columns[:, None], rows < rows[:, None]
        # A position is in its row already, so it does not count again in its column.
        masks = _both(real)
        masks = [
            combine_masks(masks[0], near),
            combine_masks(masks[1], above[:, None]),
        ]
        dot_product = self.dot_product
        logits = [
            ops.matmul(query, ops.swapaxes(key, -1, -2)),
            _turned(ops.matmul(_turned(query), ops.swapaxes(_turned(key), -1, -2))),
        ]
        logits = ops.concatenate(logits, axis=-1)
        mask = side_by_side(masks, (*ops.shape(real)[:2], *ops.shape(query)[2:4]))
        if bias is not None:
            shape = (*ops.shape(bias)[:2], *ops.shape(query)[2:4])
            bias = side_by_side(_both(bias), shape)
        weights = dot_product.attention_weights(logits, mask, bias, training)
        width, end = length_of(query, 3), length_of(weights, -1)
        in_row = cut_axis(weights, 0, width, axis=4)
        in_column = cut_axis(weights, width, end, axis=4)
        output = ops.matmul(in_row, value)
        output = output + _turned(ops.matmul(_turned(in_column), _turned(value)))
        return dot_product.of_seeing(output, mask)

    def sees(self, query, keys, cache):
        places = [self._place(cache, ops.maximum(x, 0)) for x in (query, keys)]
        (row, column), (key_rows, key_columns) = places
        if self.axis == 0:
            return key_columns == column, key_rows - row
        if self.axis == 1:
            return key_rows == row, key_columns - column
        visible = ops.logical_or(key_columns == column, key_rows == row)
        return visible, keys - query

    def cache_length(self, max_length, positions=None):
        is_grid = positions is not None and len(positions.lengths) > 1
        is_bounded = self.axis == 1 and not is_grid
        return self._width(None) if is_bounded else max_length

    def max_positions(self, cache):
        is_bounded = self.axis == 1 and "row" not in cache
        return None if is_bounded else super().max_positions(cache)

    def make_cache(self, batch_size, max_length, positions=None):
        cache = super().make_cache(batch_size, max_length, positions)
        width = self._width(positions)
        if positions is None or len(positions.lengths) == 1:
            return cache
        places = ops.arange(positions.lengths[0] * width, dtype="int32")
        places = positions.arrange(places[None, None])[:, 0]
        for name, x in (("row", places // width), ("column", places % width)):
            cache[name] = ops.broadcast_to(x, (batch_size, ops.shape(x)[1]))
        return cache

    def _place(self, cache, places):
        """Returns rows and columns of places in the sequence."""
        if "row" not in cache:
            width = self._width(None)
            return places // width, places % width
        # All sequences of a batch have the same grid.
        return [
            ops.take(cache[name][0], ops.minimum(places, cache[name].shape[1] - 1))
            for name in ("row", "column")
        ]

    def _width(self, positions):
        """Returns the number of columns."""
        if positions is not None and len(positions.lengths) > 1:
            width = positions.lengths[1]
            if self.width not in (None, width):
                raise ValueError(
                    "`width` must be that of the positions, if they are on two axes. "
                    f"Received: width={self.width} with positions {positions.lengths}. "
                    "Leave it out"
                )
            return width
        if self.width is None:
            raise ValueError(
                "`width` must be given for positions on one axis. Received: "
                "width=None. Pass the number of columns, or `query` as (batch, height, "
                "width, dim)"
            )
        return self.width


def _turned(x):
    """Swaps rows and columns of `[batch, heads, row, column, ...]`."""
    return ops.swapaxes(x, 2, 3)


def _both(x):
    """Returns the row and column of each query, `[B, H, row, column, slots]` each."""
    return [x[:, :, :, None, :], _turned(x)[:, :, None]]


def _settings(sizes):
    return {"width": sizes.row_length}


PATTERNS = {
    "axial": Pattern(
        AxialHeads,
        _settings,
        has_relative_positions=False,
        of_images=True,
        refuses=("entmax_alpha",),
    )
}

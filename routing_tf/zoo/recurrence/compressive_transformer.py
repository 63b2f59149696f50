"""The Compressive Transformer: what leaves the memory is compressed and kept."""

import keras
from keras import ops

from routing_tf.layers.support import parts_of_batches
from routing_tf.layers.support.backends import top_k
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import cloned
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.parts_of_batches import update_or_hold
from routing_tf.layers.support.tensors import largest
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_not_negative
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import static_length
from routing_tf.zoo.parts import refusals
from routing_tf.zoo.recurrence.segments import check_multiple
from routing_tf.zoo.recurrence.segments import check_parts
from routing_tf.zoo.recurrence.segments import checked_state
from routing_tf.zoo.recurrence.segments import empty_memories
from routing_tf.zoo.recurrence.segments import segments
from routing_tf.zoo.recurrence.transformer_xl import TransformerXLAttention
from routing_tf.zoo.recurrence.transformer_xl import TransformerXLBackbone

__all__ = ["CompressiveAttention", "CompressiveTransformerBackbone"]

COMPRESSIONS = ("convolution", "mean_pooling", "max_pooling", "most_used")


@keras.saving.register_keras_serializable("routing_tf")
class CompressiveAttention(TransformerXLAttention):
    """Causal attention to a segment, to a memory, and to a compressed memory before it.

    At the end of a segment its tokens enter the memory, whose oldest `segment_length`
    positions leave it and are compressed; compressed positions that are too many are
    forgotten. Relative positions count positions of both memories alike. No gradient
    flows into the memories.

    Compression learns from a loss of its own, attention reconstruction: the mean square
    of the difference between what the heads read, by content alone, in the positions
    that leave and in the compressed ones. Its gradients reach nothing but the
    convolution. Calls with `training=True` write it to
    `statistics["reconstruction_loss"]`, and add it, times its weight, to the losses of
    the layer; other compressions have nothing to learn and add no loss.

    A call without a state begins a text and splits it into segments, so `fit` trains
    with recurrence. A call with a state goes on with a text: by whole segments, or by a
    part of one, such as a token, that must not reach beyond its end. Outputs are the
    same, but parts do not train compression.

    Args:
        num_heads: number of heads.
        key_dim: size of a query, key or value of one head.
        segment_length: number of positions of a segment.
        memory_length: number of positions that the memory holds, a multiple of
            `segment_length`.
        compressed_length: number of positions that the compressed memory holds.
        compression_rate: number of positions that become one; it divides
            `segment_length`. Defaults to 4.
        compression: `"convolution"` (the default), `"mean_pooling"` or `"max_pooling"`
            of `compression_rate` positions each; or `"most_used"`, which keeps the
            positions with the largest attention weights, in the mean over all tokens
            that could read them.
        reconstruction_weight: weight of the loss. Defaults to 1.0.
        **kwargs: `dropout`, `kernel_initializer` and `side_attention`, which reads both
            memories and the segment, as in `TransformerXLAttention`; and arguments of
            `keras.layers.Layer`, such as `name` and `dtype`.

    Call arguments and what a call returns are those of `TransformerXLAttention`; inputs
    must have a known length.

    Raises:
        ValueError: if a length is no multiple; when called, if the length of inputs is
            unknown or, with a state, neither that of whole segments nor of a part, or
            the state is of other inputs.

    Example:

    ```python
    import numpy as np
    from routing_tf import zoo

    attention = zoo.CompressiveAttention(
        2, 8, segment_length=8, memory_length=8, compressed_length=4
    )
    x = np.random.default_rng(0).normal(size=(2, 32, 16)).astype("float32")
    assert attention(x, training=True).shape == (2, 32, 16)
    assert len(attention.losses) == 1
    state = attention.make_state(batch_size=2)
    output, state = attention(x, state=state)
    assert state["compressed"].shape == (2, 4, 16)
    ```

    Reference: Rae et al., "Compressive Transformers for Long-Range Sequence Modelling"
    (https://arxiv.org/abs/1911.05507), algorithms 1 and 2. Tested only against NumPy
    code of this repository.
    """

    loss_names = ("reconstruction_loss",)

    compressed_length = Argument(check_positive_integer)
    compression_rate = Argument(check_positive_integer)
    compression = Argument(check_choice, COMPRESSIONS)
    reconstruction_weight = Argument(check_not_negative)

    def __init__(
        self,
        num_heads,
        key_dim,
        segment_length,
        memory_length,
        compressed_length,
        compression_rate=4,
        compression="convolution",
        reconstruction_weight=1.0,
        **kwargs,
    ):
        check_positive_integer("segment_length", segment_length)
        super().__init__(num_heads, key_dim, memory_length, segment_length, **kwargs)
        self.compressed_length = compressed_length
        self.compression_rate = compression_rate
        self.compression = compression
        self.reconstruction_weight = reconstruction_weight
        if self.same_length:
            raise ValueError(
                "`same_length` must be False for attention that compresses whole "
                "segments. Received: same_length=True"
            )
        check_multiple(memory_length=memory_length, segment_length=segment_length)
        check_multiple(segment_length=segment_length, compression_rate=compression_rate)

    def build(self, inputs_shape):
        super().build(inputs_shape)
        if self.compression == "convolution":
            self.convolution = keras.layers.Conv1D(
                self.dim,
                self.compression_rate,
                strides=self.compression_rate,
                data_format="channels_last",
                kernel_initializer=cloned(self.kernel_initializer),
                name="compression",
                dtype=self.dtype_policy,
            )
            self.convolution.build((None, self.segment_length, self.dim))
        name, fixed = "reconstruction_loss", {"trainable": False, "autocast": False}
        loss = self.add_weight((), "zeros", "float32", name=name, **fixed)
        self.statistics = {name: loss}

    def make_state(self, batch_size, memory_length=None, compressed_length=None):
        """Makes the state of texts of which nothing was read.

        Args:
            batch_size: number of texts.
            memory_length: number of positions of the memory, a multiple of
                `segment_length`; None (the default) for that of the layer.
            compressed_length: the same for the compressed memory, and any number.
        """
        check_positive_integer("batch_size", batch_size)
        return self._empty_state(batch_size, memory_length, compressed_length)

    def _empty_state(self, batch_size, memory_length=None, compressed_length=None):
        memory_length = self.memory_length if memory_length is None else memory_length
        if compressed_length is None:
            compressed_length = self.compressed_length
        lengths = {"memory": memory_length, "compressed": compressed_length}
        lengths["segment"] = self.segment_length
        state = empty_memories(self, batch_size, **lengths)
        check_multiple(memory_length=memory_length, segment_length=self.segment_length)
        state["position"] = ops.zeros((batch_size,), dtype="int32")
        if self.compression == "most_used":
            shape = (batch_size, memory_length + self.segment_length)
            state["usage"] = ops.zeros(shape, dtype="float32")
        return state

    def call(self, inputs, mask=None, training=None, state=None):
        refusals.tokens_shape(self, inputs.shape, self.dim)
        x, real = refusals.without_padding(inputs, mask)
        begins = state is None
        if begins:
            state = self._empty_state(ops.shape(x)[0])
        else:
            state = checked_state(state, x, self._state_names())
            length = static_length("inputs", x)
            check_parts(length, state["position"], self.segment_length)
            if "usage" in state:  # an outer layer may have cast it
                state = {**state, "usage": ops.cast(state["usage"], "float32")}
        outputs, differences = [], []
        for own, own_real in segments(x, real, self.segment_length):
            is_whole = own.shape[1] == self.segment_length
            position = 0 if is_whole else _common(state["position"])
            output, state = self._read(own, own_real, state, position, training)
            outputs.append(output)
            ended, left = self._ended(state)
            if is_whole:
                state = ended
                if training and self.trainable:
                    differences.append(self._difference(own, own_real, *left))
            else:
                is_end = _common(state["position"]) == self.segment_length
                state = {k: ops.where(is_end, ended[k], state[k]) for k in ended}
        if differences:
            self._add_loss(differences)
        output = ops.concatenate(outputs, axis=1)
        return output if begins else (output, state)

    def _state_names(self):
        parts = ("memory", "compressed", "segment")
        names = [*parts, *(f"{part}_mask" for part in parts), "position"]
        return [*names, "usage"] if self.compression == "most_used" else names

    def _read(self, x, real, state, position, training):
        """Returns what tokens read, and the state with them in its segment."""
        segment, segment_mask = self._written(x, real, state, position)
        rows = ops.concatenate([state["compressed"], state["memory"], segment], axis=1)
        masks = [state["compressed_mask"], state["memory_mask"], segment_mask]
        number = state["compressed"].shape[1]
        output, weights = self._attend(
            x,
            rows,
            ops.concatenate(masks, axis=1),
            offset=number + state["memory"].shape[1] + position,
            training=training,
        )
        after = {
            **state,
            "segment": ops.stop_gradient(segment),
            "segment_mask": segment_mask,
            "position": state["position"] + x.shape[1],
        }
        if self.compression == "most_used":
            weights = ops.stop_gradient(weights[..., number:])
            used = ops.einsum("bhlk,bl->bk", weights, ops.cast(real, "float32"))
            after["usage"] = state["usage"] + used
        return output, after

    def _written(self, x, real, state, position):
        """Returns the segment of a state, and its mask, with tokens from a position."""
        length = x.shape[1]
        if length == self.segment_length:
            return x, real
        places = ops.arange(self.segment_length, dtype="int32") - position
        is_new = ops.logical_and(places >= 0, places < length)
        places = ops.clip(places, 0, length - 1)
        new = ops.take(x, places, axis=1)
        segment = ops.where(is_new[:, None], new, state["segment"])
        mask = ops.where(is_new, ops.take(real, places, axis=1), state["segment_mask"])
        return segment, mask

    def _ended(self, state):
        """Returns the state before the next segment, and what left the memory.

        These are positions and their mask, and compressed ones and their mask.
        """
        length, number = self.segment_length, state["compressed"].shape[1]
        rows = ops.concatenate([state["memory"], state["segment"]], axis=1)
        mask = ops.concatenate([state["memory_mask"], state["segment_mask"]], axis=1)
        old, old_real = rows[:, :length], mask[:, :length]
        new, new_real = self._compressed(old, old_real, state.get("usage"))
        compressed = [state["compressed"], ops.stop_gradient(new)]
        compressed_mask = [state["compressed_mask"], new_real]
        after = {
            **state,
            "memory": rows[:, length:],
            "memory_mask": mask[:, length:],
            "compressed": ops.concatenate(compressed, axis=1)[:, -number:],
            "compressed_mask": ops.concatenate(compressed_mask, axis=1)[:, -number:],
            "segment_mask": ops.zeros_like(state["segment_mask"]),
            "position": ops.zeros_like(state["position"]),
        }
        if self.compression == "most_used":
            after["usage"] = ops.pad(state["usage"][:, length:], [[0, 0], [0, length]])
        return after, (old, old_real, new, new_real)

    def _compressed(self, rows, real, usage):
        """Returns the compressed positions and their mask."""
        if self.compression == "most_used":
            return self._most_used(rows, real, usage)
        rate = self.compression_rate
        groups = (-1, self.segment_length // rate, rate)
        in_group = ops.reshape(real, groups)
        is_any = ops.any(in_group, axis=-1)
        if self.compression == "convolution":
            return self.convolution(rows), is_any
        rows = ops.reshape(rows, (*groups, self.dim))
        in_group = in_group[..., None]
        if self.compression == "mean_pooling":
            count = ops.sum(ops.cast(in_group, rows.dtype), axis=2)
            return ops.sum(rows, axis=2) / ops.maximum(count, 1), is_any
        rows = ops.where(in_group, rows, large_negative(rows.dtype))
        return ops.where(is_any[..., None], largest(rows, axis=2), 0), is_any

    def _most_used(self, rows, real, usage):
        """Returns the positions with the largest mean weights, in order of time."""
        # Tokens that could read a position: itself and those after it.
        readers = usage.shape[1] - ops.arange(self.segment_length, dtype="int32")
        mean = usage[:, : self.segment_length] / ops.cast(readers, "float32")
        number = self.segment_length // self.compression_rate
        _, places = top_k(ops.where(real, mean, -1.0), number)
        places = ops.sort(ops.cast(places, "int32"), axis=-1)
        kept = ops.take_along_axis(rows, places[..., None], axis=1)
        return kept, ops.take_along_axis(real, places, axis=1)

    def _difference(self, x, real, old, old_real, new, new_real):
        """Compares what tokens read in positions and in compressed ones.

        Returns the sum of their mean square differences, and the number of tokens.
        """
        query = ops.stop_gradient(self._heads(self.query_dense(x)))
        difference = self._contents(query, old, old_real)
        difference = difference - self._contents(query, new, new_real)
        squares = ops.mean(ops.square(difference), axis=(1, 3))
        counts = ops.logical_and(real, ops.any(old_real, axis=-1, keepdims=True))
        counts = ops.cast(counts, "float32")
        return ops.sum(squares * counts), ops.sum(counts)

    def _contents(self, query, rows, real):
        """Reads rows by content; gradients flow to the rows alone."""
        kernels = [
            ops.stop_gradient(ops.cast(dense.kernel, rows.dtype))
            for dense in (self.key_dense, self.value_dense)
        ]
        key, value = (self._heads(ops.matmul(rows, kernel)) for kernel in kernels)
        logits = product(query, key, transpose_y=True)
        weights = self._weights(logits, real[:, None, None, :])
        return ops.cast(product(ops.cast(weights, value.dtype), value), "float32")

    def _add_loss(self, differences):
        total, number = (sum(each) for each in zip(*differences, strict=True))
        update_or_hold(self, [ops.stop_gradient(total), number])
        if self.compression == "convolution" and self.reconstruction_weight:
            own = [self.reconstruction_weight * total]
            parts_of_batches.add_batch_loss(
                self, "reconstruction_loss", own, [number], parts_of_batches.mean
            )

    def move(self, statistics):
        """Writes the statistics of a step; see `OnlineKMeans.move`."""
        total, number = statistics
        mean = parts_of_batches.mean([total], [number])
        self.statistics["reconstruction_loss"].assign(mean)


def _common(positions):
    """Returns the position that all rows have; 0 for no rows."""
    return ops.maximum(largest(positions), 0)


@keras.saving.register_keras_serializable("routing_tf")
class CompressiveTransformerBackbone(TransformerXLBackbone):
    """A causal transformer with a memory and a compressed memory in each block.

    Each block has a `CompressiveAttention`; `blocks[i].attention.statistics` has its
    reconstruction loss.

    Args:
        vocabulary_size: number of token ids.
        num_layers: number of blocks.
        num_heads: number of heads of a block.
        hidden_dim: size of a hidden state.
        intermediate_dim: size between the two linear maps of the feed-forward layers.
        segment_length: number of positions of a segment.
        memory_length: number of positions of a memory, a multiple of `segment_length`.
        compressed_length: number of positions that a compressed memory holds.
        compression_rate: number of positions that become one. Defaults to 4.
        compression: how, see `CompressiveAttention`. Defaults to `"convolution"`.
        reconstruction_weight: weight of the loss of each block. Defaults to 1.0.
        **kwargs: other arguments of `TransformerXLBackbone` and `keras.Model`.

    Call arguments and Returns: as in `TransformerXLBackbone`.

    Example:

    ```python
    import numpy as np
    from routing_tf import zoo

    backbone = zoo.CompressiveTransformerBackbone(
        256, 2, 2, 16, 32, segment_length=8, memory_length=8, compressed_length=8
    )
    assert backbone(np.ones((1, 32), "int32")).shape == (1, 32, 16)
    ```

    Reference: Rae et al. (https://arxiv.org/abs/1911.05507).
    """

    _attention_class = CompressiveAttention
    _attention_arguments = (
        *TransformerXLBackbone._attention_arguments,
        *("compressed_length", "compression_rate", "compression"),
        "reconstruction_weight",
    )

    compressed_length = Argument(check_positive_integer)
    compression_rate = Argument(check_positive_integer)
    reconstruction_weight = Argument(check_not_negative)

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        num_heads,
        hidden_dim,
        intermediate_dim,
        segment_length,
        memory_length,
        compressed_length,
        compression_rate=4,
        compression="convolution",
        reconstruction_weight=1.0,
        **kwargs,
    ):
        # What blocks are made from.
        self.compressed_length = compressed_length
        self.compression_rate = compression_rate
        self.compression = compression
        self.reconstruction_weight = reconstruction_weight
        sizes = (vocabulary_size, num_layers, num_heads, hidden_dim, intermediate_dim)
        super().__init__(*sizes, memory_length, segment_length, **kwargs)

"""Patterns that have no meaning between two sequences."""

import dataclasses

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.lengths import is_known
from routing_tf.layers.lengths import length_of
from routing_tf.layers.lengths import of_length


class OneSequenceHeads(HeadGroup):
    """Heads that attend inside one sequence and refuse another one."""

    def prepared(self, inputs):
        inputs = super().prepared(inputs)
        if inputs.is_cross_attention:
            raise ValueError(
                f"`{type(self).__name__}` attend inside one sequence: they compare "
                "places of queries and keys in it. Received: is_cross_attention=True. "
                "Call the layer without `value`, or take `FullHeads` for another "
                "sequence"
            )
        length, memory_length = (length_of(x, 2) for x in (inputs.query, inputs.value))
        if is_known(length, memory_length) and length != memory_length:
            raise ValueError(
                "`query` and `value` must have the same length in "
                f"`{type(self).__name__}`, which attend inside one sequence. Received: "
                f"lengths {length} and {memory_length}. Take `FullHeads` for another "
                "sequence"
            )
        value = of_length(inputs.value, 2, length)
        return dataclasses.replace(inputs, value=value)

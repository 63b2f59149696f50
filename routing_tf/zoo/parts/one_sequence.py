"""Patterns that have no meaning between two sequences."""

from routing_tf.layers import HeadGroup
from routing_tf.layers.heads.refusals import of_one_length


class OneSequenceHeads(HeadGroup):
    """Heads that attend inside one sequence and refuse another one."""

    def prepared(self, inputs):
        inputs = super().prepared(inputs)
        if inputs.is_cross_attention:
            raise ValueError(
                f"`{type(self).__name__}` attend inside one sequence, because they "
                "compare places of queries and keys. Received: "
                "is_cross_attention=True. Call the layer without `value`, or use "
                "`FullHeads` for another sequence"
            )
        return of_one_length(
            inputs, f"`{type(self).__name__}` attend inside one sequence"
        )

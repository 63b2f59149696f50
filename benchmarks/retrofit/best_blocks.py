"""The blocks of keys that a query likes best on average, beside those near by.

With blocks of a single key these are the keys that full attention weighs most: what no
linear method can know.
"""

import keras
from keras import ops

from routing_tf import layers

HIDDEN = -1e30


@keras.saving.register_keras_serializable("benchmarks")
class BestBlocksHeads(layers.FullHeads):
    """Heads that see first and recent keys, and the best blocks of all others.

    The work is that of full attention. For causal self-attention without padding.

    Args:
        num_heads: number of heads in the group.
        num_sinks: number of first keys.
        num_recent: number of recent keys, on average.
        num_best: number of other keys.
        block_length: number of keys of a block. Defaults to 1.
        **kwargs: arguments of `FullHeads`.
    """

    def __init__(
        self, num_heads, num_sinks, num_recent, num_best, block_length=1, **kwargs
    ):
        super().__init__(num_heads, **kwargs)
        self.num_sinks, self.num_recent = num_sinks, num_recent
        self.num_best, self.block_length = num_best, block_length

    def attend(self, inputs, training=None):
        size, length = self.block_length, inputs.query.shape[2]
        places = ops.arange(length)
        own, places = places[:, None], places[None]
        border = ops.maximum(own + 1 - self.num_recent + size // 2, 0) // size * size
        near = ops.logical_or(places < self.num_sinks, places >= border)
        is_far = ops.cast(ops.logical_not(near), "float32")
        logits = ops.matmul(inputs.query, ops.swapaxes(inputs.key, 2, 3))
        blocks = ops.one_hot(ops.arange(length) // size, -(-length // size))
        counts = ops.matmul(is_far, blocks)
        means = ops.matmul(logits * is_far, blocks) / ops.maximum(counts, 1.0)
        means = ops.where(counts > 0, means, HIDDEN)
        number = min(self.num_best // size, means.shape[-1])
        least = ops.top_k(means, number)[0][..., -1:]
        best = ops.logical_and(means >= least, counts > 0)
        best = ops.matmul(ops.cast(best, "float32"), ops.transpose(blocks)) > 0
        return self.dot_product(
            inputs.query,
            inputs.key,
            inputs.value,
            attention_mask=ops.logical_or(near, best),
            use_causal_mask=True,
            training=training,
        )

"""Attention to the nearest tokens of a sequence, in chunks of queries."""

from keras import ops

from routing_tf.layers.caches import rows
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.support import blocks
from routing_tf.layers.support.lengths import is_known
from routing_tf.layers.support.lengths import length_of
from routing_tf.layers.support.lengths import numbers
from routing_tf.layers.support.masks import known_mask


def attend(dot_product, inputs, window, training=None):
    """Lets each query attend to the tokens near it.

    Args:
        dot_product: `ScaledDotProduct`.
        inputs: `HeadInputs` of self-attention.
        window: number of tokens that a query sees, including its own: the last ones
            under a causal mask, otherwise as many on each side.
        training: whether dropout is on.

    Returns:
        `<float>[batch, heads, length, value_dim]`, and the logarithms of sums of
        exponentials `<float32>[batch, heads, length]`, see `ScaledDotProduct`.
    """
    length = length_of(inputs.query, 2)
    if is_known(length):
        window = min(window, length)
    size = chunk_size_for(window)
    before = -(-(window - 1) // size)
    after = 0 if inputs.use_causal_mask else before

    def windows(x):
        cut = blocks.break_into_blocks(x, size, axis=2)
        return blocks.memory_windows(cut, (before,), (after,), axis=2)

    real = windows(known_mask(inputs.value, inputs.value_mask))
    back = numbers(size)[:, None] + before * size
    back = back - numbers((before + 1 + after) * size)
    is_near = (back >= (1 - window if after else 0)) & (back < window)
    bias = inputs.token_bias
    results = dot_product(
        blocks.break_into_blocks(inputs.query, size, axis=2),
        windows(inputs.key),
        windows(inputs.value),
        attention_mask=ops.logical_and(real[..., None, :], is_near),
        bias=None if bias is None else windows(bias)[..., None, :],
        offset=before * size,
        return_logsumexp=True,
        training=training,
    )
    return [blocks.put_back_blocks(x, length, axis=2) for x in results]


def step(group, tokens, query, window, index):
    """Lets a query `[B, H, 1, D]` at `index` see the last `window` rows up to it."""
    window = min(window, tokens.shape[2])
    places = index - (window - 1) + numbers(window)
    read = ops.take(tokens, ops.maximum(places, 0), axis=2)
    return rows.attend_to_rows(group, query, read, places >= 0, places - index)

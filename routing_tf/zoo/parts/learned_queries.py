"""Learned queries of each head, which attend to all tokens of a sequence."""

from keras import ops

from routing_tf.layers.support.initializers import cloned


def add_weight(group, name, number, dim, initializer):
    """Makes vectors of each head, `number` of them of `dim` numbers."""
    # With one axis for all heads, its initializer knows the number of vectors.
    return group.add_weight(
        name=name,
        shape=(number, group.num_heads * dim),
        initializer=cloned(initializer),
    )


def of_heads(group, weight, dtype):
    """Returns the vectors of a weight as `[1, heads, number, dim]`."""
    number, size = weight.shape
    weight = ops.cast(ops.convert_to_tensor(weight), dtype)
    weight = ops.reshape(weight, (number, group.num_heads, size // group.num_heads))
    return ops.transpose(weight, (1, 0, 2))[None]


def attend(group, weight, inputs, value, training):
    """Attends with the learned queries of a weight to the tokens of a sequence.

    `value` is `<float>[batch, heads, length, columns]`. Returns `[batch, heads, number,
    columns]`.
    """
    key = inputs.key
    query = of_heads(group, weight, key.dtype) * group.key_dim**-0.5
    query = ops.broadcast_to(query, (ops.shape(key)[0], *ops.shape(query)[1:]))
    mask, bias = (
        None if x is None else x[:, :, None]
        for x in (inputs.value_mask, inputs.token_bias)
    )
    return group.dot_product(
        query, key, value, attention_mask=mask, bias=bias, training=training
    )

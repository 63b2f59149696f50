"""Filtered probabilities, and draws whose settings may be tensors.

The rules are those of the samplers of keras_hub, whose settings are Python values and
cannot be inputs of a compiled or saved function.
"""

from keras import ops

from routing_tf.layers.support import extremes


def filtered_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Returns the probabilities of the next token that a sampler draws from.

    First, the logits `<float>[batch, vocabulary_size]` are divided by the temperature
    (0 keeps only the most probable token). Then only the `top_k` most probable tokens
    are kept (0 keeps all). Then only the first tokens are kept whose probabilities,
    before tokens were dropped, sum to more than `top_p`. The rest, at least one token,
    sums to 1. The settings are numbers or scalars.

    Reference: `TopKSampler` and `TopPSampler` of keras_hub.
    """
    logits = ops.cast(logits, "float32")
    vocabulary_size = logits.shape[-1]
    temperature = ops.cast(temperature, "float32")
    is_drawn = temperature > 0
    # A small temperature must not make the largest logit infinite.
    logits -= extremes.largest(logits, axis=-1, keepdims=True)
    probabilities = ops.softmax(logits / ops.where(is_drawn, temperature, 1.0))
    values, order = ops.top_k(probabilities, k=vocabulary_size, sorted=True)
    ranks = ops.argsort(order, axis=-1)
    top_p = ops.cast(top_p, "float32")
    # Sums may be rounded to more than 1.
    in_top_p = ops.logical_or(ops.cumsum(values, axis=-1) <= top_p, top_p >= 1.0)
    # The token that exceeds `top_p` also stays.
    limit = 1 + ops.sum(ops.cast(in_top_p, "int32"), axis=-1, keepdims=True)
    top_k = ops.cast(top_k, "int32")
    limit = ops.minimum(limit, ops.where(top_k > 0, top_k, vocabulary_size))
    limit = ops.where(is_drawn, limit, 1)
    kept = ops.where(ops.cast(ranks, "int32") < limit, probabilities, 0.0)
    return kept / ops.sum(kept, axis=-1, keepdims=True)


def draw(probabilities, uniform):
    """Draws a token `<int32>[batch]` for each row; equal numbers draw equal tokens.

    `uniform` are independent and uniform in (0, 1), of the shape of `probabilities`.
    """
    # The largest of Gumbel variables, because a rounded sum of probabilities could end
    # in a dropped token.
    noise = -ops.log(-ops.log(uniform))
    return ops.cast(ops.argmax(ops.log(probabilities) + noise, axis=-1), "int32")

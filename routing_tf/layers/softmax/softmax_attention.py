"""Softmax attention whose gradient takes fewer passes and, optionally, less memory."""

import keras
from keras import ops

from routing_tf.layers.softmax.query_parts import WHOLE
from routing_tf.layers.softmax.query_parts import cut
from routing_tf.layers.softmax.query_parts import joined
from routing_tf.layers.softmax.query_parts import sum_of_prefixes
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.keras_internals import computed_after
from routing_tf.layers.support.masks import causal_mask_as_bias
from routing_tf.layers.support.tensors import is_broadcastable
from routing_tf.layers.support.tensors import product


def softmax(logits):
    """Returns the softmax over the last axis, also if its length is 1."""
    # Keras would warn about a single key, whose weight is 1 and whose gradient is 0.
    return ops.exp(logits - logits) if logits.shape[-1] == 1 else ops.softmax(logits)


def can_attend(query, key, value, bias=None):
    """Returns whether `softmax_attention` can take these tensors.

    It does not sum gradients over broadcast axes, and does not convert tensors.
    """
    leading = query.shape[:-2]
    if not leading or key.shape[:-2] != leading or value.shape[:-2] != leading:
        return False
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    logits = (*query.shape[:-1], key.shape[-2])
    return bias is None or is_broadcastable(bias.shape, logits)


def softmax_attention(query, key, value, bias=None, parts=WHOLE, keeps_weights=True):
    """Attends, with a gradient of its own.

    The derivative of a softmax subtracts the weighted mean from the gradient of a
    query's weights. This mean is also the product of the query's output and the
    output's gradient, which are rows as long as a value instead of as long as the keys
    (Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135, appendix B.2).

    Args:
        query: `<float>[..., queries, key_dim]`.
        key: `<float>[..., keys, key_dim]`, with the same leading axes.
        value: `<float>[..., keys, value_dim]`, with the same leading axes.
        bias: `<float>`, broadcastable to `[..., queries, keys]`, added to the logits,
            without a gradient; None (the default) for none.
        parts: the `Part`s of the queries, for the value and for the gradient. Defaults
            to all of them at once.
        keeps_weights: whether the gradient finds the weights of pairs in memory (the
            default), or computes them again. In eager mode, the tape of TensorFlow
            still stores them.

    Returns:
        `<float>[..., queries, value_dim]`.
    """
    causal = [part.causal_mask for part in parts if part.causal_mask is not None]
    biases = [] if bias is None else [bias]
    biases += [causal_mask_as_bias(query.dtype, mask) for mask in causal]

    def weights_of(cuts, biases):
        """Returns the weights of each part, `<float>[..., queries, keys]`."""
        biases, own, weights = list(biases), None, []
        if bias is not None:
            own = biases.pop(0)
        for part, ((query, *_), (key, _)) in zip(parts, cuts, strict=True):
            logits = product(query, key, transpose_y=True)
            if own is not None:
                logits = logits + (own if len(parts) == 1 else part.pairs(own))
            if part.causal_mask is not None:
                logits = logits + biases.pop(0)
            weights.append(softmax(logits))
        return weights

    # Biases are arguments, although they have no gradients, because JAX may not close
    # over them.
    @stated_gradient
    def attend(query, key, value, *biases):
        cuts = cut(parts, [query], [key, value])
        kept = weights_of(cuts, biases)
        outputs = [product(w, x) for w, (_, (_, x)) in zip(kept, cuts, strict=True)]
        output = outputs[0] if len(parts) == 1 else joined(outputs)

        def gradient(upstream):
            # Half precision would lose too much.
            dtype = keras.backend.result_type(output.dtype, "float32")
            along = ops.cast(output, dtype) * ops.cast(upstream, dtype)
            mean = ops.cast(ops.sum(along, axis=-1, keepdims=True), output.dtype)
            own, again = (query, key, value), biases
            if not keeps_weights:
                own = computed_after(upstream, *own, *biases)
                own, again = own[:3], own[3:]
            cuts = cut(parts, [own[0], upstream, mean], own[1:])
            weights = kept if keeps_weights else weights_of(cuts, again)
            found = [_gradients(w, *x, *y) for w, (x, y) in zip(weights, cuts)]
            of_query, of_key, of_value = zip(*found, strict=True)
            return (
                joined(of_query),
                sum_of_prefixes(of_key),
                sum_of_prefixes(of_value),
                *(ops.zeros_like(bias) for bias in biases),
            )

        return output, gradient

    return attend(query, key, value, *biases)


def _gradients(weights, query, upstream, mean, key, value):
    """Returns the gradients of queries, keys and values of one part."""
    of_weights = product(upstream, value, transpose_y=True)
    of_logits = weights * (of_weights - mean)
    return (
        product(of_logits, key),
        product(of_logits, query, transpose_x=True),
        product(weights, upstream, transpose_x=True),
    )

"""Softmax attention whose gradient takes fewer passes, and less memory if asked to."""

import contextlib
import contextvars

import keras
from keras import ops

from routing_tf.layers.axes import is_broadcastable
from routing_tf.layers.keras_internals import computed_after
from routing_tf.layers.products import product

_keeps_weights = contextvars.ContextVar("keeps_weights", default=True)


@contextlib.contextmanager
def weights_again():
    """Gradients of attention traced inside compute its weights again, and keep none."""
    token = _keeps_weights.set(False)
    try:
        yield
    finally:
        _keeps_weights.reset(token)


def softmax(logits):
    """Returns the softmax over the last axis, also where its length is 1."""
    # Keras would warn of that one; its weight is 1, and its gradient 0.
    return ops.exp(logits - logits) if logits.shape[-1] == 1 else ops.softmax(logits)


def can_attend(query, key, value, biases=()):
    """Tells whether `softmax_attention` takes some tensors.

    It does not sum gradients over axes along which one of them is repeated, nor does it
    convert them.
    """
    leading = query.shape[:-2]
    logits = (*query.shape[:-1], key.shape[-2])
    return (
        len(leading) > 0
        and all(x.shape[:-2] == leading for x in (key, value))
        and all(x.dtype == query.dtype for x in (key, value))
        and all(is_broadcastable(bias.shape, logits) for bias in biases)
    )


def softmax_attention(query, key, value, biases=()):
    """Attends with a stated gradient.

    The derivative of a softmax subtracts from the gradient of a query's weights their
    mean by these weights. That is also the product of the query's output and the
    output's gradient, a row as long as a value in place of one as long as the keys
    (Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135, appendix B.2).

    Args:
        query: `<float>[..., queries, key_dim]`.
        key: `<float>[..., keys, key_dim]`, with the same leading axes.
        value: `<float>[..., keys, value_dim]`, likewise.
        biases: list of `<float>`, broadcastable to `[..., queries, keys]`, added to the
            logits, without gradients. Defaults to none.

    Returns:
        `<float>[..., queries, value_dim]`.
    """

    keeps_weights = _keeps_weights.get()

    # Biases are arguments, though they have no gradients: JAX may not close over them.
    @ops.custom_gradient
    def attend(query, key, value, *biases):
        weights = _weights(query, key, *biases)
        output = product(weights, value)

        def gradient(*args, upstream=None):
            (upstream,) = args or (upstream,)
            own = weights
            if not keeps_weights:
                # Not before they are needed, and not shared with those of above.
                own = _weights(*computed_after(upstream, query, key, *biases))
            # Half precision would lose too much.
            dtype = keras.backend.result_type(output.dtype, "float32")
            along = ops.cast(output, dtype) * ops.cast(upstream, dtype)
            mean = ops.cast(ops.sum(along, axis=-1, keepdims=True), output.dtype)
            of_weights = product(upstream, value, transpose_y=True)
            of_logits = own * (of_weights - mean)
            return (
                product(of_logits, key),
                product(of_logits, query, transpose_x=True),
                product(own, upstream, transpose_x=True),
                *(ops.zeros_like(bias) for bias in biases),
            )

        return output, gradient

    return attend(query, key, value, *biases)


def _weights(query, key, *biases):
    return softmax(sum(biases, product(query, key, transpose_y=True)))

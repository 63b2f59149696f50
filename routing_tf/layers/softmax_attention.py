"""Softmax attention whose gradient takes fewer passes and, optionally, less memory."""

import contextlib
import contextvars
import dataclasses

import keras
from keras import ops

from routing_tf.layers.axes import cut_axis
from routing_tf.layers.axes import cut_pairs
from routing_tf.layers.axes import is_broadcastable
from routing_tf.layers.keras_internals import computed_after
from routing_tf.layers.products import product
from routing_tf.layers.stated_gradients import are_stated
from routing_tf.layers.stated_gradients import stated_gradient

_keeps_weights = contextvars.ContextVar("keeps_weights", default=True)


@contextlib.contextmanager
def weights_again():
    """Inside this context, gradients of attention recompute its weights.

    In eager mode, the tape of TensorFlow still stores them.
    """
    token = _keeps_weights.set(False)
    try:
        yield
    finally:
        _keeps_weights.reset(token)


def softmax(logits):
    """Returns the softmax over the last axis, also if its length is 1."""
    # Keras would warn about a single key, whose weight is 1 and whose gradient is 0.
    return ops.exp(logits - logits) if logits.shape[-1] == 1 else ops.softmax(logits)


def can_attend(query, key, value, bias=None):
    """Tells whether `softmax_attention` can take these tensors.

    It does not sum gradients over broadcast axes, and does not convert tensors.
    """
    leading = query.shape[:-2]
    logits = (*query.shape[:-1], key.shape[-2])
    return (
        len(leading) > 0
        and all(x.shape[:-2] == leading for x in (key, value))
        and all(x.dtype == query.dtype for x in (key, value))
        and (bias is None or is_broadcastable(bias.shape, logits))
    )


def softmax_attention(query, key, value, bias=None, causal_biases=()):
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
        causal_biases: list of `<float>[part of the queries, keys up to its last one]`,
            added to the logits of each part in turn, the last of which sees all keys;
            empty (the default) for a single part that sees all keys.

    Returns:
        `<float>[..., queries, value_dim]`.
    """
    keeps_weights = not are_stated() or _keeps_weights.get()
    biases = [*([] if bias is None else [bias]), *causal_biases]

    def parts_of(biases):
        return _parts(None if bias is None else biases.pop(0), biases)

    # Biases are arguments, although they have no gradients, because JAX may not close
    # over them.
    @stated_gradient
    def attend(query, key, value, *biases):
        parts = parts_of(list(biases))
        kept = [part.weights(query, key) for part in parts]
        outputs = [product(x, p.keys(value)) for x, p in zip(kept, parts, strict=True)]
        output = outputs[0] if len(parts) == 1 else ops.concatenate(outputs, axis=-2)

        def gradient(*args, upstream=None):
            (upstream,) = args or (upstream,)
            # Half precision would lose too much.
            dtype = keras.backend.result_type(output.dtype, "float32")
            along = ops.cast(output, dtype) * ops.cast(upstream, dtype)
            mean = ops.cast(ops.sum(along, axis=-1, keepdims=True), output.dtype)
            tensors, own_parts, weights = (query, key, value), parts, kept
            if not keeps_weights:
                again = computed_after(upstream, query, key, value, *biases)
                tensors, own_parts = again[:3], parts_of(list(again[3:]))
                weights = [part.weights(*tensors[:2]) for part in own_parts]
            of_query, of_key, of_value = zip(
                *(
                    part.gradients(*tensors, upstream, mean, own)
                    for part, own in zip(own_parts, weights, strict=True)
                ),
                strict=True,
            )
            return (
                of_query[0] if len(parts) == 1 else ops.concatenate(of_query, axis=-2),
                _sum_of_prefixes(of_key),
                _sum_of_prefixes(of_value),
                *(ops.zeros_like(bias) for bias in biases),
            )

        return output, gradient

    return attend(query, key, value, *biases)


@dataclasses.dataclass
class _Part:
    """Queries from `start` to `stop` and the keys that they see; all keys for None."""

    start: int | None
    stop: int | None
    num_keys: int | None
    biases: list

    def queries(self, x):
        """Cuts `[..., queries, .]`."""
        return x if self.start is None else cut_axis(x, self.start, self.stop, axis=-2)

    def keys(self, x):
        """Cuts `[..., keys, .]`."""
        return x if self.start is None else cut_axis(x, 0, self.num_keys, axis=-2)

    def weights(self, query, key):
        logits = product(self.queries(query), self.keys(key), transpose_y=True)
        return softmax(sum(self.biases, logits))

    def gradients(self, query, key, value, upstream, mean, weights):
        """Gradients of the part's queries, keys and values."""
        upstream = self.queries(upstream)
        of_weights = product(upstream, self.keys(value), transpose_y=True)
        of_logits = weights * (of_weights - self.queries(mean))
        return (
            product(of_logits, self.keys(key)),
            product(of_logits, self.queries(query), transpose_x=True),
            product(weights, upstream, transpose_x=True),
        )


def _parts(bias, causal_biases):
    """Returns a `_Part` for each causal bias; one of all queries without any."""
    if len(causal_biases) < 2:
        biases = [x for x in (bias, *causal_biases) if x is not None]
        return [_Part(None, None, None, biases)]
    parts, start = [], 0
    for causal_bias in causal_biases:
        size, num_keys = causal_bias.shape
        own = cut_pairs(bias, start, size, num_keys)
        biases = [causal_bias] if own is None else [own, causal_bias]
        parts.append(_Part(start, start + size, num_keys, biases))
        start += size
    return parts


def _sum_of_prefixes(tensors):
    """Adds tensors, of which earlier ones are shorter on the second last axis."""
    *shorter, total = tensors
    for x in shorter:
        missing = [(0, 0)] * len(x.shape)
        missing[-2] = (0, total.shape[-2] - x.shape[-2])
        total = total + ops.pad(x, missing)
    return total

"""Blocks of attention and feed-forward in plain NumPy, with the weights of layers."""

import numpy as np

from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 5, 4


def values(*weights):
    arrays = [golden_cases.to_numpy(w).astype("float64") for w in weights]
    return arrays[0] if len(arrays) == 1 else arrays


def weights_of(layer):
    """Returns all weights of a layer by their names."""
    return {weight.name: values(weight) for weight in layer.weights}


def assert_follows(
    formula, group, length, memory_length=None, real=None, has_bias=False, **about
):
    """Fails unless heads return what a formula says of random tokens; returns it.

    `formula` takes the group, queries, keys and values in float64, which keys are
    `real`, their `bias` if there is one, and what there is `about` the call: whether it
    is `causal`, and which queries are real, without which all of them are.
    """
    helpers.built(group, KEY_DIM, VALUE_DIM)
    arrays = helpers.streams(length, memory_length, KEY_DIM, VALUE_DIM)
    memory_length = memory_length or length
    if real is None:
        # The first queries of the second row see nothing under a causal mask.
        ends = max(memory_length - 2, 1), memory_length
        real = helpers.mask_with_a_hole(memory_length, *ends)
        real[1, : memory_length // 3] = False
    if has_bias:
        about["bias"] = helpers.normal(BATCH, memory_length, seed=5)
    names = {"bias": "token_bias", "causal": "use_causal_mask"}
    names["query_real"] = "query_mask"
    options = {names[name]: value for name, value in about.items()}
    options["is_cross_attention"] = length != memory_length
    output, _ = golden_cases.run(group, *arrays, value_mask=real, **options)
    arrays = [x.astype("float64") for x in arrays]
    expected = formula(group, *arrays, real=real, **about)
    shown = np.broadcast_to(about.get("query_real", True), (BATCH, length))
    shown = np.broadcast_to(shown[:, None], output.shape[:3])
    golden_cases.assert_close(output[shown], expected[shown], 2e-5)
    return output


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def at_distance(group, key, value, distance):
    """Adds the vectors of a relative position to a key and a value, if there are."""
    tables = helpers.relative_tables(group)
    if tables is None:
        return key, value
    limit = len(tables[0]) // 2
    entry = np.clip(distance, -limit, limit) + limit
    return key + tables[0][entry], value + tables[1][entry]


def attend_to_each(query, seen):
    """What one query of each head reads in a list of keys, values and biases."""
    if not seen:
        return 0.0
    *pairs, biases = zip(*seen)
    keys, values = (np.stack(x, axis=1) for x in pairs)
    output, _ = helpers.dense_attention(query[:, None], keys, values, True, [*biases])
    return output[:, 0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norm(x, layer):
    gamma, beta = values(layer.gamma, layer.beta)
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + layer.epsilon) * gamma + beta


def heads_of(attention, name, x):
    """Returns projections as `[batch, heads, length, size]`."""
    kernel, bias = values(
        getattr(attention, f"{name}_kernel"), getattr(attention, f"{name}_bias")
    )
    x = x @ kernel.reshape(x.shape[-1], -1) + bias.reshape(-1)
    return x.reshape(*x.shape[:2], attention.num_heads, -1).swapaxes(1, 2)


def attend(attention, x, memory, sees, more_logits=None):
    """Attention of one group of heads where `sees` `[batch, length, memory length]`.

    `sees` may have an axis of heads after that of the batch.
    `more_logits` is a function of the queries `[batch, heads, length, size]`, not yet
    scaled, that returns what is added to their products with the keys.
    """
    query = heads_of(attention, "query", x)
    key, value = (heads_of(attention, name, memory) for name in ("key", "value"))
    more = 0.0 if more_logits is None else more_logits(query, key)
    scale = query.shape[-1] ** -0.5
    sees = sees[:, None] if sees.ndim == 3 else sees
    found, _ = helpers.dense_attention(query * scale, key, value, sees, more * scale)
    joined = found.swapaxes(1, 2).reshape(*x.shape[:2], -1)
    kernel, bias = values(attention.output_kernel, attention.output_bias)
    return joined @ kernel.reshape(joined.shape[-1], -1) + bias.reshape(-1)


def dense(x, layer):
    kernel, bias = values(layer.kernel, layer.bias)
    return x @ kernel + bias


def feed_forward(x, layer):
    hidden = dense(x, layer.input_dense)
    return dense(hidden / (1 + np.exp(-1.702 * hidden)), layer.output_dense)


def block(x, layer, sees, memory=None, more_logits=None):
    """A `TransformerBlock` of self-attention, or of attention to a memory alone."""
    name = "attention" if memory is None else "cross_attention"
    attention = getattr(layer, name)

    def normed(x, *place):
        steps = getattr(layer, "_".join(place))
        return norm(x, steps.norms[0]) if steps.norms else x

    y = normed(x, name, "input")
    y = attend(attention, y, y if memory is None else memory, sees, more_logits)
    x = normed(x + y, name, "output")
    y = feed_forward(normed(x, "feed_forward", "input"), layer.feed_forward)
    return normed(x + y, "feed_forward", "output")

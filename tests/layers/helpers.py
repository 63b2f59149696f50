"""Attention in plain NumPy, and saving a layer, for the tests of the layers.

The tests start most weights at zero and then `randomize` them: JAX compiles the
random initializers for every shape, which takes longer than the tests themselves.
"""

import functools
import inspect
import json

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases

CLUSTERED = (
    *(layers.RoutedHeads, layers.ClusterStridedHeads, layers.HashedHeads),
    *(layers.RandomHeads, zoo.ThresholdHeads),
)
ON_JAX = keras.backend.backend() == "jax"
# A further case on JAX, where it takes long to compile.
FURTHER_ON_JAX = [pytest.mark.thorough] * ON_JAX


def further_on_jax(test):
    return FURTHER_ON_JAX[0](test) if FURTHER_ON_JAX else test


def only_on(backend, reason=None):
    """Marks tests of what there is on one backend alone."""
    is_other = keras.backend.backend() != backend
    return pytest.mark.skipif(is_other, reason=reason or f"of {backend}")


def normal(*shape, seed=0):
    """Returns normal random numbers in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def streams(length, memory_length=None, dim=6, value_dim=None, heads=2):
    """Returns random queries, keys and values of heads in two sequences."""
    memory = memory_length or length
    sizes = (length, dim), (memory, dim), (memory, value_dim or dim)
    return [normal(2, heads, *size, seed=seed) for seed, size in enumerate(sizes)]


def built(group, dim=6, value_dim=None, is_random=True):
    """Builds heads for sequences of any length; with other than their first weights."""
    shapes = [(None, group.num_heads, None, size) for size in (dim, value_dim or dim)]
    group.build(shapes[0], shapes[0], shapes[1])
    if is_random:
        randomize(group)
    return group


def attention(*groups, key_dim=4, dim=8, axes=1, memory_dim=None, **options):
    """Returns an attention layer for any lengths, with random weights."""
    options = {"kernel_initializer": "zeros", **options}
    unknown = [None] * (1 + axes)
    shapes = (*unknown, dim), memory_dim and (*unknown, memory_dim)
    return randomized(layers.MixedAttention(groups, key_dim, **options), *shapes)


def block(*groups, feed_forward=None, key_dim=4, dim=8, memory_dim=None, **options):
    """Returns a block for any lengths, with random weights."""
    attention = None
    if groups:
        attention = layers.MixedAttention(groups, key_dim, kernel_initializer="zeros")
    block = layers.TransformerBlock(attention, feed_forward, **options)
    memory = (None, None, memory_dim or dim) if block.cross_attention else None
    return randomized(block, (None, None, dim), memory)


def assign(layer, **values):
    """Gives weights of a layer values, by the names of its attributes."""
    for name, value in values.items():
        getattr(layer, name).assign(value)


def tail_mask(length, *lengths):
    """Returns a mask with a row for each of `lengths`, True for that many tokens."""
    return np.arange(length)[None] < np.array(lengths)[:, None]


def mask_with_a_hole(length, *lengths):
    """As `tail_mask`, and the first row lacks one token in the middle."""
    mask = tail_mask(length, *lengths)
    mask[0, length // 4] = False
    return mask


def randomize(layer, seed=0):
    """Fills all weights with random numbers; those of counts stay positive."""
    random = np.random.default_rng(seed)
    for weight in layer.weights:
        values = random.normal(size=weight.shape).astype("float32")
        weight.assign(np.abs(values) + 1.0 if weight.name == "counts" else values)


def randomized(layer, *shapes):
    """Builds a layer for inputs of these shapes, with random weights; returns it."""
    layer.build(*shapes)
    randomize(layer)
    return layer


def share_random_weights(attention, other):
    """Gives an attention layer of Keras random weights, and ours the same ones."""
    randomize(other)
    own = {weight.name: weight for weight in attention.weights}
    for weight in other.weights:
        projection, kind = weight.path.split("/")[-2:]
        weight_of_ours = own.pop(f"{projection.removeprefix('attention_')}_{kind}")
        values = golden_cases.to_numpy(weight)
        weight_of_ours.assign(values.reshape(weight_of_ours.shape))
    assert not own


def compiled(function, jit_compile=True):
    """Compiles a function of tensors; returns it with arrays in their place.

    `jit_compile` is TensorFlow's: False for no XLA, None to compile nothing at all. On
    JAX the whole function is compiled, which is much quicker than one operation after
    another. Torch compiles nothing.
    """
    if keras.backend.backend() == "jax":
        import jax

        options = golden_cases.compiler_options()
        function = jax.jit(function, compiler_options=options)
    elif keras.backend.backend() == "tensorflow" and jit_compile is not None:
        import tensorflow as tf

        function = tf.function(function, jit_compile=jit_compile, autograph=False)

    def call(*arrays):
        tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, arrays)
        return golden_cases.to_numpy(function(*tensors))

    return call


def normalize(tokens):
    """Layer normalization of the last axis, without scale and bias, in float64."""
    tokens = np.asarray(tokens).astype("float64")
    centred = tokens - tokens.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)


def turned(x, wavelength):
    """Rotary positions 0, 1 ... of `x` `[..., length, dim]`, in float64."""
    first, second = np.split(np.asarray(x, "float64"), 2, axis=-1)
    half = first.shape[-1]
    angles = np.arange(x.shape[-2])[:, None] / wavelength ** (np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def compared(group, query, key):
    """Returns queries and keys of a group as their products are taken, in float64."""
    if isinstance(group, CLUSTERED):
        query, key = normalize(query), normalize(key)
    elif group.qk_norm:
        size = query.shape[-1] ** 0.5
        query = mean_square_norm(query * size) / size
        key = mean_square_norm(key)
    if group.qk_norm:
        scales = golden_cases.to_numpy([group.query_scale, group.key_scale])
        query, key = query * scales[0], key * scales[1]
    if group.rotary_positions:
        query, key = (turned(x, group.rotary_wavelength) for x in (query, key))
    return query, key


def mean_square_norm(x):
    """Divides by the square root of the mean square of the last axis, in float64."""
    x = np.asarray(x, "float64")
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def softmax_options(group):
    """How a head group weighs keys, as options of `dense_attention`."""
    alpha = getattr(group, "entmax_alpha", None)
    if alpha == "learned":
        scores = golden_cases.to_numpy(group.dot_product.alpha_scores)
        alpha = 1 + 1 / (1 + np.exp(-scores.astype("float64")))[:, None, None]
    return {"cap": group.logit_soft_cap, "alpha": alpha}


def entmax_weights(weights, alpha):
    """What entmax makes of the logits of a softmax: they differ by a constant."""
    power = 1 / (alpha - 1)
    logits = np.log(np.maximum(weights.astype("float64"), 1e-300))
    scores = (alpha - 1) * (logits - logits.max(axis=-1, keepdims=True))
    low, high = np.full(scores.shape[:-1] + (1,), -1.0), np.zeros(1)
    for _ in range(60):
        middle = (low + high) / 2
        total = (np.maximum(scores - middle, 0) ** power).sum(-1, keepdims=True)
        low, high = np.where(total > 1, middle, low), np.where(total > 1, high, middle)
    return np.where(weights > 0, np.maximum(scores - low, 0) ** power, 0.0)


def dense_attention(
    query, key, value, mask, bias=0.0, tables=None, distances=None, cap=None, alpha=None
):
    """Softmax attention over all pairs, in float64: outputs and weights.

    A query for which `mask` is False at all keys gets zero. `tables` are the relative
    position vectors of keys and of values, `distances` say which of them to take, and
    columns of values beyond those of the vectors are averaged without them. `cap` is a
    soft cap of the logits without the bias; entmax with `alpha` replaces the softmax.
    """
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    logits = query @ np.swapaxes(key, -1, -2)
    if tables is not None:
        limit = len(tables[0]) // 2
        key_vectors, value_vectors = (
            np.asarray(table, "float64")[np.clip(distances, -limit, limit) + limit]
            for table in tables
        )
        logits = logits + np.einsum("...id,...ijd->...ij", query, key_vectors)
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    logits = logits + bias
    mask = np.broadcast_to(mask, logits.shape)
    largest = np.where(mask, logits, -1e300).max(axis=-1, keepdims=True)
    weights = np.where(mask, np.exp(np.where(mask, logits - largest, 0.0)), 0.0)
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    if alpha is not None:
        weights = entmax_weights(weights, alpha)
    output = weights @ value
    if tables is not None:
        size = value_vectors.shape[-1]
        output[..., :size] += np.einsum("...ij,...ijd->...id", weights, value_vectors)
    return output, weights


def one_later(x, axis):
    """Moves numbers one place on: what comes in is zero, or False."""
    moved = np.roll(x, 1, axis)
    moved[(slice(None),) * axis + (0,)] = 0
    return moved


def one_earlier(x, axis):
    """Undoes `one_later`; what comes in is zero, or False."""
    moved = np.roll(x, -1, axis)
    moved[(slice(None),) * axis + (-1,)] = 0
    return moved


def last_members(clusters, real, window, read=None, key_shift=0):
    """The rule "the last `window` members of the cluster that you read".

    `clusters` are those of keys, `read` those that queries read (None for the same),
    `<int>[batch, heads, length]`. Returns who sees whom `[batch, heads, length,
    length]`, and the rank of each member minus the number of members before the query.
    """
    length = clusters.shape[-1]
    read = clusters if read is None else read
    members = read[..., :, None] == clusters[..., None, :]
    members &= real[:, None, None, :]
    ranks = members.cumsum(axis=-1) - members
    before = (members & np.tri(length, k=-1, dtype="bool")).sum(-1, keepdims=True)
    sees = members & np.tri(length, k=-key_shift, dtype="bool")
    sees &= ranks >= sees.sum(axis=-1, keepdims=True) - window
    return sees & real[:, None, :, None], ranks - before


def relative_tables(group):
    """Returns the tables of a head group or `ScaledDotProduct`; None without them."""
    relative = getattr(group, "dot_product", group).relative_position
    if relative is None:
        return None
    return golden_cases.to_numpy([relative.key_embeddings, relative.value_embeddings])


def assert_equals_piece(
    layer, case, arguments, variables, tolerance, of_gradients=None
):
    """Fails unless outputs and gradients are those of a golden case of a piece.

    `arguments` are the names that the arrays of a call have in the case, `variables`
    those of the layer by their names there.
    """
    of_gradients = of_gradients or tolerance
    direction = keras.ops.convert_to_tensor(case["in/cotangent"])
    assert variables.keys() == case.group("var").keys()
    for name, value in case.group("var").items():
        variables[name].assign(value)
    result = golden_cases.gradients(
        layer,
        lambda output, _: keras.ops.sum(output * direction),
        {**{each: case[name] for each, name in arguments.items()}, "training": True},
        wrt=tuple(arguments),
        variables=variables,
    )
    golden_cases.assert_close(result.outputs, case["out/output"], tolerance)
    for argument, name in arguments.items():
        gradient = result.inputs[argument]
        if f"grad/{name}" in case:
            expected = case[f"grad/{name}"]
            golden_cases.assert_close(gradient, expected, of_gradients, 1e-6, name)
        else:
            assert name in case.config["none_grads"]
            assert gradient is None or not np.any(gradient)
    for name, expected in case.group("grad/var").items():
        gradient = result.variables[name]
        golden_cases.assert_close(gradient, expected, of_gradients, label=name)


def assert_same_results(actual, expected, tolerance=1e-5):
    """Fails unless outputs, losses and gradients of two `Result`s are the same."""
    golden_cases.assert_close(actual.outputs, expected.outputs, tolerance)
    losses = np.sort(actual.losses), np.sort(expected.losses)
    golden_cases.assert_close(*losses, tolerance, label="losses")
    for which in ("inputs", "variables"):
        found, gradients = getattr(actual, which), getattr(expected, which)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            golden_cases.assert_close(found[name], gradient, tolerance, label=name)


def assert_keeps_settings(layer):
    """Fails unless the config holds all arguments and makes the same layer."""
    config = layer.get_config()
    classes = [cls for cls in type(layer).__mro__ if issubclass(cls, layers.HeadGroup)]
    for cls in classes or [type(layer)]:
        arguments = set(inspect.signature(cls.__init__).parameters)
        assert arguments - {"self", "args", "kwargs"} <= config.keys()
    assert type(layer).from_config(config).get_config() == config


def assert_survives_saving(layer, folder, *arrays, has_outputs=True, **options):
    """Fails unless settings, weights and outputs outlive a config and a file."""
    assert_keeps_settings(layer)
    inputs = [keras.Input(array.shape[1:], dtype=array.dtype) for array in arrays]
    model = keras.Model(inputs, layer(*inputs, **options))
    randomize(layer)
    path = folder / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    # A file turns tuples into lists.
    assert as_json(loaded.layers[-1].get_config()) == as_json(layer.get_config())
    for weight, copy in zip(model.weights, loaded.weights, strict=True):
        assert weight.path == copy.path
        assert weight.trainable == copy.trainable
        np.testing.assert_array_equal(*golden_cases.to_numpy([weight, copy]))
    # JAX takes long to compile both.
    if has_outputs and keras.backend.backend() != "jax":
        outputs = [golden_cases.run(m, list(arrays))[0] for m in (model, loaded)]
        np.testing.assert_array_equal(*outputs)


class Held(keras.layers.Layer):
    """Calls a layer on each argument; returns what that would have moved `moves` by."""

    def __init__(self, layer, moves=None):
        super().__init__()
        self.layer, self.moves = layer, layer if moves is None else moves
        self.built = True

    def call(self, *parts, training=None):
        with layers.hold_updates() as updates:
            for part in parts:
                self.layer(part, training=training)
        assert all(layer is self.moves for layer, _ in updates)
        return [statistics for _, statistics in updates]


def in_pieces(call, sizes, arrays, state):
    """Hands on sequences in pieces of these sizes, with the state of the last call.

    `call` takes the pieces, the state and where they start, and returns an output and
    the next state. Returns all outputs and the last state.
    """
    first = compiled(lambda *arguments: call(*arguments, 0), jit_compile=None)
    later, outputs, start = compiled(call, jit_compile=None), [], 0
    for size in sizes:
        pieces = [x[:, start : start + size] for x in arrays]
        if start == 0:
            output, state = first(*pieces, state)
        else:
            output, state = later(*pieces, state, np.int32(start))
        outputs.append(output)
        start += size
    return np.concatenate(outputs, axis=1), state


def assert_pieces_equal_the_whole(
    layer, x, *sizes, whole=None, shown=slice(None), tolerance=1e-5, **about
):
    """Fails unless pieces of these sizes, and one of the rest, equal one pass.

    `whole` are options of that pass alone, `about` arrays of tokens in all calls, by
    their names. Outputs are compared where they are `shown`.
    """
    sizes = *sizes, x.shape[1] - sum(sizes)
    whole = {"use_causal_mask": True} if whole is None else whole
    expected, _ = golden_cases.run(layer, x, **about, **whole)

    def call(x, *rest):
        *pieces, cache, start = rest
        named = dict(zip(about, pieces, strict=True))
        return layer(x, cache=cache, cache_index=start, **named)

    cache = layer.make_cache(len(x), x.shape[1])
    found, _ = in_pieces(call, sizes, (x, *about.values()), cache)
    golden_cases.assert_close(found[shown], expected[shown], tolerance)


def assert_steps_read_a_memory(layer, dim, has_bias=True):
    """Fails unless steps of attention to another sequence equal that in one pass."""
    x, memory = normal(2, 9, dim), normal(2, 17, dim, seed=1)
    query_mask = mask_with_a_hole(9, 9, 7)
    about = {"value_mask": tail_mask(17, 17, 12)}
    about |= {"token_bias": normal(2, 17, seed=2)} if has_bias else {}

    def both(x, query_mask, memory, about):
        cache = layer.make_cache(2, 9, value=memory, **about)
        first, cache = layer(
            x[:, :1], value=memory, query_mask=query_mask[:, :1], cache=cache
        )
        layer(x[:, 3:4], cache=cache, cache_index=np.int32(1))
        rest, _ = layer(
            x[:, 1:], query_mask=query_mask[:, 1:], cache=cache, cache_index=np.int32(1)
        )
        expected = layer(x, value=memory, query_mask=query_mask, **about)
        return expected, keras.ops.concatenate([first, rest], axis=1)

    call = compiled(both, jit_compile=None)
    expected, steps = call(x, query_mask, memory, about)
    golden_cases.assert_close(steps[query_mask], expected[query_mask], 1e-5)


class Decoder:
    """The ways to call a layer, of arrays; on JAX each is compiled once.

    A call takes tokens, a mask of those that are no padding, and a token bias, which is
    left out without `has_bias`.
    """

    def __init__(self, layer, has_bias=True):
        def about(real, bias):
            return {"query_mask": real, **({"token_bias": bias} if has_bias else {})}

        whole = functools.partial(layer, use_causal_mask=True, routing_scope="prefix")

        def all_at_once(x, real, bias):
            return whole(x, **about(real, bias))

        def with_cache(x, real, bias, cache, index):
            return layer(x, cache=cache, cache_index=index, **about(real, bias))

        # Few calls are quicker without a graph; the tests of `generate` have one.
        self.whole = compiled(all_at_once, jit_compile=None)
        start = functools.partial(with_cache, index=0)
        self.start = compiled(start, jit_compile=None)
        self.step = compiled(with_cache, jit_compile=None)

    def steps(self, tokens, cache, first, end, size=1):
        """Attends with the tokens from a position on, so many at once."""
        outputs = []
        for index in range(first, end, size):
            x, real, bias = (x[:, index : index + size] for x in tokens)
            output, cache = self.step(x, real, bias, cache, np.int32(index))
            outputs.append(output)
        return np.concatenate(outputs, axis=1), cache


def assert_steps_equal_the_whole(
    layer, dim, max_length=None, has_bias=True, tolerance=1e-5
):
    """Fails unless calls with a cache equal one pass, in whatever pieces tokens come.

    Returns the outputs of one pass, and those without padding and bias.
    """
    length, size, start = 19, 4, 8
    real = mask_with_a_hole(length, length, length - 4)
    tokens = normal(2, length, dim), real, normal(2, length, seed=2)
    decoder = Decoder(layer, has_bias)
    expected = decoder.whole(*tokens)

    def assert_right(outputs, first, end):
        shown, wanted = real[:, first:end], expected[:, first:end]
        golden_cases.assert_close(
            outputs[:, : end - first][shown], wanted[shown], tolerance
        )

    empty = layer.make_cache(2, max_length or length)
    outputs, cache = decoder.steps(tokens, empty, 0, 3)
    assert_right(outputs, 0, 3)
    # What a rejected draft has left behind is nothing.
    draft = normal(2, size, dim, seed=3), real[:, :size] | True, tokens[2][:, :size]
    decoder.step(*draft, cache, np.int32(3))
    outputs, cache = decoder.steps(tokens, cache, 3, 19, size)
    assert_right(outputs, 3, 19)
    # A start forgets what was before. It may have room behind its tokens, as any call:
    # in the first row the last one of them is padding.
    fed = [x[:, : start + 4] for x in tokens]
    fed[1] = fed[1] & (np.arange(start + 4) < start)
    outputs, cache = decoder.start(*fed, cache)
    assert_right(outputs, 0, start)
    fed = [x[:, start : start + size] for x in tokens]
    fed[1] = fed[1] & (np.arange(size) < 3)
    outputs, cache = decoder.step(*fed, cache, np.int32(start))
    assert_right(outputs, start, start + 3)
    outputs, _ = decoder.steps(tokens, cache, start + 3, start + 5)
    assert_right(outputs, start + 3, start + 5)
    return expected, decoder.whole(tokens[0], real | True, tokens[2] * 0)


def as_json(config):
    return json.loads(json.dumps(config))

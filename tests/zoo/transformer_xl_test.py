"""Tests of Transformer-XL, against loops over queries and keys in NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers

BATCH, LENGTH, DIM, HEADS, KEY = 2, 12, 5, 2, 4
VOCABULARY = 11


@pytest.fixture(autouse=True)
def eager_calls(eager):
    """Each layer is called a few times."""


def built(memory_length=6, cls=zoo.TransformerXLAttention, **options):
    options = {"kernel_initializer": "zeros", "memory_length": memory_length, **options}
    layer = cls(HEADS, KEY, **options)
    layer.build((None, None, DIM))
    helpers.randomize(layer)
    return layer


def weights_of(layer):
    """Kernels by projection, `[dim, heads, key_dim]`, and biases, in float64."""
    found = {}
    for name in ("query", "key", "value", "position"):
        kernel = golden_cases.to_numpy(getattr(layer, f"{name}_dense").kernel)
        found[name] = kernel.astype("float64").reshape(DIM, HEADS, KEY)
    for name in ("content_bias", "position_bias"):
        found[name] = golden_cases.to_numpy(getattr(layer, name))[:, 0]
    return found


def sinusoid(distance):
    half = (DIM + 1) // 2
    angles = [distance / 10000 ** (i / half) for i in range(half)]
    return np.array([*np.sin(angles), *np.cos(angles)])[:DIM]


def read(weights, x, head, rows):
    """One head of one query reads a list of pairs of distances and vectors.

    Returns what it reads, and the weights of the rows.
    """
    query = x @ weights["query"][:, head]
    logits = []
    for distance, row in rows:
        position = sinusoid(distance) @ weights["position"][:, head]
        key = row @ weights["key"][:, head]
        logits.append((query + weights["content_bias"][head]) @ key)
        logits[-1] += (query + weights["position_bias"][head]) @ position
    shares = np.exp((np.array(logits) - max(logits)) / KEY**0.5)
    shares /= shares.sum()
    values = [row @ weights["value"][:, head] for _, row in rows]
    return shares @ np.array(values), shares


def oracle(layer, x, real, first_seen):
    """The query at each position t sees the positions from `first_seen(t)` to t."""
    weights, x = weights_of(layer), x.astype("float64")
    output_kernel = golden_cases.to_numpy(layer.output_dense.kernel)
    output = np.zeros(x.shape)
    for b, t in np.argwhere(real):
        seen = [j for j in range(max(first_seen(t), 0), t + 1) if real[b, j]]
        rows = [(t - j, x[b, j]) for j in seen]
        heads = [read(weights, x[b, t], head, rows)[0] for head in range(HEADS)]
        output[b, t] = np.concatenate(heads) @ output_kernel
    return output


def in_pieces(layer, x, sizes, state, real=None):
    """Calls with a state, for pieces of these sizes; returns outputs and the state."""

    def call(x, real, state):
        return layer(x, mask=real, state=state)

    call, outputs, start = helpers.compiled(call, jit_compile=None), [], 0
    real = np.ones(x.shape[:2], "bool") if real is None else real
    for size in sizes:
        piece = slice(start, start + size)
        output, state = call(x[:, piece], real[:, piece], state)
        outputs.append(output)
        start += size
    return np.concatenate(outputs, axis=1), state


CASES = {
    "one segment": ({}, lambda t: 0),
    "segments": ({"segment_length": 4}, lambda t: t // 4 * 4 - 6),
    "memory shorter than a segment": (
        {"segment_length": 5, "memory_length": 3},
        lambda t: t // 5 * 5 - 3,
    ),
    "same length": ({"segment_length": 4, "same_length": True}, lambda t: t - 6),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name):
    options, first_seen = CASES[name]
    layer, x = built(**options), helpers.normal(BATCH, LENGTH, DIM, seed=1)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 9)
    output, _ = golden_cases.run(layer, x, mask=real)
    expected = oracle(layer, x, real, first_seen)
    golden_cases.assert_close(output[real], expected[real], 1e-5)


@pytest.mark.parametrize(
    "memory_length, sizes, options, first_seen",
    [
        (LENGTH, [1] * LENGTH, {}, lambda t: 0),
        (6, [4, 4, 4], {}, lambda t: t // 4 * 4 - 6),
        (6, [5, 1, 2, 4], {"same_length": True}, lambda t: t - 6),
    ],
    ids=["all before, token by token", "segments", "same length, any pieces"],
)
def test_pieces_of_a_text(memory_length, sizes, options, first_seen):
    """The state has another memory than the layer, as in evaluation."""
    layer, x = built(3, **options), helpers.normal(BATCH, LENGTH, DIM, seed=1)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 9)
    state = layer.make_state(BATCH, memory_length=memory_length)
    output, state = in_pieces(layer, x, sizes, state, real)
    expected = oracle(layer, x, real, first_seen)
    golden_cases.assert_close(output[real], expected[real], 1e-5)
    assert state["memory"].shape == (BATCH, memory_length, DIM)
    np.testing.assert_array_equal(state["memory_mask"], real[:, -memory_length:])


def assert_no_leak_and_no_padding(layer, length):
    """No later token changes an earlier output, and padding changes nothing."""
    x, real = helpers.normal(BATCH, length, DIM), helpers.tail_mask(length, length, 9)
    real[0, 2] = False
    before, losses = golden_cases.run(layer, x, mask=real, training=True)
    for position in (3, 5, 9):
        changed = x.copy()
        changed[:, position:] = helpers.normal(BATCH, length - position, DIM, seed=3)
        after, _ = golden_cases.run(layer, changed, mask=real, training=True)
        np.testing.assert_array_equal(after[:, :position], before[:, :position])
        assert np.any(after[:, position:] != before[:, position:])
    spoilt = np.where(real[..., None], x, np.nan).astype("float32")
    after, after_losses = golden_cases.run(layer, spoilt, mask=real, training=True)
    np.testing.assert_array_equal(after[real], before[real])
    np.testing.assert_array_equal(after_losses, losses)
    assert np.all(np.isfinite(before))


def test_no_leak_and_no_padding():
    assert_no_leak_and_no_padding(built(segment_length=4), LENGTH)


def test_no_gradient_flows_into_the_memory():
    layer, x = built(segment_length=4), helpers.normal(BATCH, LENGTH, DIM)
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(output[:, 4:8] ** 2),
        {"inputs": x},
        wrt=("inputs",),
    )
    gradient = result.inputs["inputs"]
    np.testing.assert_array_equal(gradient[:, :4], 0)
    assert np.all(gradient[:, 4:8] != 0)
    changed = x.copy()
    changed[:, :4] += 1  # which is read nevertheless
    after, _ = golden_cases.run(layer, changed)
    assert np.all(np.any(after[:, 4:8] != result.outputs[:, 4:8], axis=(1, 2)))


def backbone(cls=zoo.TransformerXLBackbone, **options):
    options = {"memory_length": LENGTH, **options}
    model = cls(VOCABULARY, 2, HEADS, 8, 6, **options)
    helpers.randomize(model)
    for weight in model.weights:  # for outputs of a usual size
        if weight.name == "kernel":
            weight.assign(0.3 * ops.convert_to_tensor(weight))
    return model


def token_ids(length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (BATCH, length))


def side_attention():
    routed = layers.RoutedHeads(2, 3, 4, key_shift=1)
    return layers.MixedAttention([routed, layers.SlidingHeads(1, 3)], key_dim=3)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("has_side", [False, True])
def test_segments_of_the_backbone_equal_the_whole(norm_position, has_side):
    """With a memory of all tokens before; routed heads beside it read it, too."""
    side = side_attention() if has_side else None
    model = backbone(norm_position=norm_position, side_attention=side)
    ids, real = token_ids(), helpers.tail_mask(LENGTH, LENGTH, 9)
    inputs = {"token_ids": ids, "padding_mask": real}
    whole, _ = golden_cases.run(model, inputs)

    def call(x, mask, state):
        return model({"token_ids": x, "padding_mask": mask}, state=state)

    call, outputs = helpers.compiled(call, jit_compile=None), []
    state = model.make_state(BATCH)
    for piece in (slice(0, 7), slice(7, 8), slice(8, LENGTH)):
        output, state = call(ids[:, piece], real[:, piece], state)
        outputs.append(output)
    outputs = np.concatenate(outputs, axis=1)
    golden_cases.assert_close(outputs[real], whole[real], 1e-4)
    assert whole.std() > 0.1


def test_blocks_have_copies_of_the_side_attention():
    model = backbone(side_attention=side_attention())
    first, second = (block.attention.side_attention for block in model.blocks)
    assert first is not second
    config = model.get_config()
    assert type(model).from_config(config).get_config() == config
    result = golden_cases.gradients(
        model, lambda output, losses: ops.sum(output**2), {"inputs": token_ids()}
    )
    for path, gradient in result.variables.items():
        assert np.any(gradient != 0), path


@pytest.mark.parametrize("has_side", [False, True])
def test_a_saved_model_has_the_same_outputs(has_side, tmp_path):
    side = side_attention() if has_side else None
    model = backbone(segment_length=4, side_attention=side, dropout=0.1)
    ids = keras.Input((LENGTH,), dtype="int32")
    outer = keras.Model(ids, keras.layers.Dense(3)(model(ids)))
    assert outer.output_shape == (None, LENGTH, 3)
    for saved in (model, outer):
        saved.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        outputs = [golden_cases.run(m, token_ids())[0] for m in (saved, loaded)]
        np.testing.assert_array_equal(*outputs)


def assert_trains(model, length):
    """Fails unless `fit` with compiled steps lowers the loss."""
    ids = keras.Input((length,), dtype="int32")
    lm = keras.Model(ids, keras.layers.Dense(VOCABULARY)(model(ids)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lm.compile(keras.optimizers.Adam(0.01), loss, jit_compile=True)
    x = token_ids(length)
    history = lm.fit(x, np.roll(x, -1, axis=1), epochs=8, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]


@pytest.mark.thorough
def test_trains(compiled):
    assert_trains(backbone(segment_length=4, dropout=0.1), LENGTH)


def assert_half_precision(make, length, **options):
    exact, half = make(), make(dtype="mixed_bfloat16")
    x = helpers.normal(BATCH, length, DIM)
    weights, outputs = [0.3 * w for w in exact.get_weights()], []
    for layer in (exact, half):
        layer.set_weights(weights)
        state = layer.make_state(BATCH)
        output, state = golden_cases.run(layer, x, state=state, **options)[0]
        outputs.append(np.asarray(output, "float32"))
    golden_cases.assert_close(outputs[1], outputs[0], 0.05)
    assert keras.backend.standardize_dtype(half.make_state(1)["memory"].dtype) == (
        "bfloat16"
    )


def test_half_precision():
    assert_half_precision(lambda **own: built(**own), LENGTH)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: built(0), "`memory_length` must be a positive integer"),
        (lambda: built(segment_length=0), "`segment_length` must be a positive"),
        (lambda: built(same_length=2), "`same_length` must be one of False, True"),
        (lambda: built(dropout=1), "`dropout` must be a rate"),
        (lambda: built(side_attention="full"), "must be a `MixedAttention` or"),
        (lambda: built().make_state(0), "`batch_size` must be a positive integer"),
        (lambda: built().make_state(1, 2.0), "`memory_length` must be a positive"),
        (
            lambda: zoo.TransformerXLAttention(1, 2, 3)(np.ones((2, 3))),
            "Received: shape=\\(2, 3\\)",
        ),
        (
            lambda: zoo.TransformerXLAttention(1, 2, 3).make_state(1),
            "needs a layer that is built",
        ),
        (
            lambda: built()(np.ones((2, 3, DIM)), state=built().make_state(3)),
            "`state` must be what `make_state`",
        ),
        (lambda: backbone(key_dim=-1), "`key_dim` must be a positive integer"),
        (lambda: backbone(norm_position="both"), "`norm_position` must be one of"),
        (
            lambda: zoo.TransformerXLBackbone(9, 1, 3, 8, 4, 4),
            "`num_heads` must divide `hidden_dim`",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()

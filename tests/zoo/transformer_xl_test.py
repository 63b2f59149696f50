"""Tests of Transformer-XL, against loops over queries and distances in NumPy."""

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
SIDES = [False, pytest.param(True, marks=pytest.mark.thorough)]
# Each layer is called a few times.
pytestmark = pytest.mark.usefixtures("eager")


def built(memory_length=6, cls=zoo.TransformerXLAttention, **options):
    options = {"kernel_initializer": "zeros", "memory_length": memory_length, **options}
    return helpers.randomized(cls(HEADS, KEY, **options), (None, None, DIM))


def weights_of(layer):
    """Kernels by projection, `[dim, heads, key_dim]`, and biases, in float64."""
    found = {}
    for name in ("query", "key", "value", "position"):
        kernel = golden_cases.to_numpy(getattr(layer, f"{name}_dense").kernel)
        found[name] = kernel.astype("float64").reshape(DIM, HEADS, KEY)
    for name in ("content_bias", "position_bias"):
        found[name] = golden_cases.to_numpy(getattr(layer, name))[:, 0]
    found["output"] = golden_cases.to_numpy(layer.output_dense.kernel)
    return found


def sinusoid(distance):
    half = (DIM + 1) // 2
    angles = [distance / 10000 ** (i / half) for i in range(half)]
    return np.array([*np.sin(angles), *np.cos(angles)])[:DIM]


def read(weights, x, rows):
    """The heads of one query read a list of pairs of distances and vectors.

    Returns what they read, and the sums over the heads of the weights of the rows.
    """
    places = np.array([sinusoid(distance) for distance, _ in rows])
    vectors = np.array([row for _, row in rows])

    def heads(x, name):
        return np.einsum("nd,dhk->hnk", x, weights[name])

    query, key = heads(x[None], "query"), heads(vectors, "key")
    value, positions = heads(vectors, "value"), heads(places, "position")
    content, place = (weights[f"{x}_bias"][:, None] for x in ("content", "position"))
    logits = (query + place) @ positions.swapaxes(1, 2) / KEY**0.5
    query = (query + content) / KEY**0.5
    found, shares = helpers.dense_attention(query, key, value, True, logits)
    return found.reshape(-1), shares[:, 0].sum(axis=0)


def oracle(layer, x, real, first_seen):
    """The query at each position t sees the positions from `first_seen(t)` to t."""
    weights, output = weights_of(layer), np.zeros(x.shape)
    for b, t in np.argwhere(real):
        seen = [j for j in range(max(first_seen(t), 0), t + 1) if real[b, j]]
        rows = [(t - j, x[b, j]) for j in seen]
        output[b, t] = read(weights, x[b, t], rows)[0] @ weights["output"]
    return output


def in_pieces(layer, x, real, sizes, state):
    """Calls with a state, for pieces of these sizes; returns outputs and the state."""

    def call(x, real, state, start):
        if len(x.shape) == 2:
            return layer({"token_ids": x, "padding_mask": real}, state=state)
        return layer(x, mask=real, state=state)

    return helpers.in_pieces(call, sizes, (x, real), state)


def border(segment, memory):
    """What a token of a segment sees first."""
    return lambda t: t // segment * segment - memory


CASES = {
    "one segment": ({}, None, lambda t: 0),
    "segments": ({"segment_length": 4}, None, border(4, 6)),
    "a short memory": ({"segment_length": 5, "memory_length": 3}, None, border(5, 3)),
    "same length": ({"segment_length": 4, "same_length": True}, None, lambda t: t - 6),
    # In pieces, with a memory of 6 in place of 3.
    "segments as pieces": ({}, [4, 4, 4], border(4, 6)),
    "any pieces": ({"same_length": True}, [5, 1, 2, 4], lambda t: t - 6),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name):
    options, sizes, first_seen = CASES[name]
    x, real = helpers.normal(BATCH, LENGTH, DIM, seed=1), np.ones((2, LENGTH), "bool")
    real[1, 9:] = real[0, 3] = False
    if sizes is None:
        layer = built(**options)
        output, _ = golden_cases.run(layer, x, mask=real)
    else:
        layer = built(3, **options)
        state = layer.make_state(BATCH, memory_length=6)
        output, state = in_pieces(layer, x, real, sizes, state)
        np.testing.assert_array_equal(state["memory_mask"], real[:, -6:])
    expected = oracle(layer, x, real, first_seen)
    golden_cases.assert_close(output[real], expected[real], 1e-5)


def assert_memory_is_read_without_gradient(layer, length, first):
    """A segment of 4 from `first` on reads the first tokens, and no gradient flows."""
    x, segment = helpers.normal(BATCH, length, DIM), slice(first, first + 4)

    def objective(output, losses):
        return ops.sum(output[:, segment] ** 2)

    result = golden_cases.gradients(layer, objective, {"inputs": x}, wrt=("inputs",))
    gradient = result.inputs["inputs"]
    np.testing.assert_array_equal(gradient[:, :first], 0)
    assert np.all(gradient[:, segment] != 0)
    x[:, :4] += 1
    after, _ = golden_cases.run(layer, x)
    before = result.outputs
    assert np.all(np.any(after[:, segment] != before[:, segment], axis=(1, 2)))


def test_no_gradient_flows_into_the_memory():
    assert_memory_is_read_without_gradient(built(segment_length=4), LENGTH, 4)


def side_attention():
    routed = layers.RoutedHeads(2, 3, 4, key_shift=1)
    return layers.MixedAttention([routed, layers.SlidingHeads(1, 3)], key_dim=3)


def backbone(cls=zoo.TransformerXLBackbone, **options):
    model = cls(VOCABULARY, 2, HEADS, 8, 6, **{"memory_length": LENGTH, **options})
    helpers.randomize(model)
    model.set_weights([0.3 * weight for weight in model.get_weights()])
    return model


def token_ids(length=LENGTH):
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, length))
    return ids.astype("int32")


@pytest.mark.parametrize(
    "norm_position, has_side",
    # Routed heads beside those with a memory take JAX long to compile.
    [("post", False), pytest.param("pre", True, marks=helpers.FURTHER_ON_JAX)],
)
def test_pieces_of_a_text_equal_the_whole(norm_position, has_side):
    """With a memory of all tokens before; routed heads beside it read it, too."""
    side = side_attention() if has_side else None
    model = backbone(norm_position=norm_position, side_attention=side)
    ids, real = token_ids(), helpers.tail_mask(LENGTH, LENGTH, 9)
    inputs = {"token_ids": ids, "padding_mask": real}
    whole, _ = golden_cases.run(model, inputs)
    outputs, _ = in_pieces(model, ids, real, [1, 1, 4, 1, 5], model.make_state(BATCH))
    golden_cases.assert_close(outputs[real], whole[real], 1e-4)
    assert whole.std() > 0.1


@helpers.further_on_jax
def test_blocks_have_weights_of_their_own():
    model = backbone(side_attention=side_attention())
    first, second = (block.attention.side_attention for block in model.blocks)
    assert first is not second
    result = golden_cases.gradients(
        model, lambda output, losses: ops.sum(output**2), {"inputs": token_ids()}
    )
    for path, gradient in result.variables.items():
        assert np.any(gradient != 0), path


@pytest.mark.thorough
def test_trains(compiled):
    """By `fit`, with compiled steps."""
    ids, model = keras.Input((LENGTH,), dtype="int32"), backbone(segment_length=4)
    lm = keras.Model(ids, keras.layers.Dense(VOCABULARY)(model(ids)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lm.compile(keras.optimizers.Adam(0.01), loss, jit_compile=True)
    x = token_ids()
    history = lm.fit(x, np.roll(x, -1, axis=1), epochs=24, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]


def test_states_pass_through_keras_as_they_are():
    """`stateless_call` is how a loop of one's own calls models on JAX."""
    model = backbone()
    weights = (model.trainable_variables, model.non_trainable_variables)

    def both(ids):
        state = model.make_state(BATCH)
        (stateless, _), _ = model.stateless_call(*weights, ids, state=state)
        return stateless, model(ids, state=state)[0]

    both = helpers.compiled(both, jit_compile=None)
    golden_cases.assert_close(*both(token_ids()), 1e-6)


def test_attention_beside_the_memory_may_depend_on_places():
    """Blocks lie at the same rows in a whole text and in its segments."""
    local = layers.MixedAttention([layers.LocalHeads(2, (4,))], key_dim=4)
    local.build((None, None, 8))  # as one that another model has used
    side = {"side_attention": local, "memory_length": 6}
    model, ids = backbone(segment_length=4, **side), token_ids()
    real = np.ones(ids.shape, "bool")
    outputs, _ = in_pieces(model, ids, real, [4, 4, 4], model.make_state(BATCH))
    golden_cases.assert_close(outputs, golden_cases.run(model, ids)[0], 1e-5)


X = np.ones((2, 3, DIM))


def unbuilt():
    return zoo.TransformerXLAttention(1, 2, 3)


def of_one_block(model):
    return model(token_ids(), state=model.make_state(BATCH)[:1])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: built(side_attention="full"), "`side_attention`.*='full'"),
        (lambda: built().make_state(0), "`batch_size`.*batch_size=0"),
        (lambda: built().make_state(1, 2.0), r"`memory_length`.*memory_length=2\.0"),
        (lambda: unbuilt()(X[0]), r"`TransformerXLAttention`.*shape=\(3, 5\)"),
        (lambda: unbuilt().make_state(1), "`make_state`.*built=False"),
        (
            lambda: built()(X, state=built().make_state(3)),
            r"`state`.*\(3, 6, 5\).*\(2, 3, 5\)",
        ),
        (lambda: built()(X, state=3), "`state`.*state=3"),
        (lambda: built()(X, state={}), "`state`.*`make_state`"),
        (lambda: built()(keras.Input((3, DIM)), state={}), "`state`.*<KerasTensor"),
        (lambda: of_one_block(backbone()), "`state`.* 2 "),
        (
            lambda: built()(X, mask=np.ones((2, 4), "bool")),
            r"`mask`.*\(2, 4\).*\(2, 3, 5\)",
        ),
        (lambda: built()(X[:, :0]), r"Received: shape=\(2, 0, 5\)"),
        (lambda: backbone()(token_ids()[0]), r"\['token_ids'\].*\(12,\)"),
        (lambda: backbone()({"ids": token_ids()}), r"'token_ids'.*\['ids'\]"),
        (lambda: backbone(norm_position="both"), "`norm_position`.*='both'"),
        (lambda: zoo.TransformerXLBackbone(9, 1, 3, 8, 4, 4), "Received: 3 .* 8"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Tests of the Compressive Transformer, against loops over lists of rows in NumPy."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import transformer_xl_test as xl

BATCH, DIM, HEADS, KEY = xl.BATCH, xl.DIM, xl.HEADS, xl.KEY
SEGMENT, RATE, LENGTH = 4, 2, 22  # five segments and a half


# Each layer is called a few times.
pytestmark = pytest.mark.usefixtures("eager")


def built(compression="convolution", memory_length=4, compressed_length=5, **options):
    sizes = {"memory_length": memory_length, "compressed_length": compressed_length}
    options = {"segment_length": SEGMENT, "compression_rate": RATE, **sizes, **options}
    return xl.built(cls=zoo.CompressiveAttention, compression=compression, **options)


def compress(layer, group):
    """Makes one row of a group of rows, which are pairs of vector and reality."""
    vectors = [x * is_real for x, is_real in group]
    real = [x for x, is_real in group if is_real]
    if layer.compression == "convolution":
        kernel, bias = golden_cases.to_numpy(layer.convolution.weights)
        row = sum(x @ k for x, k in zip(vectors, kernel, strict=True)) + bias
    elif not real:
        row = np.zeros(DIM)
    else:
        pooled = {"mean_pooling": np.mean, "max_pooling": np.max}[layer.compression]
        row = pooled(real, axis=0)
    return row, bool(real)


def most_used(rows, used):
    """Keeps the rows with the largest means of the weights that they had."""
    means = [np.mean(u) if is_real else -1 for (_, is_real), u in zip(rows, used)]
    best = sorted(np.argsort(-np.array(means), kind="stable")[: SEGMENT // RATE])
    return [rows[i] for i in best]


def contents(weights, x, rows):
    """What the heads read in rows by content alone, `[heads * key_dim]`."""
    left_out = ("position", "content_bias", "position_bias")
    plain = weights | {name: 0 * weights[name] for name in left_out}
    return xl.read(plain, x, [(0, row) for row, is_real in rows if is_real])[0]


def oracle(layer, x, real):
    """Reads one text after another, with memories that are lists.

    Returns:
        The outputs, and the reconstruction loss.
    """
    weights, x = xl.weights_of(layer), x.astype("float64")
    output, errors = np.zeros(x.shape), []
    for b in range(len(x)):
        memory, compressed, used = [], [], []
        for start in range(0, x.shape[1], SEGMENT):
            tokens = range(start, min(start + SEGMENT, x.shape[1]))
            used += [[] for _ in tokens]
            for t in tokens:
                segment = [(x[b, j], real[b, j]) for j in range(start, t + 1)]
                rows = compressed + memory + segment
                seen = [j for j, (_, is_real) in enumerate(rows) if is_real]
                shares = np.zeros(len(rows))
                if real[b, t]:
                    pairs = [(len(rows) - 1 - j, rows[j][0]) for j in seen]
                    attended, shares[seen] = xl.read(weights, x[b, t], pairs)
                    output[b, t] = attended @ weights["output"]
                for j in range(len(compressed), len(rows)):
                    used[j - len(compressed)].append(shares[j])
            if len(tokens) < SEGMENT:
                break
            memory += [(x[b, t], real[b, t]) for t in tokens]
            if len(memory) > layer.memory_length:
                old, memory = memory[:SEGMENT], memory[SEGMENT:]
                if layer.compression == "most_used":
                    new = most_used(old, used)
                else:
                    groups = [old[i : i + RATE] for i in range(0, SEGMENT, RATE)]
                    new = [compress(layer, group) for group in groups]
                used = used[SEGMENT:]
                compressed = (compressed + new)[-layer.compressed_length :]
                errors += [
                    contents(weights, x[b, t], old) - contents(weights, x[b, t], new)
                    for t in tokens
                    if real[b, t] and any(is_real for _, is_real in old)
                ]
    return output, np.mean(np.square(errors))


def padded_text():
    real = helpers.tail_mask(LENGTH, LENGTH, 17)
    real[0, [1, 4, 5]] = False  # a group is padding, and a part of one
    return helpers.normal(BATCH, LENGTH, DIM, seed=1), real


CASES = {
    "convolution": {},
    "longer memory": {"memory_length": 8, "compressed_length": 1},
    "mean pooling": {"compression": "mean_pooling"},
    "max pooling": {"compression": "max_pooling"},
    "most used": {"compression": "most_used", "compressed_length": 3},
    "most used later": {"compression": "most_used", "memory_length": 8},
}


@pytest.mark.parametrize(
    "name", kinds.some(CASES, ("convolution", "max pooling", "most used later"))
)
def test_equals_the_oracle(name):
    layer, (x, real) = built(reconstruction_weight=0.5, **CASES[name]), padded_text()
    output, losses = golden_cases.run(layer, x, mask=real, training=True)
    expected, loss = oracle(layer, x, real)
    golden_cases.assert_close(output[real], expected[real], 1e-5)
    assert loss > 0.01
    statistic = golden_cases.to_numpy(layer.statistics["reconstruction_loss"])
    golden_cases.assert_close(statistic, loss, 1e-4)
    learns = layer.compression == "convolution"
    golden_cases.assert_close(losses, [0.5 * loss] if learns else [], 1e-4)
    with layers.hold_updates() as updates:  # which replicas add up
        layer(x, mask=real, training=True)
    golden_cases.assert_close(ops.divide(*updates[0][1]), loss, 1e-4)


@pytest.mark.parametrize(
    "compression, sizes",
    [("convolution", [3, 1, 8, 2, 2, 4, 2]), ("most_used", [1] * LENGTH)],
)
def test_pieces_of_a_text_equal_whole_segments(compression, sizes):
    layer, (x, real) = built(compression), padded_text()
    whole, _ = golden_cases.run(layer, x, mask=real)
    output, state = xl.in_pieces(layer, x, real, sizes, layer.make_state(BATCH))
    golden_cases.assert_close(output[real], whole[real], 1e-5)
    np.testing.assert_array_equal(state["position"], LENGTH % SEGMENT)


def test_a_state_may_have_longer_memories():
    layer, (x, real) = built(), padded_text()
    state = layer.make_state(BATCH, memory_length=8, compressed_length=9)
    output, _ = xl.in_pieces(layer, x, real, [20, 2], state)
    longer = built(memory_length=8, compressed_length=9)
    expected, _ = golden_cases.run(longer, x, mask=real)
    golden_cases.assert_close(output[real], expected[real], 1e-5)


def test_the_loss_reaches_the_compression_alone():
    layer, (x, real) = built(), padded_text()
    options = {"inputs": x, "mask": real, "training": True}
    own, task = (
        golden_cases.gradients(layer, objective, options, wrt=("inputs",))
        for objective in (
            lambda output, losses: sum(losses),
            lambda output, losses: ops.sum(output**2),
        )
    )
    assert not np.any(own.inputs["inputs"])
    for path in own.variables:
        gradients = [result.variables[path] for result in (own, task)]
        has_some = [g is not None and np.any(g != 0) for g in gradients]
        assert has_some == ([True, False] if "compression" in path else [False, True])


def test_no_gradient_flows_into_the_memories():
    # The first tokens are compressed by then.
    xl.assert_memory_is_read_without_gradient(built(), LENGTH, 12)


def backbone(**options):
    sizes = {"segment_length": SEGMENT, "memory_length": 4, "compressed_length": 6}
    cls = zoo.CompressiveTransformerBackbone
    return xl.backbone(cls, compression_rate=RATE, **sizes, **options)


@pytest.mark.parametrize("has_side", xl.SIDES)
def test_the_backbone_goes_on_behind_a_state(has_side):
    """Routed heads beside those with memories read the memories, too."""
    length, side = 15, xl.side_attention() if has_side else None
    model, ids = backbone(side_attention=side), xl.token_ids(length)
    whole, _ = golden_cases.run(model, ids)
    real, sizes = np.ones((BATCH, length), "bool"), [8, 4, 2, 1]
    output, _ = xl.in_pieces(model, ids, real, sizes, model.make_state(BATCH))
    golden_cases.assert_close(output, whole, 1e-4)
    _, losses = golden_cases.run(model, ids, training=True)
    # Of each block; and of its routed heads in each segment.
    assert len(losses) == 2 + (2 * 4 if has_side else 0)


def continued(length, **state):
    layer = built()
    return layer(np.ones((2, length, DIM)), state=layer.make_state(2) | state)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: built(compression_rate=3), "`segment_length`.*`compression_rate`.*=3"),
        (lambda: built().make_state(1, 6), "`memory_length`.*memory_length=6"),
        (lambda: built().make_state(1, 4, 0), "`compressed_length`.*=0"),
        (lambda: continued(6), "length=6 .*segment_length=4"),
        (
            lambda: continued(4, position=np.ones(2, "int32")),
            "length=4 .*segment_length=4",
        ),
        (lambda: continued(1, position=np.arange(2)), "Received: .* 0 .* 1"),
        (lambda: continued(4, usage=np.ones(2)), r"`state`.*\['compressed', "),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_images_with_channels_first_change_nothing():
    layer, x = zoo.CompressiveAttention(2, 3, 4, 4, 6, 2), helpers.normal(1, 22, 8)
    layer.build(x.shape)
    expected, _ = golden_cases.run(layer, x)
    before = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_first")
    try:
        other = zoo.CompressiveAttention(2, 3, 4, 4, 6, 2)
        other.build(x.shape)
        for weight, value in zip(other.weights, layer.weights, strict=True):
            weight.assign(value)
        found, _ = golden_cases.run(other, x)
    finally:
        keras.config.set_image_data_format(before)
    np.testing.assert_allclose(found, expected, atol=1e-6)

"""Tests of the projections, the masks and the call arguments of attention."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

BATCH, LENGTH, MEMORY, DIM, KEY_DIM = 2, 12, 8, 10, 6
SELF, IMAGE = (BATCH, LENGTH, DIM), (5, 7)
ON_TORCH = keras.backend.backend() == "torch"


def routed(**options):
    defaults = {"name": "routed", "routing": "expert_choice"}
    options = {**defaults, "embeddings_initializer": "zeros", **options}
    return layers.RoutedHeads(2, 3, attention_window=5, **options)


def local(**options):
    options = {"name": "local", "embeddings_initializer": "zeros", **options}
    return layers.LocalHeads(1, (4,), **options)


def rectangles(**options):
    return layers.LocalHeads(1, (2, 4), embeddings_initializer="zeros", **options)


def full():
    return layers.FullHeads(2, name="full")


def built_attention(groups, value_shape=None, **options):
    options = {"kernel_initializer": "zeros", "name": "attention", **options}
    attention = layers.MixedAttention(groups, KEY_DIM, **options)
    return helpers.randomized(attention, SELF, value_shape)


def sequence(length=LENGTH, dim=DIM, seed=0):
    return helpers.normal(BATCH, length, dim, seed=seed)


@pytest.mark.parametrize("use_bias, use_gate", [(False, False), (True, True)])
def test_equals_keras_multi_head_attention(use_bias, use_gate):
    options = {"value_dim": 5, "use_bias": use_bias, "use_gate": use_gate}
    attention = built_attention([full()], (BATCH, MEMORY, 7), output_dim=9, **options)
    options |= {"output_shape": (9,), "kernel_initializer": "zeros"}
    other = keras.layers.MultiHeadAttention(2, KEY_DIM, **options)
    query, memory = sequence(), sequence(MEMORY, 7, seed=1)
    other.build(query.shape, memory.shape)
    helpers.share_random_weights(attention, other)

    real = helpers.tail_mask(MEMORY, 8, 5)
    options = {"value_mask": real, "return_attention_scores": True}
    (outputs, _), (expected, _) = (
        golden_cases.run(each, query, memory, **options) for each in (attention, other)
    )

    for actual, wanted in zip(outputs, expected, strict=True):
        golden_cases.assert_close(actual, wanted, 1e-5)


def test_fills_masks_from_keras():
    ids = np.array([[3, 1, 2, 4, 1, 2, 5, 0], [2, 1, 0, 0, 0, 0, 0, 0]], "int32")
    attention = built_attention([routed(), local(), full()], name="masked")
    embedding = keras.layers.Embedding(6, DIM, mask_zero=True)
    inputs = keras.Input((8,), dtype="int32"), keras.Input((8, DIM)), keras.Input((8,))
    x = embedding(inputs[0])
    outputs = attention(x), attention(x, token_bias=inputs[2]), attention(inputs[1], x)
    model = keras.Model(inputs, outputs)
    memory, bias = sequence(8, seed=1), helpers.normal(BATCH, 8, seed=2)
    actual, _ = golden_cases.run(model, [ids, memory, bias])

    real = ids != 0
    x = golden_cases.to_numpy(embedding.embeddings)[ids]
    plain, _ = golden_cases.run(attention, x)
    assert golden_cases.relative_error(actual[0], plain) > 0.1
    expected = [
        golden_cases.run(attention, x, query_mask=real),
        golden_cases.run(attention, x, query_mask=real, token_bias=bias),
        golden_cases.run(attention, memory, x, value_mask=real),
    ]
    for output, (wanted, _) in zip(actual, expected, strict=True):
        golden_cases.assert_close(output, wanted, 1e-6)


def test_fills_the_mask_outside_of_a_model_and_keeps_it():
    attention = built_attention([full()])
    x, real = sequence(), helpers.tail_mask(LENGTH, 12, 7)
    x[~real] = 0.0
    output = attention(keras.layers.Masking()(x))
    expected, _ = golden_cases.run(attention, x, query_mask=real)
    golden_cases.assert_close(golden_cases.to_numpy(output), expected, 1e-6)
    np.testing.assert_array_equal(golden_cases.to_numpy(output._keras_mask), real)


def test_kernels_never_start_alike():
    attention = layers.MixedAttention(
        [full()], KEY_DIM, kernel_initializer=keras.initializers.RandomNormal()
    )
    attention.build(SELF)
    kernels = [attention.query_kernel, attention.key_kernel, attention.value_kernel]
    query, key, value = golden_cases.to_numpy(kernels)
    assert np.all(query != key) and np.all(key != value) and np.all(value != query)


@pytest.mark.parametrize(
    "message, options",
    [
        ("`output_shape`.*output_shape=9.*`output_dim`", {"output_shape": 9}),
        (r"`attention_axes`.*attention_axes=\(1,\)", {"attention_axes": (1,)}),
        ("`sliding_window`.*`SlidingHeads", {"sliding_window": 4}),
        ("`flash_attention`.*`attention_implementation", {"flash_attention": True}),
        (r"`dropout`.*dropout=0\.1", {"dropout": 0.1}),
        (
            "`head_groups`.*Received: <Identity",
            {"head_groups": [keras.layers.Identity()]},
        ),
    ],
)
def test_refuses_arguments_of_other_layers(message, options):
    with pytest.raises(ValueError, match=message):
        layers.MixedAttention(**{"head_groups": [full()], "key_dim": 4, **options})


def test_a_group_belongs_to_one_layer():
    group = layers.FullHeads(2, name="mine")
    with pytest.raises(ValueError, match=r"`head_groups`.*\['mine', 'mine'\]"):
        layers.MixedAttention([group, group], key_dim=4)
    x = np.ones((1, 6, 8), "float32")
    layers.MixedAttention([group], key_dim=4)(x)
    with pytest.raises(ValueError, match="`head_groups`.*Received: 'mine'"):
        layers.MixedAttention([group], key_dim=4)(x)


@pytest.mark.parametrize(
    "dtype",
    ["float32", pytest.param("mixed_bfloat16", marks=helpers.FURTHER_ON_JAX)],
)
def test_query_value_and_key_may_be_one_tensor(dtype):
    """Keras casts each argument on its own."""
    attention = built_attention([routed(dtype=dtype)], dtype=dtype)
    for x in (sequence(), keras.ops.convert_to_tensor(sequence())):
        expected = golden_cases.to_numpy(attention(x))
        for arrays, options in (
            ((x, x, x), {}),
            ((x, x), {"key": x}),
            ((x,), {"key": x}),
            ((x,), {"value": x}),
        ):
            output = golden_cases.to_numpy(attention(*arrays, **options))
            np.testing.assert_array_equal(output, expected)
    attention(x, sequence(MEMORY), key=None, key_mask=None)


@pytest.mark.parametrize("symbolic", [False, True])
def test_self_attention_may_be_said(symbolic):
    attention, x = built_attention([routed()]), sequence()

    def run(value, self_attention=None):
        if not symbolic:
            return attention(x, value, self_attention=self_attention)
        inputs = [keras.Input(SELF[1:]), keras.Input(SELF[1:])]
        memory = inputs[0] if value is x else inputs[1]
        output = attention(inputs[0], memory, self_attention=self_attention)
        return keras.Model(inputs, output)([x, value])

    of_itself, of_another = run(x), run(x.copy())
    said = [run(x.copy(), self_attention=True), run(x, self_attention=False)]
    outputs = golden_cases.to_numpy([of_itself, of_another, *said])
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1
    np.testing.assert_array_equal(outputs[2:], outputs[:2])
    with pytest.raises(ValueError, match="`value`.*`query`.*self_attention=True"):
        attention(x, sequence(MEMORY), self_attention=True)


def test_a_copy_of_the_query_is_warned_of_once():
    attention, x = built_attention([local()]), sequence()
    message = f"{attention.name!r} attends to another sequence.*`self_attention=True`"
    with pytest.warns(UserWarning, match=message) as found:
        attention(x, x.copy())
        attention(x, x.copy())
    assert [warning.filename for warning in found] == [__file__]
    # Another layer, and an input that tells nothing but its shape.
    inputs = [keras.Input(SELF[1:]), keras.Input(SELF[1:])]
    with pytest.warns(UserWarning, match="attends to another sequence"):
        built_attention([local()])(*inputs)


@pytest.mark.filterwarnings("error:.*attends to another sequence")
def test_no_warning_where_it_is_told_which_sequence_it_is():
    x = sequence()
    unknown = [keras.Input((None, SELF[-1])), keras.Input((None, SELF[-1]))]
    for query, value, options in (
        (x, None, {}),
        (x, x, {}),
        (x, sequence(MEMORY), {}),
        (x, x.copy(), {"self_attention": True}),
        (x, x.copy(), {"self_attention": False}),
        (*unknown, {}),
    ):
        built_attention([local()])(query, value, **options)
    block = layers.TransformerBlock(
        built_attention([local()]),
        feed_forward=None,
        cross_attention=built_attention([local()]),
    )
    block(x, x.copy())


def test_regularizers_and_constraints_reach_all_projections():
    attention = built_attention(
        [routed(commitment_weight=0.0)],
        use_bias=True,
        kernel_regularizer=keras.regularizers.L2(1.0),
        bias_regularizer="l1",
        kernel_constraint="non_neg",
        bias_constraint=keras.constraints.MaxNorm(1.0),
    )
    assert len(attention.trainable_weights) == 6  # no keys
    expected = 0.0
    for weight in attention.trainable_weights:
        is_kernel, x = "kernel" in weight.name, golden_cases.to_numpy(weight)
        kinds = keras.constraints.MaxNorm, keras.constraints.NonNeg
        assert isinstance(weight.constraint, kinds[is_kernel])
        expected += (x**2).sum() if is_kernel else 0.01 * np.abs(x).sum()
    loss = sum(golden_cases.to_numpy(attention.losses))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    helpers.assert_keeps_settings(attention)


def test_symbolic_shapes():
    attention = layers.MixedAttention(
        [full(), local()], KEY_DIM, output_dim=9, kernel_initializer="zeros"
    )
    query, value = keras.Input((LENGTH, DIM)), keras.Input((LENGTH, 7))
    output, scores = attention(query, value, return_attention_scores=True)
    assert output.shape == (None, LENGTH, 9)
    assert scores.shape == (None, 3, LENGTH, LENGTH)
    model = keras.Model([query, value], [output, scores])
    arrays, _ = golden_cases.run(model, [sequence(), sequence(dim=7)])
    for array, spec in zip(arrays, (output, scores), strict=True):
        assert array.shape == (BATCH, *spec.shape[1:])
    output, scores = built_attention([full()])(
        keras.Input((None, DIM)), return_attention_scores=True
    )
    assert output.shape == (None, None, DIM) and scores.shape == (None, 2, None, None)
    attention = layers.MixedAttention([full()], KEY_DIM, output_dim=9)
    query, value = keras.Input((*IMAGE, DIM)), keras.Input((3, 4, 7))
    output, scores = attention(query, value, return_attention_scores=True)
    assert output.shape == (None, *IMAGE, 9) and scores.shape == (None, 2, 35, 12)


@pytest.mark.parametrize(
    "group",
    [
        lambda: layers.FullHeads(2),
        lambda: layers.LocalHeads(2, block_shape=(4,)),
        lambda: layers.RoutedHeads(2, num_clusters=2, attention_window=6),
    ],
)
def test_a_bias_that_hides_keys_shows_nothing_behind_the_mask(group):
    attention, x = built_attention([group()]), sequence()[:1]
    options = {"query_mask": np.arange(LENGTH)[None] < 9}
    options["use_causal_mask"] = isinstance(attention.head_groups[0], layers.LocalHeads)
    changed = x + 5.0 * ~options["query_mask"][..., None]
    for value in (-1e9, -3e38, -np.inf):
        options["token_bias"] = np.zeros((1, LENGTH), "float32")
        options["token_bias"][:, :6] = value
        before, after = (
            golden_cases.run(attention, each, **options)[0][:, :9]
            for each in (x, changed)
        )
        assert np.isfinite(before).all()
        np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("length", [SELF[1], MEMORY])
def test_a_padding_mask_of_keras_is_the_mask_of_the_value(length):
    """Which may be a list, too, as all masks."""
    attention, x = built_attention([full()]), sequence()
    memory = None if length == SELF[1] else sequence(length)
    mask = helpers.tail_mask(length, length - 3, length)

    def attend(**masks):
        return golden_cases.to_numpy(attention(x, memory, **masks))

    expected = attend(value_mask=mask)
    for form in (mask[:, None].astype("int32"), mask, mask[:, None, None]):
        np.testing.assert_array_equal(attend(attention_mask=form), expected)
    np.testing.assert_array_equal(attend(value_mask=mask.tolist()), expected)
    both = attend(value_mask=mask[::-1], attention_mask=mask[:, None])
    np.testing.assert_array_equal(both, attend(value_mask=mask & mask[::-1]))
    assert np.abs(both - expected).max() > 1e-3
    if memory is None:
        both = attend(query_mask=mask, attention_mask=mask[::-1, None])
        expected = attend(query_mask=mask, value_mask=mask & mask[::-1])
        np.testing.assert_array_equal(both, expected)


def ones(*shape):
    return np.ones(shape, "float32")


X, M, KEYS = ones(*SELF), ones(*SELF[:2]) > 0, ones(BATCH, MEMORY, DIM)
PICTURE = ones(BATCH, *IMAGE, DIM)
NAMES = ("query_mask", "value_mask", "token_bias")
SQUARE = ones(12, 12)
WRONG_CALLS = [
    ((X,), {"attention_mask": ones(2, 12, 12)}, r"attention_mask.shape=\(2, 12, 12\)"),
    # Keras would take it for a matrix of pairs.
    ((ones(12, 12, DIM),), {"attention_mask": SQUARE}, r"_mask.shape=\(12, 12\)"),
    ((X, ones(2, 12, 7)), {}, r"`value`.* 10\..*value\.shape=\(2, 12, 7\)"),
    ((X, KEYS), {"use_causal_mask": True}, "`use_causal_mask=True`.* 12 .* 8"),
    ((X, KEYS[:1]), {}, "`query`.*`value`.*Received: 2 .*1"),
    *(
        ((query,), {name: ones(*shape)}, rf"`{name}`.*Received: {name}.shape={message}")
        for query, shape, names, message in (
            (X, (3, 12), NAMES[:2], r"\(3, 12\).*a batch of 2"),
            (X, (2, 11), NAMES, r"\(2, 11\) for positions \(12,\)"),
            (PICTURE, (2, 35), NAMES, r"\(2, 35\) for positions \(5, 7\)"),
        )
        for name in names
    ),
    *(
        (query, {}, f"`{name}` .*with at least one position")
        for shape in ((), (10,), (12, 10), (2, 2, 2, 2, 10), (2, 0, 10))
        for name, query in (("query", (ones(*shape),)), ("value", (X, ones(*shape))))
    ),
    ((None,), {}, "`query` .*Received: query=None"),
    ((X.tolist(),), {}, "^[^{]{,200}Received: query=a[^{]{,200}$"),
    (
        (type("OfTorch", (), {"is_nested": True})(),),
        {},
        r"`query`.*`nested\.to_padded_t",
    ),
    *([((keras.ops.ones(SELF).to_sparse_csc(),), {}, "to_dense")] if ON_TORCH else ()),
    ((X, X), {"key_mask": M}, r"`key_mask`.*key_mask\.shape=.*`value_mask`"),
    ((X, X, X + 1), {}, r"`key`.*`value`.*\(2, 12, 10\)"),
    ((X,), {"key": X + 1}, r"`key`.*`value`.*\(2, 12, 10\)"),
    ((X, None, M), {}, r"`query_mask`.*`key`.*query_mask="),
    ((X, None, None, M), {}, r"`query_mask`.*`key`.*query_mask="),
]


@pytest.mark.parametrize("arrays, options, message", WRONG_CALLS)
def test_refuses_wrong_calls(arrays, options, message):
    attention = layers.MixedAttention([full()], KEY_DIM)
    if "position" not in message:
        attention = built_attention([full()])
    with pytest.raises(ValueError, match=message):
        attention(*arrays, **options)


@helpers.only_on("tensorflow")
def test_refuses_tensors_that_are_not_dense():
    import tensorflow as tf

    attention, ragged = built_attention([full()]), tf.RaggedTensor.from_tensor(X)
    for arguments in ([ragged], [X, ragged]):
        with pytest.raises(ValueError, match=r"\.shape=.*`ragged\.to_tensor\(\)`"):
            attention(*arguments)
    with pytest.raises(ValueError, match=r"`query`.*`tf\.sparse\.to_dense\(x\)`"):
        attention(tf.sparse.from_dense(X))


def test_refuses_blocks_that_do_not_fit():
    other = layers.StridedHeads(1, (4, 2), name="other")
    message = r"`block_shape`.*Received: \[\(2, 4\), \(4, 2\)\]"
    for groups, options, rule in (
        ([rectangles(), other], {}, message),
        ([rectangles()], {"block_shape": (4, 2)}, message),
        ([rectangles()], {"block_shape": (4,)}, r"`block_shape`.*\[\(2, 4\), \(4,\)\]"),
        ([full()], {"block_shape": 0}, "`block_shape`.*block_shape=0"),
    ):
        with pytest.raises(ValueError, match=rule):
            layers.MixedAttention(groups, KEY_DIM, **options)
    strided = layers.StridedHeads(2, (2, 4))
    for groups, options, arrays, rule in (
        ([rectangles()], {}, (X,), r"`query`.*\(2, 12, 10\).*\(2, 4\)"),
        ([full()], {"block_shape": (4,)}, (PICTURE,), r"`query`.*10\).*\(4,\)"),
        ([full(), strided], {}, (PICTURE, X), r"`value`.*\(2, 12, 10\).*\(2, 4\)"),
        (
            [rectangles()],
            {},
            (PICTURE, PICTURE[:, :3, :4]),
            r"`query`.*\(3, 2\) .*\(2, 1\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"(?s){rule}"):
            built_attention(groups, **options)(*arrays)
    with pytest.raises(ValueError, match=r"`query`.*query\.shape=\(None, 10, 10\)"):
        built_attention([rectangles()])(keras.Input((10, DIM)))


@helpers.only_on("jax")
def test_exports_of_jax_need_known_lengths(tmp_path):
    tf = pytest.importorskip("tensorflow")
    layer = helpers.attention(kinds.CAUSAL["token_choice"](), kinds.CAUSAL["local"]())

    def model(length):
        x = keras.Input((length, 8))
        return keras.Model(x, layer(x, use_causal_mask=True))

    path = str(tmp_path / "model")
    rule = r"LocalHeads, RoutedHeads .*a, 8\)"
    with pytest.raises(ValueError, match=rule):
        model(None).export(path, verbose=False)
    model(12).export(path, verbose=False)
    x = helpers.normal(3, 12, 8)
    loaded = tf.saved_model.load(path)
    found = loaded.serve(x)
    expected, _ = golden_cases.run(layer, x, use_causal_mask=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)

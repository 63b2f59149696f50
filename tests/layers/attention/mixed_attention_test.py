"""Tests of the projections, the masks and the call arguments of attention."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf.layers.support.positions import Positions
from routing_tf.models.release import heads as release_heads
from tests import golden_cases
from tests.layers import helpers

BATCH, LENGTH, MEMORY, DIM, KEY_DIM = 2, 12, 8, 10, 6
SELF = (BATCH, LENGTH, DIM)


def routed(**options):
    defaults = {"name": "routed", "routing": "expert_choice"}
    options = {**defaults, "embeddings_initializer": "zeros", **options}
    return layers.RoutedHeads(2, 3, attention_window=5, **options)


def separate():
    return routed(share_query_key=False, name="separate")


def local(**options):
    options = {"name": "local", "embeddings_initializer": "zeros", **options}
    return layers.LocalHeads(1, (4,), **options)


def full():
    return layers.FullHeads(2, name="full")


def built_attention(groups, value_shape=None, **options):
    options = {"kernel_initializer": "zeros", "name": "attention", **options}
    attention = layers.MixedAttention(groups, KEY_DIM, **options)
    attention.build(SELF, value_shape)
    helpers.randomize(attention)
    return attention


def sequence(length=LENGTH, dim=DIM, seed=0):
    return helpers.normal(BATCH, length, dim, seed=seed)


def split_heads(x):
    return x.reshape(*x.shape[:2], -1, KEY_DIM).swapaxes(1, 2)


def combine(attention, heads):
    """Projects the outputs of heads `(batch, heads, length, dim)` back."""
    if attention.shared_head_projection:
        heads = heads @ golden_cases.to_numpy(attention.head_kernel)
    joined = heads.swapaxes(1, 2).reshape(*heads.shape[::2], -1)
    return joined @ golden_cases.to_numpy(attention.output_kernel)


def project(attention, query, memory):
    """Returns queries, keys and values of each group, from the rule.

    A group that shares its queries takes no keys in self-attention, and keys of the
    query projection for a memory of the same depth.
    """
    kernels = [attention.query_kernel, attention.value_kernel]
    query_kernel, value_kernel = golden_cases.to_numpy(kernels)
    queries = split_heads(query @ query_kernel) * KEY_DIM**-0.5
    query_keys = own_keys = None
    values = split_heads(memory @ value_kernel)
    same_depth = memory.shape[-1] == query.shape[-1]
    if same_depth and memory is not query:
        query_keys = split_heads(memory @ query_kernel) * KEY_DIM**-0.5
    if attention.key_kernel is not None:
        own_keys = split_heads(memory @ golden_cases.to_numpy(attention.key_kernel))
    start = own_start = 0
    for group in attention.head_groups:
        heads = slice(start, start + group.num_heads)
        own_heads = slice(own_start, own_start + group.num_heads)
        shares = not group.needs_keys and same_depth
        if not shares:
            keys = own_keys[:, own_heads]
        else:
            keys = None if query_keys is None else query_keys[:, heads]
        yield group, queries[:, heads], keys, values[:, heads]
        start += group.num_heads
        if not shares or attention.project_shared_keys:
            own_start += group.num_heads
    assert own_keys is None or own_start == own_keys.shape[1]


@pytest.mark.parametrize("project_shared_keys", [False, True])
@pytest.mark.parametrize("memory_dim", [None, DIM, 7])
def test_splits_projections_over_groups(memory_dim, project_shared_keys):
    attention = built_attention(
        [local(flange_blocks=2), routed(), separate()],
        memory_dim and (BATCH, LENGTH, memory_dim),
        shared_head_projection=project_shared_keys,
        project_shared_keys=project_shared_keys,
        output_dim=9 if project_shared_keys else None,
    )
    query = sequence()
    memory = query if memory_dim is None else sequence(dim=memory_dim, seed=1)

    output, _ = golden_cases.run(attention, query, None if memory is query else memory)

    heads = [
        golden_cases.run(
            group, queries, keys, values, is_cross_attention=memory is not query
        )[0]
        for group, queries, keys, values in project(attention, query, memory)
    ]
    expected = combine(attention, np.concatenate(heads, axis=1))
    assert expected.shape[-1] == (9 if project_shared_keys else DIM)
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize("use_bias, use_gate", [(False, False), (True, True)])
def test_equals_keras_multi_head_attention(use_bias, use_gate):
    attention = built_attention(
        [full()],
        (BATCH, MEMORY, 7),
        value_dim=5,
        output_dim=9,
        use_bias=use_bias,
        use_gate=use_gate,
    )
    other = keras.layers.MultiHeadAttention(
        2,
        KEY_DIM,
        value_dim=5,
        output_shape=(9,),
        use_bias=use_bias,
        use_gate=use_gate,
        kernel_initializer="zeros",
    )
    query, memory = sequence(), sequence(MEMORY, 7, seed=1)
    real = helpers.tail_mask(MEMORY, 8, 5)
    other.build(query.shape, memory.shape)
    helpers.randomize(other)
    own = {weight.name: weight for weight in attention.weights}
    for weight in other.weights:
        projection, kind = weight.path.split("/")[-2:]
        weight_of_ours = own.pop(f"{projection.removeprefix('attention_')}_{kind}")
        values = golden_cases.to_numpy(weight)
        weight_of_ours.assign(values.reshape(weight_of_ours.shape))
    assert not own

    outputs, _ = golden_cases.run(
        attention, query, memory, value_mask=real, return_attention_scores=True
    )

    expected, _ = golden_cases.run(
        other, query, memory, value_mask=real, return_attention_scores=True
    )
    for actual, wanted in zip(outputs, expected, strict=True):
        golden_cases.assert_close(actual, wanted, 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 4])
def test_equals_sliding_windows_of_keras(window, causal):
    attention = built_attention([layers.SlidingHeads(2, radius=window - 1)])
    other = keras.layers.MultiHeadAttention(
        2, KEY_DIM, use_bias=False, kernel_initializer="zeros", sliding_window=window
    )
    x, real = sequence(), helpers.tail_mask(LENGTH, LENGTH, 9)
    other.build(x.shape, x.shape)
    for name in ("query", "key", "value", "output"):
        kernel = golden_cases.to_numpy(getattr(attention, f"{name}_kernel"))
        own = getattr(other, f"_{name}_dense").kernel
        own.assign(kernel.reshape(own.shape))
    options = {"query_mask": real, "use_causal_mask": causal}

    output, _ = golden_cases.run(attention, x, **options)

    expected, _ = golden_cases.run(other, x, x, value_mask=real, **options)
    golden_cases.assert_close(output[real], expected[real], 1e-5)


def test_unused_key_columns_get_no_gradient():
    attention = built_attention([routed(), full()], project_shared_keys=True)
    result = golden_cases.gradients(
        attention, lambda output, losses: keras.ops.sum(output), {"query": sequence()}
    )
    gradient = result.variables["attention/key_kernel"]
    unused = 2 * KEY_DIM
    assert not np.any(gradient[:, :unused])
    assert np.all(np.any(gradient[:, unused:], axis=0))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_scores_make_the_output(causal):
    attention = built_attention([routed(), separate(), local(), full()])
    x = sequence()
    real = helpers.tail_mask(LENGTH, 11, 6)
    options = {"query_mask": real, "use_causal_mask": causal}

    (output, scores), _ = golden_cases.run(
        attention, x, return_attention_scores=True, **options
    )

    assert scores.shape == (BATCH, 7, LENGTH, LENGTH)
    plain, _ = golden_cases.run(attention, x, **options)
    golden_cases.assert_close(output, plain, 1e-6)
    values = split_heads(x @ golden_cases.to_numpy(attention.value_kernel))
    golden_cases.assert_close(output, combine(attention, scores @ values), 1e-5)
    # Nobody attends to padding, and causally nobody to a later token.
    hidden = ~np.broadcast_to(real[:, None, None], scores.shape)
    if causal:
        hidden |= np.triu(np.ones((LENGTH, LENGTH), "bool"), 1)
    assert np.all(scores[hidden] == 0.0)
    sums = scores.sum(axis=-1)
    sums_of_real = sums.swapaxes(1, 2)[real]
    golden_cases.assert_close(sums_of_real[:, 4:], np.ones((17, 3)), 1e-5)
    # A token in no cluster gets nothing; separate keys may all be later.
    possible = np.array([0.0, 1.0])
    if causal:
        possible = np.array([0.0, 1 / 3, 1 / 2, 2 / 3, 1.0])
    distance = np.abs(sums_of_real[:, :4, None] - possible).min(axis=-1)
    assert np.max(distance) < 1e-5
    assert np.ptp(sums_of_real[:, :2]) > 0.5  # some tokens are in no cluster


@pytest.mark.parametrize("causal", [False, True])
def test_padding_has_no_influence(causal):
    attention = built_attention(
        [
            routed(max_relative_position=2, decay=0.9, commitment_weight=1.0),
            local(max_relative_position=2),
            full(),
        ]
    )
    weights = attention.get_weights()
    short, length = sequence(9), 9
    real = helpers.tail_mask(length, 9, 7)
    results = []
    for padding in (None, np.zeros(SELF, "float32"), 100 * sequence(seed=5)):
        x, mask = short, real
        if padding is not None:
            mask = helpers.tail_mask(LENGTH, 9, 7)
            x = np.where(mask[..., None], np.pad(x, [(0, 0), (0, 3), (0, 0)]), padding)
        attention.set_weights(weights)
        output, losses = golden_cases.run(
            attention, x, query_mask=mask, use_causal_mask=causal, training=True
        )
        results.append([output[:, :length][real], *losses, *attention.get_weights()])
    moved = [np.any(a != b) for a, b in zip(weights, results[0][2:], strict=True)]
    assert sum(moved) == 3
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            golden_cases.assert_close(actual, expected, 1e-5)
    for actual, expected in zip(*results[1:], strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_later_tokens_change_no_earlier_output():
    attention = built_attention([local(), full()])
    x = sequence()
    before, _ = golden_cases.run(attention, x, use_causal_mask=True)
    for position in (0, 5, 11):
        changed = x.copy()
        changed[:, position:] = 3.0
        after, _ = golden_cases.run(attention, changed, use_causal_mask=True)
        np.testing.assert_array_equal(after[:, :position], before[:, :position])
        assert np.all(after[:, position] != before[:, position])


def test_token_bias_is_added_to_the_logits_of_keys():
    attention = built_attention([routed(), local(), full()])
    bias = np.zeros((BATCH, LENGTH), "float32")
    bias[:, 3:5] = -1e4
    (_, scores), _ = golden_cases.run(
        attention, sequence(), token_bias=bias, return_attention_scores=True
    )
    # A row that sees others as well no longer sees the two.
    others = np.delete(scores, (3, 4), axis=-1).sum(axis=-1) > 0
    assert others.mean() > 0.5
    assert np.all(scores[..., 3:5][others] < 1e-6)


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


def test_zero_rows_are_padding_for_the_release():
    attention = built_attention(
        [
            release_heads.ExactRoutedHeads(2, 3, 5, routing="expert_choice"),
            release_heads.ExactLocalHeads(1, (4,)),
        ]
    )
    x, real = sequence(), helpers.tail_mask(LENGTH, 12, 7)
    x[~real] = 0.0
    (output, scores), _ = golden_cases.run(attention, x, return_attention_scores=True)
    expected, _ = golden_cases.run(attention, x, query_mask=real)
    golden_cases.assert_close(output, expected, 1e-5)
    assert np.all(scores[1, :, :, 7:] == 0.0)


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
    unknown_length = layers.MixedAttention([full()], KEY_DIM)(keras.Input((None, DIM)))
    assert unknown_length.shape == (None, None, DIM)


def test_mixed_precision_keeps_the_state_in_float32():
    with_dtype = {"dtype": "mixed_bfloat16"}
    groups = [routed(max_relative_position=2, **with_dtype), local(**with_dtype)]
    attention = built_attention(groups, use_gate=True, **with_dtype)
    before = attention.get_weights()
    bias = helpers.normal(BATCH, LENGTH, seed=2)
    (output, scores), losses = golden_cases.run(
        attention,
        sequence(),
        query_mask=helpers.tail_mask(LENGTH, 12, 6),
        token_bias=bias,
        use_causal_mask=True,
        return_attention_scores=True,
        training=True,
    )
    assert str(output.dtype) == str(scores.dtype) == "bfloat16"
    assert all(np.all(np.isfinite(x.astype("float32"))) for x in (output, scores))
    assert [str(loss.dtype) for loss in losses] == ["float32"]
    moved = [
        weight.name
        for weight, old, new in zip(
            attention.weights, before, attention.get_weights(), strict=True
        )
        if np.any(old != new)
    ]
    assert sorted(moved) == ["centroids", "counts", "sums"]
    assert {str(weight.dtype) for weight in attention.weights} == {"float32"}


def test_names_and_shapes_of_weights():
    attention = built_attention(
        [routed(max_relative_position=2), local()],
        value_dim=5,
        shared_head_projection=True,
    )
    shapes = {w.path: (tuple(w.shape), w.trainable) for w in attention.weights}
    inner = "attention/routed"
    assert shapes == {
        "attention/query_kernel": ((DIM, 3 * KEY_DIM), True),
        "attention/key_kernel": ((DIM, KEY_DIM), True),
        "attention/value_kernel": ((DIM, 3 * 5), True),
        "attention/head_kernel": ((5, 5), True),
        "attention/output_kernel": ((3 * 5, DIM), True),
        f"{inner}/dot_product/relative_position/key_embeddings": ((5, 6), True),
        f"{inner}/dot_product/relative_position/value_embeddings": ((5, 5), True),
        f"{inner}/kmeans/centroids": ((2, 3, KEY_DIM), False),
        f"{inner}/kmeans/counts": ((2, 3), False),
        f"{inner}/kmeans/sums": ((2, 3, KEY_DIM), False),
    }


def test_kernels_never_start_alike():
    attention = layers.MixedAttention(
        [full()], KEY_DIM, kernel_initializer=keras.initializers.RandomNormal()
    )
    attention.build(SELF)
    kernels = [attention.query_kernel, attention.key_kernel, attention.value_kernel]
    query, key, value = golden_cases.to_numpy(kernels)
    assert np.all(query != key) and np.all(key != value) and np.all(value != query)


def test_survives_saving(tmp_path):
    attention = layers.MixedAttention(
        [
            routed(
                max_relative_position=2,
                decay=0.5,
                commitment_weight=0.1,
                update_rule="paper",
            ),
            local(flange_blocks=2, dropout=0.1),
            full(),
        ],
        key_dim=KEY_DIM,
        output_dim=9,
        shared_head_projection=True,
        project_shared_keys=True,
        kernel_initializer="ones",
        use_gate=True,
        name="attention",
    )
    helpers.assert_survives_saving(attention, tmp_path, sequence())


@pytest.mark.parametrize(
    "group", [routed(ema=False, embeddings_initializer="ones"), local(), full()]
)
def test_head_groups_keep_their_settings(group):
    helpers.assert_keeps_settings(group)
    assert group.compute_output_shape((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 7)) == (
        (2, 3, 4, 7)
    )


@pytest.mark.parametrize(
    "message, options",
    [
        ("`key_dim`.*Received: key_dim=0", {"key_dim": 0}),
        ("`value_dim`.*Received: value_dim=-1", {"value_dim": -1}),
        ("`use_gate`.*Received: use_gate='sigmoid'", {"use_gate": "sigmoid"}),
        ("`output_shape`.*output_shape=9. Pass.*`output_dim`", {"output_shape": 9}),
        (r"`attention_axes`.*attention_axes=\(1,\)", {"attention_axes": (1,)}),
        ("`sliding_window`.*`SlidingHeads", {"sliding_window": 4}),
        ("`flash_attention`.*`attention_implementation", {"flash_attention": True}),
        ("`dropout`.*head groups", {"dropout": 0.1}),
        ("`output_dim`.*Received: output_dim=1.5", {"output_dim": 1.5}),
        (r"`head_groups`.*Received: head_groups=\[\]", {"head_groups": []}),
        ("`head_groups`.*Received: head_groups=None", {"head_groups": None}),
        (
            "`kernel_initializer`.*Received: kernel_initializer=3.5",
            {"kernel_initializer": 3.5},
        ),
        (
            "`head_groups`.*Received: <Identity",
            {"head_groups": [keras.layers.Identity()]},
        ),
    ],
)
def test_refuses_wrong_arguments(message, options):
    with pytest.raises(ValueError, match=message):
        layers.MixedAttention(**{"head_groups": [full()], "key_dim": 4, **options})


def test_refuses_wrong_calls():
    attention = built_attention([full()])
    mask = np.ones((BATCH, LENGTH, LENGTH), "bool")
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(2, 12, 12\)"):
        attention(sequence(), attention_mask=mask)
    # Keras would take it for a matrix of pairs.
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(12, 12\)"):
        attention(sequence()[:1].repeat(12, axis=0), attention_mask=mask[0])
    with pytest.raises(ValueError, match=r"built with, 10.*value.shape=\(2, 12, 7\)"):
        attention(sequence(), sequence(dim=7))
    with pytest.raises(ValueError, match="use_causal_mask.*lengths 12 and 8"):
        attention(sequence(), sequence(MEMORY), use_causal_mask=True)
    with pytest.raises(ValueError, match="same batch size. Received: 2 and 1"):
        attention(sequence(), sequence(MEMORY)[:1])
    for name in ("query_mask", "value_mask"):
        with pytest.raises(ValueError, match=rf"{name}.shape=\(3, 12\).*a batch of 2"):
            attention(sequence(), **{name: np.ones((3, LENGTH), "bool")})
    for shape in ((), (10,), (LENGTH, 10), (BATCH, 2, 2, 2, 10), (BATCH, 0, 10)):
        wrong = np.zeros(shape, "float32")
        with pytest.raises(ValueError, match="`query` .*with at least one position"):
            layers.MixedAttention([full()], KEY_DIM)(wrong)
        with pytest.raises(ValueError, match="`value` .*with at least one position"):
            layers.MixedAttention([full()], KEY_DIM)(sequence(), wrong)
    with pytest.raises(ValueError, match="`query` .*Received: query=None"):
        attention(None)


def test_masks_may_be_lists():
    attention, mask = built_attention([full()]), np.arange(LENGTH) < 7
    first, second = (
        attention(sequence(), query_mask=m) for m in (mask[None], [mask.tolist()] * 2)
    )
    np.testing.assert_array_equal(*golden_cases.to_numpy([first, second]))


def test_symbolic_shapes_are_checked():
    attention = layers.MixedAttention([layers.LocalHeads(1, (2, 2))], key_dim=4)
    with pytest.raises(ValueError, match="Pass .batch, length, dim. for blocks"):
        attention(keras.Input((10, 6)))
    output, scores = built_attention([full()])(
        keras.Input((None, 10)), return_attention_scores=True
    )
    assert scores.shape[2:] == (None, None)


@pytest.mark.parametrize("value", [-1e9, -3e38, -np.inf])
@pytest.mark.parametrize(
    "group",
    [
        lambda: layers.FullHeads(2),
        lambda: layers.LocalHeads(2, block_shape=(4,)),
        lambda: layers.RoutedHeads(2, num_clusters=2, attention_window=6),
    ],
)
def test_a_bias_that_hides_keys_shows_nothing_behind_the_mask(group, value):
    attention = layers.MixedAttention([group()], key_dim=4)
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 12, 8)).astype("float32")
    bias = np.zeros((1, 12), "float32")
    bias[:, :6] = value
    mask = np.arange(12)[None] < 9

    def run(x):
        y = attention(
            x, query_mask=mask, token_bias=bias, use_causal_mask=not is_routed
        )
        return keras.ops.convert_to_numpy(y)

    is_routed = isinstance(attention.head_groups[0], layers.RoutedHeads)
    y = run(x)
    x[:, 9:] += 5.0  # padding
    assert np.isfinite(y).all()
    np.testing.assert_allclose(run(x)[:, :9], y[:, :9], atol=1e-6)


def test_a_group_belongs_to_one_layer():
    group = layers.FullHeads(2, name="mine")
    with pytest.raises(ValueError, match="twice.*'mine', 'mine'"):
        layers.MixedAttention([group, group], key_dim=4)
    x = np.ones((1, 6, 8), "float32")
    layers.MixedAttention([group], key_dim=4)(x)
    with pytest.raises(ValueError, match="'mine', built by another layer"):
        layers.MixedAttention([group], key_dim=4)(x)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("convert", [np.asarray, keras.ops.convert_to_tensor])
def test_query_as_value_is_self_attention(convert, dtype):
    # Keras casts each argument on its own.
    group = layers.RoutedHeads(2, num_clusters=2, attention_window=6)
    attention = layers.MixedAttention([group], key_dim=4, dtype=dtype)
    x = convert(np.random.default_rng(0).normal(size=(1, 12, 8)).astype("float32"))
    attention(x, value=x, training=True)
    counts = keras.ops.convert_to_numpy(group.kmeans.counts)
    # One update: 2 clusters start at 1 each and see 12 tokens once.
    np.testing.assert_allclose(counts.sum(-1), 0.999 * 2 + 0.001 * 12, rtol=1e-5)


def test_query_value_and_key_may_be_one_tensor():
    attention, x = built_attention([routed()]), sequence()
    expected = attention(x)
    outputs = [attention(x, x, x), attention(x, x, key=x), attention(x, key=x)]
    for output in golden_cases.to_numpy(outputs):
        np.testing.assert_array_equal(output, golden_cases.to_numpy(expected))
    attention(x, sequence(MEMORY), key=None)


@pytest.mark.parametrize("length", [SELF[1], MEMORY])
def test_a_padding_mask_of_keras_is_the_mask_of_the_value(length):
    attention, x = built_attention([full(), local()]), sequence()
    memory = None if length == SELF[1] else sequence(length)
    mask = helpers.tail_mask(length, length - 3, length)
    outputs = [
        attention(x, memory, attention_mask=mask[:, None]),
        attention(x, memory, attention_mask=mask[:, None].astype("int32")),
        attention(x, memory, attention_mask=mask),
        attention(x, memory, attention_mask=mask[:, None, None]),
        attention(x, memory, value_mask=mask),
        attention(x, memory, value_mask=mask[::-1], attention_mask=mask[:, None]),
        attention(x, memory, value_mask=mask & mask[::-1]),
    ]
    *forms, expected, both, expected_of_both = map(golden_cases.to_numpy, outputs)
    for output in forms:
        np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(both, expected_of_both)
    assert np.abs(both - expected).max() > 1e-3


def test_a_padding_mask_of_keras_stands_beside_the_mask_of_the_query():
    attention, x = built_attention([full()]), sequence()
    mask = helpers.tail_mask(SELF[1], SELF[1] - 3, SELF[1])
    output = attention(x, query_mask=mask, attention_mask=mask[::-1, None])
    expected = attention(x, query_mask=mask, value_mask=mask & mask[::-1])
    np.testing.assert_array_equal(*golden_cases.to_numpy([output, expected]))


def test_messages_say_what_to_pass_and_print_no_arrays():
    attention, x = built_attention([full()]), sequence()
    with pytest.raises(ValueError, match="Received: query=a list. Pass a") as e:
        attention(x.tolist())
    assert len(str(e.value)) < 200
    with pytest.raises(ValueError, match="`key_mask` must be left out.*`value_mask`"):
        attention(x, x, key_mask=np.ones(SELF[:2], "bool"))
    attention(x, x, key_mask=None)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        ragged = tf.RaggedTensor.from_tensor(x)
        for arguments in ([ragged], [x, ragged]):
            with pytest.raises(ValueError, match="dense .*ragged.to_tensor"):
                attention(*arguments)
        with pytest.raises(ValueError, match="`query` must be a dense tensor.*sparse"):
            attention(tf.sparse.from_dense(x))


def test_refuses_keys_of_their_own_and_masks_by_position():
    attention, x = built_attention([full()]), sequence()
    with pytest.raises(ValueError, match="`key` must be .* keys are made from `value`"):
        attention(x, x, x + 1)
    with pytest.raises(ValueError, match="`key` must be"):
        attention(x, key=x + 1)
    mask = np.ones((BATCH, LENGTH), "bool")
    for masks in ([mask], [None, mask]):
        with pytest.raises(ValueError, match="`query_mask`, .* must be passed by name"):
            attention(x, None, *masks)


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
    with pytest.raises(ValueError, match="shape of `query` with `self_attention=True`"):
        attention(x, sequence(MEMORY), self_attention=True)


def test_a_copy_of_the_query_is_warned_of_once():
    attention, x = built_attention([routed()]), sequence()
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
        built_attention([routed()])(query, value, **options)
    block = layers.TransformerBlock(
        built_attention([routed()]),
        feed_forward=None,
        cross_attention=built_attention([routed()]),
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
    weights = {w.name: w for w in attention.trainable_weights}
    assert len(weights) == 6  # no keys
    for name, weight in weights.items():
        kind = (
            keras.constraints.NonNeg if "kernel" in name else keras.constraints.MaxNorm
        )
        assert isinstance(weight.constraint, kind)
    values = dict(zip(weights, golden_cases.to_numpy(list(weights.values()))))
    expected = sum(
        (x**2).sum() if "kernel" in name else 0.01 * np.abs(x).sum()
        for name, x in values.items()
    )
    loss = sum(golden_cases.to_numpy(attention.losses))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    helpers.assert_keeps_settings(attention)


HEIGHT, WIDTH, BLOCK = 5, 7, (2, 4)
GRID = (3, 2)


def local_2d(**options):
    options = {"name": "local_2d", "embeddings_initializer": "zeros", **options}
    return layers.LocalHeads(1, BLOCK, **options)


def strided_2d(**options):
    options = {"name": "strided_2d", "embeddings_initializer": "zeros", **options}
    return layers.StridedHeads(2, BLOCK, **options)


def image(height=HEIGHT, width=WIDTH, seed=0):
    return helpers.normal(BATCH, height, width, DIM, seed=seed)


def blocked(height=HEIGHT, width=WIDTH):
    """For each position in raster order its block's row and column, and its own."""
    rows, columns = np.divmod(np.arange(height * width), width)
    inside = np.stack([rows % BLOCK[0], columns % BLOCK[1]])
    return np.stack([rows // BLOCK[0], columns // BLOCK[1]]), inside


def places():
    """For each position in raster order its place in blocked order."""
    (row, column), (inner_row, inner_column) = blocked()
    return ((row * GRID[1] + column) * 2 + inner_row) * 4 + inner_column


def masked_image():
    real = helpers.normal(BATCH, HEIGHT, WIDTH, seed=4) > -1.0
    real[1, 3:] = False
    return real


@pytest.mark.parametrize("causal", [False, True])
def test_image_is_a_sequence_in_blocked_order(causal):
    groups = [
        local_2d(max_relative_position=5),
        routed(max_relative_position=2),
        strided_2d(max_relative_position=1),
        local(max_relative_position=3),
    ]
    attention = built_attention(groups)
    x, real = image(), masked_image()
    bias = helpers.normal(BATCH, HEIGHT, WIDTH, seed=5)

    output, losses = golden_cases.run(
        attention,
        x,
        query_mask=real,
        token_bias=bias,
        use_causal_mask=causal,
        training=True,
    )

    def arrange(array):
        sequence = np.zeros((*array.shape[:-2], 48, array.shape[-1]), array.dtype)
        sequence[..., places(), :] = array
        return sequence

    mask = arrange(real.reshape(BATCH, -1, 1))[..., 0]
    bias = arrange(bias.reshape(BATCH, -1, 1))[..., 0]
    flat = x.reshape(BATCH, -1, DIM)
    attention = built_attention(
        [type(g).from_config({**g.get_config(), "name": g.name}) for g in groups]
    )
    heads = []
    for group, queries, keys, values in project(attention, flat, flat):
        result, loss = golden_cases.run(
            group,
            arrange(queries),
            None if keys is None else arrange(keys),
            arrange(values),
            query_mask=mask,
            value_mask=mask,
            token_bias=bias,
            use_causal_mask=causal,
            positions=Positions((HEIGHT, WIDTH), (2, 4)),
            memory_positions=Positions((HEIGHT, WIDTH), (2, 4)),
            training=True,
        )
        heads.append(result[:, :, places()])
        if loss:
            golden_cases.assert_close(losses, loss, 1e-5)
    expected = combine(attention, np.concatenate(heads, axis=1)).reshape(x.shape)
    # Members of a cluster that are padding have an output that nobody uses.
    golden_cases.assert_close(output[real], expected[real], 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_map_of_an_image_is_in_raster_order(causal):
    attention = built_attention([strided_2d(), local_2d(), full()])
    x, real = 0.2 * image(), masked_image()  # no weight so small that it is zero
    (row, column), inside = blocked()
    place = places()
    earlier = place[None] <= place[:, None]
    near = np.abs(row - row[:, None]) <= 1
    near &= np.abs(column - column[:, None]) <= 1
    alike = np.all(inside[:, None] == inside[:, :, None], axis=0)
    sees = np.stack([alike, alike, near, near | True, near | True])
    sees = sees & (earlier | (not causal)) & real.reshape(BATCH, 1, 1, -1)

    (output, scores), _ = golden_cases.run(
        attention,
        x,
        query_mask=real,
        use_causal_mask=causal,
        return_attention_scores=True,
    )

    np.testing.assert_array_equal(scores > 0, sees)
    flat = x.reshape(BATCH, -1, DIM)
    values = split_heads(flat @ golden_cases.to_numpy(attention.value_kernel))
    expected = combine(attention, scores @ values).reshape(x.shape)
    golden_cases.assert_close(output, expected, 1e-5)
    bias = np.zeros(real.shape, "float32")
    bias[:, 1, 2] = -1e4
    (_, scores), _ = golden_cases.run(
        attention, x, token_bias=bias, return_attention_scores=True
    )
    assert np.all(scores[..., WIDTH + 2] < 1e-6) and np.all(scores.sum(-1) > 0.99)


def test_later_positions_of_an_image_change_no_earlier_output():
    token_choice = routed(routing="token_choice")
    attention = built_attention(
        [local_2d(), strided_2d(), local(), full(), token_choice]
    )
    x = image()
    before, _ = golden_cases.run(attention, x, use_causal_mask=True)
    order = places().reshape(HEIGHT, WIDTH)
    for place in (5, 12, 33):
        changed = np.where((order >= place)[..., None], image(seed=3), x)
        after, _ = golden_cases.run(attention, changed, use_causal_mask=True)
        earlier = order < place
        np.testing.assert_array_equal(after[:, earlier], before[:, earlier])
        assert np.all(after[:, order == place] != before[:, order == place])


@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_an_image_has_no_influence(causal):
    attention = built_attention([local_2d(), routed(), strided_2d()])
    weights, real = attention.get_weights(), masked_image()
    results = []
    for seed in (0, 3):
        x = np.where(real[..., None], image(), 50 * image(seed=seed))
        attention.set_weights(weights)
        output, losses = golden_cases.run(
            attention, x, query_mask=real, use_causal_mask=causal, training=True
        )
        results.append([output[real], *losses, *attention.get_weights()])
    for actual, expected in zip(*results, strict=True):
        golden_cases.assert_close(actual, expected, 1e-5)


def test_memory_of_another_height_and_width():
    attention = built_attention([strided_2d(), full()], (BATCH, 3, 4, DIM))
    query, memory = 0.2 * image(), image(3, 4, seed=1)
    real = helpers.normal(BATCH, 3, 4, seed=4) > -0.5

    (output, scores), _ = golden_cases.run(
        attention, query, memory, value_mask=real, return_attention_scores=True
    )

    inside, memory_inside = blocked()[1], blocked(3, 4)[1]
    alike = np.all(inside[:, :, None] == memory_inside[:, None], axis=0)
    sees = np.stack([alike, alike, alike | True, alike | True])
    np.testing.assert_array_equal(scores > 0, sees & real.reshape(BATCH, 1, 1, -1))
    flat = memory.reshape(BATCH, -1, DIM)
    values = split_heads(flat @ golden_cases.to_numpy(attention.value_kernel))
    expected = combine(attention, scores @ values).reshape(query.shape)
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_image_without_blocks_is_read_row_by_row(causal):
    attention = built_attention([local(), routed(), full()])
    x, real = image(3, 4), helpers.normal(BATCH, 3, 4, seed=4) > -0.5
    output, _ = golden_cases.run(attention, x, query_mask=real, use_causal_mask=causal)
    expected, _ = golden_cases.run(
        attention,
        x.reshape(BATCH, 12, DIM),
        query_mask=real.reshape(BATCH, 12),
        use_causal_mask=causal,
    )
    np.testing.assert_array_equal(output.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    "causal, masked",
    [
        (False, True),
        *(
            pytest.param(*ways, marks=pytest.mark.thorough)
            for ways in ((False, False), (True, False), (True, True))
        ),
    ],
)
def test_block_shape_on_one_axis_has_no_influence(causal, masked):
    def groups():
        return [
            routed(decay=0.9, commitment_weight=1.0),
            layers.ClusterStridedHeads(1, 2, attention_window=5, name="cluster"),
            local(),
            layers.StridedHeads(1, (4,), name="strided"),
            layers.FixedHeads(1, 4, 2, name="fixed"),
            layers.RandomHeads(1, 2, attention_window=5, name="random"),
            layers.HashedHeads(1, 4, attention_window=3, name="hashed"),
            full(),
        ]

    bias = helpers.normal(BATCH, LENGTH, seed=5)
    real = helpers.tail_mask(LENGTH, 12, 8) if masked else np.ones((2, LENGTH)) > 0
    results = []
    for block_shape in (None, (9,), 5):
        attention = built_attention(groups(), block_shape=block_shape)
        output, losses = golden_cases.run(
            attention,
            sequence(),
            query_mask=real if masked else None,
            token_bias=bias,
            use_causal_mask=causal,
            training=True,
        )
        results.append([output[real], *losses, *attention.get_weights()])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            golden_cases.assert_close(actual, expected, 1e-5)


def test_image_survives_saving(tmp_path):
    attention = layers.MixedAttention(
        [local_2d(flange_blocks=(1, 0)), strided_2d(token_bias_weight="fixed")],
        KEY_DIM,
        block_shape=list(BLOCK),
        kernel_initializer="zeros",
        name="attention",
    )
    helpers.assert_survives_saving(attention, tmp_path, image())


def test_symbolic_shapes_of_an_image():
    attention = layers.MixedAttention([full()], KEY_DIM, output_dim=9)
    query, value = keras.Input((HEIGHT, WIDTH, DIM)), keras.Input((3, 4, 7))
    output, scores = attention(query, value, return_attention_scores=True)
    assert output.shape == (None, HEIGHT, WIDTH, 9)
    assert scores.shape == (None, 2, HEIGHT * WIDTH, 12)


@pytest.mark.parametrize("name", ["query_mask", "value_mask", "token_bias"])
def test_refuses_masks_that_do_not_fit(name):
    message = rf"`{name}`.*Received: {name}.shape=\(2, 35\) for positions \(5, 7\)"
    with pytest.raises(ValueError, match=message):
        built_attention([full()])(image(), **{name: np.ones((BATCH, 35), "float32")})
    message = rf"{name}.shape=\(2, 11\) for positions \(12,\)"
    with pytest.raises(ValueError, match=message):
        built_attention([full()])(sequence(), **{name: np.ones((BATCH, 11), "float32")})


def test_refuses_blocks_that_do_not_fit():
    other = layers.StridedHeads(1, (4, 2), name="other")
    message = r"`block_shape`.*must have the same.*Received: \[\(2, 4\), \(4, 2\)\]"
    with pytest.raises(ValueError, match=message):
        layers.MixedAttention([local_2d(), other], KEY_DIM)
    with pytest.raises(ValueError, match=message):
        layers.MixedAttention([local_2d()], KEY_DIM, block_shape=(4, 2))
    with pytest.raises(ValueError, match="must have the same"):
        layers.MixedAttention([local_2d()], KEY_DIM, block_shape=(4,))
    with pytest.raises(ValueError, match="`block_shape`.*block_shape=0"):
        layers.MixedAttention([full()], KEY_DIM, block_shape=0)
    with pytest.raises(ValueError, match=r"(?s)`query`.*\(2, 12, 10\).*\(2, 4\)"):
        built_attention([local_2d()])(sequence())
    with pytest.raises(ValueError, match=r"(?s)`query`.*\(2, 5, 7, 10\).*\(4,\)"):
        built_attention([full()], block_shape=(4,))(image())
    with pytest.raises(ValueError, match=r"(?s)`value`.*\(2, 12, 10\).*\(2, 4\)"):
        built_attention([full(), strided_2d()])(image(), sequence())
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(2, 1\) blocks"):
        built_attention([local_2d()])(image(), image(3, 4))

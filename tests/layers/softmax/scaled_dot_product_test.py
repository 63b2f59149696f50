"""Tests of softmax attention with masks, biases and relative positions."""

import numpy as np
import pytest
from keras import ops

from routing_tf.layers import ScaledDotProduct
from routing_tf.layers.softmax.scaled_dot_product import joined_parts
from routing_tf.layers.support.masks import large_negative
from routing_tf.models.release.heads import ReleaseDotProduct
from tests import golden_cases
from tests.layers import helpers

QUERIES, KEYS, KEY_DIM, VALUE_DIM = 4, 12, 6, 5


def inputs(value_dim=VALUE_DIM):
    return (
        helpers.normal(2, 3, QUERIES, KEY_DIM),
        helpers.normal(2, 3, KEYS, KEY_DIM, seed=1),
        helpers.normal(2, 3, KEYS, value_dim, seed=2),
    )


def built_layer(**options):
    layer = ScaledDotProduct(embeddings_initializer="zeros", **options)
    layer.build(*(x.shape for x in inputs()))
    return layer


def some_mask():
    mask = np.random.default_rng(3).random((2, 1, QUERIES, KEYS)) < 0.6
    mask[0, 0, 1] = False
    return mask


@pytest.mark.parametrize(
    "limit, shape", [(3, (2, 3, QUERIES, KEYS)), (30, (2, 1, 1, KEYS))]
)
def test_distances_may_follow_no_order(limit, shape):
    layer = built_layer(max_relative_position=limit)
    helpers.randomize(layer)
    bias = helpers.normal(2, 3, QUERIES, KEYS, seed=4)
    distances = np.random.default_rng(5).integers(-8, 9, size=shape).astype("int32")
    about = {"attention_mask": some_mask(), "bias": bias, "distances": distances}
    tables = helpers.relative_tables(layer)
    apart = np.broadcast_to(distances, bias.shape)
    expected, _ = helpers.dense_attention(*inputs(), some_mask(), bias, tables, apart)
    output, _ = golden_cases.run(layer, *inputs(), **about)
    golden_cases.assert_close(output, expected, 1e-5)
    # Without relative positions they have no influence.
    expected, _ = helpers.dense_attention(*inputs(), some_mask(), bias)
    output, _ = golden_cases.run(built_layer(), *inputs(), **about)
    golden_cases.assert_close(output, expected, 1e-5)


def test_distances_that_are_given_count_as_those_in_the_order_of_slots():
    """For outputs and the gradients of queries, keys, values and both tables."""
    i, j = np.ogrid[:QUERIES, :KEYS]
    arguments = dict(zip(("query", "key", "value"), inputs(), strict=True))
    layer = relative_layer()
    in_order, at_distances = (
        golden_cases.gradients(
            layer,
            lambda output, losses: ops.sum(output**2),
            {**arguments, "attention_mask": some_mask(), **where},
            wrt=tuple(arguments),
        )
        for where in ({"offset": 4}, {"distances": (j - 4 - i).astype("int32")})
    )
    assert len(in_order.variables) == 2
    helpers.assert_same_results(at_distances, in_order, 1e-4)


def test_many_keys_at_the_same_distance_add_up():
    """A sum of 1024 small numbers in bfloat16 would stop at a quarter of it."""
    layer, keys = relative_layer(dtype="bfloat16"), 2048
    query = np.zeros((1, 1, 1, KEY_DIM), "float32")
    distances = np.where(np.arange(keys) < 1024, -9, 9).astype("int32")[None]

    arguments = {"query": query, "distances": distances}
    for name, size in (("key", KEY_DIM), ("value", VALUE_DIM)):
        arguments[name] = np.zeros((1, 1, keys, size), "float32")
    result = golden_cases.gradients(
        layer, lambda output, losses: ops.sum(output), arguments, wrt=("query",)
    )

    # Half of the weight on the first rows of the tables, half on the last.
    key_rows, value_rows = (x[[0, -1]] for x in helpers.relative_tables(layer))
    golden_cases.assert_close(result.outputs[0, 0, 0], value_rows.mean(0), 0.02)
    to_logits = value_rows.sum(axis=1) - value_rows.sum(axis=1).mean()
    expected = 0.5 * to_logits @ key_rows
    golden_cases.assert_close(result.inputs["query"][0, 0, 0], expected, 0.02)


def relative_layer(**options):
    layer = ScaledDotProduct(3, embeddings_initializer="zeros", **options)
    return helpers.randomized(layer, *(x.shape for x in inputs()))


def test_may_attend_to_all_slots_when_it_sees_none():
    layer = ReleaseDotProduct()
    layer.build(*(x.shape for x in inputs()))
    output, _ = golden_cases.run(layer, *inputs(), attention_mask=some_mask())
    golden_cases.assert_close(output[0, :, 1], inputs()[2].mean(axis=-2)[0], 1e-5)


def test_dropout_drops_weights_in_training_only():
    layer = built_layer(dropout=0.5)
    query, key, _ = inputs()
    value = np.broadcast_to(np.eye(KEYS, dtype="float32"), (2, 3, KEYS, KEYS))
    kept, _ = golden_cases.run(layer, query, key, value)
    golden_cases.assert_close(kept.sum(axis=-1), np.ones((2, 3, QUERIES)), 1e-5)
    dropped, _ = golden_cases.run(layer, query, key, value, training=True)
    assert 0.2 < np.mean(dropped == 0) < 0.8
    golden_cases.assert_close(dropped[dropped != 0], 2 * kept[dropped != 0], 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masked_logit_is_finite_and_hidden(dtype):
    layer = ScaledDotProduct(dtype=dtype)
    layer.build(*(x.shape for x in inputs()))
    assert np.isfinite(np.array(large_negative(dtype)).astype(dtype).astype("float32"))
    query, key, value = inputs()
    mask = np.ones((QUERIES, KEYS), "bool")
    mask[:, -1] = False
    output, _ = golden_cases.run(layer, query, key, value, attention_mask=mask)
    value[..., -1, :] = 100.0
    other, _ = golden_cases.run(layer, query, key, value, attention_mask=mask)
    assert str(output.dtype) == dtype
    np.testing.assert_array_equal(output, other)


@pytest.mark.parametrize(
    "num_queries, with_mask, limit",
    [(128, True, 5), (64, True, None), (64, False, 5), (33, True, 200)],
)
def test_causal_parts_equal_a_dense_mask(num_queries, with_mask, limit):
    """In four parts, two and one; some queries see padding alone."""
    num_keys = num_queries + 16
    query, key, value = (
        helpers.normal(2, 3, length, 6, seed=seed)
        for seed, length in enumerate([num_queries, num_keys, num_keys])
    )
    mask = np.ones((2, 1, 1, num_keys), "bool")
    mask[1, ..., :20] = False
    mask[0, ..., 40:50] = False
    bias = helpers.normal(2, 1, 1, num_keys, seed=4)
    layer = ScaledDotProduct(limit, embeddings_initializer="zeros")
    helpers.randomized(layer, query.shape, key.shape, value.shape)
    given = {"attention_mask": mask, "bias": bias} if with_mask else {}
    offset = num_keys - num_queries

    def run(**options):
        return golden_cases.gradients(
            layer,
            lambda outputs, losses: ops.sum(ops.multiply(outputs, np.arange(6.0))),
            {"query": query, "key": key, "value": value, "offset": offset, **options},
            wrt=("query", "key", "value"),
        )

    causal = np.tri(num_queries, num_keys, offset, dtype="bool")
    dense = given | {"attention_mask": causal & mask if with_mask else causal}
    helpers.assert_same_results(run(**given, use_causal_mask=True), run(**dense))


def test_causal_queries_that_see_padding_alone_attend_alike_to_all_as_released():
    """So many queries that others would go in parts."""
    x = helpers.normal(2, 128, 6)
    mask = np.arange(128) >= 3
    layer = ReleaseDotProduct(dtype="float16")
    output, _ = golden_cases.run(
        layer, 3 * x, x, x, attention_mask=mask, use_causal_mask=True
    )
    means = np.repeat(x.mean(axis=1, keepdims=True), 3, axis=1)
    golden_cases.assert_close(output[:, :3], means, 2e-3)


def test_a_scalar_bias_changes_nothing():
    x = helpers.normal(2, 64, 6)
    options = {"use_causal_mask": True}
    expected, _ = golden_cases.run(ScaledDotProduct(), x, x, x, **options)
    options["bias"] = np.float32(2.0)
    output, _ = golden_cases.run(ScaledDotProduct(), x, x, x, **options)
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("error")
def test_a_single_key_has_all_the_weight():
    x = helpers.normal(3, 2, 1, 4)
    layer, mask = ScaledDotProduct(), np.array([True, False])[:, None, None]
    np.testing.assert_array_equal(layer(x, x, x, use_causal_mask=True), x)
    output = ops.convert_to_numpy(layer(x, x, x, attention_mask=mask))
    np.testing.assert_array_equal(output, np.where(mask, x, 0))


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 3e-3)])
def test_parts_of_the_keys_join_to_all_of_them(dtype, tolerance):
    """Also where a query sees nothing of a part, or nothing at all."""
    layer = built_layer(dtype=dtype)
    query, key, value = inputs()
    bias = helpers.normal(2, 3, QUERIES, KEYS, seed=4)

    def part(keys):
        return golden_cases.run(
            layer,
            query,
            key[:, :, keys],
            value[:, :, keys],
            attention_mask=some_mask()[..., keys],
            bias=bias[..., keys],
            return_logsumexp=True,
        )[0]

    parts = [part(keys) for keys in (slice(0, 1), slice(1, 5), slice(5, KEYS))]
    outputs, sums = (np.stack(x, axis=n) for x, n in zip(zip(*parts), (-2, -1)))
    joined = golden_cases.to_numpy(
        joined_parts(ops.convert_to_tensor(outputs), ops.convert_to_tensor(sums))
    )
    expected, _ = helpers.dense_attention(query, key, value, some_mask(), bias)
    golden_cases.assert_close(joined, expected, tolerance)


def test_sums_under_a_causal_mask():
    """In which queries attend in parts."""
    x = helpers.normal(1, 256, KEY_DIM)
    _, sums = golden_cases.run(
        built_layer(), x, x, x, use_causal_mask=True, return_logsumexp=True
    )[0]
    logits = np.where(np.tri(256, dtype="bool"), x[0] @ x[0].T, -np.inf)
    golden_cases.assert_close(sums[0], np.log(np.exp(logits).sum(axis=-1)), 1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "num_queries, shape",
    [(7, (6,)), (5, (5, 6)), (7, (2, 1, 6)), (5, (5, 1)), (64, (32,)), (64, (40,))],
)
def test_queries_that_see_nothing_return_zero(num_queries, shape, is_causal):
    """Under a causal mask those before the first key, too."""
    num_keys = max(shape[-1], 6)
    query, key = helpers.normal(2, num_queries, 4), helpers.normal(2, num_keys, 4)
    mask = np.random.default_rng(1).random(shape) < 0.5
    mask.reshape(-1, shape[-1])[0, :4] = False
    seen = np.broadcast_to(mask, (2, num_queries, num_keys))
    if is_causal:
        offset = num_keys - num_queries
        seen = seen & np.tri(num_queries, num_keys, offset, dtype=bool)
    options = {"attention_mask": mask, "use_causal_mask": is_causal}
    output, _ = golden_cases.run(ScaledDotProduct(), query, key, key, **options)
    expected, _ = helpers.dense_attention(query, key, key, seen)
    golden_cases.assert_close(output, expected, 1e-5)
    np.testing.assert_array_equal(np.all(output == 0, axis=-1), ~seen.any(axis=-1))

"""Tests of the drop-in layer."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers

BATCH, LENGTH, DIM = 2, 12, 10
SETTINGS = {
    "num_heads": 4,
    "key_dim": 6,
    "num_clusters": 3,
    "attention_window": 5,
    "kernel_initializer": "zeros",
}


def built_attention(**options):
    attention = layers.RoutingAttention(**{**SETTINGS, **options}, name="attention")
    attention.build((BATCH, LENGTH, DIM))
    helpers.randomize(attention)
    return attention


def sequence(length=LENGTH, seed=0):
    return helpers.normal(BATCH, length, DIM, seed=seed)


@pytest.mark.parametrize("share_query_key", [False, True])
def test_is_mixed_attention_of_routed_and_local_heads(share_query_key):
    attention = built_attention(
        num_local_heads=3,
        local_block_size=4,
        value_dim=5,
        output_dim=9,
        max_relative_position=2,
        share_query_key=share_query_key,
    )
    mixed = layers.MixedAttention(
        [
            layers.RoutedHeads(
                1, 3, 5, share_query_key=share_query_key, max_relative_position=2
            ),
            layers.LocalHeads(3, (4,), max_relative_position=2),
        ],
        key_dim=6,
        value_dim=5,
        output_dim=9,
        kernel_initializer="zeros",
    )
    mixed.build((BATCH, LENGTH, DIM))
    mixed.set_weights(attention.get_weights())
    outputs = [
        golden_cases.run(layer, sequence(), use_causal_mask=True)[0]
        for layer in (attention, mixed)
    ]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    "num_local_heads, local_block_size, kinds",
    [(0, None, ["RoutedHeads"]), (4, 7, ["LocalHeads"])],
)
def test_may_have_one_kind_of_heads(num_local_heads, local_block_size, kinds):
    attention = layers.RoutingAttention(
        **SETTINGS, num_local_heads=num_local_heads, local_block_size=local_block_size
    )
    assert [type(group).__name__ for group in attention.head_groups] == kinds
    assert attention.num_heads == 4


def test_local_blocks_have_the_size_of_the_window_by_default():
    attention = layers.RoutingAttention(**SETTINGS, num_local_heads=1)
    assert attention.head_groups[1].block_shape == (5,)


def test_window_longer_than_the_input_is_cut_to_it():
    outputs = []
    for window in (LENGTH, 10 * LENGTH):
        attention = built_attention(attention_window=window, num_local_heads=1)
        outputs.append(golden_cases.run(attention, sequence())[0])
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("length", [1, 2])
def test_takes_very_short_sequences(length):
    attention = built_attention(
        num_local_heads=2, max_relative_position=2, routing="expert_choice"
    )
    x = sequence(length)
    (output, scores), _ = golden_cases.run(
        attention, x, use_causal_mask=True, return_attention_scores=True, training=True
    )
    assert output.shape == x.shape
    # All tokens sit in all three clusters, whose mean they get.
    golden_cases.assert_close(scores.sum(axis=-1), np.ones((2, 4, length)), 1e-5)


def test_attends_to_a_memory_of_another_length():
    attention = built_attention(num_local_heads=0)
    memory, real = sequence(20, seed=1), helpers.tail_mask(20, 20, 9)
    output, _ = golden_cases.run(attention, sequence(), memory, value_mask=real)
    assert output.shape == (BATCH, LENGTH, DIM)
    memory[~real] = 7.0
    other, _ = golden_cases.run(attention, sequence(), memory, value_mask=real)
    np.testing.assert_array_equal(output, other)


def test_state_moves_only_in_training_and_only_if_trainable():
    attention = built_attention(num_local_heads=1)
    before = attention.get_weights()

    def moved():
        return [
            weight.name
            for weight, old in zip(attention.weights, before, strict=True)
            if np.any(golden_cases.to_numpy(weight) != old)
        ]

    golden_cases.run(attention, sequence(), training=False)
    assert not moved()
    attention.trainable = False
    golden_cases.run(attention, sequence(), training=True)
    assert not moved()
    # Another layer: JAX has compiled this one as it was.
    attention = built_attention(num_local_heads=1)
    golden_cases.run(attention, sequence(), training=True)
    assert sorted(moved()) == ["centroids", "counts", "sums"]


def test_losses_are_the_clustering_losses():
    for options, number in (({}, 1), ({"num_local_heads": 4}, 0)):
        _, losses = golden_cases.run(built_attention(**options), sequence())
        assert len(losses) == number
        assert all(loss > 0 for loss in losses)


def test_mixed_precision_reaches_the_head_groups():
    attention = built_attention(num_local_heads=2, dtype="mixed_bfloat16")
    output, _ = golden_cases.run(attention, sequence(), training=True)
    assert str(output.dtype) == "bfloat16"
    assert {str(weight.dtype) for weight in attention.weights} == {"float32"}
    for group in attention.head_groups:
        assert group.compute_dtype == "bfloat16"


def test_dropout_acts_in_training_only():
    attention = built_attention(dropout=0.5, num_local_heads=2)
    plain, _ = golden_cases.run(built_attention(num_local_heads=2), sequence())
    output, _ = golden_cases.run(attention, sequence())
    np.testing.assert_array_equal(output, plain)
    (_, scores), _ = golden_cases.run(
        attention, sequence(), training=True, return_attention_scores=True
    )
    (_, full_scores), _ = golden_cases.run(
        attention, sequence(), return_attention_scores=True
    )
    for heads in (slice(0, 2), slice(2, 4)):
        seen = full_scores[:, heads] > 0
        assert 0.2 < np.mean(scores[:, heads][seen] == 0) < 0.8


def train_and_evaluate(attention, jit_compile):
    """Trains once, then evaluates, compiled or not."""
    x = sequence()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        call = tf.function(attention.__call__, jit_compile=jit_compile)
        return golden_cases.to_numpy([call(x, training=True), call(x)])
    call = golden_cases.run if jit_compile else lambda *a, **k: (a[0](*a[1:], **k),)
    return golden_cases.to_numpy([call(attention, x, training=True)[0], attention(x)])


@pytest.mark.thorough
def test_jit_compilation_changes_nothing():
    attention = built_attention(num_local_heads=2)
    weights = attention.get_weights()
    results = []
    for jit_compile in (False, True):
        attention.set_weights(weights)
        outputs = train_and_evaluate(attention, jit_compile)
        results.append([*outputs, *attention.get_weights()])
    assert sum(np.any(a != b) for a, b in zip(weights, results[0][2:])) == 3
    for actual, expected in zip(*results, strict=True):
        golden_cases.assert_close(actual, expected, 1e-5)


def test_survives_saving(tmp_path):
    attention = layers.RoutingAttention(
        **{**SETTINGS, "kernel_initializer": "ones"},
        num_local_heads=1,
        local_block_size=4,
        value_dim=5,
        output_dim=9,
        max_relative_position=2,
        share_query_key=False,
        dropout=0.1,
        name="attention",
    )
    helpers.assert_survives_saving(
        attention, tmp_path, sequence(), use_causal_mask=True
    )


@pytest.mark.parametrize(
    "name, received",
    [
        ("num_heads", 0),
        ("num_clusters", 0),
        ("attention_window", -1),
        ("num_local_heads", 5),
        ("num_local_heads", -1),
        ("num_local_heads", 1.5),
        ("num_local_heads", True),
        ("local_block_size", 0),
        ("routing", "nobody_chooses"),
        ("seed", -1),
        ("kernel_regularizer", "nope"),
        ("bias_constraint", 3),
        ("key_shift", 2),
        ("key_shift", True),
        ("key_dim", "6"),
        ("value_dim", 0),
        ("max_relative_position", 0),
        ("dropout", 1.0),
        ("dropout", None),
        ("kernel_initializer", "nope"),
    ],
)
def test_refuses_wrong_arguments(name, received):
    with pytest.raises(ValueError) as error:
        layers.RoutingAttention(**{**SETTINGS, name: received})
    assert f"`{name}`" in str(error.value)
    assert f"Received: {name}={received!r}" in str(error.value)


def test_arguments_of_mixed_attention_are_saved():
    attention = layers.RoutingAttention(
        2, 4, 2, 4, shared_head_projection=True, use_bias=True, kernel_regularizer="l2"
    )
    copy = layers.RoutingAttention.from_config(attention.get_config())
    assert copy.shared_head_projection and copy.use_bias
    assert isinstance(copy.kernel_regularizer, keras.regularizers.L2)


def test_seed_decides_the_dropout():
    x = helpers.normal(1, 12, 8)
    settings = {**SETTINGS, "num_local_heads": 1, "dropout": 0.5}
    outputs = []
    for seed in (3, 3, 4):
        attention = layers.RoutingAttention(**settings, seed=seed)
        attention.build(x.shape)
        helpers.randomize(attention)
        outputs.append(golden_cases.to_numpy(attention(x, training=True)))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])


def test_one_dimensional_keys_cannot_be_routed():
    attention = layers.RoutingAttention(
        2, key_dim=1, num_clusters=2, attention_window=4
    )
    with pytest.raises(ValueError, match="key_dim=1"):
        attention(np.ones((1, 8, 4), "float32"))


def test_hands_the_routing_to_its_heads():
    attention = layers.RoutingAttention(
        num_heads=2,
        key_dim=4,
        num_clusters=2,
        attention_window=4,
        routing="expert_choice",
        routing_scope="prefix",
        prefix_block_size=3,
    )
    (heads,) = attention.head_groups
    assert (heads.routing, heads.routing_scope) == ("expert_choice", "prefix")
    assert heads.prefix_block_size == 3
    with pytest.raises(ValueError, match="`routing_scope` must be one of"):
        heads.routing_scope = "past"


def test_the_sound_routing_is_the_default():
    memory = sequence(20, seed=1)
    for arrays, causal, routing in (
        ((sequence(),), True, "token_choice"),
        ((sequence(),), False, "expert_choice"),
        ((sequence(), memory), False, "expert_choice"),
    ):
        outputs = [
            golden_cases.run(
                built_attention(**options), *arrays, use_causal_mask=causal
            )[0]
            for options in ({}, {"routing": routing})
        ]
        np.testing.assert_array_equal(*outputs)
    with pytest.raises(ValueError, match="`routing=None` .*is_cross_attention=True"):
        built_attention()(sequence(), value=sequence(seed=1), use_causal_mask=True)


def test_hands_the_shift_of_keys_to_its_heads():
    attention = built_attention(num_local_heads=2, key_shift=1)
    assert [group.key_shift for group in attention.head_groups] == [1, 1]
    helpers.assert_keeps_settings(attention)
    (output, scores), _ = golden_cases.run(
        attention, sequence(), use_causal_mask=True, return_attention_scores=True
    )
    # No key comes before the first one, and none is read with the first value.
    assert np.all(output[:, 0] == 0.0) and np.all(scores[..., 0] == 0.0)
    assert np.all(np.any(output[:, 1:] != 0.0, axis=(1, 2)))


@pytest.mark.parametrize("num_local_heads", [0, 4])
def test_shifted_keys_are_for_causal_self_attention(num_local_heads):
    attention = built_attention(num_local_heads=num_local_heads, key_shift=1)
    for options in (
        {},
        {"value": sequence(seed=1)},
        {"value": sequence(seed=1), "use_causal_mask": True},
    ):
        with pytest.raises(ValueError, match="`key_shift=1` needs .*Received: use_c"):
            attention(sequence(), **options)
    with pytest.raises(ValueError, match="`key_shift=1` .*is_cross_attention=True"):
        attention.make_cache(BATCH, LENGTH, value=sequence(seed=1))


def test_clustering_reaches_the_routed_heads(tmp_path):
    clustering = {"decay": 0.9, "revive_after": 7, "centroid_initialization": "tokens"}
    layer = layers.RoutingAttention(4, 8, 3, 5, 2, clustering=clustering)
    (group,) = (g for g in layer.head_groups if isinstance(g, layers.RoutedHeads))
    kmeans = group.kmeans
    for name, value in clustering.items():
        assert getattr(group, name) == getattr(kmeans, name) == value
    helpers.assert_keeps_settings(layer)


def test_refuses_other_settings_of_the_clustering():
    with pytest.raises(ValueError, match="`clustering`.*Received: .*'num_clusters'"):
        layers.RoutingAttention(4, 8, 3, 5, clustering={"num_clusters": 3})
    for value in (3, "decay"):
        with pytest.raises(ValueError, match=f"`clustering` must be.*={value!r}"):
            layers.RoutingAttention(4, 8, 3, 5, clustering=value)

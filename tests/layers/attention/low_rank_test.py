import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.golden_cases import to_numpy
from tests.layers import helpers

DIM, MEMORY_DIM, RANK = 12, 10, 3


def attention(memory_dim=None, **changes):
    """Returns a layer with routed heads, which share projections, and local ones."""
    clusters = {"num_clusters": 3, "attention_window": 4, "decay": 0.5}
    groups = [
        layers.RoutedHeads(2, max_relative_position=3, **clusters),
        layers.LocalHeads(1, block_shape=(4,)),
    ]
    layer = layers.MixedAttention(groups, key_dim=4, value_dim=5, **changes)
    layer.build((2, 16, DIM), None if memory_dim is None else (2, 20, memory_dim))
    return layer


def sequence(length=16, dim=DIM):
    return helpers.normal(2, length, dim)


def sums(layer, projections=("query", "value")):
    """Returns the weights of a layer with adapters, added up by hand, by name."""
    weights = {weight.path: to_numpy(weight) for weight in layer.weights}
    names = {path.rpartition("/")[2]: path for path in weights}
    a, b = (weights.pop(names[f"lora_kernel_{matrix}"]) for matrix in "ab")
    row = column = 0
    for name in projections:
        rows, columns = weights[names[f"{name}_kernel"]].shape
        product = a[row : row + rows] @ b[:, column : column + columns]
        weights[names[f"{name}_kernel"]] += layer.lora_alpha / RANK * product
        row, column = row + rows, column + columns
    return list(weights.values())


@pytest.mark.parametrize(
    "options, memory_dim",
    [
        ({}, None),
        ({"lora_alpha": 6}, MEMORY_DIM),
        ({"projections": ("query", "key", "value", "head", "output")}, None),
    ],
)
def test_adapters_add_to_the_kernels(options, memory_dim):
    layer, plain = (
        attention(memory_dim, shared_head_projection=True) for _ in range(2)
    )
    layer.enable_lora(RANK, **options)
    assert layer.lora_rank == RANK
    assert not to_numpy(layer.lora_kernel_b).any()
    layer.lora_kernel_b.assign(helpers.normal(*layer.lora_kernel_b.shape))
    plain.set_weights(sums(layer, layer.lora_projections))
    inputs = [sequence()]
    if memory_dim is not None:
        inputs.append(sequence(20, memory_dim))
    actual, expected = (golden_cases.run(each, *inputs)[0] for each in (layer, plain))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_all_but_the_adapters_is_frozen():
    layer = attention()
    layer.enable_lora(RANK)
    shapes = {weight.name: tuple(weight.shape) for weight in layer.trainable_weights}
    assert shapes == {
        "lora_kernel_a": (2 * DIM, RANK),
        "lora_kernel_b": (RANK, 3 * 4 + 3 * 5),
    }
    # Each projection starts with columns of its own.
    a = to_numpy(layer.lora_kernel_a)
    assert np.abs(a[:DIM] - a[DIM:]).min() > 0
    before = to_numpy(layer.weights)
    golden_cases.run(layer, sequence(), use_causal_mask=True, training=True)
    for weight, value in zip(to_numpy(layer.weights), before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_steps_use_the_adapters():
    layer, x = attention(), sequence(9)
    layer.enable_lora(RANK, projections=("query", "value", "output"))
    layer.lora_kernel_b.assign(helpers.normal(*layer.lora_kernel_b.shape))
    helpers.assert_pieces_equal_the_whole(layer, x, 8)


def test_files_hold_the_sums(tmp_path):
    adapted, plain = (
        keras.Sequential([keras.Input((16, DIM)), attention(name="attention")])
        for _ in range(2)
    )
    layer = adapted.get_layer("attention")
    layer.enable_lora(RANK)
    for weight in (layer.lora_kernel_a, layer.lora_kernel_b):
        weight.assign(helpers.normal(*weight.shape))
    expected = sums(layer)
    adapted.save_weights(tmp_path / "model.weights.h5")
    adapted.save(tmp_path / "model.keras")
    plain.load_weights(tmp_path / "model.weights.h5")
    adapted.load_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for weights in (plain.weights, loaded.weights, sums(layer)):
        for weight, value in zip(to_numpy(weights), expected, strict=True):
            np.testing.assert_allclose(weight, value, rtol=1e-6, atol=1e-7)
    assert not to_numpy(layer.lora_kernel_b).any()
    assert to_numpy(layer.lora_kernel_a).any()


def test_errors():
    layer = layers.RoutingAttention(2, 4, 3, 4)
    with pytest.raises(ValueError, match="LoRA.*'routing_attention"):
        layer.enable_lora(RANK)
    layer.build((2, 16, DIM))
    for rank in (0, 1.5):
        with pytest.raises(ValueError, match=f"`rank`.*rank={rank}"):
            layer.enable_lora(rank)
    # All its heads share the projections of queries and keys.
    for projections in ((), ("queries",), ("key", "value")):
        with pytest.raises(ValueError, match=r"`projections`.*projections=\("):
            layer.enable_lora(RANK, projections=projections)
    with pytest.raises(ValueError, match=r"`projections`.*=\('value', 'value'\)"):
        layer.enable_lora(RANK, projections=("value", "value"))
    with pytest.raises(ValueError, match="`b_initializer`.*='ones_and_twos'"):
        layer.enable_lora(RANK, b_initializer="ones_and_twos")
    assert len(layer.trainable_weights) > 2
    layer.enable_lora(RANK)
    with pytest.raises(ValueError, match="LoRA.*'routing_attention"):
        layer.enable_lora(RANK)

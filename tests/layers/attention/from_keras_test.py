"""`MixedAttention.from_keras`."""

import keras
import numpy as np
import pytest

from routing_tf import layers

LENGTH, DIM = 12, 16
KINDS = {
    "multi_head": lambda **kwargs: keras.layers.MultiHeadAttention(
        num_heads=4, key_dim=6, **kwargs
    ),
    "grouped": lambda **kwargs: keras.layers.GroupQueryAttention(
        head_dim=6, num_query_heads=4, num_key_value_heads=2, **kwargs
    ),
}
MASK = np.arange(LENGTH)[None, None] < np.array([LENGTH, 7])[:, None, None]


def made(kind="multi_head", memory=None, **kwargs):
    layer = KINDS[kind](bias_initializer="normal", **kwargs)
    keras_output(layer, tokens(), tokens() if memory is None else memory)
    return layer


def keras_output(layer, *arguments, **options):
    """Keras' output; its fused attention on JAX takes no `value_dim`."""
    return layer(*arguments, return_attention_scores=True, **options)[0]


def assert_close(output, expected):
    arrays = map(keras.ops.convert_to_numpy, (output, expected))
    np.testing.assert_allclose(*arrays, atol=1e-5)


def tokens(size=DIM):
    return np.random.default_rng(size).normal(size=(2, LENGTH, size)).astype("float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias": False},
        {"use_gate": True},
        {"value_dim": 5},
    ],
    ids=str,
)
def test_full_heads_are_exact(kind, options):
    if kind == "grouped" and "value_dim" in options:
        pytest.skip("its values have the size of its keys")
    layer, x = made(kind, **options), keras.ops.convert_to_tensor(tokens())
    full = layers.MixedAttention.from_keras(layer, [layers.FullHeads(4)])
    for call in ({"use_causal_mask": True}, {"attention_mask": MASK}):
        assert_close(full(x, x, **call), keras_output(layer, x, x, **call))


def test_window_and_adapters_are_exact():
    layer, x = made(sliding_window=4), tokens()
    layer.query_dense.enable_lora(2)
    adapter = layer.query_dense.lora_kernel_b
    adapter.assign(np.ones(adapter.shape))
    heads = [layers.SlidingHeads(4, radius=3)]
    near = layers.MixedAttention.from_keras(layer, heads)
    expected = keras_output(layer, x, x, use_causal_mask=True)
    assert_close(near(x, use_causal_mask=True), expected)


def test_another_sequence_is_exact():
    x, memory = tokens(), tokens(10)
    layer = made(memory=memory)
    full = layers.MixedAttention.from_keras(layer, [layers.FullHeads(4)])
    assert_close(full(x, memory), keras_output(layer, x, memory))


@pytest.mark.parametrize(
    "layer, heads, message",
    [
        (lambda: keras.layers.Dense(2), {}, "MultiHeadAttention"),
        (KINDS["multi_head"], {}, "`layer`.*'multi_head_attention"),
        (made, {"num_heads": 3}, "`head_groups`.* 3 .* 4 "),
        (lambda: made(sliding_window=4), {}, "radius=3"),
        (lambda: made(output_shape=(2, 3)), {}, r"`layer`.*attention_axes=\(1,\)"),
    ],
)
def test_refusals(layer, heads, message):
    with pytest.raises(ValueError, match=message):
        heads = layers.FullHeads(**{"num_heads": 4, **heads})
        layers.MixedAttention.from_keras(layer(), [heads])


def test_heads_that_share_queries_and_keys_are_refused():
    heads = layers.RoutedHeads(4, num_clusters=2, attention_window=4)
    with pytest.raises(ValueError, match="share_query_key=False"):
        layers.MixedAttention.from_keras(made(), [heads])

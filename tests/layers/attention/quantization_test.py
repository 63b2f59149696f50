"""`quantize` of Keras, which finds the projections of attention."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

LENGTH, DIM = 12, 16
pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Keras multiplies no integers there"
)


def models(**options):
    """Returns a model of our attention, and one of that of Keras, with its weights."""
    x, mask = keras.Input((LENGTH, DIM)), keras.Input((LENGTH,), dtype="bool")
    ours = layers.MixedAttention([layers.FullHeads(2)], key_dim=8, **options)
    theirs = keras.layers.MultiHeadAttention(2, 8, **options)
    own = keras.Model([x, mask], ours(x, query_mask=mask))
    other = keras.Model([x, mask], theirs(x, x, attention_mask=mask[:, None]))
    helpers.randomize(own)
    for name in ("query", "key", "value", "output", "gate"):
        dense = getattr(theirs, f"_{name}_dense", None)
        for kind in ("kernel", "bias"):
            weight = getattr(ours, f"{name}_{kind}")
            if weight is not None:
                copy = getattr(dense, kind)
                # JAX gives memory away, which the two must not share.
                copy.assign(np.reshape(golden_cases.to_numpy(weight), copy.shape))
    return own, other


def inputs():
    return [helpers.normal(2, LENGTH, DIM), helpers.tail_mask(LENGTH, LENGTH, 7)]


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
@pytest.mark.parametrize(
    "mode, use_bias, use_gate",
    kinds.some(
        [("int8", True, True), ("int4", False, False), ("float8", True, False)],
        [("int8", True, True)],
    ),
)
def test_numbers_are_those_of_keras(mode, use_bias, use_gate, tmp_path):
    own, other = models(use_bias=use_bias, use_gate=use_gate)
    before = own.predict_on_batch(inputs())
    for model in (own, other):
        model.quantize(mode)
    # In a graph, where TensorFlow fuses products with scales and masks.
    actual, expected = (model.predict_on_batch(inputs()) for model in (own, other))
    real = inputs()[1]
    # A few tokens may be rounded to another integer.
    is_close = np.isclose(actual[real], expected[real], rtol=1e-4, atol=1e-5)
    assert is_close.mean() > 0.9
    np.testing.assert_allclose(actual[real], expected[real], rtol=0.02, atol=0.1)
    assert np.abs(actual - before)[real].max() > 1e-3
    attention = own.layers[-1]
    assert len(attention.quantized_projections) == 4 + use_gate
    bits = {weight.dtype for weight in attention.weights if len(weight.shape) == 2}
    assert ("int8" in bits) == (mode != "float8")
    if mode != "float8":
        assert not any(weight.name.endswith("_kernel") for weight in own.weights)
    own.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [v.path for v in loaded.weights] == [v.path for v in own.weights]
    np.testing.assert_array_equal(loaded.predict_on_batch(inputs()), actual)


def in_block():
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=8)
    return layers.TransformerBlock(attention, layers.FeedForward(16))


def test_parts_may_be_quantized_before_the_whole_is_built():
    block = in_block()
    block.feed_forward(helpers.normal(1, 2, DIM))
    block.feed_forward.input_dense.quantize("int8")
    policies = block.get_config()["dtype"]["config"]["policy_map"]
    assert [key.endswith("/input") for key in policies] == [True]


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
def test_steps_and_adapters_of_a_quantized_layer():
    attention = layers.RoutingAttention(
        4, 4, 3, 5, num_local_heads=2, key_shift=1, name="attention"
    )
    x = keras.Input((LENGTH, DIM))
    model = keras.Model(x, attention(x, use_causal_mask=True))
    model.quantize("int8")
    with pytest.raises(ValueError, match="LoRA.*'attention'.*`enable_lora`"):
        attention.enable_lora(2)
    attention.query_projection.enable_lora(2)
    added = attention.query_projection.lora_kernel_b
    added.assign(helpers.normal(*added.shape))

    helpers.assert_pieces_equal_the_whole(attention, helpers.normal(2, LENGTH, DIM), 7)


def test_adapters_are_added_first():
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    attention.build((None, LENGTH, DIM))
    with pytest.raises(ValueError, match="'mixed_attention.*/query_projection'"):
        attention.query_projection.enable_lora(2)
    attention.enable_lora(2)
    with pytest.raises(ValueError, match="'mixed_attention.*`enable_lora`"):
        attention.query_projection.quantize("int8")

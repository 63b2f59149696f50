"""Models of all families, with the heads of other patterns and back."""

import functools

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import retrofit
from tests.retrofit import families

pytestmark = pytest.mark.usefixtures("eager")
#: Those whose shape of attention, mask or cache no other one has.
SHAPES = ("Gemma2", "Gemma3", "GPT2", "GPTNeoX", "Mistral", "Phi3", "Qwen3")
ALL = [
    pytest.param(x, marks=() if x in SHAPES else pytest.mark.thorough)
    for x in families.FAMILIES
    if x != "GptOss"
]
LENGTHS = np.array([[6], [11]])


@functools.cache
def causal_lm(family):
    return families.causal_lm(family)


@pytest.fixture
def changed():
    """Changes models, and restores them after the test."""
    models = set()

    def change(family, heads, **options):
        model = causal_lm(family)
        models.add(model)
        options = {"keep_full": (), **options}
        return retrofit.sparsify(model, families.IDS[:1], heads=heads, **options)

    yield change
    for model in models:
        retrofit.restore(model)


@pytest.mark.parametrize("family", ALL)
def test_heads_that_see_everything_are_exact(family, changed):
    model = causal_lm(family)
    before = families.outputs(model)
    report = changed(family, layers.FullHeads(families.NUM_HEADS))
    assert report.model is model
    np.testing.assert_allclose(families.outputs(model), before, atol=1e-4)
    for layer in report.layers:
        if not layer.reason:
            assert layer.exact_mass == pytest.approx(1.0, abs=1e-5)
            assert layer.error < 1e-5
    retrofit.restore(model)
    np.testing.assert_array_equal(families.outputs(model), before)
    changed(family, layers.SlidingHeads(families.NUM_HEADS, radius=3))
    after = families.outputs(model)
    assert np.abs(after - before).max() > 1e-3 or family == "Gemma2"
    # Causal to the last bit.
    ids = families.IDS.copy()
    ids[:, 12:] = 1
    other = keras.ops.convert_to_numpy(model({**families.INPUTS, "token_ids": ids}))
    np.testing.assert_array_equal(other[0, :12], after[:12])


@pytest.mark.parametrize("keep_full", [(), (0,)], ids=str)
@pytest.mark.parametrize("family", ALL)
def test_generation_equals_whole_passes(family, keep_full, changed):
    if keep_full and family in ("Gemma2", "Gemma3"):
        pytest.skip("the first layer has a window and stays anyway")
    heads = layers.SlidingHeads(families.NUM_HEADS, radius=4)
    model = changed(family, heads, keep_full=keep_full).model
    check_generation(model)


def check_generation(model, chunk=4):
    """Generates in a batch of prompts of unlike lengths."""
    model.prefill_length = chunk
    model.compile(sampler="greedy")
    ids = families.IDS[:, :17]
    real = np.arange(17) < LENGTHS
    prompt = {"token_ids": ids, "padding_mask": real.astype("int32")}
    if "Gemma3" in type(model).__name__:
        prompt["images"] = np.zeros((2, 0, 1, 1, 3))
    made = model.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(made[real], ids[real])
    whole = {"token_ids": made, "padding_mask": np.ones_like(made)}
    best = keras.ops.convert_to_numpy(model(whole)).argmax(axis=-1)
    np.testing.assert_array_equal(made[:, 1:][~real[:, 1:]], best[:, :-1][~real[:, 1:]])

"""Models of all families, with multipole heads and back."""

import functools

import numpy as np
import pytest

from routing_tf import layers
from routing_tf import retrofit
from tests.layers import kinds
from tests.retrofit import families

pytestmark = pytest.mark.usefixtures("eager")


def some(names, *unmarked):
    """Returns families, all but a few of them marked as thorough, on JAX but one."""
    return kinds.some(names, ["Llama3"] if families.ON_JAX else unmarked)


NEAR = {
    "num_recent": 32,
    "num_clusters": 4,
    "attention_window": 4,
    "clusters_per_query": 2,
}
FAR = {**NEAR, "num_recent": 4, "num_sinks": 1, "block_length": 2}
#: Of prompts, and of what is made of them: two chunks of 4 tokens, and one token more.
LENGTHS, WHOLE = np.array([[10], [12]]), 14


@functools.cache
def causal_lm(family):
    return families.causal_lm(family)


@pytest.fixture
def changed():
    """Changes models, and restores them after the test."""
    models = set()

    def change(family, **options):
        model = causal_lm(family)
        models.add(model)
        options = {"keep_full": (), **options}
        return retrofit.sparsify(model, families.IDS[:1], **options)

    yield change
    for model in models:
        retrofit.restore(model)


# One of each shape of attention.
@pytest.mark.parametrize(
    "family", some(families.FAMILIES, "GPT2", "GPTNeoX", "Gemma2", "Llama3")
)
def test_exact_where_all_pairs_are_near_and_restored_to_the_bit(family):
    model = causal_lm(family)
    before = families.outputs(model)
    paths = [weight.path for weight in model.weights]
    report = retrofit.sparsify(model, families.IDS[:1], keep_full=(), **NEAR)
    assert report.model is model
    np.testing.assert_allclose(families.outputs(model), before, atol=1e-4)
    for layer in report.layers:
        if not layer.reason:
            assert layer.exact_mass == pytest.approx(1.0, abs=1e-5)
            assert layer.error < 1e-5
    assert set(paths) < {weight.path for weight in model.weights}
    retrofit.restore(model)
    np.testing.assert_array_equal(families.outputs(model), before)
    assert paths == [weight.path for weight in model.weights]


# Of each way to make queries, keys and layers, and all that the next test leaves out.
OF_EACH_WAY = ("GPT2", "GPTNeoX", "Gemma2", "Gemma3", "GptOss", "Llama3", "Phi3")


@pytest.mark.parametrize("family", some(OF_EACH_WAY, "GPT2", "Llama3"))
def test_sparse_models_are_causal_and_generate_what_whole_passes_say(family, changed):
    before = families.outputs(causal_lm(family))
    model = changed(family, **FAR).model
    after = families.outputs(model)
    assert np.abs(after - before).max() > 1e-4
    ids = families.IDS.copy()
    ids[:, 12:] = 1
    other = families.of_padding_too(model, {**families.INPUTS, "token_ids": ids})
    np.testing.assert_array_equal(other[0, :12], after[:12])
    check_generation(model)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            x, marks=families.NOT_ON_JAX if x == "GPT2" else pytest.mark.thorough
        )
        for x in families.FAMILIES
    ],
)
def test_generation_with_a_layer_that_stays(family, changed):
    if family in ("Gemma2", "Gemma3", "GptOss"):
        pytest.skip("some of its layers stay anyway")
    heads = layers.SlidingHeads(families.NUM_HEADS, radius=4)
    check_generation(changed(family, heads=heads, keep_full=(0,)).model)


def check_generation(model, chunk=4, sampler="greedy"):
    """Generates in a batch of prompts of unlike lengths."""
    model.prefill_length = chunk
    model.compile(sampler=sampler)
    ids = families.IDS[:, :WHOLE]
    real = np.arange(WHOLE) < LENGTHS
    prompt = {"token_ids": ids, "padding_mask": real.astype("int32")}
    if "Gemma3" in type(model).__name__:
        prompt["images"] = np.zeros((2, 0, 1, 1, 3))
    made = model.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(made[real], ids[real])
    whole = {"token_ids": made, "padding_mask": np.ones_like(made)}
    best = families.of_padding_too(model, whole).argmax(axis=-1)
    np.testing.assert_array_equal(made[:, 1:][~real[:, 1:]], best[:, :-1][~real[:, 1:]])

"""Latents that read long inputs, against a dense oracle of their own in NumPy."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import dense_blocks

BATCH, LENGTH, DIM, LATENTS, SIZE = 2, 9, 6, 3, 4
ROUTED = [layers.RoutedHeads(2, num_clusters=2, attention_window=2)]
CASES = {
    "latents": {"num_layers": 2, "num_cross_heads": 2},
    "shared": {"num_cross_attentions": 3, "output_dim": 6, "num_outputs": 2},
    "own": {"num_cross_attentions": 2, "share_weights": False, "output_dim": 5},
    "causal": {"causal": True, "num_cross_attentions": 2},
}


def built(name=None, **options):
    options = {"num_layers": 1, **CASES.get(name, {}), **options}
    model = zoo.PerceiverBackbone(LATENTS, SIZE, num_heads=2, **options)
    return helpers.randomized(model, (None, None, SIZE if model.causal else DIM))


def arguments(model):
    """Returns call arguments: inputs, and queries if there are no learned ones."""
    x = helpers.normal(BATCH, LENGTH, SIZE if model.causal else DIM)
    if model.output_dim is None or model.num_outputs is not None:
        return [x]
    return [x, helpers.normal(BATCH, 4, model.output_dim, seed=1)]


def real_inputs():
    """The first row lacks the last but one, the second the first two."""
    real = np.arange(LENGTH) >= np.array([[0], [2]])
    real[0, -2] = False
    return real


def oracle(model, real, x, queries=None):
    seen = np.repeat(real[:, None], LATENTS, axis=1)
    among = np.ones((BATCH, 1, LATENTS))
    if model.causal:
        latents = x[:, LENGTH - LATENTS :].astype("float64")
        for latent in range(LATENTS):
            seen[:, latent, LENGTH - LATENTS + latent + 1 :] = False
        among = np.tri(LATENTS)[None] * real[:, None, LENGTH - LATENTS :]
    else:
        latents = np.stack([dense_blocks.values(model.latents)] * BATCH)
    blocks = list(model.blocks)
    for index in range(model.num_cross_attentions):
        index = min(index, 1) if model.share_weights else index
        memory = dense_blocks.norm(x, model.input_norms[index])
        reading = model.reading_blocks[index]
        latents = dense_blocks.block(latents, reading, seen, memory)
        first = 0 if model.share_weights else index * model.num_layers
        for layer in blocks[first : first + model.num_layers]:
            latents = dense_blocks.block(latents, layer, among > 0)
    if model.output_dim is None:
        return latents
    if queries is None:
        queries = np.stack([dense_blocks.values(model.learned_queries)] * BATCH)
    memory = dense_blocks.norm(latents, model.latent_norm)
    everything = np.ones((BATCH, 1, LATENTS), "bool")
    return dense_blocks.block(queries, model.output_block, everything, memory)


@pytest.mark.parametrize("name", kinds.some(CASES, ("shared", "causal")))
def test_equals_the_oracle(name):
    model, real = built(name), real_inputs()
    x, *queries = arguments(model)
    expected = oracle(model, real, x, *queries)
    actual, _ = golden_cases.run(model, x, *queries, mask=real)
    golden_cases.assert_close(actual, expected, 1e-4)
    assert model.compute_output_shape(*(q.shape for q in (x, *queries))) == actual.shape
    # Keras masks hide it, too; and what padding contains has no influence.
    x = np.where(real[..., None], x, 0.0).astype("float32")
    masked = helpers.compiled(lambda x, *q: model(keras.layers.Masking()(x), *q), None)
    other = masked(x, *queries)
    shown = real[:, -LATENTS:] if model.causal else slice(None)
    golden_cases.assert_close(other[shown], actual[shown], 1e-5)


def test_reads_fewer_inputs_than_latents():
    (x,) = arguments(model := built(causal=True))
    assert golden_cases.run(model, x[:, :2])[0].shape == (BATCH, 2, SIZE)


def test_reads_inputs_for_which_there_is_no_square_matrix():
    """10 GB for each head, were all pairs of inputs compared."""
    x = helpers.normal(1, 50_000, DIM)
    output, _ = golden_cases.run(built("latents"), x)
    assert output.shape == (1, LATENTS, SIZE) and np.all(np.isfinite(output))


CACHED = {
    "shared": ({"num_cross_attentions": 3}, 7, 1),
    "own": ({"num_cross_attentions": 2, "share_weights": False}, 8, 1),
    "routed": ({"heads": ROUTED}, 7, 2),
}


@pytest.mark.parametrize("name", kinds.some(CACHED, ["shared"]))
def test_steps_equal_a_pass_over_all_inputs(name):
    options, start, size = CACHED[name]
    model, real = built(causal=True, **options), real_inputs()
    (x,) = arguments(model)
    expected, _ = golden_cases.run(model, x, mask=real)

    def step(x, real, cache, first):
        return model(x, mask=real, cache=cache, cache_index=first)

    cache = model.make_cache(BATCH, LENGTH)
    _, cache = helpers.in_pieces(step, [LENGTH], (x[:, ::-1], real), cache)
    sizes = [start, *[size] * ((LENGTH - start) // size)]  # forgets what was before
    outputs, _ = helpers.in_pieces(step, sizes, (x, real), cache)
    shown = real[:, -LATENTS:]
    golden_cases.assert_close(outputs[shown], expected[shown], 1e-5)


def test_heads_have_the_dtype_of_the_model_whose_config_is_plain():
    model = built(heads=[layers.FullHeads(2)], dtype="mixed_bfloat16")
    assert type(model.get_config()["heads"][0]["config"]) is dict
    assert model.blocks[0].attention.head_groups[0].compute_dtype == "bfloat16"


def test_caches_need_a_causal_model_and_a_start_that_reaches_the_latents():
    with pytest.raises(ValueError, match="causal=False.*`causal=True`"):
        built("latents").make_cache(1, 4)
    model = built("causal")
    (x,) = arguments(model)
    cache, others = (model.make_cache(size, LENGTH) for size in (BATCH, BATCH + 1))
    for arrays, options, rule in (
        ((x[:, :6],), {}, "Received: 6 .* 6 .* 8.*`max_length`"),
        ((x[:, :2],), {"cache_index": 8}, "`cache_index`.*cache_index=8 .* 2 .* 9"),
        ((x,), {"training": True}, "Received: training=True"),
        ((x, x), {}, r"`output_queries`.*shape=\(2, 9, 4\), output_dim=None"),
        ((x,), {"cache": others}, r"`cache`.*`inputs`.*inputs\.shape=\(2, 9, 4\) .* 3"),
    ):
        with pytest.raises(ValueError, match=rule):
            model(*arrays, **{"cache": cache, **options})
    _, after = model(x[:, : LENGTH - 2], cache=cache)
    with pytest.raises(ValueError, match="`cache_index`.*cache_index=8 .* 7"):
        model(x[:, -1:], cache=after, cache_index=np.array(LENGTH - 1))
    with pytest.raises(ValueError, match="causal=False.*`causal=True`"):
        other = built("latents")
        other(arguments(other)[0], cache=cache)


def test_outputs_behind_a_cache_have_the_mask_of_their_inputs():
    model = built("causal")
    (x,) = arguments(model)
    masked = keras.layers.Masking()(x[:, : LENGTH - 1])
    output, _ = model(masked, cache=model.make_cache(BATCH, LENGTH))
    blocks = layers.MixedAttention([layers.FullHeads(1)], 4)
    assert blocks(output).shape == output.shape

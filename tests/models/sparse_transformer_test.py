"""The Sparse Transformer of Child et al. (2019), against NumPy by its text."""

import keras_hub
import numpy as np
import pytest

from routing_tf import models
from routing_tf.generation.token_stream import TokenStream
from tests import golden_cases
from tests.models import image_transformer_test
from tests.models import preset_variables_test
from tests.models import small_models
from tests.zoo import dense_blocks

STRIDE, HEADS, COLUMNS, GAIN = 4, 2, 2, 0.125
SETTINGS = {
    "num_local_heads": 0,
    "num_routed_heads": 0,
    "num_factorized_heads": HEADS,
    "local_block_length": STRIDE,
    "num_summary_columns": COLUMNS,
    "num_layers": 3,
    "intermediate_dim": 64,
    "coordinate_embeddings": True,
    "feed_forward": "sigmoid_gelu",
    "attention_bias": True,
    "initializer": "fan_in_normal",
    "initializer_gain": GAIN,
    "scale_residual_initializer": True,
    "drops_inputs": False,
}
ARRANGEMENTS = ("interleaved", "merged", "separate")
EVERY = [(p, a) for p in ("strided", "fixed") for a in ARRANGEMENTS]
FEW = [("strided", "interleaved"), ("strided", "merged"), ("fixed", "merged")]
# What is called token by token takes long on JAX.
STEPPED = [] if small_models.ON_JAX else [("strided", "interleaved")]
every_way = pytest.mark.parametrize(
    "pattern, arrangement",
    [
        pytest.param(*way, marks=() if way in FEW else pytest.mark.thorough)
        for way in EVERY
    ],
)
stepwise = pytest.mark.parametrize(
    "pattern, arrangement",
    [
        pytest.param(*way, marks=() if way in STEPPED else small_models.FURTHER)
        for way in FEW
    ],
)
PRESETS = {
    # Millions of weights in Table 1 and section 7 of the paper.
    "sparse_transformer_cifar10": 59,
    "sparse_transformer_enwik8": 95,
    "sparse_transformer_imagenet64": 152,
}


def language_model(pattern="strided", arrangement="interleaved", **changes):
    factors = {"factorized_pattern": pattern, "factorized_arrangement": arrangement}
    return small_models.language_model(**{**SETTINGS, **factors, **changes})


def sees(pattern, arrangement, layer, length):
    """What each head of a block sees, `<bool>[heads, length, length]`: A(1) and A(2).

    Sections 4.3 and 5.2 of the paper; r in its equation is counted from 0.
    """
    i, j = np.ogrid[:length, :length]
    if pattern == "strided":
        halves = [i - j <= STRIDE, (i - j) % STRIDE == 0]
    else:
        halves = [i // STRIDE == j // STRIDE, j % STRIDE >= STRIDE - COLUMNS]
    halves = [np.broadcast_to(half, (length, length)) & (j <= i) for half in halves]
    if arrangement == "merged":
        return np.stack([halves[0] | halves[1]] * HEADS)
    if arrangement == "separate":
        return np.stack(halves)
    return np.stack([halves[layer % 2]] * HEADS)


def all_weights(lm):
    return {v.path: np.float64(small_models.array(v)) for v in lm.trainable_variables}


def of(weights, start):
    start += "/"
    return {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}


@every_way
def test_logits_are_those_of_the_paper(pattern, arrangement):
    lm = language_model(pattern, arrangement)
    x = small_models.inputs((23, 23), buffer=23)
    weights, position = all_weights(lm), np.arange(23)

    h = weights["token_embedding/embeddings"][x["token_ids"]]
    h = h + weights["grid_embedding/axis_0_embeddings"][position // STRIDE]
    h = h + weights["grid_embedding/axis_1_embeddings"][position % STRIDE]
    for layer in range(3):
        visible = sees(pattern, arrangement, layer, 23)
        # `H + a(H) + b(H)`, section 5.2.
        h = dense_blocks.block(h, lm.backbone.blocks[layer], visible[None])
    h = dense_blocks.norm(h, lm.backbone.final_norm)
    expected = h @ weights["logits/kernel"] + weights["logits/bias"]

    logits, _ = golden_cases.run(lm, x)
    golden_cases.assert_close(logits, expected, 2e-5)


@stepwise
def test_tokens_one_by_one(pattern, arrangement):
    lm = language_model(pattern, arrangement, num_layers=2)
    x = small_models.inputs((13, 13), buffer=13)
    expected, _ = golden_cases.run(lm, x)
    cache = lm.make_cache(2, 13)
    logits, _, cache = lm.call_with_cache(x["token_ids"][:, :6], cache, 0)
    found = [small_models.array(logits)]
    logits, _, _ = lm.call_with_cache(x["token_ids"][:, 6:], cache, 6)
    found.append(small_models.array(logits))
    golden_cases.assert_close(np.concatenate(found, axis=1), expected, 2e-5)


def test_initial_values():
    h = small_models.hyperparameters(**SETTINGS, vocabulary_size=300).replace(
        hidden_dim=64, intermediate_dim=256
    )
    lm = models.RoutingTransformerCausalLM(models.RoutingTransformer(h))
    weights = {v.path: small_models.array(v) for v in lm.trainable_variables}
    wanted = {
        "token_embedding/embeddings": GAIN / 64**0.5,
        "grid_embedding/axis_0_embeddings": GAIN / (2 * 64) ** 0.5,
        "block_0/attention/query_kernel": GAIN / 64**0.5,
        "block_0/attention/output_kernel": GAIN / 64**0.5 / 6**0.5,
        "block_2/feed_forward/input/kernel": GAIN / 64**0.5,
        "block_2/feed_forward/output/kernel": GAIN / 256**0.5 / 6**0.5,
    }
    for path, stddev in wanted.items():
        assert np.isclose(np.std(weights[path]), stddev, rtol=0.15), path
    assert not np.any(weights["logits/kernel"])
    assert not np.any(weights["block_0/attention/output_bias"])


def test_residual_scale_of_the_other_initializer():
    found = []
    for scale in (False, True):
        settings = {"num_layers": 8, "scale_residual_initializer": scale}
        h = small_models.hyperparameters(hidden_dim=64, **settings)
        variables = models.RoutingTransformer(h).trainable_variables
        found.append(small_models.arrays(variables))
    for path in ("attention/output_kernel", "feed_forward/output/kernel"):
        plain, scaled = (np.std(weights[f"block_0/{path}"]) for weights in found)
        assert np.isclose(plain / scaled, 4.0, rtol=0.15)


@pytest.mark.parametrize("name", PRESETS)
def test_numbers_of_weights_are_those_of_the_paper(name):
    shapes = preset_variables_test.shapes(name, "keras", "weights")
    number = sum(preset_variables_test.sizes(shapes))
    assert round(number / 1e6) == PRESETS[name]
    h = models.preset_hyperparameters(name)
    half = name == "sparse_transformer_cifar10"
    assert h.num_heads * h.size_of_key == h.hidden_dim // (2 if half else 1)
    assert h.num_heads * (h.value_dim or h.size_of_key) == h.hidden_dim
    assert h.intermediate_dim == (2 if half else 4) * h.hidden_dim


def small_image_model(**changes):
    shape = {"image_height": 3, "image_width": 4, "max_sequence_length": 36}
    return image_transformer_test.image_model(**{**SETTINGS, **shape, **changes})


def test_embeddings_of_images():
    """One table of values, and vectors of row, column and channel."""
    model = small_image_model()
    images = np.random.default_rng(0).integers(0, 11, (2, 3, 4, 3)).astype("int32")
    weights = of(all_weights(model), "embedding")
    values = np.pad(images.reshape(2, -1), [(0, 0), (1, 0)])[:, :-1]
    expected = weights["channel_embedding/embeddings"][values]
    for axis, places in enumerate(np.indices((3, 4, 3))):
        table = weights[f"position_embedding/axis_{axis}_embeddings"]
        expected = expected + table[places.reshape(-1)]
    found = small_models.array(model.embedding(images))
    golden_cases.assert_close(found, expected, 1e-6)
    for place in (0, 1, 17, 35):
        one = model.embedding.at(values[:, place], place)
        golden_cases.assert_close(
            small_models.array(one)[:, 0], expected[:, place], 1e-6
        )


@stepwise
def test_images_sub_pixel_by_sub_pixel(pattern, arrangement):
    model = small_image_model(
        factorized_pattern=pattern, factorized_arrangement=arrangement
    )
    images = np.random.default_rng(0).integers(0, 11, (2, 3, 4, 3)).astype("int32")
    expected = golden_cases.run(model, images)[0].reshape(2, 36, -1)
    values = np.pad(images.reshape(2, -1), [(0, 0), (1, 0)])
    logits, cache = model.start_cache(images, model.make_cache(2), num_given=20)
    logits = small_models.array(logits).reshape(2, 36, -1)
    golden_cases.assert_close(logits[:, :20], expected[:, :20], 2e-5)
    for place in (20, 21):
        logits, cache = model.call_with_cache(values[:, place], cache, place)
        logits = small_models.array(logits)
        golden_cases.assert_close(logits, expected[:, place], 2e-5)


def test_a_text_may_end_where_the_grid_does():
    lm = language_model("fixed", "merged", num_layers=1, max_sequence_length=12)
    lm.compile(sampler="greedy")
    x = small_models.inputs((1,), 13)
    expected = lm.generate(x, stop_token_ids=None)["token_ids"][0]
    greedy = keras_hub.samplers.get("greedy")
    stream = TokenStream(lm, greedy, 13)
    for given in (1, 11):
        start = expected[:given].tolist()
        places = [int(row[0]) for _, row in stream([start])]
        np.testing.assert_array_equal([*start, *places], expected)
    with pytest.raises(ValueError, match="`max_length`.* 13 .*max_length=14"):
        lm.generate(small_models.inputs((1,), 14), stop_token_ids=None)
    with pytest.raises(ValueError, match="`num_tokens`.* 13 .*num_tokens=14"):
        TokenStream(lm, greedy, 14)
    with pytest.raises(ValueError, match="`routing`.*num_factorized_heads=2"):
        TokenStream(lm, greedy)


def test_drops_inputs():
    for drops in (True, False):
        lm = language_model(residual_dropout=0.1, drops_inputs=drops)
        names = [layer.name for layer in lm.backbone.embedding_layers]
        assert ("input_dropout" in names) == drops


@pytest.mark.parametrize(
    "message, changes",
    [
        (
            "`local_block_width`.*local_block_width=6",
            {**image_transformer_test.SETTINGS, "local_block_width": 6},
        ),
        (
            "`num_factorized_heads`.*factorized_arrangement='separate'",
            {"num_factorized_heads": 1, "factorized_arrangement": "separate"},
        ),
        (
            "`num_summary_columns`.*local_block_length=4",
            {"factorized_pattern": "fixed", "num_summary_columns": 5},
        ),
        ("`coordinate_embeddings`.*num_encoder_layers=2", {"num_encoder_layers": 2}),
        ("position_embeddings=False", {"position_embeddings": False}),
    ],
)
def test_refused(message, changes):
    fields = {**small_models.SETTINGS, **SETTINGS, **changes}
    with pytest.raises(ValueError, match=message):
        models.Hyperparameters(**{**fields, "num_factorized_heads": 2, **changes})

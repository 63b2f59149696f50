"""Tests of what holds for all layers of the zoo that are no heads."""

from functools import partial

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.zoo.recurrence.compressive_transformer import COMPRESSIONS
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import sparse_projections_test as projections
from tests.zoo import transformer_xl_test

BATCH, LENGTH, DIM = 2, 22, 8
ROUTED = [layers.RoutedHeads(2, 2, 3)]
perceiver = partial(zoo.PerceiverBackbone, 3, DIM, num_layers=1, num_heads=2)
causal = partial(perceiver, causal=True)
funnel = partial(zoo.FunnelBackbone, DIM, 2, (1, 1), 1)
sparse = partial(zoo.SparseFeedForward, 12, 4, 3)
learner = partial(zoo.TokenLearner, 3, 5)
experts = partial(
    *(zoo.MixtureOfExperts, 3, 5), load_balancing_weight=1.0, z_loss_weight=1.0
)
memory = partial(zoo.ProductKeyMemory, 2, 7, 4, 6, query_norm="batch")
compressive = partial(zoo.CompressiveAttention, 2, 3, 4, 4, 6, 2)
OTHER_LAST = {"output_dim": 4, "num_outputs": 2, "num_cross_attentions": 2}


def block(feed_forward, **options):
    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=4)
    return layers.TransformerBlock(attention, feed_forward, **options)


def projected(groups=projections.mixed, **options):
    return zoo.SparseProjectionAttention(groups(), 4, **options)


CASES = {
    "perceiver": partial(perceiver, share_weights=False, **OTHER_LAST),
    "causal": causal,
    "causal, routed": partial(causal, heads=ROUTED),
    "funnel": funnel,
    "sparse": partial(sparse, temperature=0.2, seed=1),
    "learner": partial(learner, normalization="sigmoid"),
    "learner, softmax": learner,
    "experts": partial(experts, capacity=8),
    "two experts": partial(experts, capacity=12, top_k=2),
    "block, experts": lambda: block(experts(capacity=8)),
    "block, experts, remat": lambda: block(experts(capacity=8), remat=True),
    "block, memory": lambda: block(memory()),
    "recurrent": partial(zoo.TransformerXLAttention, 2, 3, 6, 4),
    **{
        f"compressive, {compression}": partial(compressive, compression=compression)
        for compression in COMPRESSIONS
    },
    "projections": projected,
    "projections, gated": partial(projected, use_bias=True, use_gate=True),
    "projections, full": partial(projected, lambda: [layers.FullHeads(2)]),
    # Heads that see one position alone show what its projections read.
    "projections, alone": partial(
        projected, lambda: [layers.LocalHeads(2, (1,), flange_blocks=0)]
    ),
}
RECURRENT = [name for name in CASES if name.startswith(("recurrent", "compressive"))]
NUM_LOSSES = {
    **dict.fromkeys(("experts", "two experts", "block, experts"), 2),
    "block, experts, remat": 2,
    **dict.fromkeys(("projections", "compressive, convolution"), 1),
}


# Each layer is called a few times.
pytestmark = pytest.mark.usefixtures("eager")


def built(name, **options):
    return helpers.randomized(CASES[name](**options), (None, None, DIM))


def about(name, real=None):
    """Arguments of a call, as a layer names them."""
    mask, options = "mask", {}
    if name.startswith("projections"):
        mask, options = "query_mask", {"use_causal_mask": not name.endswith("alone")}
    elif name.startswith("block"):
        mask = "padding_mask"
    return options if real is None else {mask: real, **options}


@pytest.mark.parametrize(
    "name",
    kinds.some(
        ["causal", "causal, routed", "experts", "two experts", *RECURRENT]
        + ["projections", "projections, alone"],
        ["causal, routed", "experts", "recurrent", "compressive, most_used"]
        + ["projections"],
    ),
)
def test_no_later_token_influences_an_output(name):
    """Those of a Perceiver stand at the last inputs."""
    layer, x = built(name), helpers.normal(BATCH, LENGTH, DIM)
    before, _ = golden_cases.run(layer, x, **about(name))
    assert np.all(np.isfinite(before))
    for position in (1, 9, 20, LENGTH - 1):
        changed = x.copy()
        changed[:, position:] = 9 * helpers.normal(BATCH, LENGTH - position, DIM)
        after, _ = golden_cases.run(layer, changed, **about(name))
        earlier = max(position - LENGTH + before.shape[1], 0)
        np.testing.assert_array_equal(after[:, :earlier], before[:, :earlier])
        assert np.any(after[:, earlier:] != before[:, earlier:])


@pytest.mark.parametrize("name", RECURRENT[:2])
def test_recurrent_layers_take_no_sequences(name):
    output, _ = golden_cases.run(built(name), np.zeros((0, LENGTH, DIM), "float32"))
    assert output.shape == (0, LENGTH, DIM)


@pytest.mark.parametrize("name", ["experts", "sparse", "memory", *RECURRENT[:2]])
def test_other_axes_than_it_was_built_for_are_refused(name):
    layer = memory() if name == "memory" else CASES[name]()
    layer.build((None, None, DIM))
    for shape in ((LENGTH, DIM), (BATCH, LENGTH, 1, DIM), (BATCH, LENGTH, DIM + 1)):
        with pytest.raises(ValueError, match=f"`{type(layer).__name__}`.*shape="):
            layer(np.zeros(shape, "float32"))


@pytest.mark.parametrize(
    "name",
    kinds.some(
        ["learner", "learner, softmax", "experts", "two experts", "block, experts"]
        + ["block, experts, remat", "block, memory", *RECURRENT, "projections"],
        ["learner", "two experts", "block, memory", "recurrent", "projections"]
        + ["compressive, convolution"],
    ),
)
def test_padding_has_no_influence(name):
    """Not on outputs nor losses; some layers do not even take zero times it."""
    layer, x = built(name), helpers.normal(BATCH, LENGTH, DIM)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, 15)
    noise = np.nan if name in ("experts", "two experts", *RECURRENT) else 50.0
    weights, results = layer.get_weights(), []
    for each in (x, np.where(real[..., None], x, noise).astype("float32")):
        layer.set_weights(weights)
        options = {**about(name, real), "training": True}
        output, losses = golden_cases.run(layer, each, **options)
        shown = slice(None) if name.startswith("learner") else real
        results.append([output[shown], *losses])
    assert len(results[0]) == 1 + NUM_LOSSES.get(name, 0)
    for actual, expected in zip(*results, strict=True):
        golden_cases.assert_close(actual, expected, 2e-6)


@pytest.mark.parametrize(
    "name", ["perceiver", "funnel", "sparse", "learner", "projections, gated"]
)
def test_learns_all_weights(name):
    """Beside a sequence of padding alone."""
    layer, real = built(name), helpers.tail_mask(LENGTH, 0, LENGTH - 1)
    x = "query" if name.startswith("projections") else "inputs"
    result = golden_cases.gradients(
        layer,
        lambda output, losses: ops.sum(output**3),
        {x: helpers.normal(BATCH, LENGTH, DIM), "training": True}
        | ({} if name == "sparse" else about(name, real)),
        wrt=(x,),
    )
    # A constant in all keys of a query changes no weight of a softmax.
    of_all = {path: g for path, g in result.variables.items() if "key_bias" not in path}
    for gradient in (*of_all.values(), *result.inputs.values()):
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


@pytest.mark.parametrize(
    "name",
    kinds.some(
        ["perceiver", "funnel", "sparse", "learner", "projections, full"]
        + ["recurrent", "compressive, convolution"],
        ["funnel", "sparse", "recurrent"],
    ),
)
def test_half_precision(name):
    length = 20 if name in RECURRENT else 11
    outputs, x = [], helpers.normal(BATCH, length, DIM) / 4
    for dtype, policy in (("float32", "float32"), ("bfloat16", "mixed_bfloat16")):
        layer, options = built(name, dtype=policy), about(name)
        if name == "sparse":  # no choice is close
            layer.controller.bias.assign(100.0 * np.arange(12))
        if name in RECURRENT:
            layer.set_weights([0.3 * weight for weight in layer.get_weights()])
            state = golden_cases.to_numpy(layer.make_state(BATCH))
            assert state["memory"].dtype == dtype
            options = {"state": state, "training": True}
        output, _ = golden_cases.run(layer, x, **options)
        outputs.append(output[0] if name in RECURRENT else output)
        assert outputs[-1].dtype == dtype
    golden_cases.assert_close(*outputs[::-1], 0.05 if name in RECURRENT else 0.1)


HALF = {"dropout": 0.5}
SEED = {"seed": 3}
# What makes a layer, and the options with which it draws numbers in training.
NOISY = {
    "experts": (partial(experts, 8, 2), {"router_jitter": 0.5, **SEED}),
    "dropped experts": (partial(experts, 8), {**HALF, **SEED}),
    "memory": (
        partial(zoo.ProductKeyMemory, 2, 7, 4, 6),
        {"input_dropout": 0.5, **SEED},
    ),
    "sinkhorn": (
        lambda gumbel_noise=False: layers.MixedAttention(
            [zoo.SinkhornHeads(2, 4, gumbel_noise=gumbel_noise, dropout_seed=3)], 4
        ),
        {"gumbel_noise": True},
    ),
    "routing": (
        partial(layers.RoutingAttention, 4, 6, 3, 5, num_local_heads=1),
        {**HALF, **SEED},
    ),
    "feed-forward": (partial(layers.FeedForward, 8), HALF),
    "block": (partial(block, None), HALF),
}


@pytest.mark.parametrize("name", kinds.some(NOISY, ("experts", "memory", "block")))
def test_noise_is_seeded_and_only_in_training(name):
    make, noise = NOISY[name]
    quiet, first, second = (make(**options) for options in ({}, noise, noise))
    x = helpers.normal(BATCH, LENGTH, DIM)
    for layer in (quiet, first, second):
        helpers.randomized(layer, x.shape).trainable = False  # no centroid moves
    expected, _ = golden_cases.run(quiet, x, training=True)
    np.testing.assert_allclose(golden_cases.run(first, x)[0], expected, rtol=1e-6)
    a, b, c = (
        golden_cases.run(each, x, training=True)[0] for each in (first, first, second)
    )
    assert np.all(np.isfinite(a)) and np.any(a != expected) and np.any(a != b)
    if noise is not HALF:
        np.testing.assert_array_equal(a, c)


leaking = partial(experts, capacity=8, top_k=2, places="by_choice")
DROPOUT = {"dropout": 0.1}
SEEDED = {**DROPOUT, **SEED}
# JAX takes long to compile it.
SIDE = None if helpers.ON_JAX else transformer_xl_test.side_attention()
SAVED = {
    "causal": CASES["causal, routed"],
    "perceiver": partial(CASES["perceiver"], **DROPOUT),
    "funnel": partial(funnel, **DROPOUT),
    "sparse": partial(sparse, temperature=0.2, **SEEDED),
    "learner": partial(CASES["learner"], **SEEDED),
    "fuser": partial(zoo.TokenFuser, **SEEDED),
    "experts": partial(experts, 4, 2, places="by_choice", router_jitter=0.1, **SEEDED),
    "memory": partial(memory, 3, use_bias=True, input_dropout=0.1, seed=3),
    "recurrent": partial(
        zoo.TransformerXLAttention, 2, 3, 6, 4, same_length=True, **DROPOUT
    ),
    "compressive": partial(compressive, reconstruction_weight=0.5, **DROPOUT),
    "recurrent backbone": partial(
        *(zoo.TransformerXLBackbone, 9, 2, 2, 8, 6, 6, 4),
        **{"norm_position": "pre", "side_attention": SIDE, **DROPOUT},
    ),
    "compressive backbone": partial(
        *(zoo.CompressiveTransformerBackbone, 9, 2, 2, 8, 6, 4, 4, 6, 2),
        **{"compression": "most_used", "key_dim": 3},
    ),
    "projections, small_modules": partial(
        projected, **projections.CASES["small_modules"], kernel_regularizer="l2"
    ),
}
FURTHER = {
    case: partial(projected, **options)
    for case, options in projections.CASES.items()
    if case != "small_modules"
}


FEW_SAVED = [name for name in SAVED if name not in ("perceiver", "recurrent backbone")]


@pytest.mark.parametrize("name", kinds.some({**SAVED, **FURTHER}, FEW_SAVED))
def test_survives_saving(name, tmp_path):
    length = 22 if name == "compressive backbone" else 8
    x, make = helpers.normal(BATCH, length, DIM), {**SAVED, **FURTHER}[name]
    arrays = (x[:, :3], x) if name == "fuser" else (x,)
    if name.endswith("backbone"):
        arrays = (np.arange(BATCH * length, dtype="int32").reshape(BATCH, -1) % 9,)
    helpers.assert_survives_saving(make(), tmp_path, *arrays)


@helpers.further_on_jax
def test_short_outputs_have_the_mask_of_embeddings():
    """Also where neither batch nor length is known."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, DIM, mask_zero=True)(ids)
    x = zoo.FunnelBackbone(DIM, 2, (1, 1), 0)(x)
    mean = keras.layers.GlobalAveragePooling1D()(x)
    found, padded = (
        keras.ops.convert_to_numpy(keras.Model(ids, mean)(row))
        for row in (np.array([[1, 2, 3]]), np.array([[1, 2, 3, 0, 0, 0]]))
    )
    golden_cases.assert_close(found, padded, 1e-5)


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Keras multiplies no integers there"
)
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
@pytest.mark.parametrize(
    "name",
    [
        "causal, routed",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("funnel", "sparse", "learner", "block, memory", "recurrent")
        ),
    ],
)
def test_quantized_files_load(name, tmp_path):
    x = helpers.normal(BATCH, LENGTH, DIM)
    model = keras.Sequential([CASES[name]()])
    model(x)
    model.quantize("int8")
    assert any("int8" in weight.dtype for weight in model.weights)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for actual, expected in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(*map(golden_cases.to_numpy, (actual, expected)))
    expected = keras.tree.map_structure(golden_cases.to_numpy, model(x))
    actual = keras.tree.map_structure(golden_cases.to_numpy, loaded(x))
    keras.tree.map_structure(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            partial(leaking, places="by_probability"),
            marks=helpers.only_on("tensorflow", "JAX gathers nothing from no rows"),
        ),
        partial(compressive, compression="max_pooling"),
    ],
)
def test_empty_batches(make):
    layer, x = make(), helpers.normal(BATCH, 20, DIM)
    layer(x)
    assert keras.tree.flatten(layer(x[:0]))[0].shape == (0, 20, DIM)


X, SHAPE = np.ones((2, 3, DIM), "float32"), (None, None, DIM)


@pytest.mark.parametrize(
    "refused, message",
    [
        (lambda: perceiver(causal=True, output_dim=4), "`output_dim`.*output_dim=4"),
        (lambda: perceiver(num_outputs=2), "`num_outputs`.*num_outputs=2"),
        (lambda: perceiver(num_cross_heads=3), "Received: 3 .* 8"),
        (
            lambda: perceiver(causal=True)(X[..., 1:]),
            r"`latent_dim`.*shape=\(2, 3, 7\)",
        ),
        (
            lambda: perceiver()(X, X),
            r"`output_queries`.*shape=\(2, 3, 8\), output_dim=None",
        ),
        (lambda: perceiver(output_dim=6)(X), "`output_queries`.*output_dim=6"),
        (lambda: zoo.FunnelBackbone(DIM, 2, (1, 0)), "`block_sizes`.*block_sizes=0"),
        (lambda: zoo.FunnelBackbone(DIM, 3), "Received: 3 .* 8"),
        (lambda: funnel()(X[..., 1:]), r"`hidden_dim`.*shape=\(2, 3, 7\)"),
        (
            lambda: built("causal")(X[None]),
            r"`PerceiverBackbone`.*shape=\(1, 2, 3, 8\)",
        ),
        (lambda: built("funnel")(X[None]), r"`FunnelBackbone`.*shape=\(1, 2, 3, 8\)"),
        (lambda: built("sparse")(X[0]), r"`SparseFeedForward`.*shape=\(3, 8\)"),
        (lambda: built("sparse").choose(X[0]), r"`SparseFeedForward`.*shape=\(3, 8\)"),
        (lambda: sparse().choose(X), "`choose`.*built=False"),
        (lambda: funnel().encode(X), "`encode`.*built=False"),
        (
            lambda: built("perceiver")(X[..., 1:]),
            r"`PerceiverBackbone`.*shape=\(2, 3, 7\)",
        ),
        (lambda: zoo.MixtureOfExperts(1, 5, 6, 2), "`top_k`.*`num_experts`.*=1"),
        (
            lambda: experts(capacity=8, second_choice="random"),
            '`second_choice="random"`.*top_k=1',
        ),
        (lambda: leaking().make_cache(2), "places='by_choice'.*`places=\"by_token\"`"),
        (lambda: leaking()(X, cache=np.zeros((2, 3), "int32")), "places='by_choice'"),
        (lambda: experts(capacity=8)(X[None]), r"Received: shape=\(1, 2, 3, 8\)"),
        (lambda: memory()(X[0]), r"Received: shape=\(3, 8\)"),
        (lambda: learner()(X[None]), r"`TokenLearner`.*shape=\(1, 2, 3, 8\)"),
        (
            lambda: zoo.TokenFuser().build(SHAPE, SHAPE),
            r"`tokens`.*shape=\(None, None, 8\)",
        ),
        (lambda: projected(num_modules=3).build(SHAPE), "`num_modules`.*num_modules=3"),
        (
            lambda: projected(use_output_projection=False, output_dim=6).build(SHAPE),
            r"key_dim=4, .* 6\. .*`use_output_projection=True`",
        ),
        (lambda: built("projections")(X, X[:, :2]), r"value\.shape=\(2, 2, 8\)"),
        (
            lambda: built("projections").make_cache(1, 4, value=X),
            r"value\.shape=\(2, 3, 8\).*`MixedAttention`",
        ),
    ],
)
def test_refusals(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()

"""Tests of attention by kernels that keep no logits."""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.softmax import fused_attention
from tests import golden_cases
from tests.layers import helpers

BATCH, HEADS, LENGTH, DIM = 2, 2, 32, 12
KINDS = {
    "full": functools.partial(layers.FullHeads, HEADS),
    "local": functools.partial(layers.LocalHeads, HEADS, (8,)),
    "expert choice": functools.partial(
        layers.RoutedHeads, HEADS, 3, 10, routing="expert_choice"
    ),
    "token choice": functools.partial(layers.RoutedHeads, HEADS, 3, 8),
    "apart": functools.partial(layers.RoutedHeads, HEADS, 3, 8, share_query_key=False),
}
ON_JAX = helpers.ON_JAX
on_jax = helpers.only_on("jax")


def inputs(group, length=LENGTH):
    query, key, value = helpers.streams(length, dim=DIM)
    return {"query": query, "key": key if group.needs_keys else None, "value": value}


def built_group(make, implementation="plain", length=LENGTH, **options):
    group = make(name="heads", attention_implementation=implementation, **options)
    return helpers.randomized(group, *[(BATCH, HEADS, length, DIM)] * 3)


def results(
    make, implementation, length=LENGTH, has_bias=False, padded=True, **options
):
    """The results of a group, under a causal mask, and the state that it leaves."""
    if has_bias:
        options["token_bias_weight"] = "trainable"
    group = built_group(make, implementation, length, **options)
    arguments = {**inputs(group, length), "use_causal_mask": True, "training": True}
    if padded:
        real = helpers.mask_with_a_hole(length, length, 2 * length // 3)
        arguments |= {"query_mask": real, "value_mask": real}
    if has_bias:
        arguments["token_bias"] = helpers.normal(BATCH, length, seed=4)
    upstream = helpers.normal(BATCH, HEADS, length, DIM, seed=5)
    found = golden_cases.gradients(
        group,
        lambda output, losses: (
            ops.sum(ops.cast(output, "float32") * upstream) + sum(losses)
        ),
        arguments,
        wrt=("query", "value"),
    )
    return found, golden_cases.to_numpy(group.non_trainable_variables)


of_fused = functools.partial(results, has_bias=True)
each_kind = pytest.mark.parametrize(
    "kind, key_shift", [(kind, int(kind != "full")) for kind in KINDS]
)


@on_jax
@each_kind
def test_equals_the_plain_path(kind, key_shift):
    (actual, _), (expected, _) = (
        of_fused(KINDS[kind], each, key_shift=key_shift) for each in ("xla", "plain")
    )
    assert len(expected.inputs | expected.variables) >= 3
    helpers.assert_same_results(actual, expected, 1e-4)


@on_jax
def test_equals_the_plain_path_in_bfloat16():
    options = {"key_shift": 1, "dtype": "bfloat16"}
    (actual, _), (expected, _) = (
        of_fused(KINDS["token choice"], each, **options) for each in ("xla", "plain")
    )
    golden_cases.assert_close(actual.outputs, expected.outputs, 0.05)


def _has_gpu():
    if not ON_JAX:
        return False
    import jax

    return jax.default_backend() == "gpu"


@pytest.mark.skipif(not _has_gpu(), reason="cuDNN needs a GPU")
@each_kind
def test_cudnn_equals_the_plain_path(kind, key_shift):
    options = {"key_shift": key_shift, "dtype": "bfloat16"}
    (actual, _), (expected, _) = (
        of_fused(KINDS[kind], each, **options) for each in ("cudnn", "plain")
    )
    helpers.assert_same_results(actual, expected, 0.05)


def lowered(kind, monkeypatch, **options):
    """The forward and backward pass of a group, for a GPU with cuDNN."""
    import jax
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # No machine without a GPU has cuDNN.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    group = built_group(KINDS[kind], "cudnn", **options)
    arrays = inputs(group)
    half = {
        name: None if x is None else x.astype("bfloat16") for name, x in arrays.items()
    }

    def loss(arrays):
        output = group(**arrays, use_causal_mask=True)
        return ops.sum(ops.cast(output, "float32"))

    step = jax.jit(jax.grad(loss))
    return step.trace(half).lower(lowering_platforms=("cuda",)).as_text()


@on_jax
@each_kind
def test_cudnn_attends_forward_and_backward(kind, key_shift, monkeypatch):
    text = lowered(kind, monkeypatch, key_shift=key_shift, dtype="bfloat16")
    assert "cudnn$fmha" in text and "Backward" in text
    # The softmax is the kernel's.
    assert "stablehlo.exponential" not in text
    if kind == "full":
        assert "CAUSAL" in text


@on_jax
def test_masks_and_biases_of_other_shapes():
    """A mask has more sequences than the queries; a bias may be infinite."""
    query, key = helpers.normal(1, 3, 6, 8), helpers.normal(1, 3, 10, 8, seed=1)
    mask = np.random.default_rng(2).random((2, 1, 6, 10)) < 0.5
    bias = np.zeros((6, 10), "float32")
    bias[0], bias[1, 2] = -np.inf, -np.inf
    plain, fused = (
        golden_cases.run(
            layers.ScaledDotProduct(attention_implementation=name),
            *(query, key, key),
            attention_mask=mask.astype(dtype),
            bias=bias,
        )[0]
        for name, dtype in (("plain", "bool"), ("xla", "int32"))
    )
    golden_cases.assert_close(fused, plain, 1e-5)


@on_jax
def test_batches_that_cuda_cannot_launch_are_cut(monkeypatch):
    import jax

    x = helpers.normal(66000, 2, 8)
    pairs = {
        "attention_mask": np.arange(66000 * 4).reshape((66000, 2, 2)) % 3 > 0,
        "bias": helpers.normal(2, 2, seed=1),
    }
    plain, fused = (
        layers.ScaledDotProduct(attention_implementation=name)
        for name in ("plain", "xla")
    )
    parts = []
    whole = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda query, *args, **options: (
            parts.append(len(query)) or whole(query, *args, **options)
        ),
    )
    output = fused(x, x, x, **pairs)
    expected = plain(x, x, x, **pairs)
    golden_cases.assert_close(output, expected, 1e-5)
    # CUDA's grids have at most 65,535 blocks along the second and third axis.
    assert parts and max(parts) < 65536


# On other backends than JAX the first is refused as well as all others.
REFUSED = {
    "nothing else": ("xla", {}, {}),
    "relative positions": ("xla", {"max_relative_position": 3}, {}),
    "entmax": ("xla", {"cls": zoo.EntmaxDotProduct}, {}),
    "soft cap": ("xla", {"logit_soft_cap": 1.5}, {}),
    "dropout": ("xla", {"dropout": 0.1}, {"training": True}),
    "sums": ("xla", {}, {"return_logsumexp": True}),
    "no cuDNN": ("cudnn", {"dtype": "bfloat16"}, {}),
}


@pytest.mark.parametrize("obstacle", REFUSED)
def test_what_no_kernel_computes_is_refused(obstacle, monkeypatch):
    if obstacle == "nothing else" and ON_JAX:
        pytest.skip("only the backend is an obstacle")
    if obstacle == "no cuDNN" and ON_JAX:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        monkeypatch.setattr(cudnn, "cuda_versions", None)
    implementation, options, call = REFUSED[obstacle]
    options = {"cls": layers.ScaledDotProduct, **options}
    layer = options.pop("cls")(attention_implementation=implementation, **options)
    x = ops.ones((1, 1, 4, 8), options.get("dtype", "float32"))
    received = f"attention_implementation='{implementation}'"
    with pytest.raises(ValueError, match=f"`attention_implementation`.*{received}"):
        layer(x, x, x, **call)


@on_jax
@pytest.mark.parametrize(
    "dtype, size, num_keys, is_taken",
    [
        ("bfloat16", 128, 6, True),
        ("float32", 128, 6, False),
        ("bfloat16", 136, 6, False),
        ("bfloat16", 128, 5, False),
    ],
)
def test_what_cudnn_takes(dtype, size, num_keys, is_taken):
    query, key = (ops.ones((1, 1, length, size), dtype) for length in (4, num_keys))
    found = fused_attention.obstacle("cudnn", query, key, key)
    assert (found is None) == is_taken


@on_jax
def test_a_batch_of_unknown_size_is_refused():
    import jax
    from jax import export

    (size,) = export.symbolic_shape("size")
    layer = layers.ScaledDotProduct(attention_implementation="xla")
    layer.build((None, 4, 8), (None, 4, 8), (None, 4, 8))
    x = jax.ShapeDtypeStruct((size, 4, 8), "float32")
    with pytest.raises(ValueError, match="`attention_implementation`.*='xla'"):
        export.export(jax.jit(lambda x: layer(x, x, x)))(x)


def test_auto_is_plain_without_a_gpu_and_says_so_once():
    group = built_group(KINDS["local"], "auto")
    plain = built_group(KINDS["local"])
    fused_attention.warn_once.cache_clear()  # earlier tests may have been told
    with pytest.warns(UserWarning) as warned:
        for _ in range(2):
            output = group(**inputs(group), use_causal_mask=True)
    expected = plain(**inputs(plain), use_causal_mask=True)
    np.testing.assert_array_equal(*golden_cases.to_numpy([output, expected]))
    said = [x for x in warned if "attention_implementation" in str(x.message)]
    assert len(said) == 1


@pytest.fixture
def without_flash_attention():
    keras.config.disable_flash_attention()
    yield
    keras.config.enable_flash_attention()


def test_the_switch_of_keras_makes_plain_of_auto(without_flash_attention):
    group = built_group(KINDS["local"], "auto")
    fused_attention.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group(**inputs(group), use_causal_mask=True)
    keras.config.enable_flash_attention()
    with pytest.warns(UserWarning, match='="auto" is "plain" here'):
        group(**inputs(group), use_causal_mask=True)

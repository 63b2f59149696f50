"""Sparse queries, keys and values, against loops over tokens in NumPy."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.zoo import dense_blocks

BATCH, LENGTH, DIM, KEY_DIM, HEADS = 2, 11, 8, 4, 2
IDS = np.stack([np.repeat([4, 7, 4, 0], [4, 2, 3, 2])] * BATCH).astype("int32")
CASES = {
    "default": {},
    "even": {"use_bias": True, "length_kernel_size": 2, "module_kernel_size": 5},
    "small_modules": {"num_modules": 4, "length_kernel_size": 4},
    "of_a_token": {"length_kernel_size": 1, "module_kernel_size": 1},
    "without_projection": {"use_output_projection": False},
}


# Each layer is called a few times.
pytestmark = pytest.mark.usefixtures("eager")


def mixed():
    """Heads of which some share the projection of queries and keys."""
    routed = layers.RoutedHeads(1, 2, 4, max_relative_position=5, name="routed_heads")
    return [routed, layers.LocalHeads(1, (4,), name="local_heads")]


def built(groups=None, **options):
    options = {"kernel_initializer": "zeros", **options}
    groups = groups or [layers.FullHeads(HEADS)]
    layer = zoo.SparseProjectionAttention(groups, KEY_DIM, **options)
    return helpers.randomized(layer, (None, None, DIM))


def modules_of(layer, token):
    """Returns the modules of a token, `[modules, size]`."""
    gates, kernel = dense_blocks.values(layer.module_gates, layer.module_kernel)
    modules = np.zeros((len(gates), kernel.shape[1]))
    for s, m in np.ndindex(modules.shape):
        modules[s, m] = sum(token * gates[s] * kernel[:, m])
    if layer.use_bias:
        modules += dense_blocks.values(layer.module_bias).reshape(modules.shape)
    return modules


def filters_of(layer, name):
    """Returns a kernel `[modules, tokens, size, size]`, the last token the newest."""
    kernel = dense_blocks.values(getattr(layer, f"{name}_kernel"))
    shape = (layer.module_kernel_size, layer.length_kernel_size)
    return kernel.reshape(*shape, -1, kernel.shape[-1])


def projected(layer, name, x, real):
    """Convolves the modules of one module of one token after the other."""
    modules = [[modules_of(layer, t) * r for t, r in zip(*row)] for row in zip(x, real)]
    modules, kernel = np.array(modules), filters_of(layer, name)
    output, around = np.zeros_like(modules), len(kernel) // 2
    for b, t, s in np.ndindex(modules.shape[:3]):
        for k, f in np.ndindex(kernel.shape[:2]):
            module, token = s + k - around, t + f - kernel.shape[1] + 1
            if 0 <= module < modules.shape[2] and token >= 0:
                output[b, t, s] += modules[b, token, module] @ kernel[k, f]
    if layer.use_bias:
        output += dense_blocks.values(getattr(layer, f"{name}_bias"))
    return output.reshape(*x.shape[:2], HEADS, KEY_DIM).swapaxes(1, 2)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case):
    layer, x = built(**CASES[case]), helpers.normal(BATCH, LENGTH, DIM)
    real = helpers.mask_with_a_hole(LENGTH, LENGTH, LENGTH - 3)
    sees = np.tri(LENGTH, dtype="bool") & real[:, None, None]
    query, key, value = (
        projected(layer, n, x, real) for n in ("query", "key", "value")
    )
    expected, _ = helpers.dense_attention(query / KEY_DIM**0.5, key, value, sees)
    expected = expected.swapaxes(1, 2).reshape(BATCH, LENGTH, -1)
    if layer.use_output_projection:
        expected = expected @ dense_blocks.values(layer.output_kernel)
    if layer.use_bias:
        expected = expected + dense_blocks.values(layer.output_bias)
    output, _ = golden_cases.run(layer, x, query_mask=real, use_causal_mask=True)
    golden_cases.assert_close(output[real], expected[real], 1e-5)
    # Masks of Keras's attention and padding of packed documents hide it, too.
    for options in (
        {"attention_mask": real[:, None]},
        {"segment_ids": (real * 3).astype("int32")},
    ):
        other, _ = golden_cases.run(layer, x, use_causal_mask=True, **options)
        if "segment_ids" in options:  # a hole ends a document
            other, expected = other[1:], expected[1:]
        shown = real[-len(other) :]
        golden_cases.assert_close(other[shown], expected[shown], 1e-5)


@pytest.mark.parametrize("num_modules", [None, 4])
def test_heads_of_any_kind_read_what_is_projected(num_modules):
    layer, x = built(mixed(), num_modules=num_modules), helpers.normal(2, LENGTH, DIM)
    names, outputs, real = ("query", "key", "value"), [], np.ones((2, LENGTH))
    arrays = [projected(layer, n, x, real).astype("float32") for n in names]
    for head, group in enumerate(layer.head_groups):
        query, key, value = (array[:, head : head + 1] for array in arrays)
        query, key = query * KEY_DIM**-0.5, key if group.needs_keys else None
        output, _ = golden_cases.run(group, query, key, value, use_causal_mask=True)
        outputs.append(output)
    joined = np.concatenate(outputs, axis=1).swapaxes(1, 2).reshape(2, LENGTH, -1)
    output, _ = golden_cases.run(layer, x, use_causal_mask=True)
    expected = joined @ dense_blocks.values(layer.output_kernel)
    golden_cases.assert_close(output, expected, 1e-4)


def test_packed_documents_do_not_see_each_other():
    layer, x = built(mixed(), length_kernel_size=4), helpers.normal(BATCH, LENGTH, DIM)
    options = {"segment_ids": IDS, "use_causal_mask": True}
    packed, _ = golden_cases.run(layer, x, **options)
    other, _ = golden_cases.run(layer, np.where(IDS[..., None] == 7, x, -x), **options)
    np.testing.assert_array_equal(other[IDS == 7], packed[IDS == 7])
    for own in (slice(0, 4), slice(4, 6), slice(6, 9)):
        alone, _ = golden_cases.run(layer, x[:, own], use_causal_mask=True)
        golden_cases.assert_close(packed[:, own], alone, 1e-4)


STEPS = {
    "default": {},
    "long_kernel": {"length_kernel_size": 6, "use_bias": True},
    "small_modules": {"num_modules": 4, "length_kernel_size": 2},
    "of_a_token": {"length_kernel_size": 1},
}


@pytest.mark.parametrize("case", kinds.some(STEPS, ["default"]))
def test_steps_equal_the_whole(case):
    helpers.assert_steps_equal_the_whole(built(mixed(), **STEPS[case]), DIM)


@pytest.mark.parametrize("size", [1, 3])
def test_steps_of_packed_documents_equal_the_whole(size):
    layer, x = built(length_kernel_size=4), helpers.normal(BATCH, LENGTH, DIM)
    # The second document begins in the call of the first, the third behind it.
    sizes, about = [5, *[size] * (6 // size - 1)], {"segment_ids": IDS}
    helpers.assert_pieces_equal_the_whole(layer, x, *sizes, shown=IDS > 0, **about)


def test_a_step_without_ids_goes_on_with_the_last_document():
    layer, x = built(length_kernel_size=4), helpers.normal(BATCH, LENGTH, DIM)
    whole, _ = golden_cases.run(layer, x, segment_ids=IDS, use_causal_mask=True)

    def last(x, ids):
        cache = layer.make_cache(BATCH, LENGTH)
        _, cache = layer(x, segment_ids=ids, cache=cache)  # is forgotten
        _, cache = layer(x[:, :5], segment_ids=ids[:, :5], cache=cache)
        return layer(x[:, 5:6], cache=cache, cache_index=np.int32(5))[0]

    output = helpers.compiled(last, jit_compile=None)(x, IDS)
    golden_cases.assert_close(output, whole[:, 5:6], 1e-5)


def test_positions_on_two_axes_need_a_kernel_over_modules_alone():
    group, x = layers.LocalHeads(HEADS, (2, 2)), helpers.normal(BATCH, 4, 3, DIM)
    layer = zoo.SparseProjectionAttention([group], KEY_DIM, length_kernel_size=1)
    helpers.randomized(layer, x.shape)
    output, _ = golden_cases.run(layer, x, use_causal_mask=True)
    changed = x.copy()
    changed[:, 0, 2] += 1.0  # in the second block
    after, _ = golden_cases.run(layer, changed, use_causal_mask=True)
    np.testing.assert_array_equal(after[:, :2, :2], output[:, :2, :2])
    layer = zoo.SparseProjectionAttention([layers.LocalHeads(HEADS, (2, 2))], KEY_DIM)
    with pytest.raises(ValueError, match="`query`.*length_kernel_size=3"):
        layer(x)


def test_a_gate_reads_the_modules_of_its_token():
    width = HEADS * KEY_DIM
    options = {"use_output_projection": False, "output_dim": width}
    layer, x = built(use_gate=True, **options), helpers.normal(BATCH, LENGTH, DIM)
    gated, _ = golden_cases.run(layer, x)
    kernel = dense_blocks.values(layer.gate_kernel)
    layer.gate_kernel.assign(np.zeros_like(kernel))
    half, _ = golden_cases.run(layer, x)
    modules = [[modules_of(layer, token).ravel() for token in row] for row in x]
    gate = dense_blocks.sigmoid(np.array(modules) @ kernel)
    golden_cases.assert_close(gated, 2 * half * gate, 1e-5)


def test_refuses_caches_that_do_not_fit():
    layer, x = built(), helpers.normal(BATCH, LENGTH, DIM)
    dense = layers.MixedAttention([layers.FullHeads(HEADS)], KEY_DIM)
    cache = dense.make_cache(BATCH, LENGTH)
    with pytest.raises(ValueError, match="`cache`.*`make_cache`"):
        layer(x, cache=cache)
    cache = layer.make_cache(BATCH + 1, LENGTH)
    with pytest.raises(ValueError, match=r"`cache`.*query\.shape=\(2, 11, 8\) .* 3"):
        layer(x, cache=cache, cache_index=2)
    with pytest.raises(ValueError, match=r"`cache_index`.*cache_index=int32\(2,\)"):
        index = np.zeros(2, "int32")
        layer(x, cache=layer.make_cache(BATCH, LENGTH), cache_index=index)


def test_steps_in_half_precision():
    half, exact = built(dtype="mixed_bfloat16"), built()
    x = helpers.normal(BATCH, LENGTH, DIM) / 4
    expected, _ = golden_cases.run(exact, x, use_causal_mask=True)

    def steps(x):
        _, cache = half(x[:, :5], cache=half.make_cache(BATCH, LENGTH))
        output, _ = half(x[:, 5:], cache=cache, cache_index=5)
        return keras.ops.cast(output, "float32")

    output = helpers.compiled(steps, jit_compile=None)(x)
    golden_cases.assert_close(output, expected[:, 5:], 0.05)


@pytest.mark.thorough
def test_is_adapted_and_quantized():
    x = helpers.normal(BATCH, LENGTH, DIM)
    layer = built()
    expected, _ = golden_cases.run(layer, x)
    for name in ("query", "key", "value", "output"):
        getattr(layer, f"{name}_projection").quantize("int8")
    golden_cases.assert_close(golden_cases.run(layer, x)[0], expected, 0.1)
    layer = built()
    layer.enable_lora(2, projections=("module", "query"))
    golden_cases.assert_close(golden_cases.run(layer, x)[0], expected, 1e-6)
    result = golden_cases.gradients(
        layer, lambda output, losses: keras.ops.sum(output**2), {"query": x}
    )
    gradient = result.variables[layer.lora_kernel_b.path]
    assert np.any(gradient[:, :KEY_DIM]) and np.any(gradient[:, KEY_DIM:])

"""Tests that blocks that forget their activations train as others do."""

import functools
import unittest.mock

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.attention import mixed_attention
from routing_tf.layers.attention.rematerialization import train_and_forget
from routing_tf.layers.support.backends import are_stated
from tests import golden_cases
from tests.layers import helpers
from tests.zoo import cases

BATCH, LENGTH, DIM = 2, 12, 10
MASK = helpers.tail_mask(LENGTH, 12, 7)


def sequence(seed=0):
    return helpers.normal(BATCH, LENGTH, DIM, seed=seed)


def built_block(
    remat, cross_attention=False, dtype=None, key_shift=0, few=True, **options
):
    """A block that forgets nothing, all (True), or what a part does, by its name.

    With shifted keys queries choose their clusters, apart from keys. With `few` there
    is one group of heads.
    """
    keras.utils.set_random_seed(0)
    shared = {"dropout": 0.3, "dtype": dtype}
    of_heads = {"key_shift": key_shift, **shared}
    routing = {"routing": "expert_choice", **of_heads}
    if key_shift:
        routing |= {"routing": "token_choice", "share_query_key": False}
    of_trained, trained = layers.RoutedHeads, routing
    if key_shift:
        of_trained = zoo.ThresholdHeads
        trained = {"share_query_key": False, **of_heads}
    clustering = {"commitment_weight": 0.5, "decay": 0.5, "revive_after": 2}

    def attention(name):
        groups = [
            layers.LocalHeads(1, (4,), **of_heads),
            layers.RoutedHeads(2, 3, 5, name="routed", **clustering, **routing),
            of_trained(1, 3, 5, name="trained", ema=False, **trained),
        ]
        groups, forgets = groups[1:2] if few else groups, remat == "attention"
        return layers.MixedAttention(
            groups, key_dim=6, remat=forgets, name=name, dtype=dtype
        )

    block = layers.TransformerBlock(
        attention("attention"),
        layers.FeedForward(8, name="feed_forward", **shared),
        attention("cross_attention") if cross_attention else None,
        remat=remat is True,
        remat_feed_forward=remat == "feed_forward",
        name="block",
        **{**shared, **options},
    )
    shape = (BATCH, LENGTH, DIM)
    return helpers.randomized(block, shape, *[shape] * cross_attention)


def squares(outputs, losses):
    return ops.sum(ops.cast(outputs, "float32") ** 2) + 2 * sum(losses)


def gradients(block, **arguments):
    """Two steps, so that state that has moved is seen again."""
    memory = {"memory": sequence(3)} if block.cross_attention else {}
    arguments = {"padding_mask": MASK, **memory, **arguments}
    results = []
    for seed in range(2):
        # Dropout of torch draws from its one generator.
        keras.utils.set_random_seed(seed)
        given = {"inputs": sequence(seed), **arguments, "training": True}
        wrt = ("inputs", *memory)
        results.append(golden_cases.gradients(block, squares, given, wrt))
    return results, golden_cases.to_numpy(block.non_trainable_variables)


def assert_same(blocks, tolerance=1e-5, **arguments):
    results = [gradients(block, **arguments) for block in blocks]
    (expected, state), (actual, actual_state) = results
    for a, b in zip(actual, expected):
        assert len(b.losses) > 0
        helpers.assert_same_results(a, b, tolerance)
    variables = blocks[0].non_trainable_variables
    for variable, a, b in zip(variables, actual_state, state, strict=True):
        golden_cases.assert_close(a, b, tolerance, label=variable.path)


@helpers.further_on_jax
@pytest.mark.parametrize(
    "remat, norm_position, cross_attention",
    [
        (True, "pre", True),
        pytest.param("feed_forward", "pre", False, marks=pytest.mark.thorough),
        pytest.param("attention", "post", True, marks=pytest.mark.thorough),
    ],
)
def test_trains_as_without(remat, norm_position, cross_attention):
    """The same dropout, the same losses once each, centroids moved once."""
    options = {"norm_position": norm_position, "cross_attention": cross_attention}
    options |= {"few": remat == "feed_forward", "key_shift": int(not cross_attention)}
    assert_same([built_block(each, **options) for each in (False, remat)])


@pytest.mark.parametrize(
    "remat, options, is_alone",
    [
        ("weights", {}, True),
        ("weights", {"token_bias_weight": "trainable"}, False),
        pytest.param(
            *("weights", {"max_relative_position": 4}, False),
            marks=pytest.mark.thorough,
        ),
        pytest.param(*("weights", {"dropout": 0.5}, False), marks=pytest.mark.thorough),
        (True, {"token_bias_weight": "trainable"}, False),
    ],
)
def test_weights_alone_are_forgotten_of_a_softmax_alone(
    monkeypatch, remat, options, is_alone
):
    wholes, results = [], []

    def whole(group, inputs):
        wholes.append(group)
        return train_and_forget(group, inputs)

    monkeypatch.setattr(mixed_attention, "train_and_forget", whole)
    for each in (False, remat):
        keras.utils.set_random_seed(0)
        groups = [layers.LocalHeads(2, (4,), name="local", **options)]
        groups += [layers.RoutedHeads(2, 3, 5, name="routed", dropout_seed=1)]
        attention = helpers.attention(*groups, dim=DIM, remat=each, name="attention")
        arguments = {"query": sequence(), "use_causal_mask": True, "training": True}
        if has_bias := "token_bias_weight" in options:
            arguments["token_bias"] = helpers.normal(BATCH, LENGTH, seed=4)
        wrt = ("query", *["token_bias"] * has_bias)
        results.append(golden_cases.gradients(attention, squares, arguments, wrt))
    assert attention.get_config()["remat"] == remat
    # A gradient that is stated computes them again.
    assert (groups[0] in wholes) == (not is_alone or not are_stated())
    is_whole = has_bias or remat is True or not are_stated()
    assert (groups[1] in wholes) == is_whole
    helpers.assert_same_results(*results)


@pytest.mark.parametrize(
    "make, is_alone",
    [
        (functools.partial(layers.FullHeads, 2), True),
        (functools.partial(zoo.ReformerHeads, 2, 4, 5, num_rounds=2), False),
        (functools.partial(zoo.NystromHeads, 2, 4), False),
    ],
)
def test_heads_that_have_no_softmax_alone(monkeypatch, make, is_alone):
    whole = unittest.mock.Mock(side_effect=train_and_forget)
    monkeypatch.setattr(mixed_attention, "train_and_forget", whole)
    attention = helpers.attention(make(), dim=DIM, remat="weights")
    golden_cases.run(attention, sequence(), training=True)
    assert whole.called == (not is_alone or not are_stated())


EXPLORING = {"exploring_queries": 6, "dropout": 0.3, "dropout_seed": 1}


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(layers.RoutedHeads, 2, 3, 4, **EXPLORING),
        pytest.param(
            functools.partial(layers.MultipoleHeads, 2, 3, 4, 2, 3, 1, **EXPLORING),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            functools.partial(zoo.NativeSparseHeads, 2, 4, 2, 4, 3),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            functools.partial(
                cases.SMALL["IndexedHeads"], warm_up_steps=0, gather_length=1
            ),
            marks=helpers.FURTHER_ON_JAX,
        ),
    ],
)
def test_heads_with_more_inputs_or_state(make):
    """Features, seeds and counts of steps are those of heads that keep all."""
    results = []
    for remat in (False, True):
        attention = helpers.attention(make(name="heads"), remat=remat, name="attention")
        arguments = {"query": helpers.normal(2, LENGTH, 8), "use_causal_mask": True}
        arguments["training"] = True
        for _ in range(2):
            found = golden_cases.gradients(attention, squares, arguments, ("query",))
        state = golden_cases.to_numpy(attention.non_trainable_variables)
        results.append((found, state))
    (expected, state), (actual, actual_state) = results
    helpers.assert_same_results(actual, expected)
    for moved, wanted in zip(actual_state, state, strict=True):
        golden_cases.assert_close(moved, wanted, 1e-5)


@pytest.mark.slow
def test_trains_as_without_under_mixed_precision():
    blocks = [built_block(remat, dtype="mixed_float16") for remat in (False, True)]
    assert_same(blocks, tolerance=2e-2)


def test_a_frozen_block_keeps_its_centroids():
    block = built_block(True)
    block.trainable = False
    before = block.get_weights()
    golden_cases.run(block, sequence(), training=True)
    for old, new in zip(before, block.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)


def test_outer_updates_are_held():
    totals = []
    for remat in (False, True):
        block = built_block(remat)
        kmeans = block.attention.head_groups[0].kmeans
        before = golden_cases.to_numpy(kmeans.centroids)
        held = helpers.Held(block, kmeans)
        (statistics,), _ = golden_cases.run(held, sequence(), training=True)
        totals.append(statistics)
        np.testing.assert_array_equal(golden_cases.to_numpy(kmeans.centroids), before)
    for actual, expected in zip(totals[1], totals[0], strict=True):
        golden_cases.assert_close(actual, expected, 1e-5)


def test_activations_are_computed_again():
    """There are more products. JAX: what is differentiated says so."""
    counts = []
    for remat in (False, True):
        block = built_block(remat)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            @tf.function
            def step(x, block=block):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(block(x, training=True))
                return tape.gradient(loss, block.attention.query_kernel.value)

            graph = step.get_concrete_function(tf.constant(sequence())).graph
            kinds = [operation.type for operation in graph.get_operations()]
            counts.append(kinds.count("MatMul") + kinds.count("BatchMatMulV2"))
        elif keras.backend.backend() == "torch":
            from torch.utils.flop_counter import FlopCounterMode

            with FlopCounterMode(display=False) as counter:
                ops.sum(block(sequence(), training=True)).backward()
            counts.append(counter.get_total_flops())
        else:
            import jax

            def loss(values, block=block):
                variables = block.trainable_variables
                with keras.StatelessScope(list(zip(variables, values))):
                    return ops.sum(block(sequence(), training=True))

            values = [variable.value for variable in block.trainable_variables]
            counts.append(str(jax.make_jaxpr(jax.grad(loss))(values)).count("remat"))
    assert counts[1] > counts[0]

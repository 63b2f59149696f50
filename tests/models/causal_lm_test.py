import contextlib

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from routing_tf import models
from routing_tf import tokenizers
from routing_tf.generation.token_stream import TokenStream
from tests import golden_cases
from tests import tracing
from tests.layers import kinds
from tests.models import small_models

ON_JAX = small_models.ON_JAX
BUFFER = 10


def cross_entropy(logits, targets):
    logits = logits.astype("float64")
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (np.log(np.exp(logits).sum(-1)) - chosen).mean()


def targets(x):
    return np.roll(x["token_ids"], -1, axis=1)


def test_batches_without_a_row():
    lm = small_models.language_model(num_layers=1, routing="expert_choice")
    x = {name: values[:0] for name, values in small_models.inputs((2,), 8).items()}
    logits, losses = golden_cases.run(lm, x)
    assert logits.shape[:2] == (0, 8)
    assert np.isfinite(losses).all()
    lm.compile(sampler="greedy")
    for prompts in (x, tf.data.Dataset.from_tensors(x)):
        found = lm.generate(prompts, stop_token_ids=None)
        assert {name: array.shape for name, array in found.items()} == {
            "token_ids": (0, 8),
            "padding_mask": (0, 8),
        }


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ((), np.array([]), np.array([], "object"))
        ),
        tf.constant([], tf.string),
    ],
)
def test_no_prompt_has_no_continuation(prompts, greedy):
    lm, *_ = greedy
    assert lm.generate(prompts, max_length=8) == []
    batches = tf.data.Dataset.from_tensor_slices(tf.constant([], tf.string)).batch(2)
    assert lm.generate(batches, max_length=8) == []


def test_prompts_are_never_cut():
    """Three letters, one of two bytes, and the leading id take five tokens."""
    preprocessor = models.RoutingTransformerCausalLMPreprocessor(
        tokenizers.ByteTokenizer(), sequence_length=4
    )
    lm = small_models.language_model(
        vocabulary_size=258, num_layers=1, preprocessor=preprocessor
    )
    texts = tf.data.Dataset.from_tensor_slices(["a", "b\xe9c"]).batch(1)
    for prompts in ("b\xe9c", ["a", "b\xe9c"], texts):
        with pytest.raises(ValueError, match="Received: .* 4 .*max_length=4"):
            lm.generate(prompts, strip_prompt=True)
    assert lm.generate("b\xe9c", max_length=5) == "b\xe9c"
    inputs = texts.map(preprocessor.generate_preprocess)
    with pytest.raises(tf.errors.InvalidArgumentError, match=" 4 .*max_length=4"):
        list(inputs)


@pytest.fixture(scope="module")
def losses_by_hand():
    """Losses of two steps of gradient descent, without the training of Keras."""
    lm = small_models.language_model(num_layers=1)
    x = small_models.inputs()
    one_hot = np.eye(small_models.VOCABULARY_SIZE, dtype="float32")[targets(x)]

    def loss(logits, losses):
        chosen = keras.ops.sum(logits * one_hot, axis=-1)
        return keras.ops.mean(keras.ops.logsumexp(logits, axis=-1) - chosen) + sum(
            losses
        )

    values = []
    for _ in range(2):
        result = golden_cases.gradients(lm, loss, {"inputs": x, "training": True})
        assert len(result.losses) == 1 and result.losses[0] > 0.1
        values.append(cross_entropy(result.outputs, targets(x)) + sum(result.losses))
        for variable in lm.trainable_variables:
            variable.assign_sub(0.1 * result.variables[variable.path])
    return values


@pytest.mark.parametrize(
    "jit_compile",
    [
        pytest.param(True, marks=pytest.mark.thorough),
        # Without compilation JAX takes half a minute.
        pytest.param(False, marks=[pytest.mark.slow] if ON_JAX else []),
    ],
)
def test_training_is_gradient_descent_on_all_losses(jit_compile, losses_by_hand):
    lm = small_models.language_model(num_layers=1)
    lm.compile(
        optimizer=keras.optimizers.SGD(0.1),
        jit_compile=jit_compile,
        weighted_metrics=None,
    )
    with tracing.traced() if jit_compile else contextlib.nullcontext():
        x, options = small_models.inputs(), {"batch_size": 2, "shuffle": False}
        history = lm.fit(x, targets(x), epochs=2, verbose=0, **options).history
    reported = history["loss"]
    np.testing.assert_allclose(reported, losses_by_hand, rtol=1e-5)
    assert reported[1] < reported[0] - 0.01


def test_the_preprocessor_makes_inputs_targets_and_weights():
    preprocessor = models.RoutingTransformerCausalLMPreprocessor(
        tokenizers.ByteTokenizer(), sequence_length=6
    )
    x, y, weights = keras.tree.map_structure(small_models.array, preprocessor(["abc"]))
    assert x["token_ids"].tolist() == [[0, 99, 100, 101, 1, 0]]
    assert x["padding_mask"].tolist() == [[True] * 5 + [False]]
    assert y.tolist() == [[99, 100, 101, 1, 0, 0]]
    assert weights.tolist() == [[True] * 4 + [False] * 2]


def generate(lm, x, stop_token_ids=None):
    output = lm.generate(dict(x), stop_token_ids=stop_token_ids)
    assert (output["token_ids"] == x["token_ids"])[x["padding_mask"]].all()
    return output["token_ids"], output["padding_mask"]


@pytest.fixture(scope="module")
def greedy():
    """A model, prompts of different lengths, and their greedy continuations."""
    lm = small_models.language_model(seed=31, **small_models.GENERATING)
    lm.compile(sampler="greedy")
    # Behind the prompts the buffer holds other ids, which nothing must see.
    x = small_models.inputs((2, 5), BUFFER, seed=1)
    token_ids, mask = generate(lm, x)
    assert mask.all()
    return lm, x, token_ids


def test_generation_stops(greedy):
    lm, x, token_ids = greedy
    generated = ~x["padding_mask"]
    # The first of them stops a row; ids inside of prompts stop nothing.
    stops = tuple(int(stop) for stop in (token_ids[1, 0], token_ids[1, 6]))
    stopped, mask = generate(lm, x, stop_token_ids=stops)
    is_stop = np.isin(token_ids, stops) & generated
    assert is_stop.any()
    before = np.cumsum(is_stop, axis=1) - is_stop
    np.testing.assert_array_equal(mask, before == 0)
    np.testing.assert_array_equal(stopped[mask], token_ids[mask])
    assert not stopped[~mask].any()


def test_ids_and_mask_of_other_shapes_are_refused(greedy):
    lm, x, _ = greedy
    for cut in (lambda a: a[0], lambda a: a[:, :4] if a.dtype == bool else a):
        wrong = {name: cut(array) for name, array in x.items()}
        with pytest.raises(ValueError, match=r"`token_ids`.*`padding_mask`.*\("):
            lm.generate(wrong, stop_token_ids=None)


@pytest.mark.parametrize(
    "ids, message",
    [
        ([0, small_models.VOCABULARY_SIZE], "0 .* 31"),
        ([0, -1], "-1 .* 0"),
        ([0, 3 + 2**32], "0 .* 4294967299"),
        ([0, 2.5], r"0\.0 .* 2\.5"),
        ([0, np.nan], "nan .* nan"),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(greedy, ids, message):
    lm, *_ = greedy
    message = f" 30, .*`vocabulary_size`.*Received: {message} "
    rows = np.array([[*ids, -7, -7]])
    with pytest.raises(ValueError, match=message):
        lm.generate(
            {"token_ids": rows, "padding_mask": [[True, True, False, False]]},
            stop_token_ids=None,
        )
    with pytest.raises(ValueError, match=message):
        next(TokenStream(lm, keras_hub.samplers.GreedySampler(), 9)([ids]))
    if rows.dtype == "int64":
        with pytest.raises(ValueError, match=message):
            lm.score(ids)


@pytest.mark.parametrize(
    "dtype", kinds.some(("uint8", "float32", "int64"), ["float32"])
)
def test_ids_may_have_any_type(greedy, dtype):
    lm, x, token_ids = greedy
    ids = x["token_ids"].astype(dtype)
    found, _ = generate(lm, {**x, "token_ids": ids})
    np.testing.assert_array_equal(found, token_ids)

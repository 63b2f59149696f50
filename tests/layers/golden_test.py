"""Attention layers against the golden numbers of the original release."""

import keras
import numpy as np
import pytest
from keras import ops

from routing_tf.models import release
from tests import golden_cases

OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 3e-5
# Gradients that are zero in theory are stored as tiny noise.
GRADIENT_FLOOR = 1e-5


def call_arguments(case):
    config = case.config
    query = case["in/query_antecedent"]
    arguments = {
        "query": query,
        "query_mask": np.ones(query.shape[:-1], "bool"),
        "use_causal_mask": config["masked"],
        "training": config["mode"] == "train",
    }
    memory_mask = "query_mask"
    if "in/memory_antecedent" in case:
        memory = case["in/memory_antecedent"]
        arguments["value"] = memory
        arguments["value_mask"] = np.ones(memory.shape[:2], "bool")
        memory_mask = "value_mask"
    if "in/padding_bias" in case:
        arguments[memory_mask] = case["in/padding_bias"] == 0
    if "in/token_bias" in case:
        arguments["token_bias"] = case["in/token_bias"]
    return arguments


def check_gradients(case, prefix, actual):
    """Compares all of them; those the release has none for must vanish."""
    expected = case.group(f"grad/{prefix}")
    expected.pop("padding_bias", None)  # a mask here, and masks have no gradient
    assert expected.keys() <= actual.keys()
    for name, gradient in actual.items():
        label = f"gradient of {name}"
        if name in expected:
            golden_cases.assert_close(
                gradient, expected[name], GRADIENT_TOLERANCE, GRADIENT_FLOOR, label
            )
        else:
            assert f"{prefix}/{name}" in case.config["none_grads"], label
            assert gradient is None or not np.any(gradient), label


@pytest.fixture(autouse=True)
def start_at_zero(monkeypatch):
    """All variables get golden values; to compile random ones first takes long."""

    def zeros(shape, dtype=None, **kwargs):
        return ops.zeros(shape, dtype)

    monkeypatch.setattr(keras.random, "normal", zeros)
    monkeypatch.setattr(
        keras.initializers.VarianceScaling,
        "__call__",
        lambda self, shape, dtype=None: zeros(shape, dtype),
    )


@pytest.mark.parametrize("path", golden_cases.paths("attention/*.npz"))
def test_attention_equals_release(path):
    case = golden_cases.load(path)
    layer = release.attention_layer(case.config)
    release.assign_variables(layer, case.group("var"))
    inputs = {
        name: argument
        for name, argument in (
            ("query_antecedent", "query"),
            ("memory_antecedent", "value"),
            ("token_bias", "token_bias"),
        )
        if f"grad/in/{name}" in case
    }

    result = golden_cases.gradients(
        layer,
        lambda output, losses: (
            ops.sum(ops.multiply(output, case["in/cotangent"])) + sum(losses)
        ),
        call_arguments(case),
        wrt=tuple(inputs.values()),
        variables=release.variables_by_name(layer),
    )

    golden_cases.assert_close(
        result.outputs, case["out/output"], OUTPUT_TOLERANCE, label="output"
    )
    extra_losses = [
        loss for name, loss in case.group("out").items() if "extra_loss" in name
    ]
    assert len(extra_losses) == case.config["n_losses"]
    golden_cases.assert_close(
        sum(result.losses), sum(extra_losses), OUTPUT_TOLERANCE, label="losses"
    )
    check_gradients(
        case, "in", {name: result.inputs[argument] for name, argument in inputs.items()}
    )
    check_gradients(case, "var", result.variables)
    after = release.read_variables(layer)
    expected = {**case.group("var"), **case.group("after")}
    assert after.keys() == expected.keys()
    for name, value in expected.items():
        golden_cases.assert_close(
            after[name], value, OUTPUT_TOLERANCE, label=f"{name} after the call"
        )

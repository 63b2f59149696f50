"""Whole image models against numbers of the release, see tests/golden."""

import numpy as np
import pytest
from keras import ops

from routing_tf.models import release
from tests import golden_cases
from tests.models import small_models

PATHS = golden_cases.paths("models/image_*.npz")
LOGITS, LOSSES, GRADIENTS, STATE = 1e-4, 1e-5, 1e-3, 1e-5


class Run:
    """One case of the release and what this package computes for it."""

    def __init__(self, path):
        self.case = case = golden_cases.load(path)
        config = case.config
        conditional = "in/inputs" in case
        self.model = release.image_model(
            config["hparams"],
            config["num_channels"],
            config["target_vocab"],
            config["class_vocab"] if conditional else None,
        )
        release.assign_variables(self.model, case.group("var"))
        self.targets = case["in/targets"]
        self.inputs = {"images": self.targets}
        if conditional:
            self.inputs["labels"] = case["in/inputs"]
        self.evaluated = golden_cases.run(self.model, self.inputs, training=False)
        self.before = release.read_variables(self.model)
        self.result = golden_cases.gradients(
            self.model,
            self.objective,
            {"inputs": self.inputs, "training": True},
            variables=release.variables_by_name(self.model),
        )
        self.after = release.read_variables(self.model)

    def objective(self, logits, losses):
        logits_part = ops.sum(logits * self.case["in/cotangent"])
        return logits_part + self.training_loss(logits) + sum(losses)

    def training_loss(self, logits):
        """The mean cross-entropy of all sub-pixels, value 0 included."""
        one_hot = np.eye(logits.shape[-1], dtype="float32")[self.targets]
        nll = ops.logsumexp(logits, axis=-1) - ops.sum(logits * one_hot, axis=-1)
        return ops.mean(nll)

    def check_outputs(self, mode, logits, losses):
        out = self.case.group(f"out/{mode}")
        golden_cases.assert_close(logits, out["logits"], LOGITS)
        golden_cases.assert_close(
            self.training_loss(logits), out["loss_training"], LOSSES
        )
        assert len(losses) == len(small_models.kmeans_layers(self.model))
        assert bool(losses) == ("loss_extra_loss" in out)
        if losses:
            golden_cases.assert_close(sum(losses), out["loss_extra_loss"], LOSSES)


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: path.split("/")[-1])
def run(request):
    return Run(request.param)


def test_all_cases_are_there():
    assert len(PATHS) == 6


def test_evaluation(run):
    run.check_outputs("eval", *run.evaluated)
    start = run.case.group("var")
    assert run.before.keys() == start.keys()
    for name, value in start.items():
        np.testing.assert_array_equal(run.before[name], value, err_msg=name)


def test_training(run):
    run.check_outputs("train", run.result.outputs, run.result.losses)


def test_gradients(run):
    expected = run.case.group("grad/var")
    floor = 1e-5 * max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in run.result.variables.items():
        if name in expected:
            golden_cases.assert_close(
                gradient, expected[name], GRADIENTS, floor, label=name
            )
        else:
            assert f"var/{name}" in run.case.config["none_grads"], name
            assert gradient is None or not np.any(gradient), name


def test_state_after_training(run):
    expected = {**run.case.group("var"), **run.case.group("after")}
    for name, value in expected.items():
        golden_cases.assert_close(run.after[name], value, STATE, label=name)

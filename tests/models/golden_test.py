"""Whole models against numbers of the release, see tests/golden."""

import numpy as np
import pytest
from keras import ops

from routing_tf.models import release
from tests import golden_cases
from tests.models import small_models

PATHS = golden_cases.paths("models/*.npz")
# JAX takes long to compile gradients: there one case of each kind is enough.
ON_BOTH_BACKENDS = (
    "pg19_local_cluster8k",
    "wikitext103_local_hash4k",
    "translate_local_cluster512",
    "image_class_conditional",
    "image_mnist_local_cluster_strided",
)
LOGITS, LOSSES, GRADIENTS, STATE = 1e-4, 1e-5, 1e-3, 1e-5


class Run:
    """One case of the release and what this package computes for it."""

    def __init__(self, path):
        self.case = golden_cases.load(path)
        self.lm, self.inputs, self.targets = self.prepare(self.case)
        release.assign_variables(self.lm, self.case.group("var"))
        self.evaluated = golden_cases.run(self.lm, self.inputs, training=False)
        self.before = release.read_variables(self.lm)
        self.result = golden_cases.gradients(
            self.lm,
            self.objective,
            {"inputs": self.inputs, "training": True},
            variables=release.variables_by_name(self.lm),
        )
        self.after = release.read_variables(self.lm)

    def prepare(self, case):
        """Returns the model, its inputs, and the targets that are scored."""
        has_encoder = "in/inputs" in case
        build = release.seq2seq_model if has_encoder else release.language_model
        lm = build(case.config["hparams"], case.config["vocab_size"])
        targets = case["in/targets"]
        ids = np.pad(targets, [(0, 0), (1, 0)])[:, :-1]
        inputs = {"token_ids": ids, "padding_mask": np.ones(ids.shape, "bool")}
        if has_encoder:
            inputs = {f"decoder_{name}": x for name, x in inputs.items()}
            inputs["encoder_embeddings"] = case["in/inputs"][:, :, 0]
        return lm, inputs, targets[:, : case["in/cotangent"].shape[1]]

    def weights(self):
        """Targets of id 0 do not count."""
        return (self.targets != 0).astype("float32")

    def objective(self, logits, losses):
        logits_part = ops.sum(logits * self.case["in/cotangent"])
        return logits_part + self.training_loss(logits) + sum(losses)

    def training_loss(self, logits):
        """The mean cross-entropy of the targets that count."""
        weights = self.weights()
        one_hot = np.eye(logits.shape[-1], dtype="float32")[self.targets]
        nll = ops.logsumexp(logits, axis=-1) - ops.sum(logits * one_hot, axis=-1)
        return ops.sum(nll * weights) / weights.sum()

    def check_outputs(self, mode, logits, losses):
        out = self.case.group(f"out/{mode}")
        golden_cases.assert_close(logits, out["logits"], LOGITS)
        loss = self.training_loss(logits)
        golden_cases.assert_close(loss, out["loss_training"], LOSSES)
        assert len(losses) == len(small_models.kmeans_layers(self.lm))
        extra_loss = out.get("loss_extra_loss", np.zeros(()))
        assert bool(losses) == bool(extra_loss)
        golden_cases.assert_close(sum(losses), extra_loss, LOSSES)


class ImageRun(Run):
    def prepare(self, case):
        config, images = case.config, case["in/targets"]
        inputs, num_classes = {"images": images}, None
        if "in/inputs" in case:
            inputs["labels"], num_classes = case["in/inputs"], config["class_vocab"]
        model = release.image_model(
            config["hparams"],
            config["num_channels"],
            config["target_vocab"],
            num_classes,
        )
        return model, inputs, images

    def weights(self):
        """All sub-pixels count, those of intensity 0 too."""
        return np.ones(self.targets.shape, "float32")


def marks(path):
    if small_models.ON_JAX and not any(name in path for name in ON_BOTH_BACKENDS):
        return [pytest.mark.slow]
    return []


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(path, marks=marks(path), id=path.split("/")[-1]) for path in PATHS
    ],
)
def run(request):
    return (ImageRun if "/image_" in request.param else Run)(request.param)


def test_all_cases_are_there():
    assert len(PATHS) == 14


def test_evaluation(run):
    run.check_outputs("eval", *run.evaluated)


def test_evaluation_changes_no_variable(run):
    small_models.assert_equal(run.before, run.case.group("var"))


def test_training(run):
    run.check_outputs("train", run.result.outputs, run.result.losses)


def test_gradients(run):
    golden = run.case.group("grad/var")
    # In the release the centroids count as trainable, but they have no gradient.
    without = {name.removeprefix("var/") for name in run.case.config["none_grads"]}
    assert all(name.endswith("/means") for name in without)
    assert run.result.variables.keys() == golden.keys() - without
    floor = 1e-5 * max(np.abs(gradient).max() for gradient in golden.values())
    for name, gradient in run.result.variables.items():
        golden_cases.assert_close(gradient, golden[name], GRADIENTS, floor, name)


def test_state_after_the_training_step(run):
    expected = {**run.case.group("var"), **run.case.group("after")}
    assert run.after.keys() == expected.keys()
    for name, value in expected.items():
        golden_cases.assert_close(run.after[name], value, STATE, label=name)


def test_inputs_longer_than_targets_may_be_are_cut(run):
    length = run.case["in/targets"].shape[1]
    is_longer = run.case.name == "enwik8_local_cluster8k"
    used = length // 2 if is_longer else length
    assert run.evaluated[0].shape[1] == run.result.outputs.shape[1] == used

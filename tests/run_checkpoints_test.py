"""Tests of the checkpoints of a run."""

import keras
import numpy as np
import pytest

from routing_tf import models
from routing_tf import training
from routing_tf.training import checkpoints as run_checkpoints
from routing_tf.training.checkpoints import RunCheckpoints
from tests.models import small_models

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture(scope="module")
def lm():
    lm = small_models.language_model()
    training.compile_for_training(lm)
    return lm


def set_all(lm, value):
    for variable in lm.weights:
        variable.assign(np.full(variable.shape, value))


def first(lm):
    return float(np.ravel(lm.weights[0])[0])


def save(lm, folder, *steps, best=None):
    checkpoints = RunCheckpoints(folder, lm)
    for step in steps:
        set_all(lm, step)
        checkpoints.save(step, best)
    checkpoints.wait()
    return checkpoints


def names(folder, which="last"):
    return [path.name for path in run_checkpoints.paths(folder, which)]


def damage(path, is_cut=False):
    data = path.with_name(path.name + ".data-00000-of-00001")
    content = bytearray(data.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    data.write_bytes(content[:middle] if is_cut else content)


def test_what_is_saved_is_what_was_there_when_it_was_saved(lm, tmp_path):
    """Training goes on while a checkpoint is written."""
    checkpoints = RunCheckpoints(tmp_path, lm)
    for step in range(1, 4):
        set_all(lm, step)
        checkpoints.save(step)
        set_all(lm, -1)
    checkpoints.wait()
    named = run_checkpoints.named_variables(lm)
    for step, path in enumerate(run_checkpoints.paths(tmp_path), 1):
        found, _, values = run_checkpoints.read(path, named)
        assert found == step
        for name, value in values.items():
            if name.startswith("model|"):
                np.testing.assert_array_equal(value, np.full(value.shape, step))


def test_all_variables_are_named_once(lm):
    named = run_checkpoints.named_variables(lm)
    assert len(named) == len(lm.weights) + len(lm.optimizer.variables)
    scaled = small_models.language_model()
    adam = keras.optimizers.Adam()
    scaled.compile(optimizer=keras.optimizers.LossScaleOptimizer(adam))
    scaled.optimizer.build(scaled.trainable_variables)
    named = run_checkpoints.named_variables(scaled)
    assert len(named) == len(scaled.weights) + len(scaled.optimizer.variables)


def test_the_best_one_is_kept_apart(lm, tmp_path):
    save(lm, tmp_path, 1, 2, 3, 4)
    save(lm, tmp_path, 2, best=run_checkpoints.Best(0.5, 64))
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]
    assert names(tmp_path, "best") == ["step-2"]
    # A loss of fewer tokens is none to compare with.
    before = save(lm, tmp_path, 1, best=run_checkpoints.Best(0.4, 9))
    before.save(5), before.wait()
    save(lm, tmp_path, 6, best=run_checkpoints.Best(0.5, 64))
    checkpoints = RunCheckpoints(tmp_path, lm)
    assert checkpoints.restore() == 5
    assert checkpoints.best == (0.5, 64)


@pytest.mark.parametrize("is_listed, is_cut", [(True, True), (False, False)])
def test_the_one_before_a_damaged_one(is_listed, is_cut, lm, tmp_path):
    """A killed process may not have told TensorFlow's list of its last one."""
    save(lm, tmp_path, 1, 2, 3)
    if not is_listed:
        (tmp_path / "checkpoints" / "checkpoint").unlink()
    damaged = run_checkpoints.paths(tmp_path)[-1]
    damage(damaged, is_cut)
    said = []
    checkpoints = RunCheckpoints(tmp_path, lm)
    assert checkpoints.restore(said.append) == 2
    assert first(lm) == 2
    assert "must be whole" in said[0] and str(damaged) in said[0]
    assert checkpoints.last_whole.endswith("step-2")
    # It is put aside, so that others take the same one.
    assert names(tmp_path) == ["step-1", "step-2"]
    checkpoints.save(3)
    checkpoints.wait()
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]
    assert RunCheckpoints(tmp_path, lm).restore() == 3
    for step in range(4, 8):
        checkpoints.save(step)
    checkpoints.wait()
    assert names(tmp_path) == ["step-5", "step-6", "step-7"]


def test_none_can_be_read(lm, tmp_path):
    save(lm, tmp_path, 1, 2)
    for path in run_checkpoints.paths(tmp_path):
        path.with_name(path.name + ".index").write_bytes(b"")
    set_all(lm, 7)
    with pytest.raises(
        run_checkpoints.DamagedCheckpointError, match="/checkpoints/step-2"
    ):
        RunCheckpoints(tmp_path, lm).restore(lambda text: None)
    assert first(lm) == 7


def test_what_a_killed_process_left_is_removed(lm, tmp_path):
    save(lm, tmp_path, 1)
    folder = tmp_path / "checkpoints"
    (folder / "step-2_temp").mkdir()
    (folder / "step-2_temp" / "part").write_bytes(b"x")
    (folder / "step-2.data-00000-of-00001").write_bytes(b"x")
    save(lm, tmp_path, 3)
    left = {path.name.partition(".")[0] for path in folder.glob("step-*")}
    assert left == {"step-1", "step-3"}


def test_another_model_is_refused(lm, tmp_path):
    save(lm, tmp_path, 1)
    other = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    with pytest.raises(
        ValueError,
        match=r"/checkpoints/step-1 .*token_embedding.*\[31, 16\] .*\[258, 32\]",
    ):
        RunCheckpoints(tmp_path, other).restore(lambda text: None)


def test_workers_are_asked_before_a_variable_changes(lm, tmp_path):
    save(lm, tmp_path, 1)
    set_all(lm, 7)

    def refuse(step):
        raise ValueError(f"step={step}")

    with pytest.raises(ValueError, match="step=1"):
        RunCheckpoints(tmp_path, lm).restore(agree=refuse)
    assert first(lm) == 7


def test_variables_with_one_path_are_refused():
    twins = [keras.layers.Dense(2, name="twin") for _ in range(2)]

    class Twins(keras.Model):
        def build(self, input_shape):
            for layer in twins:
                layer.build(input_shape)

    model = Twins()
    model.twins = twins
    model.build((1, 3))
    with pytest.raises(ValueError, match="Received: 4 .* 2 "):
        run_checkpoints.named_variables(model)

"""Checkpoints of a run: `tf.train.Checkpoint` on every backend.

A checkpoint contains all weights with the k-means state, the state of the optimizer,
and the step, which decides data order and random numbers. Both backends can read it.
"""

import contextlib
import math
import pathlib
import re
import shutil
import typing

import keras
import numpy as np
import tensorflow as tf

from routing_tf.files.named_files import check_no_pattern

NUM_CHECKPOINTS = 3
_NAME = "step"


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be read, or belongs to another model."""


class Best(typing.NamedTuple):
    """The lowest held-out loss of a run so far, in nats per token.

    `num_tokens` is the number of tokens of which `loss` is the mean; 0 if unknown.
    Means over different tokens cannot be compared; equal numbers count as the same.
    """

    loss: float = math.inf
    num_tokens: float = 0.0

    def is_comparable_with(self, other):
        """Returns whether two losses are of the same number of tokens, or may be."""
        numbers = self.num_tokens, other.num_tokens
        return 0 in numbers or numbers[0] == numbers[1]


class RunCheckpoints:
    """The checkpoints in a model directory: the last ones, and the best.

    A thread of TensorFlow writes them while training continues, from two copies of all
    variables in the host's memory. An incomplete checkpoint does not count.

    Args:
        model_dir: folder of the run.
        lm: the model; its optimizer, if any, is saved too.

    Example:

    ```python
    from routing_tf import models
    from routing_tf.training import checkpoints

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    saved = checkpoints.RunCheckpoints("my_run", lm)
    saved.save(step=10)
    saved.wait()
    assert checkpoints.step_of(checkpoints.paths("my_run")[-1]) == 10
    ```
    """

    def __init__(self, model_dir, lm):
        check_no_pattern("model_dir", model_dir)
        self.folder = folder_of(model_dir)
        self._variables = named_variables(lm)
        self.best = Best()
        self._checkpoint = None
        self._restored = None

    def save(self, step, best=None):
        """Starts to write a checkpoint, and keeps only the last three.

        If `best`, the held-out loss of this state, is given, the checkpoint is the best
        one, which is kept separately.

        Raises:
            OSError: if this or an earlier checkpoint could not be written; those before
                it are complete.
        """
        try:
            self._prepare()
            for name, variable in self._variables.items():
                self._copies[name].assign(keras.ops.convert_to_numpy(variable))
            self.best = best or self.best
            self._copies["step"].assign(step)
            self._copies["best_loss"].assign(self.best.loss)
            self._copies["best_tokens"].assign(self.best.num_tokens)
            manager, number = self._last, NUM_CHECKPOINTS
            if best is not None:
                manager, number = self._best, 1
            manager.save(checkpoint_number=step, options=self._options)
            # The write before this one has ended.
            _remove_surplus(manager, number)
        except tf.errors.OpError as error:
            raise self._failure(error) from error

    def wait(self):
        """Waits until all checkpoints are written; raises like `save`."""
        if self._checkpoint is None:
            return
        try:
            self._checkpoint.sync()
        except tf.errors.OpError as error:
            raise self._failure(error) from error

    def restore(self, say=print, agree=None):
        """Loads the newest readable checkpoint; unreadable ones are renamed.

        `say` reports which ones cannot be read. `agree`, called with the step before
        the first variable changes, raises an error if other workers found another step.
        Returns the number of steps trained; 0 if there is no checkpoint.

        Raises:
            DamagedCheckpointError: if there are checkpoints, and none can be read.
        """
        step, values, errors = 0, {}, {}
        for path in reversed(resumable(self.folder.parent)):
            try:
                step, self.best, values = read(path, self._variables)
                self._restored = path
                break
            except DamagedCheckpointError as error:
                errors[path] = error
                say(f"WARNING: {error}")
        if agree is not None:
            agree(step)
        if errors and self._restored is None:
            raise next(iter(errors.values()))
        if errors:
            say(f"WARNING: continuing from the one before, {self._restored}")
        for path in errors:
            _put_aside(path)
        for name, value in values.items():
            self._variables[name].assign(value)
        for path in paths(self.folder.parent, "best"):
            best = _best_of(path)
            if best.loss < self.best.loss or not self.best.is_comparable_with(best):
                self.best = best
        return step

    @property
    def last_whole(self):
        """Path of the last checkpoint that was completely written or read, or None."""
        written = self._checkpoint is not None and self._last.latest_checkpoint
        if written and written != self._latest_before:
            return written
        return None if self._restored is None else str(self._restored)

    def _prepare(self):
        """Makes the copies to write, and the managers of the last and the best."""
        if self._checkpoint is not None:
            return
        with tf.device("CPU:0"):
            self._copies = {
                name: tf.Variable(keras.ops.convert_to_numpy(variable))
                for name, variable in self._variables.items()
            }
            self._copies["step"] = tf.Variable(0, dtype=tf.int64)
            self._copies["best_loss"] = tf.Variable(math.inf, dtype=tf.float64)
            self._copies["best_tokens"] = tf.Variable(0.0, dtype=tf.float64)
        self._checkpoint = tf.train.Checkpoint(variables=self._copies)
        self._options = tf.train.CheckpointOptions(
            experimental_enable_async_checkpoint=True
        )
        self._last = self._manager(self.folder, NUM_CHECKPOINTS)
        self._latest_before = self._last.latest_checkpoint
        self._best = self._manager(self.folder / "best", 1)

    def _manager(self, folder, number):
        """The manager of the last checkpoints of a folder, including those in it."""
        folder.mkdir(parents=True, exist_ok=True)
        manager = tf.train.CheckpointManager(
            self._checkpoint, str(folder), max_to_keep=number, checkpoint_name=_NAME
        )
        _remove_leftovers(folder)
        return manager

    def _failure(self, error):
        last = "There is no earlier checkpoint"
        if self.last_whole:
            last = f"The last complete one is {self.last_whole}"
        return OSError(
            "The checkpoint could not be written; is the disk full? Received: "
            f"{_first_line(error)}. {last}; the same command continues from there"
        )


def folder_of(model_dir):
    """Returns the folder of a run's checkpoints."""
    return pathlib.Path(model_dir, "checkpoints")


def paths(model_dir, which="last"):
    """Returns the `"last"` or `"best"` paths without .index, the oldest first."""
    return _paths_in(folder_of(model_dir) / ("best" if which == "best" else ""))


def resumable(model_dir, which="last"):
    """Returns `paths`, or without any that of the best, to continue from."""
    return paths(model_dir, which) or paths(model_dir, "best")


def _paths_in(folder):
    found = [path.with_suffix("") for path in folder.glob(f"{_NAME}-*.index")]
    found = [path for path in found if re.fullmatch(rf"{_NAME}-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(path):
    """Returns the number of steps trained, from the path of a checkpoint."""
    return int(pathlib.Path(path).name.removeprefix(f"{_NAME}-"))


def num_bytes(path):
    """Returns the size of the values in a checkpoint."""
    path = pathlib.Path(path)
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}.data-*"))


def is_run_checkpoint(path):
    """Returns whether a path is that of a checkpoint of a run, without .index."""
    path = pathlib.Path(path)
    named = re.fullmatch(rf"{_NAME}-\d+", path.name)
    return bool(named) and path.with_name(path.name + ".index").is_file()


def model_dir_of(path):
    """Returns the model directory that contains a checkpoint."""
    folder = pathlib.Path(path).parent
    return (folder.parent if folder.name == "best" else folder).parent


def named_variables(lm, with_optimizer=True):
    """Returns the variables of a model that a checkpoint contains, by name.

    Those of its optimizer, if it has one, are left out without `with_optimizer`.
    """
    named = {f"model|{_key(v.path)}": v for v in lm.weights}
    if len(named) < len(lm.weights):
        raise ValueError(
            "The variables of a model must have different paths. Received: "
            f"{len(lm.weights)} variables with {len(named)} paths. Give layers side by "
            "side different names"
        )
    optimizer = getattr(lm, "optimizer", None)
    if with_optimizer and optimizer is not None:
        for variable in optimizer.variables:
            # The name of the optimizer itself depends on the number of optimizers.
            _, _, path = variable.path.partition("/")
            name = f"optimizer|{_key(path)}"
            # An optimizer that scales the loss counts separately from the one inside.
            named[f"{name}|inner" if name in named else name] = variable
    return named


def restore(path, variables):
    """Loads variables from a checkpoint, all or none; raises like `read`."""
    for name, value in read(path, variables)[2].items():
        variables[name].assign(value)


def read(path, variables):
    """Reads the step, the `Best` loss so far, and a dict of NumPy arrays.

    `path` is without .index; `variables` is what `named_variables` returns.

    Raises:
        DamagedCheckpointError: if it is damaged or belongs to another model.
        ValueError: if TensorFlow cannot read from a folder of this name.
    """
    check_no_pattern("path", path)
    try:
        reader = tf.train.load_checkpoint(str(path))
        _check_shapes(path, variables, reader.get_variable_to_shape_map())
        values = {name: reader.get_tensor(_entry(name)) for name in variables}
        step, loss = (reader.get_tensor(_entry(name)) for name in ("step", "best_loss"))
        name = _entry("best_tokens")
        num_tokens = reader.get_tensor(name) if reader.has_tensor(name) else 0.0
    # TensorFlow makes an `IndexError` of a file that ends too early.
    except (tf.errors.OpError, ValueError, RuntimeError, OSError, IndexError) as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        raise DamagedCheckpointError(
            f"The checkpoint must be whole. Received: {path}: {_first_line(error)}"
        ) from error
    return int(step), Best(float(loss), float(num_tokens)), values


def _best_of(path):
    try:
        return read(path, {})[1]
    except DamagedCheckpointError:
        return Best()


def _remove_leftovers(folder):
    """Removes the files of a process that was killed in the middle of a write."""
    whole = {path.name for path in _paths_in(folder)}
    for path in folder.glob(f"{_NAME}-*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif ".data-" in path.name and path.name.partition(".")[0] not in whole:
            path.unlink()


def _remove_surplus(manager, number):
    """Removes old checkpoints that a process did not list before it was killed."""
    listed = [pathlib.Path(path) for path in manager.checkpoints]
    for path in _paths_in(pathlib.Path(manager.directory)):
        later = [one for one in listed if step_of(one) > step_of(path)]
        if path not in listed and len(later) >= number:
            for file in path.parent.glob(f"{path.name}.*"):
                file.unlink()


def _put_aside(path):
    """Renames a damaged checkpoint, so that it is not the newest one."""
    index = path.with_name(f"{path.name}.index")
    with contextlib.suppress(FileNotFoundError):  # another worker was faster
        index.replace(index.with_name(f"{index.name}.damaged"))


def _check_shapes(path, variables, there):
    differences = []
    for name, variable in variables.items():
        here, found = list(variable.shape), there.get(_entry(name))
        if found != here:
            differences.append(f"{name} has the shape {found} there, {here} here")
    if differences:
        raise DamagedCheckpointError(
            "The checkpoint must belong to a model and an optimizer with these "
            f"hyperparameters. Received: {path} with {len(differences)} differences: "
            f"{'; '.join(differences[:5])}"
        )


def _key(path):
    """A name that TensorFlow writes unchanged."""
    return path.replace("/", "|").replace(".", "_")


def _entry(name):
    return f"variables/{name}/.ATTRIBUTES/VARIABLE_VALUE"


def _first_line(error):
    return str(error).strip().split("\n")[0]


def first_not_finite(lm):
    """Returns the path of the first weight that is not finite; None if all are."""
    for variable in lm.weights:
        if not np.isfinite(keras.ops.convert_to_numpy(variable)).all():
            return variable.path
    return None

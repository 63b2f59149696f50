"""The folder of a run: its settings and its checkpoints.

run.json         what is trained on what; a later run there must agree
checkpoints/     step_00000400.keras and the two before it; `keras.saving`
loads each as a compiled language model
metrics.jsonl    one JSON object per logged step
tensorboard/     the same numbers for TensorBoard
"""

import dataclasses
import json
import pathlib
import re
import warnings
import zipfile

import keras
import numpy as np

from routing_tf import models
from routing_tf import problems
from routing_tf.layers import Compatibility
from routing_tf.models.checkpoints import ReleaseCheckpoint
from routing_tf.models.checkpoints import load_into

NUM_CHECKPOINTS = 3
# What may change when a run goes on: its length and where its data lies.
FREE_TO_CHANGE = {"data_dir", "hparams_set", "hyperparameters.train_steps"}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run trains on what, as `run.json` holds it; made by `configure`.

    Args:
        problem: name of the problem.
        hyperparameters: `Hyperparameters` of the model and its training.
        hparams_set: name of the preset they come from, for the reader.
        data_dir: folder of the problem's data, or None.
        problem_options: dict of the problem's other options.
        num_tokens: dict of the number of ids in the splits that the run trains on and
            is scored on, by which changed data is noticed.
        init_checkpoint: where the first weights come from; None for random ones.
        seed: seed of weights, data order and dropout.
    """

    problem: str
    hyperparameters: models.Hyperparameters
    hparams_set: str = ""
    data_dir: str | None = None
    problem_options: dict = dataclasses.field(default_factory=dict)
    num_tokens: dict = dataclasses.field(default_factory=dict)
    init_checkpoint: str | None = None
    seed: int = 0

    def make_problem(self):
        """Returns the problem, whose windows are as long as the model's sequences."""
        options = problems.get_class(self.problem).options_for(self.hyperparameters)
        options = {**options, **self.problem_options}
        return problems.get(self.problem, data_dir=self.data_dir, **options)

    @classmethod
    def load(cls, model_dir):
        """Reads the `run.json` of a model directory; None if there is none.

        Raises:
            ValueError: if it cannot be understood.
        """
        path = pathlib.Path(model_dir, "run.json")
        try:
            fields = json.loads(path.read_text())
            hyperparameters = models.Hyperparameters(**fields.pop("hyperparameters"))
            return cls(hyperparameters=hyperparameters, **fields)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                "`model_dir` must hold a run.json of this version of routing_tf, or "
                f"none. Received: {str(path)!r}: {error}"
            ) from error

    def save(self, model_dir):
        """Writes `run.json`."""
        path = pathlib.Path(model_dir, "run.json")
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def check_continues(self, earlier, model_dir):
        """Raises a `ValueError` if a run with `earlier` cannot go on with this one."""
        # An earlier version counted all splits, also those that a run does not use.
        tokens = {
            split: earlier.num_tokens[split]
            for split in self.num_tokens
            if split in earlier.num_tokens
        }
        there, here = (
            _flat(dataclasses.replace(earlier, num_tokens=tokens)),
            _flat(self),
        )
        names = sorted((there.keys() | here.keys()) - FREE_TO_CHANGE)
        differences = [
            f"{name} was {there.get(name)!r}, now {here.get(name)!r}"
            for name in names
            if there.get(name) != here.get(name)
        ]
        if differences:
            raise ValueError(
                "`model_dir` must be new, or the run in it must have the same "
                f"settings. Received: {str(model_dir)!r}, where "
                f"{'; '.join(differences)}. Use another model_dir, or leave these "
                "settings out to continue that run"
            )


def _flat(config):
    """The fields of a `RunConfig` by dotted names, as JSON gives them back."""

    def walk(prefix, value):
        if not isinstance(value, dict):
            return {prefix: value}
        items = [walk(f"{prefix}.{key}", item) for key, item in value.items()]
        return {key: item for found in items for key, item in found.items()}

    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    return {key.removeprefix("."): value for key, value in walk("", fields).items()}


def configure(problem, hyperparameters, **fields):
    """Makes the configuration of a run, and its problem.

    Args:
        problem: name of the problem.
        hyperparameters: `Hyperparameters`; the vocabulary size is the problem's.
        **fields: other fields of `RunConfig`.

    Returns:
        `RunConfig` and the prepared problem.

    Raises:
        ValueError: if the problem or its data is not there, or a model of these
            hyperparameters does not fit it.
    """
    source = fields.get("init_checkpoint")
    if source and is_release_checkpoint(source):
        # The weights rely on them.
        hyperparameters = hyperparameters.replace(compatibility=Compatibility.trained())
    config = RunConfig(problem, hyperparameters, **fields)
    problem = config.make_problem()
    problem.check_hyperparameters(hyperparameters)
    problem.prepare()
    config = dataclasses.replace(
        config,
        hyperparameters=hyperparameters.replace(
            vocabulary_size=problem.vocabulary_size
        ),
        num_tokens={
            split: problem.num_tokens(split)
            for split in (problem.train_split, problem.eval_split)
        },
    )
    return config, problem


def checkpoints(model_dir):
    """Returns the paths of a run's checkpoints, the oldest first."""
    found = pathlib.Path(model_dir, "checkpoints").glob("step_*.keras")
    return sorted(path for path in found if re.fullmatch(r"step_\d+", path.stem))


def step_of(checkpoint):
    """Returns the step at which a checkpoint was written, from its name."""
    return int(pathlib.Path(checkpoint).stem.removeprefix("step_"))


def save_checkpoint(lm, model_dir, step):
    """Writes a checkpoint and removes all but the last three.

    Args:
        lm: the compiled language model.
        model_dir: the model directory.
        step: number of steps trained.

    Returns:
        Path of the checkpoint.

    Raises:
        FloatingPointError: if a weight is not finite; nothing is written then.
    """
    for variable in lm.weights:
        if not np.isfinite(np.asarray(variable)).all():
            raise FloatingPointError(
                f"All weights must be finite. Received: {variable.path} at step {step}"
            )
    folder = pathlib.Path(model_dir, "checkpoints")
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{step:08d}.keras"
    partial = folder / "partial.keras"
    lm.save(partial, overwrite=True)
    partial.replace(path)
    for old in checkpoints(model_dir)[:-NUM_CHECKPOINTS]:
        old.unlink()
    return path


def restore_checkpoint(lm, checkpoint):
    """Loads weights, k-means and optimizer state into a freshly compiled model.

    Args:
        lm: a language model of the same hyperparameters, compiled.
        checkpoint: path of the checkpoint.

    Raises:
        ValueError: if the file is damaged or belongs to another model.
    """
    try:
        lm.load_weights(checkpoint)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            "The checkpoint must be a whole file of a model with these "
            f"hyperparameters. Received: {str(checkpoint)!r}: {error}. Remove it to "
            "continue from the one before"
        ) from error
    # Keras only warns where the state is that of another optimizer.
    if int(lm.optimizer.iterations) != step_of(checkpoint):
        raise ValueError(
            f"The checkpoint must hold the state of the {lm.optimizer.name} optimizer "
            f"after {step_of(checkpoint)} steps. Received: {str(checkpoint)!r}"
        )


def load_language_model(source):
    """Loads a trained language model.

    Args:
        source: a model directory, whose last checkpoint is taken, a `.keras` file or
            a keras_hub preset directory.

    Returns:
        A `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
        `RoutingImageTransformer`, not compiled for training.

    Raises:
        ValueError: if there is no such thing.
    """
    path = pathlib.Path(source)
    saved = [path] if path.suffix == ".keras" else checkpoints(path)
    try:
        with warnings.catch_warnings():
            # It is not compiled for training, so its optimizer stays empty.
            warnings.filterwarnings("ignore", "Skipping variable loading")
            if saved:
                return keras.saving.load_model(saved[-1], compile=False)
            config = path / "config.json"
            if config.is_file():
                cls = models.RoutingTransformerCausalLM
                backbone = models.RoutingTransformerEncoderDecoder.__name__
                if json.loads(config.read_text())["class_name"] == backbone:
                    cls = models.RoutingTransformerSeq2SeqLM
                return cls.from_preset(str(path))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"The model {source!r} cannot be read: {error}") from error
    raise ValueError(
        "A model is given as a model directory with checkpoints, a .keras file, a "
        "preset directory with a config.json, or to start from the path of a "
        f"checkpoint of the release without .index. Received: {source!r}"
    )


def is_release_checkpoint(source):
    """Tells whether a path is that of a checkpoint of the original release."""
    return pathlib.Path(f"{str(source).removesuffix('.index')}.index").is_file()


def initialize(lm, source):
    """Gives a model of its own settings the weights of another.

    Args:
        lm: the model to write into.
        source: as for `load_language_model`, or the path of a checkpoint of the
            original release.

    Raises:
        ValueError: if there is no such thing, or the models have different variables;
            nothing is written then.
    """
    if is_release_checkpoint(source):
        load_into(lm, ReleaseCheckpoint(source))
    else:
        copy_weights(load_language_model(source), lm)


def copy_weights(source, target):
    """Copies all weights and the k-means state from one model to another.

    Args:
        source: the language model to copy from.
        target: the language model to copy to.

    Raises:
        ValueError: if the models have different variables; nothing is copied then.
    """
    there = {variable.path: tuple(variable.shape) for variable in source.weights}
    here = {variable.path: tuple(variable.shape) for variable in target.weights}
    differences = [
        f"{path} has the shape {there.get(path)} there, {here.get(path)} here"
        for path in sorted(there.keys() | here.keys())
        if there.get(path) != here.get(path)
    ]
    if differences:
        raise ValueError(
            "The model to start from must have the same variables. Received: "
            f"{len(differences)} differences: {'; '.join(differences)}. Use the "
            "hyperparameters it was trained with, and a problem with its vocabulary"
        )
    values = {variable.path: variable for variable in source.weights}
    for variable in target.weights:
        variable.assign(np.asarray(values[variable.path]))


def write_whole(path, text):
    """Writes a file so that it is never seen half written."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)

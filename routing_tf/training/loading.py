"""Loading models of runs, files and presets."""

import dataclasses
import pathlib
import warnings
import zipfile

import numpy as np

from routing_tf.files import named_files
from routing_tf.files import safe_loading
from routing_tf.files.names import SPLITS
from routing_tf.models.build import make_backbone
from routing_tf.models.build import make_model
from routing_tf.models.build import model_class_on
from routing_tf.models.release.checkpoints import ReleaseCheckpoint
from routing_tf.models.release.checkpoints import load_into
from routing_tf.training import checkpoints
from routing_tf.training import run_folder
from routing_tf.training.run_folder import RunConfig
from routing_tf.training.run_folder import is_release_checkpoint
from routing_tf.training.run_folder import load_preprocessor


def find_run(source, which="last"):
    """Finds the checkpoint of a run, its path without .index, and its `RunConfig`.

    `source` is a model directory, of which `which` names the `"last"` or the `"best"`
    checkpoint, or the path of a checkpoint.
    """
    path = str(source).removesuffix(".index")
    if checkpoints.is_run_checkpoint(path):
        _check_which(path, which)
        model_dir, saved = checkpoints.model_dir_of(path), [path]
    else:
        model_dir, saved = path, checkpoints.resumable(path, which)
    config = RunConfig.load(model_dir)
    if config is None or not saved:
        raise ValueError(
            "`--model_dir` must hold a run with a checkpoint; `python -m "
            f"routing_tf.train` makes one. Received: --model_dir={path!r}, with "
            f"--checkpoint={which}"
        )
    return saved[-1], config


def open_problem(checkpoint, config, fields, split=None, has_own_data=True):
    """Makes the problem with which a run is evaluated or analysed.

    `fields` are those of `config` that name it. Only `split` is loaded, if given; with
    `has_own_data` it must be the split that the run used.

    Raises:
        ValueError: if the data is missing or does not fit the run.
    """
    model_dir = checkpoints.model_dir_of(checkpoint)
    problem = dataclasses.replace(config, **fields).make_problem(model_dir)
    problem.check_hyperparameters(config.hyperparameters)
    if split is None:
        return problem
    problem.prepare(split)
    vocabulary_size = config.hyperparameters.vocabulary_size
    if problem.vocabulary_size > vocabulary_size:
        raise ValueError(
            "The problem's vocabulary must not be larger than the model's. Received: "
            f"{problem.vocabulary_size} ids of {problem.name}, {vocabulary_size} of "
            "the model"
        )
    run_folder.check_tokenizer(problem, model_dir, config.hyperparameters.kind)
    if has_own_data:
        config.check_data(problem, split)
    return problem


def own_files(checkpoint, config):
    """Returns the identities of a user's files that a run has in its splits.

    Files that no longer exist do not count.
    """
    problem = config.make_problem(checkpoints.model_dir_of(checkpoint))
    if not problem.has_own_files:
        return set()
    try:
        paths = [path for split in SPLITS for path in problem.source.files_of(split)]
    except ValueError:
        return set()
    return set(map(named_files.identity, paths))


def load_run(checkpoint):
    """Loads the model of a run's checkpoint, without compiling it for training."""
    model_dir = checkpoints.model_dir_of(checkpoint)
    config = RunConfig.load(model_dir)
    if config is None:
        raise ValueError(
            "A checkpoint must be in the folder of its run, with its run.json. "
            f"Received: {str(checkpoint)!r}"
        )
    h = config.hyperparameters
    preprocessor = load_preprocessor(model_dir, h.kind)
    safe_loading.check_fits(
        lambda: make_backbone(h), checkpoints.num_bytes(checkpoint), model_dir
    )
    lm = make_model(h, preprocessor, config.precision)
    checkpoints.restore(checkpoint, checkpoints.named_variables(lm, False))
    return lm


def load_language_model(source, which="last"):
    """Loads a trained language or image model, without compiling it for training.

    `source` is a model directory, of which `which` names the `"last"` or the `"best"`
    checkpoint; the path of a checkpoint; a `.keras` file; or a keras_hub
    preset directory.
    """
    path = pathlib.Path(str(source).removesuffix(".index"))
    if checkpoints.is_run_checkpoint(path):
        _check_which(path, which)
        return load_run(path)
    saved = checkpoints.resumable(path, which)
    if saved:
        return load_run(saved[-1])
    if checkpoints.paths(path):
        raise ValueError(
            f"`checkpoint` must be 'last': there is no best one in {str(source)!r}, "
            f"because the run has not been evaluated. Received: checkpoint={which!r}"
        )
    _check_which(path, which)
    try:
        with warnings.catch_warnings():
            # It is not compiled for training, so its optimizer stays empty.
            warnings.filterwarnings("ignore", "Skipping variable loading")
            if path.suffix == ".keras":
                return safe_loading.load_keras_file(path)
            config = path / "config.json"
            if config.is_file():
                backbone = safe_loading.read_json(config)["class_name"]
                return model_class_on(backbone).from_preset(str(path))
    except (OSError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"The model {source!r} cannot be read: {error}") from error
    raise ValueError(
        "A model must be a model directory with checkpoints, the path of a checkpoint "
        "of a run, a .keras file, or a preset directory with a config.json. "
        f"Received: {source!r}"
    )


def _check_which(path, which):
    """Raises a `ValueError` if one is chosen among the checkpoints of no run."""
    if which != "last":
        raise ValueError(
            "`checkpoint` chooses among those of a run. Received: checkpoint="
            f"{which!r} with {str(path)!r}, which is no folder of a run. Leave "
            "`checkpoint` out, or name the folder of the run"
        )


def initialize(lm, source):
    """Gives a model the weights of another one, all or none.

    `source` is as for `load_language_model`, or a checkpoint of the original release.
    """
    if is_release_checkpoint(source):
        load_into(lm, ReleaseCheckpoint(source))
    else:
        copy_weights(load_language_model(source), lm)


def copy_weights(source, target):
    """Copies all weights and the k-means state to another model, all or none."""
    there = {variable.path: tuple(variable.shape) for variable in source.weights}
    here = {variable.path: tuple(variable.shape) for variable in target.weights}
    differences = [
        f"{path} has the shape {there.get(path)} there, {here.get(path)} here"
        for path in sorted(there.keys() | here.keys())
        if there.get(path) != here.get(path)
    ]
    if differences:
        raise ValueError(
            "The initial model must have the same variables. Received: "
            f"{len(differences)} differences: {'; '.join(differences)}. Use the "
            "hyperparameters that it was trained with, and a problem with its "
            "vocabulary"
        )
    values = {variable.path: variable for variable in source.weights}
    for variable in target.weights:
        variable.assign(np.asarray(values[variable.path]))

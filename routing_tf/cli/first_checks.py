"""What commands refuse at once: names, values and paths that cannot be right.

Importing TensorFlow takes seconds, so mistakes that show without it are reported
before. Later code checks names and files again, and more closely.
"""

import os
import sys

from routing_tf.cli import known_names
from routing_tf.cli import known_values
from routing_tf.files import named_files
from routing_tf.files.folders import check_no_pattern
from routing_tf.files.misspelt import did_you_mean
from routing_tf.settings.hyperparameters import by_subject


def check(options):
    """Raises a `ValueError` if a flag names what does not exist."""
    for name, check_value in CHECKS.items():
        value = options[name].value if name in options else None
        if value:
            check_value(name, value)
    if "problem_option" in options:
        _check_problem_options(options)
    if "checkpoint" not in options:
        if "model_dir" in options:  # of `train`, which makes it
            _check_folder_of_checkpoints("model_dir", options.model_dir)
        return
    if "model_dir" in options:
        _check_model(options.model_dir)
    else:  # of `convert`
        _check_prefix(options.checkpoint)


def _check_problem(flag, name):
    if "routing_tf.problems" in sys.modules:  # where others may be registered
        return
    _check_known(f"`--{flag}` must be a problem", flag, name, known_names.PROBLEMS)


def _check_preset(flag, name):
    _check_known(
        f"`--{flag}` must be a set of hyperparameters", flag, name, known_names.PRESETS
    )


def _check_known(rule, flag, name, names):
    if name not in names:
        raise ValueError(f"{rule}. Received: --{flag}={name}.{_hint(name, names)}")


def _hint(name, names):
    return did_you_mean(name, names) or f" Valid names are: {', '.join(names)}"


def _check_hyperparameters(flag, text):
    names = [name for names in by_subject().values() for name in names]
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            raise ValueError(
                f"`--{flag}` must be name=value, joined by commas. Received: {item!r}"
            )
        # It is refused later, with the reason.
        if name not in (*names, "vocabulary_size"):
            raise ValueError(
                f"`--{flag}` must name hyperparameters, which --help lists. Received: "
                f"{item!r}.{_hint(name, names)}"
            )
        known_values.check(flag, name, value)


def _check_problem_options(options):
    for item in options.problem_option:
        name, _, value = (part.strip() for part in item.partition("="))
        flag, value = f"problem_option={name}", os.path.expanduser(value)
        # What was made of images is in the data folder, without them too.
        is_folder = name == "folder" and not options.data_dir
        is_file = name == "vocabulary" and value not in ("bytes", "subwords")
        if value and (is_folder or is_file):
            _check_exists(flag, value)
        if value and (name == "files" or name.endswith("_files")):
            _check_files(flag, value)


def _check_files(flag, patterns):
    named_files.find_files(f"--{flag}", patterns)


def _check_exists(flag, path):
    if not os.path.exists(path):
        raise ValueError(
            f"`--{flag}` must exist. Received: --{flag}={path!r}, which does not"
        )


def _check_folder(flag, path):
    if not os.path.isdir(path):
        raise ValueError(
            f"`--{flag}` must be a folder. Received: --{flag}={path!r}, which is none"
        )


def _check_folder_to_make(flag, path):
    while not os.path.exists(path) and os.path.dirname(path) not in ("", path):
        path = os.path.dirname(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(
            f"`--{flag}` must be a folder that can be written. Received: a path with "
            f"the file {path!r} in it"
        )


def _check_folder_of_checkpoints(flag, path):
    _check_folder_to_make(flag, path)
    check_no_pattern(f"--{flag}", path)


def _check_file_to_make(flag, path):
    if os.path.isdir(path):
        raise ValueError(
            f"`--{flag}` must be a file. Received: --{flag}={path!r}, a folder"
        )
    _check_folder_to_make(flag, os.path.dirname(path) or os.curdir)


def _check_prompts(flag, path):
    if path != "-":  # standard input
        _check_exists(flag, path)


def _check_weights(flag, path):
    # A checkpoint is named without the end of its files.
    if not os.path.exists(path) and not os.path.exists(f"{path}.index"):
        raise ValueError(
            f"`--{flag}` must be a model directory, a .keras file, a preset directory "
            f"or a checkpoint. Received: --{flag}={path!r}, which does not exist"
        )


def _check_model(path):
    _, extension = os.path.splitext(path)
    is_folder = any(
        os.path.exists(os.path.join(path, name))
        for name in ("run.json", "config.json", "checkpoints")
    )
    is_file = extension in (".keras", ".index") and os.path.isfile(path)
    if not (is_folder or is_file or os.path.isfile(f"{path}.index")):
        state = "holds none" if os.path.exists(path) else "does not exist"
        raise ValueError(
            "`--model_dir` must hold a run with a checkpoint, or a model: a .keras "
            f"file or a preset directory. Received: --model_dir={path!r}, which "
            f"{state}. `python -m routing_tf.train` makes a run"
        )


def _check_prefix(path):
    if not os.path.isfile(f"{path.removesuffix('.index')}.index"):
        raise ValueError(
            "`--checkpoint` must be the path of a TF1 checkpoint, without .index. "
            f"Received: --checkpoint={path!r}; there is no {path}.index"
        )


CHECKS = {
    "problem": _check_problem,
    "hparams_set": _check_preset,
    "hparams": _check_hyperparameters,
    "files": _check_files,
    "texts": _check_files,
    "calibration": _check_files,
    "evaluate": _check_files,
    "prompt_file": _check_prompts,
    "init_checkpoint": _check_weights,
    "hparams_file": _check_exists,
    "raw_dir": _check_folder,
    "data_dir": _check_folder_to_make,
    "export_dir": _check_folder_of_checkpoints,
    "output_dir": _check_folder_to_make,
    "output_file": _check_file_to_make,
    "vocabulary": _check_exists,
}

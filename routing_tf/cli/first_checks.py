"""What commands refuse at once: names, values and paths that cannot be right.

Importing TensorFlow takes seconds, so mistakes that show without it are reported
before. Later code checks names and files again, and more closely.
"""

import importlib.util
import os
import sys

from routing_tf.cli import flag_kinds
from routing_tf.files import named_files
from routing_tf.files.named_files import check_exists
from routing_tf.files.named_files import check_no_pattern
from routing_tf.files.names import did_you_mean
from routing_tf.settings.hyperparameters import HYPERPARAMETERS
from routing_tf.settings.hyperparameters import read


def check(options):
    """Raises a `ValueError` if a flag names what does not exist."""
    modules = options["import"].value or []
    _check_modules(modules)
    # Modules of the user register further names.
    for checks in (CHECKS,) if modules else (CHECKS, CHECKS_OF_NAMES):
        for flag, check_value in checks.items():
            value = options[flag].value if flag in options else None
            if value:
                check_value(flag, value)
    if "problem_option" in options:
        flag_kinds.check_problem_options(options)
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
    from routing_tf.settings import registries

    _check_known(f"`--{flag}` must be a problem", flag, name, registries.problems())


def _check_preset(flag, name):
    from routing_tf.settings.presets import DESCRIPTIONS

    _check_known(
        f"`--{flag}` must be a set of hyperparameters", flag, name, DESCRIPTIONS
    )


def _check_known(rule, flag, name, names):
    if name not in names:
        raise ValueError(f"{rule}. Received: --{flag}={name}.{_hint(name, names)}")


def _hint(name, names):
    return did_you_mean(name, names) or f" Valid names are: {', '.join(names)}"


def _check_modules(names):
    for name in names:
        is_file = name.endswith(".py")
        if is_file or importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ValueError(
                "`--import` must name modules that Python finds, also in the working "
                f"directory, without .py. Received: --import={name}"
            )


def _items(flag, text):
    """Yields the names and values of a list of hyperparameters."""
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            raise ValueError(
                f"`--{flag}` must be name=value, joined by commas. Received: {item!r}"
            )
        yield name, value


def _check_hyperparameters(flag, text):
    names = [name for name, own in HYPERPARAMETERS.items() if own.subject]
    for name, value in _items(flag, text):
        # That of the problem is refused later, with the reason.
        if name not in (*names, "vocabulary_size"):
            raise ValueError(
                f"`--{flag}` must name hyperparameters, which --help lists. Received: "
                f"'{name}={value}'.{_hint(name, names)}"
            )
        read(name, value, f" in `--{flag}`")


def _check_registered(flag, text):
    """Refuses names of patterns and the like that no file of this package has."""
    if "routing_tf.models" in sys.modules:  # where others may be registered
        return
    from routing_tf.settings import registries

    for name, value in _items(flag, text):
        own = HYPERPARAMETERS[name].values
        value = read(name, value)
        if own.registry is None or value is None:
            continue
        choices = registries.choices(own)
        if choices is None or value in choices:
            continue
        listed = f" Choices are: {', '.join(choices)}"
        raise ValueError(
            f"`{name}` in `--{flag}` must be a choice that there is. Received: "
            f"{name}={value!r}.{did_you_mean(value, choices) or listed}"
        )


def _check_files(flag, patterns):
    named_files.find_files(f"--{flag}", patterns)


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
        check_exists(flag, path)


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


CHECKS_OF_NAMES = {"problem": _check_problem, "hparams": _check_registered}
CHECKS = {
    "hparams_set": _check_preset,
    "hparams": _check_hyperparameters,
    "files": _check_files,
    "texts": _check_files,
    "calibration": _check_files,
    "evaluate": _check_files,
    "prompt_file": _check_prompts,
    "init_checkpoint": _check_weights,
    "hparams_file": check_exists,
    "raw_dir": _check_folder,
    "data_dir": _check_folder_to_make,
    "export_dir": _check_folder_of_checkpoints,
    "output_dir": _check_folder_to_make,
    "output_file": _check_file_to_make,
    "vocabulary": check_exists,
}

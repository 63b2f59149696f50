"""Prepares the data of a problem: from raw files, or from the network.

    python -m routing_tf.datagen --problem=enwik8 --raw_dir=downloads --data_dir=data

Raw files are checked while they are read; where one is damaged or something else the
command says which, in what line and what is wrong, and leaves nothing behind. Work
that is interrupted goes on where it was when the command is run again. Then

    python -m routing_tf.train --problem=enwik8 --data_dir=data --model_dir=runs/enwik8

trains on it.
"""

import os
import pathlib
import sys

from absl import app
from absl import flags

from routing_tf import commands
from routing_tf.choices import SPLITS


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command.

    Args:
        values: the `absl.flags.FlagValues` to define them in.
    """
    commands.define_backend_flag(values)
    flags.DEFINE_string(
        "problem",
        None,
        "Name of the problem; an unknown name lists all.",
        required=True,
        flag_values=values,
    )
    commands.define_path(
        "data_dir",
        "Folder to write to, made if missing. Problems can share it.",
        values,
        required=True,
    )
    commands.define_path(
        "raw_dir",
        "Folder with the raw files. Default: they are downloaded.",
        values,
    )
    flags.DEFINE_enum(
        "train_split",
        None,
        SPLITS,
        "Split that will be trained on, where a vocabulary is made of it. Default: "
        "train.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "problem_option",
        [],
        "Another option of the problem, as name=value. May be repeated.",
        flag_values=values,
    )


def run(options):
    """Prepares the data as the flags say.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if the problem does not exist, or its raw files are missing,
            damaged or something else.
    """
    import tensorflow_datasets as tfds

    from routing_tf import problems

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    settings = commands.parse_problem_options(options.problem_option)
    if options.train_split:
        settings["train_split"] = options.train_split
    data_dir = os.path.abspath(options.data_dir)
    problem = problems.get(options.problem, data_dir=data_dir, **settings)
    if not isinstance(problem, problems.PreparedProblem):
        print(f"{options.problem} needs no preparation; train on it right away")
        return
    try:
        pathlib.Path(data_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "`data_dir` must be a folder that can be written. Received: "
            f"{data_dir!r}: {error.strerror}"
        ) from error
    raw_dir = options.raw_dir
    if raw_dir is not None:
        raw_dir = os.path.abspath(raw_dir)
        if not os.path.isdir(raw_dir):
            raise ValueError(
                f"`raw_dir` must be a folder with raw files. Received: {raw_dir!r}, "
                "which is no folder"
            )
    for line in problem.generate(raw_dir):
        print(line, flush=True)
    print(f"data of {options.problem}: {data_dir}")


def main(argv):
    """Prepares data; returns the exit code, as `absl.app.run` expects."""
    return commands.command(run, flags.FLAGS, argv)


if __name__ == "__main__":
    define_flags()
    sys.stdout.reconfigure(errors="replace")
    app.run(main)

"""Prepares the data of a problem: from raw files, or from the network.

    python -m routing_tf.datagen --problem=enwik8 --raw_dir=downloads --data_dir=data

Raw files are checked while they are read. If one is damaged or wrong, the command names
the file, the line and the problem, and leaves no output. Interrupted work continues
when the command is repeated. Then

    python -m routing_tf.train --problem=enwik8 --data_dir=data --model_dir=runs/enwik8

trains on it.
"""

import os
import sys

from absl import flags

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.files.named_files import make_folder
from routing_tf.files.names import SPLITS

FLAGS = {
    **commands.BACKEND,
    "problem": flag_kinds.string(
        None, "Name of the problem; --problem=list lists all.", required=True
    ),
    "data_dir": flag_kinds.path(
        "Folder to write to, made if missing. Problems can share it.", required=True
    ),
    "raw_dir": flag_kinds.path(
        "Folder with the raw files. Default: they are downloaded."
    ),
    "train_split": flag_kinds.choice(
        None,
        SPLITS,
        "Split to train on; the vocabulary, if one is needed, is learned from it. "
        "Default: train.",
    ),
    **commands.OPTIONS,
}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)


def run(options):
    """Prepares the data as the flags say."""
    import tensorflow_datasets as tfds

    from routing_tf import problems

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    settings = flag_kinds.parse_problem_options(options.problem_option)
    if options.train_split:
        settings["train_split"] = options.train_split
    data_dir = os.path.abspath(options.data_dir)
    problem = problems.get(options.problem, data_dir=data_dir, **settings)
    if problem.storage is None:
        print(f"{options.problem} needs no preparation; train on it right away")
        return
    make_folder("--data_dir", data_dir)
    raw_dir = options.raw_dir
    if raw_dir is not None:
        raw_dir = os.path.abspath(raw_dir)
        if not os.path.isdir(raw_dir):
            raise ValueError(
                "`--raw_dir` must be a folder with raw files. Received: "
                f"--raw_dir={raw_dir!r}, which is not a folder"
            )
    for line in problem.generate(raw_dir):
        print(line, flush=True)
    print(f"data of {options.problem}: {data_dir}")


def main():
    """Runs the command, whose flags are those of the process."""
    commands.main(run, define_flags)

r"""Converts a checkpoint of the original release into a Keras preset directory.

    python -m routing_tf.convert --checkpoint=DIR/model.ckpt-3530000 \
        --hparams_file=DIR/hparams.json --vocabulary=DIR/vocab.subwords \
        --output_dir=rt_base

`from_preset("rt_base")` of the model's class loads the result, and
`routing_tf.train --init_checkpoint=rt_base` fine-tunes it.
"""

import os
import sys
import warnings

from absl import flags

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.files.atomic import fill_folder
from routing_tf.files.atomic import is_empty

FLAGS = {
    **commands.BACKEND,
    "checkpoint": flag_kinds.path(
        "The TF1 checkpoint: its path without .index.", required=True
    ),
    "output_dir": flag_kinds.path(
        "Folder to write the preset into; new or empty.", required=True
    ),
    "hparams_file": flag_kinds.path("The release's hparams.json of the model."),
    "vocabulary": flag_kinds.path(
        "The release's subword vocabulary, for models of texts. Without it, the model "
        "takes ids."
    ),
    "hparams_set": flag_kinds.string(
        None,
        "Name of the release's set that was trained, for settings that --hparams_file "
        "does not have; docs/presets.md lists all.",
    ),
}

# The library's arguments for the flags.
FLAGS_OF_ARGUMENTS = {
    "prefix": "checkpoint",
    "hparams": "hparams_file",
    "preset": "hparams_set",
    "vocabulary": "vocabulary",
}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)


def run(options):
    """Converts as the flags say."""
    from routing_tf.models.build import model_class
    from routing_tf.models.release.checkpoints import ReleaseCheckpoint
    from routing_tf.training.log import describe_size

    out = options.output_dir
    if os.path.exists(out) and (not os.path.isdir(out) or not is_empty(out)):
        raise ValueError(
            "`--output_dir` must be a new or empty folder. Received: "
            f"--output_dir={out!r}"
        )
    with commands.named_by_flags(FLAGS_OF_ARGUMENTS):
        kind = ReleaseCheckpoint(options.checkpoint).kind
    cls = model_class(kind)
    vocabulary = {"vocabulary": options.vocabulary} if options.vocabulary else {}
    if kind == "image" and vocabulary:
        raise ValueError(
            "`--vocabulary` is for models of texts. Received: "
            f"--vocabulary={options.vocabulary!r} with an image model"
        )
    with (
        commands.named_by_flags(FLAGS_OF_ARGUMENTS),
        warnings.catch_warnings(record=True) as notes,
    ):
        warnings.filterwarnings("always", category=UserWarning)
        model = cls.from_release_checkpoint(
            options.checkpoint,
            preset=options.hparams_set,
            hparams=options.hparams_file,
            **vocabulary,
        )
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
    with fill_folder(out) as folder:
        model.save_to_preset(str(folder))
    print(f"model: {describe_size(model)}, kind {kind!r}")
    print(
        "load it with "
        f"routing_tf.models.{cls.__name__}.from_preset({options.output_dir!r})"
    )


def main():
    """Runs the command, whose flags are those of the process."""
    commands.main(run, define_flags)

r"""Converts a checkpoint of the original release into a Keras preset directory.

    python -m routing_tf.convert --checkpoint=DIR/model.ckpt-3530000 \
        --hparams_file=DIR/hparams.json --vocabulary=DIR/vocab.subwords \
        --output_dir=rt_base

`from_preset("rt_base")` of the model's class loads the result, and
`routing_tf.train --init_checkpoint=rt_base` fine-tunes it.
"""

import os
import sys

from absl import app
from absl import flags

from routing_tf import commands
from routing_tf.files.atomic import fill_folder
from routing_tf.files.atomic import is_empty


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command.

    Args:
        values: the `absl.flags.FlagValues` to define them in.
    """
    commands.define_backend_flag(values)
    paths = {
        "checkpoint": "The TF1 checkpoint: its path without .index.",
        "output_dir": "Folder to write the preset into; new or empty.",
        "hparams_file": "The release's hparams.json of the model.",
        "vocabulary": "The release's subword vocabulary, for models of texts. Without "
        "it the result takes ids.",
    }
    for name, text in paths.items():
        is_required = name in ("checkpoint", "output_dir")
        commands.define_path(name, text, values, is_required)
    flags.DEFINE_string(
        "hparams_set",
        None,
        "Name of the set of the release that was trained, for what the file does not "
        "tell; an unknown name lists all.",
        flag_values=values,
    )


def run(options):
    """Converts as the flags say.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if there is something in the output folder, or the checkpoint and
            its settings are not complete.
    """
    from routing_tf import models
    from routing_tf.models.release.checkpoints import ReleaseCheckpoint

    out = options.output_dir
    if os.path.exists(out) and (not os.path.isdir(out) or not is_empty(out)):
        raise ValueError(
            f"`output_dir` must be a new or empty folder. Received: output_dir={out!r}"
        )
    kind = ReleaseCheckpoint(options.checkpoint).kind
    classes = (
        models.RoutingTransformerCausalLM,
        models.RoutingTransformerSeq2SeqLM,
        models.RoutingImageTransformer,
    )
    cls = next(cls for cls in classes if cls.kind == kind)
    vocabulary = {"vocabulary": options.vocabulary} if options.vocabulary else {}
    if kind == "image" and vocabulary:
        raise ValueError(
            "`vocabulary` is for models of texts. Received: "
            f"vocabulary={options.vocabulary!r} with an image model"
        )
    model = cls.from_release_checkpoint(
        options.checkpoint,
        preset=options.hparams_set,
        hparams=options.hparams_file,
        **vocabulary,
    )
    with fill_folder(out) as folder:
        model.save_to_preset(str(folder))
    print(f"model: {model.count_params():,} parameters, kind {kind!r}")
    print(
        "load it with "
        f"routing_tf.models.{cls.__name__}.from_preset({options.output_dir!r})"
    )


def main(argv):
    """Converts; returns the exit code, as `absl.app.run` expects."""
    return commands.command(run, flags.FLAGS, argv)


if __name__ == "__main__":
    define_flags()
    sys.stdout.reconfigure(errors="replace")
    app.run(main)

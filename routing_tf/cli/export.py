r"""Writes a model as a SavedModel that TensorFlow serves without this package.

    python -m routing_tf.export --model_dir=my_run --export_dir=served

Prints the functions with their inputs and outputs, and Python that uses them.
"""

import pathlib
import textwrap

from absl import flags
from absl import logging

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.cli import hub_models
from routing_tf.cli.flag_kinds import ROUTING_SCOPES
from routing_tf.files.atomic import fill_folder
from routing_tf.files.atomic import is_empty

_TEXT = """\
scores = served.score([{text!r}])
print(scores["log_likelihood"])
written = served.generate([{prompt!r}], temperature=0.8, top_k=40, seed=1, length={n})
print(written["texts"][0].numpy().decode())
"""
_IDS = """\
ids, mask = tf.constant([{ids}]), tf.constant([{mask}])
print(served.score(ids, mask)["log_likelihood"])
print(served.generate(ids, mask, temperature=0.8, seed=1, length={n})["token_ids"])
"""
_IMAGES = """\
images = served.generate({first}, temperature=0.9, seed=1)["images"]
print(served.score(images{labels})["log_likelihood"])
"""


FLAGS = {
    **commands.BACKEND,
    **commands.CHECKPOINT,
    "model_dir": flag_kinds.path(
        "Folder of a run, a .keras file or a preset directory; of one of keras_hub or "
        "`sparsify` the call is written, from ids to logits.",
        required=True,
    ),
    "export_dir": flag_kinds.path(
        "Folder to write the SavedModel into: new, empty or an earlier export, which "
        "is replaced.",
        required=True,
    ),
    "routing_scope": flag_kinds.choice(
        None,
        ROUTING_SCOPES,
        "Which tokens compete for a place in a cluster in `score`, see `evaluate`. "
        "`generate` always has prefix. Default: that of the hyperparameters.",
    ),
    "max_length": flag_kinds.integer(
        None,
        1,
        "Largest number of tokens of a text; every call computes with this length. "
        "Default: that of the model's sequences.",
    ),
    "overwrite": flag_kinds.switch(
        False, "Write into the folder even if it holds other files."
    ),
}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)


def run(options):
    """Exports as the flags say."""
    from routing_tf.models import saved_model
    from routing_tf.training import loading

    saved_model.check_backend(options.model_dir, options.export_dir)
    _check_folder(options.export_dir, options.overwrite)
    if hub_models.is_preset(options.model_dir):
        with fill_folder(options.export_dir) as folder:
            unread = "routing_scope", "max_length"
            snippet = hub_models.export(options, folder, *unread)
    else:
        model = loading.load_language_model(options.model_dir, options.checkpoint)
        print(f"model: {options.model_dir}", flush=True)
        with fill_folder(options.export_dir) as folder:
            model.export(
                folder,
                verbose=True,
                routing_scope=options.routing_scope,
                max_length=options.max_length,
            )
        snippet = _snippet(model, options)
    print(f"SavedModel: {options.export_dir}; this uses it:\n")
    print(textwrap.indent(snippet, "    "))


def _check_folder(folder, overwrite):
    path = pathlib.Path(folder)
    if not path.exists() or overwrite and path.is_dir():
        return
    is_export = (path / "saved_model.pb").is_file()
    if not path.is_dir() or not is_export and not is_empty(path):
        raise ValueError(
            "`--export_dir` must be a new or empty folder, or an earlier export. "
            f"Received: --export_dir={folder!r}. Name another folder, or pass "
            "--overwrite to keep its other files"
        )


def _snippet(model, options):
    """Returns Python that uses the SavedModel."""
    from routing_tf.tokenizers import SubwordTokenizer

    lines = ["import tensorflow as tf"]
    preprocessor = getattr(model, "preprocessor", None)
    if isinstance(getattr(preprocessor, "tokenizer", None), SubwordTokenizer):
        lines.append("import tensorflow_text  # has operations of the tokenizer")
    lines.append(f"\nserved = tf.saved_model.load({options.export_dir!r})\n")
    return "\n".join(lines) + _calls(model, options.max_length)


def _calls(model, max_length):
    from routing_tf.models import saved_functions

    h = model.hyperparameters
    if h.kind == "image":
        has_labels = h.num_classes is not None
        first, labels = ("[0, 1]", ", [0, 1]") if has_labels else ("2", "")
        return _IMAGES.format(first=first, labels=labels)
    length = min(64, max_length or saved_functions.default_max_length(model))
    calls = _IDS if model.preprocessor is None else _TEXT
    if h.kind == "seq2seq":
        # With an encoder, there is no `score`.
        calls = "".join(line for line in calls.splitlines(True) if "score" not in line)
    # No text and no prompt may be longer than that.
    return calls.format(
        n=length,
        text="It was a dark night"[:length],
        prompt="It was"[: max(1, length // 2)],
        ids=[3, 1, 2][:length],
        mask=[True, True, True][:length],
    )


def _run_quietly(options):
    """Hides TensorFlow's lines about the names of saved objects."""
    import tensorflow as tf

    if options.verbosity < logging.DEBUG:
        logging.set_verbosity(logging.WARNING)
        tf.get_logger().setLevel("WARNING")
    run(options)


def main():
    """Runs the command, whose flags are those of the process."""
    commands.main(_run_quietly, define_flags)

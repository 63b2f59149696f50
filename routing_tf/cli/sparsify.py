r"""Turns the full attention of a trained model of keras_hub into sparse attention.

    python -m routing_tf.sparsify --preset=llama3.2_1b --calibration='texts/*.txt' \
        --output_dir=sparse_llama --evaluate='others/*.txt'

`keras_hub.models.CausalLM.from_preset("sparse_llama")` loads the result, after
`from routing_tf import retrofit`. A second call with the same `--output_dir` goes on
with the evaluation.
"""

import json
import os
import pathlib

from absl import flags

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.cli import hub_models
from routing_tf.files import named_files
from routing_tf.files.atomic import fill_folder
from routing_tf.files.atomic import is_empty
from routing_tf.files.progress import progress

LENGTH = 2048

FLAGS = {
    **commands.BACKEND,
    "preset": flag_kinds.string(
        None,
        "The model: a preset directory, or the name of a preset of keras_hub.",
        required=True,
    ),
    "calibration": flag_kinds.paths(
        "Texts in whose keys clusters are found, some thousand tokens: files or glob "
        "patterns, separated by commas."
    ),
    "output_dir": flag_kinds.path(
        "Folder to write the preset into; new or empty, or that of an earlier call.",
        required=True,
    ),
    "evaluate": flag_kinds.paths(
        "Other texts: how many nats per token does the changed model lose on them? "
        "Files or glob patterns, separated by commas."
    ),
    "length": flag_kinds.integer(
        None,
        4,
        "Tokens of a window of --evaluate, of which the last 3/4 count. Default: "
        f"{LENGTH:,}, or the positions that the model has learned, if these are fewer.",
    ),
    "num_recent": flag_kinds.integer(256, 0, "Nearest tokens that a query sees."),
    "num_sinks": flag_kinds.integer(4, 0, "First tokens that all queries see."),
    "attention_window": flag_kinds.integer(
        256, 1, "Tokens of clusters that a query sees."
    ),
    "num_clusters": flag_kinds.integer(128, 1, "Clusters of each head of keys."),
    "clusters_per_query": flag_kinds.integer(
        None, 1, "Clusters that a query reads; by default 8, or all if they are fewer."
    ),
    "keep_full": flag_kinds.string(
        "auto",
        "Layers that stay full: auto for those that would suffer most, at most a "
        "tenth; none; or their numbers, separated by commas.",
    ),
}
#: Name of the file of flags in a preset.
MADE_WITH = "sparsify.json"
SETTINGS = (
    "num_recent",
    "num_sinks",
    "attention_window",
    "num_clusters",
    "clusters_per_query",
)


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)


def run(options):
    """Changes a model, and scores it, as the flags say."""
    keep_full = _layers(options.keep_full)
    out = options.output_dir
    is_there = os.path.exists(os.path.join(out, MADE_WITH))
    if is_there:
        _check_same(options, out)
        lm = hub_models.load("output_dir", out)
        print(f"goes on with the model in {out!r}")
    else:
        _check_new(options, out)
        lm = hub_models.load("preset", os.path.expanduser(options.preset))
    windows = _windows(lm, options) if options.evaluate else None
    if not is_there:
        _change(lm, options, keep_full)
    if windows is not None:
        _evaluate(lm, windows, out)


def _layers(text):
    """Returns `keep_full` as `retrofit.sparsify` takes it."""
    if text in ("auto", "none"):
        return "auto" if text == "auto" else ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(
            "`--keep_full` must be auto, none, or numbers of layers separated by "
            f"commas. Received: --keep_full={text!r}"
        ) from error


def _check_same(options, out):
    """Refuses flags that differ from those of the call that made the preset."""
    made = json.loads(pathlib.Path(out, MADE_WITH).read_text())
    for name, value in made.items():
        if options[name].present and options[name].value != value:
            raise ValueError(
                f"`--{name}` must be that of the call that made `--output_dir`, "
                f"{value}. Received: --{name}={options[name].value}. Leave it out, or "
                "name another folder"
            )


def _check_new(options, out):
    if os.path.exists(out) and (not os.path.isdir(out) or not is_empty(out)):
        raise ValueError(
            "`--output_dir` must be a new or empty folder, or that of an earlier call. "
            f"Received: --output_dir={out!r}"
        )
    if not options.calibration:
        raise ValueError(
            "`--calibration` must be given for a new model. Received: none. Pass files "
            "with some thousand tokens of text"
        )


def _texts(flag, patterns):
    paths = named_files.find_files(f"--{flag}", patterns)
    return [
        named_files.read_file(path, f"--{flag}").decode(errors="replace")
        for path in paths
    ]


def _change(lm, options, keep_full):
    from routing_tf import retrofit

    settings = {name: options[name].value for name in SETTINGS}
    texts = _texts("calibration", options.calibration)
    report = retrofit.sparsify(lm, texts, keep_full=keep_full, **settings)
    print(report)
    with fill_folder(options.output_dir) as folder:
        lm.save_to_preset(str(folder))
        made = {
            name: options[name].value for name in ("preset", "keep_full", *SETTINGS)
        }
        pathlib.Path(folder, MADE_WITH).write_text(json.dumps(made, indent=1))
    print(
        "load it, after `from routing_tf import retrofit`, with "
        f"keras_hub.models.CausalLM.from_preset({options.output_dir!r})"
    )


def _windows(lm, options):
    from routing_tf.retrofit import scoring

    texts = _texts("evaluate", options.evaluate)
    length = scoring.checked_length(lm, options.length, default=LENGTH)
    return scoring.windows_of(lm, texts, length)


def _evaluate(lm, windows, out):
    from routing_tf import retrofit
    from routing_tf.retrofit import scoring

    figures = scoring.Figures(os.path.join(out, scoring.FIGURES))
    means = []
    for name in ("sparse", "full"):
        for row in progress(windows, f"window ({name} attention)"):
            figures.add(name, row, lambda row=row: scoring.nats(lm, row))
        means.append(figures.mean(name, windows))
        if name == "sparse":
            retrofit.restore(lm)
    sparse, full = means
    print(
        f"nats per token: {sparse:.4f}; with full attention {full:.4f}, "
        f"lost {sparse - full:.4f}"
    )


def main():
    """Runs the command, whose flags are those of the process."""
    commands.main(run, define_flags)

"""Looks inside the last checkpoint of a run.

Do later tokens reach earlier outputs, through which heads, and what is it worth?

    python -m routing_tf.analyse --what=causality --model_dir=my_run

Do decoding token by token and a SavedModel give the scores of one pass?

    python -m routing_tf.analyse --what=decoding --model_dir=my_run

How different are the attention of local and routed heads (Table 6 of the paper), and
how evenly are tokens spread over clusters?

    python -m routing_tf.analyse --what=jsd --model_dir=my_run

Pictures of the attention, and a text with the tokens of one cluster marked:

    python -m routing_tf.analyse --what=maps --model_dir=my_run

Which earlier positions does each token of a text read, and do they have what comes
next?

    python -m routing_tf.analyse --what=reads --model_dir=my_run
"""

import os

from absl import flags

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.cli import hub_models
from routing_tf.cli.flag_kinds import DEFAULT_EXAMPLES
from routing_tf.cli.flag_kinds import DEFAULT_LENGTHS
from routing_tf.cli.flag_kinds import ROUTING_SCOPES

# Flags for all values of --what, and those for only some.
SHARED = ("split", "routing_scope")
READERS = {
    "num_windows": ("causality",),
    "num_perturbations": ("causality",),
    "eval_examples": ("causality", "decoding"),
    "num_runs": ("jsd",),
    "length": ("jsd", "maps", "reads"),
    "text": ("maps", "reads"),
    "layer": ("maps", "reads"),
    "head": ("maps", "reads"),
    "cluster": ("maps",),
    "token": ("reads",),
    "output_dir": ("maps", "reads"),
    "seed": ("causality", "jsd"),
}


FLAGS = {
    **commands.BACKEND,
    **commands.CHECKPOINT,
    "what": flag_kinds.choice(
        None,
        ["causality", "decoding", "jsd", "maps", "reads"],
        "What to analyse: whether later tokens reach earlier outputs; whether decoding "
        "token by token gives the scores of one pass; the Jensen-Shannon divergence of "
        "heads, and clusters; pictures of attention; or which earlier positions tokens "
        "read.",
        required=True,
    ),
    "model_dir": flag_kinds.path(
        "Folder of the run; with --what=causality and --text also a preset directory "
        "of keras_hub or of `sparsify`.",
        required=True,
    ),
    **commands.DATA,
    "split": flag_kinds.choice(
        "test", ["validation", "test"], "Split of the data to analyse."
    ),
    "routing_scope": flag_kinds.choice(
        "full",
        ROUTING_SCOPES,
        "Which tokens compete for a place in a cluster (expert choice). full: those of "
        "the whole window, as in training. prefix: those up to each token, as in "
        "sampling. --what=causality scores in both. Other heads have one scope.",
    ),
    "num_windows": flag_kinds.integer(
        8, 1, "causality: number of held-out windows whose tokens are replaced."
    ),
    "num_perturbations": flag_kinds.integer(
        4,
        1,
        "causality: number of positions of each window from which all tokens are "
        "replaced.",
    ),
    "eval_examples": flag_kinds.integer(
        None,
        0,
        "causality, decoding: number of windows to score, evenly spaced; 0: all. "
        f"Default: {DEFAULT_EXAMPLES['causality']} or {DEFAULT_EXAMPLES['decoding']}.",
    ),
    "num_runs": flag_kinds.integer(
        10, 1, "jsd: number of repetitions, each on another window with other heads."
    ),
    "length": flag_kinds.integer(
        None,
        2,
        "jsd, maps, reads: number of tokens of a window; memory grows with its square. "
        f"Default: {DEFAULT_LENGTHS['jsd']}, {DEFAULT_LENGTHS['maps']} or "
        f"{DEFAULT_LENGTHS['reads']}, at most the model's. Images are not cut.",
    ),
    "layer": flag_kinds.integer(
        None,
        0,
        "maps: layer of the cluster. Default: the last one with clusters. reads: layer "
        "of the head. Default: the last one that reads beyond the reach of local "
        "heads.",
    ),
    "head": flag_kinds.integer(
        None,
        0,
        "maps: head of the cluster, among those with clusters. Default: 0. reads: "
        "head, among all heads of the layer. Default: the one that reads most strongly "
        "beyond the reach of local heads.",
    ),
    "cluster": flag_kinds.integer(
        None, 0, "maps: cluster to mark. Default: the largest."
    ),
    "token": flag_kinds.integer(
        None,
        0,
        "reads: token whose reads are shown; the first one of a text is 1. Default: "
        "one that reads far away and strongly.",
    ),
    "seed": flag_kinds.integer(0, 0, "causality, jsd: seed of the random draws."),
    "text": flag_kinds.string(
        None,
        "maps, reads, and models of keras_hub: the text to analyse. Default: the first "
        "held-out window.",
    ),
    "output_dir": flag_kinds.path(
        "maps, reads: folder of the pictures. Default: MODEL_DIR/maps or "
        "MODEL_DIR/reads."
    ),
}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)


def run(options):
    """Analyses as the flags say."""
    if hub_models.is_preset(options.model_dir):
        read = ("text", "length")
        hub_models.analyse(options, *(x for x in (*READERS, *SHARED) if x not in read))
        return
    unread = [name for name in READERS if options.what not in READERS[name]]
    commands.refuse(options, unread, f"with --what={options.what}")
    from routing_tf.analysis import looks
    from routing_tf.analysis import pictures

    if options.what == "maps":
        pictures.check_matplotlib()
    lm, problem = load(options)
    settings = {name: options[name].value for name in (*READERS, *SHARED)}
    if not options.output_dir:
        settings["output_dir"] = os.path.join(options.model_dir, options.what)
    getattr(looks.Look(lm, problem, **settings), options.what)()


def load(options):
    """Loads the model and its problem, and describes them."""
    from routing_tf.training import loading

    split = None if options.text else options.split
    checkpoint, problem = commands.open_run(options, split)
    if problem.kind == "seq2seq":
        raise ValueError(
            "`--model_dir` must hold a run of a model without an encoder: others "
            f"cannot be analysed. Received: one of {problem.name!r} in "
            f"{options.model_dir!r}"
        )
    if split is not None:
        print(f"data: {problem.describe(split)}")
    print(f"model: {checkpoint}", flush=True)
    return loading.load_language_model(checkpoint), problem


def main():
    """Runs the command, whose flags are those of the process."""
    commands.main(run, define_flags)

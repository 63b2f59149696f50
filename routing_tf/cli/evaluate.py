"""Scores held-out data with the last checkpoint of a run.

    python -m routing_tf.evaluate --model_dir=my_run

Or scores other files in the same way:

    python -m routing_tf.evaluate --model_dir=my_run --files='books/*.txt'

Or scores each of some files separately:

    python -m routing_tf.evaluate --model_dir=my_run --texts='books/*.txt'

The last line on standard output is the score.
"""

import dataclasses
import pathlib

from absl import flags

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.cli import hub_models
from routing_tf.cli.flag_kinds import ROUTING_SCOPES
from routing_tf.files import named_files
from routing_tf.files.names import SPLITS

FLAGS = {
    **commands.BACKEND,
    **commands.CHECKPOINT,
    "model_dir": flag_kinds.path(
        "Folder of the run to evaluate, or the path of one of its checkpoints; with "
        "--texts also a .keras file or a preset directory, also one of keras_hub or of "
        "`sparsify`.",
        required=True,
    ),
    **commands.DATA,
    "split": flag_kinds.choice(
        "test",
        SPLITS,
        "Split of the data to score; only this one is loaded. Without it, --files that "
        "the run does not have are scored whole.",
    ),
    "eval_examples": flag_kinds.integer(
        0,
        0,
        "Number of windows to score, evenly spaced; 0: all. `train` scores 64 of "
        "the validation split.",
    ),
    "texts": flag_kinds.paths(
        "Files or glob patterns of UTF-8 text to score instead of the run's data, "
        "separated by commas. Each file is a separate text, cut into windows of the "
        "model's length, which are scored independently."
    ),
    "length": flag_kinds.integer(
        None,
        2,
        "--texts with a model of keras_hub: tokens of a window. Default: that of its "
        "preprocessor.",
    ),
    "routing_scope": flag_kinds.choice(
        None,
        ROUTING_SCOPES,
        "Which tokens compete for a place in a cluster (expert choice). full: those of "
        "the whole window, as in published figures; later tokens influence the score, "
        "so it leaks. prefix: those up to each token, as in sampling; slower. Other "
        "heads have one scope. Default: that of the hyperparameters, which is full by "
        "default.",
    ),
    "num_words": flag_kinds.integer(
        None,
        1,
        "Total number of words of all --texts, for the total perplexity per word, such "
        "as the original token count of a corpus. Default: the number of words between "
        "white space.",
    ),
}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)
    flags.DEFINE_alias("eval_split", "split", flag_values=values)


def run(options):
    """Evaluates as the flags say."""
    if options.texts:
        score_texts(options)
        return
    for name in ("num_words", "length"):
        if options[name].present:
            raise ValueError(
                f"`--{name}` is for `--texts`. Received: "
                f"--{name}={options[name].value} without `--texts`"
            )
    path = pathlib.Path(options.model_dir)
    if path.suffix == ".keras" or (path / "config.json").is_file():
        raise ValueError(
            "`--model_dir` must hold a run, which has data to score; a model "
            f"without a run needs `--texts`. Received: {options.model_dir!r} without "
            "`--texts`"
        )
    from routing_tf.models.score import TokenScorer
    from routing_tf.training import evaluation
    from routing_tf.training import loading

    split = options.split
    checkpoint, problem = open_data(options)
    print(f"data: {problem.describe(split)}")
    baseline = problem.baseline(split)
    if baseline:
        print(baseline)
    print(f"model: {checkpoint}", flush=True)
    lm = loading.load_language_model(checkpoint)
    scorer = TokenScorer(lm, options.routing_scope)
    result = evaluation.evaluate(scorer, problem, split, options.eval_examples or None)
    for line in evaluation.report(problem, split, result, lm.hyperparameters):
        print(line)
    print(evaluation.final_line(problem, split, result))


def open_data(options):
    """Finds the run and the problem to score; says which `--files` are scored.

    Files that the run does not have are scored whole, unless a split is named.
    """
    from routing_tf.training import loading

    split = options.split
    checkpoint, config = loading.find_run(options.model_dir, options.checkpoint)
    fields = commands.problem_fields(options, config)
    is_named = options["split"].present
    if not options.files or is_named or fields["problem"] != "text_files":
        return commands.open_run(options, split)
    paths = named_files.find_files("--files", options.files)
    own = loading.own_files(checkpoint, config)
    used = own.intersection(map(named_files.identity, paths))
    if used:
        print(
            f"files: {len(used)} of {len(paths)} belong to the run, so they are split "
            f"as for training, and the split {split!r} is scored; --texts scores whole "
            "files"
        )
        if used != own or len(used) < len(paths):
            # The split of a file depends on all files.
            print("files: WARNING: the run may have been trained on these files")
    else:
        print(f"files: {len(paths)}, none of the run; scored whole")
        fields["problem_options"][f"{split}_files"] = named_files.join_paths(paths)
    return checkpoint, loading.open_problem(
        checkpoint, config, fields, split, has_own_data=False
    )


def score_texts(options):
    """Scores the files of `--texts`."""
    names = (*commands.DATA, "split", "eval_examples")
    given = [name for name in names if options[name].present]
    if given:
        raise ValueError(
            "`--texts` are scored instead of a problem's data. Received also: "
            f"{', '.join(f'--{name}' for name in given)}"
        )
    from routing_tf import models
    from routing_tf.models import scoring
    from routing_tf.models.score import TokenScorer
    from routing_tf.models.score import influence_in_text
    from routing_tf.training import evaluation
    from routing_tf.training import loading

    paths = named_files.find_files("--texts", options.texts)
    check_texts(paths)
    if hub_models.is_preset(options.model_dir):
        hub_models.score_texts(options, paths, "routing_scope", "num_words")
        return
    commands.refuse(options, ["length"], "without a model of keras_hub")
    lm = loading.load_language_model(options.model_dir, options.checkpoint)
    if not isinstance(lm, models.RoutingTransformerCausalLM):
        raise ValueError(
            "`--texts` needs a language model without an encoder. Received: a "
            f"{type(lm).__name__} in {options.model_dir!r}"
        )
    print(f"model: {options.model_dir}", flush=True)
    scores = evaluation.score_files(
        paths,
        lambda text: lm.score(
            text, routing_scope=options.routing_scope, too_long="windows"
        ),
    )
    total, why_no_words = scoring.join(scores), None
    if options.num_words:
        total = dataclasses.replace(total, num_words=options.num_words)
    elif len(scores) > 1 and any(map(evaluation.no_words, scores)):
        why_no_words = (
            "no perplexity per word, as not every text has one; --num_words gives the "
            "number of words"
        )
    print(evaluation.describe_score("total", total, why_no_words))
    longest = max(scores, key=lambda score: score.num_tokens)
    scorer = TokenScorer(lm, total.routing_scope)
    influence = influence_in_text(scorer, longest.token_ids)
    scope = total.routing_scope
    print(evaluation.describe_scope(lm.hyperparameters, scope, influence))
    print(evaluation.final_line_of_texts(total))


def check_texts(paths):
    """Raises a `ValueError` for a file that is not UTF-8, before any is scored."""
    for path in paths:
        try:
            named_files.read_file(path, "texts").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"`--texts` must be text in UTF-8. Received: {path!r}: {error}. "
                "Convert it, for example with iconv"
            ) from error


def main():
    """Runs the command, whose flags are those of the process."""
    commands.main(run, define_flags)

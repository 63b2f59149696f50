"""Scores held-out text with the last checkpoint of a run.

    python -m routing_tf.evaluate --model_dir=my_run

Or files of text, each a text of its own:

    python -m routing_tf.evaluate --model_dir=my_run --texts='books/*.txt'

The last line on standard output is the score.
"""

import dataclasses

from absl import app
from absl import flags

from routing_tf import commands
from routing_tf import evaluation
from routing_tf import models
from routing_tf import run_directory
from routing_tf.models import scoring
from routing_tf.models.token_scorer import TokenScorer
from routing_tf.problems import text


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command.

    Args:
        values: the `absl.flags.FlagValues` to define them in.
    """
    flags.DEFINE_string(
        "model_dir",
        None,
        "Folder of the run to evaluate; with --texts also a .keras file or a preset "
        "directory.",
        required=True,
        flag_values=values,
    )
    commands.define_data_flags(values)
    for name in commands.DATA_FLAGS:  # or `--help` would leave them out
        flags.declare_key_flag(name, flag_values=values)
    flags.DEFINE_enum(
        "split",
        "test",
        ["validation", "test"],
        "Split of the data to score.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "eval_examples",
        0,
        "Windows to score, evenly spaced; 0: all. `train` takes 64 of validation.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "prefix_positions",
        256,
        "Tokens to score from their prefixes too; 0: none.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_string(
        "texts",
        None,
        "Files or glob patterns of UTF-8 text to score instead of the run's data, "
        "separated by commas. Each is a text of its own, cut into windows of the "
        "model's length that are scored independently.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "routing_scope",
        "full",
        scoring.ROUTING_SCOPES,
        "How --texts are scored. full: one pass over each window, in which later "
        "tokens may take part in choosing the members of clusters; prefix: each token "
        "from those before it alone, by one run of the model for each token.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_words",
        None,
        "Words of all --texts together, to which the total perplexity per word refers, "
        "such as the original token count of a corpus. Default: what stands between "
        "white space.",
        lower_bound=1,
        flag_values=values,
    )
    flags.register_validator(
        "prefix_positions",
        lambda number: number != 1,
        message="must be 0 or at least 2: one token has no standard error",
        flag_values=values,
    )


def run(options):
    """Evaluates as the flags say.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if there is no run to evaluate, or the data does not fit it.
    """
    if options.texts:
        score_texts(options)
        return
    if options.routing_scope != "full" or options.num_words:
        raise ValueError(
            "`--routing_scope` and `--num_words` are for `--texts`; of a problem, "
            "`--prefix_positions` tokens are scored from their prefixes. Received: no "
            "`--texts`"
        )
    config = run_directory.RunConfig.load(options.model_dir)
    saved = run_directory.checkpoints(options.model_dir)
    if config is None or not saved:
        raise ValueError(
            "`model_dir` must hold a run with a checkpoint; `python -m "
            f"routing_tf.train` makes one. Received: {options.model_dir!r}"
        )
    fields = commands.problem_fields(options, config)
    problem = dataclasses.replace(config, **fields).make_problem()
    vocabulary_size = config.hyperparameters.vocabulary_size
    if problem.vocabulary_size > vocabulary_size:
        raise ValueError(
            "The problem's vocabulary must not be larger than the model's. Received: "
            f"{problem.vocabulary_size} ids of {problem.name}, {vocabulary_size} of "
            "the model"
        )
    print(f"data: {problem.describe()}")
    if problem.baseline(options.split):
        print(problem.baseline(options.split))
    print(f"model: {saved[-1]}", flush=True)
    scorer = TokenScorer(run_directory.load_language_model(saved[-1]))
    result = evaluation.evaluate(
        scorer, problem, options.split, options.eval_examples or None
    )
    positions = options.prefix_positions
    for line in evaluation.report(
        scorer, problem, options.split, result, positions, config.seed
    ):
        print(line, flush=True)
    print(evaluation.final_line(problem, result))


def score_texts(options):
    """Scores the files of `--texts`.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if there is no language model, or a file cannot be scored.
    """
    given = [name for name in commands.DATA_FLAGS if getattr(options, name)]
    if given:
        raise ValueError(
            "`--texts` are scored instead of a problem's data. Received also: "
            f"{', '.join(f'--{name}' for name in given)}"
        )
    paths = text.find_files("texts", options.texts)
    lm = run_directory.load_language_model(options.model_dir)
    if not isinstance(lm, models.RoutingTransformerCausalLM):
        raise ValueError(
            "`--texts` need a language model without an encoder. Received: a "
            f"{type(lm).__name__} in {options.model_dir!r}"
        )
    print(f"model: {options.model_dir}", flush=True)
    scores = []
    for path in paths:
        if not text.read_file(path):
            print(f"{path}: empty")
            continue
        scores.append(score_file(lm, path, options.routing_scope))
        print(describe_score(path, scores[-1]), flush=True)
    if not scores:
        raise ValueError(
            f"`--texts` must name a file that is not empty. Received: {options.texts!r}"
        )
    total = scoring.join(scores)
    if options.num_words:
        total = dataclasses.replace(total, num_words=options.num_words)
    print(describe_score("total", total))
    print(describe_scope(lm.hyperparameters, options.routing_scope))
    print(f"held-out bits per byte: {total.bits_per_byte:.4f}")


def score_file(lm, path, routing_scope):
    """Scores one file; every token once.

    Args:
        lm: the language model.
        path: path of the file.
        routing_scope: `"full"` or `"prefix"`.

    Returns:
        `scoring.Score`.

    Raises:
        ValueError: if it is no text in UTF-8, or cannot be scored.
    """
    try:
        content = text.read_file(path).decode("utf-8")
        return lm.score(content, routing_scope=routing_scope, too_long="windows")
    except ValueError as error:
        raise ValueError(f"{path} cannot be scored: {error}") from error


def describe_score(name, score):
    """Returns a line for a reader: what a text scores.

    Args:
        name: what was scored.
        score: its `scoring.Score`.
    """
    line = (
        f"{name}: {score.num_tokens:,} tokens, {score.bits_per_byte:.4f} bits per "
        f"byte, perplexity {score.perplexity:,.4f} per token"
    )
    if score.perplexity_per_word is None:
        return f"{line}; no words"
    return (
        f"{line}, {score.perplexity_per_word:.6g} per word ({score.num_words:,} words)"
    )


def describe_scope(hyperparameters, routing_scope):
    """Returns a line for a reader: how texts were scored.

    Args:
        hyperparameters: `Hyperparameters` of the model.
        routing_scope: `"full"` or `"prefix"`.
    """
    line = f'routing scope "{routing_scope}": '
    if routing_scope == "prefix":
        return f"{line}every token from those before it alone, as in sampling"
    line += "every window in one pass; "
    if evaluation.routes_by_later_tokens(hyperparameters):
        return (
            f"{line}later tokens take part in choosing the members of clusters, so "
            "these figures leak: sampling may not reach them"
        )
    return f"{line}no head looks at later tokens, so prefixes would give the same"


def main(argv):
    """Evaluates; returns the exit code, as `absl.app.run` expects."""
    return commands.command(run, flags.FLAGS, argv)


if __name__ == "__main__":
    define_flags()
    app.run(main)

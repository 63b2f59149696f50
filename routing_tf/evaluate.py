"""Scores held-out text with the last checkpoint of a run.

    python -m routing_tf.evaluate --model_dir=my_run

The last line on standard output is the score.
"""

import dataclasses

from absl import app
from absl import flags

from routing_tf import commands
from routing_tf import evaluation
from routing_tf import run_directory


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command.

    Args:
        values: the `absl.flags.FlagValues` to define them in.
    """
    flags.DEFINE_string(
        "model_dir",
        None,
        "Folder of the run to evaluate.",
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
    scorer = evaluation.TokenScorer(run_directory.load_language_model(saved[-1]))
    result = evaluation.evaluate(
        scorer, problem, options.split, options.eval_examples or None
    )
    positions = options.prefix_positions
    for line in evaluation.report(
        scorer, problem, options.split, result, positions, config.seed
    ):
        print(line, flush=True)
    print(evaluation.final_line(problem, result))


def main(argv):
    """Evaluates; returns the exit code, as `absl.app.run` expects."""
    return commands.command(run, flags.FLAGS, argv)


if __name__ == "__main__":
    define_flags()
    app.run(main)

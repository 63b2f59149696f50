"""Trains a preset from several seeds at once: all take each step together, on JAX.

    export KERAS_BACKEND=jax
    python -m benchmarks.seeds_at_once --problem=digits --hparams_set=digits_small
    python -m benchmarks.seeds_at_once --print_only

A GPU is hardly busy with one small model, so several take little longer than one. Each
has the weights and the data of its seed, and is scored on the test split as
`benchmarks.compare_patterns` does it. A table of all runs that the file of figures has
is printed. `benchmarks.recall --seeds_at_once` trains its models in the same way.
"""

import pathlib

import jax
import jax.numpy as jnp
import keras
import tqdm
from absl import app
from absl import flags

from benchmarks import contest
from benchmarks import recall_model
from benchmarks import record
from benchmarks.recall_data import EVALUATION_SEED
from routing_tf import training
from routing_tf.cli import flag_kinds
from routing_tf.models.hyperparameters import parse_overrides
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.training import evaluation
from routing_tf.training import run_folder
from routing_tf.training.engines.jax_engine import one_step
from routing_tf.training.engines.step import TrainingStep

PRESET = "python_small"


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_string("hparams", "", "As of `routing_tf.train`.", **define)
    flags.DEFINE_string("hparams_set", PRESET, "A preset to change.", **define)
    flags.DEFINE_string("problem", "python_source", "What to train on.", **define)
    flags.DEFINE_multi_string("problem_option", [], "As of `train`.", **define)
    flags.DEFINE_string("files", None, "Text files in place of Python's.", **define)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "A model for each.", **define)
    flags.DEFINE_integer("train_steps", 900, "Steps.", lower_bound=1, **define)
    flags.DEFINE_integer(
        "steps_per_call", 45, "Steps that the device takes at once.", 1, **define
    )
    flags.DEFINE_integer("eval_examples", 128, "Windows to score.", 1, **define)
    flags.DEFINE_string(
        "results", "benchmarks/seeds_at_once.json", "File of the figures.", **define
    )
    flags.DEFINE_bool("print_only", False, "Print what the file has.", **define)


def check_backend():
    """Raises a `ValueError` except on JAX."""
    if keras.backend.backend() != "jax":
        raise ValueError(
            "Training all seeds at once needs JAX. Received: KERAS_BACKEND="
            f"{keras.backend.backend()}. Write KERAS_BACKEND=jax before the command"
        )


def stacked(trees):
    """Returns trees of the same arrays as one tree with a leading axis."""
    return keras.tree.map_structure(lambda *x: jnp.stack(x), *trees)


def many_steps(step):
    """Compiles calls of `step(state, inputs) -> (state, output)` for all seeds at once.

    Returns:
        Function of the state `[seeds, ...]` and the inputs `[steps, seeds, ...]`.
    """
    every_seed = jax.vmap(step)
    return jax.jit(
        lambda state, inputs: jax.lax.scan(every_seed, state, inputs), donate_argnums=0
    )


def train(options):
    """Trains and scores the models; returns bits per token, one for each seed."""
    check_backend()
    changes = parse_overrides(options.hparams)
    settings = preset_hyperparameters(options.hparams_set).replace(
        **changes, train_steps=options.train_steps
    )
    name, own = (
        options.problem,
        flag_kinds.parse_problem_options(options.problem_option),
    )
    if options.files:
        name, own = "text_files", {**own, "files": options.files}
    config, problem = run_folder.configure(name, settings, problem_options=own)
    size = evaluation.batch_size_of(config.hyperparameters, problem)
    states, data = [], []
    for seed in map(int, options.seeds):
        lm = training.build_model(config.hyperparameters, problem, seed)
        training.compile_for_training(lm, seed=seed)
        step = TrainingStep(lm, lm.optimizer, settings.gradient_clip_norm)
        states.append([jnp.copy(variable.value) for variable in step.variables])
        data.append(problem.dataset("train", size, seed=seed).as_numpy_iterator())
    state = stacked(states)
    call = many_steps(lambda state, x: one_step(step, state, *x))
    starts = range(0, options.train_steps, options.steps_per_call)
    for start in tqdm.tqdm(starts, disable=None):
        numbers = range(start, min(start + options.steps_per_call, options.train_steps))
        rows = [stacked([(next(each), jnp.int32(n)) for each in data]) for n in numbers]
        state, _ = call(state, stacked(rows))
    return [score(lm, step, state, i, problem, options) for i in range(len(states))]


def score(lm, step, state, index, problem, options):
    """Returns the bits per token of one of the models on the test split."""
    for variable, values in zip(step.variables, state, strict=True):
        variable.assign(values[index])
    found = evaluation.evaluate(lm, problem, "test", options.eval_examples)
    return round(found.bits, 4)


def train_recall(settings, eval_every):
    """Trains models of `benchmarks.recall`.

    Args:
        settings: list of `Settings` that differ only in the seed.
        eval_every: steps between evaluations.

    Returns:
        List of their curves, each a list of pairs of step and accuracy.
    """
    check_backend()
    networks = [recall_model.Network(each) for each in settings]
    model, steps = networks[-1].model, settings[-1].steps
    held_out = settings[-1].examples(recall_model.EVALUATED, EVALUATION_SEED)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def objective(trainable, others, tokens, positions, labels):
        logits, others, losses = model.stateless_call(
            trainable, others, [tokens, positions], training=True, return_losses=True
        )
        return loss_function(labels, logits) + sum(losses), others

    def step(state, inputs):
        trainable, others, of_optimizer = state
        compute = jax.value_and_grad(objective, has_aux=True)
        (loss, others), gradients = compute(trainable, others, *inputs)
        updated = model.optimizer.stateless_apply(of_optimizer, gradients, trainable)
        return [updated[0], list(others), list(updated[1])], loss

    def variables(network):
        model = network.model
        model.optimizer.build(model.trainable_variables)
        groups = (model.trainable_variables, model.non_trainable_variables)
        return [*groups, model.optimizer.variables]

    def batches(number):
        found = [each.examples(each.batch_size, each.seed, number) for each in settings]
        return stacked([tuple(examples[:3]) for examples in found])

    state = stacked(
        [
            [[jnp.copy(v.value) for v in group] for group in variables(n)]
            for n in networks
        ]
    )
    call, curves = many_steps(step), [[] for _ in networks]
    for start in tqdm.trange(0, steps, eval_every, disable=None):
        numbers = range(start, min(start + eval_every, steps))
        state, _ = call(state, stacked([batches(number) for number in numbers]))
        for index, curve in enumerate(curves):
            for group, values in zip(variables(networks[-1]), state, strict=True):
                for variable, each in zip(group, values, strict=True):
                    variable.assign(each[index])
            curve.append([numbers[-1] + 1, networks[-1].accuracy(held_out)])
    return curves


def table(runs):
    """Returns the lines of a table of all finished runs."""
    rows = []
    for run in runs:
        s = run["settings"]
        changed = s["hparams"].replace(",", ", ") or "as the preset"
        rows.append([changed, s["data"], s["preset"], f"{s['steps']:,}", run["bits"]])
    heads = ["hyperparameters", "data", "preset", "steps", "bits per token"]
    return record.table(heads, rows)


def benchmark(options):
    """Trains what the file lacks; prints the table."""
    figures = record.Record(options.results)
    data = options.files and pathlib.Path(options.files).name
    data = data or " ".join([options.problem, *options.problem_option])
    settings = {"hparams": options.hparams, "data": data, "steps": options.train_steps}
    settings |= {"seeds": [*map(int, options.seeds)], "preset": options.hparams_set}
    if not options.print_only and not figures.find(settings):
        device = jax.devices()[0].device_kind
        figures.add(settings, {"bits": train(options), "device": device})
    print("\n".join(table(figures.runs)))


def main(argv):
    return contest.command(argv, benchmark)


if __name__ == "__main__":
    define_flags()
    app.run(main)

"""All figures of README and docs that depend on the machine, by one command.

    pip install -e '.[bench]'
    python -m benchmarks.figures --minutes=25
    python -m benchmarks.figures --print_only
    python -m benchmarks.figures --write

The contenders are those of `attention`, `decode`, `train_step` and `scaling`, in turns
with a peer as there. What matters most comes first. Each row is written into a file at
once, so a second call goes on where the first was stopped; without the file all is
measured anew. All of it takes about an hour of two cores that have nothing else to do.
`--write` puts the tables and sentences of `benchmarks.figure_tables` into the pages.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from absl import app
from absl import flags

from benchmarks import attention
from benchmarks import compare_patterns
from benchmarks import contenders
from benchmarks import contest
from benchmarks import decode
from benchmarks import figure_tables
from benchmarks import machine
from benchmarks import pattern_heads
from benchmarks import patterns
from benchmarks import record
from benchmarks import report
from benchmarks import scaling
from benchmarks import train_step
from benchmarks.figure_tables import BOTH
from benchmarks.figure_tables import STEP

# What takes turns -> the command that has its flags, and the cases of a length.
CONTESTS = {
    "attention": (attention, contenders.attention),
    "scaling": (scaling, contenders.scaling),
    "decode": (decode, decode.cases_of),
    "train step": (train_step, train_step.cases_of),
    "SmolLM2": (attention, contenders.smollm2),
}
# What is computed there, in place of forward and backward pass.
KINDS = {"decode": "decode", "train step": STEP, "SmolLM2": "forward"}
PEERS = ("torch", "jax", "routing_transformer")
# Fewer turns where a run takes seconds.
LONG = ("--rounds=2", "--warm_up_runs=3")


@dataclasses.dataclass(frozen=True)
class Group:
    """Contenders that take turns with a reference.

    Args:
        what: a key of `CONTESTS`.
        length: number of tokens.
        names: contenders in the order in which they run.
        compare: name of the reference.
        dtype: what they compute in; the reference computes in `--compare_dtype`.
        arguments: flags of the command.
    """

    what: str
    length: int
    names: tuple
    compare: str
    dtype: str = "float32"
    arguments: tuple = ()

    @property
    def kind(self):
        """What is computed, the heading of the command's tables."""
        return KINDS.get(self.what, BOTH)

    def settings(self, case):
        """What the record calls the row of a `Case` or a `Row`."""
        names = ("contender", "length", "dtype", "passes")
        found = {name: getattr(case, name) for name in names}
        return {"what": self.what, **found}

    def run(self, results, is_over):
        """Runs what the record lacks; writes each row into it."""
        options = self.options()
        _, cases_of = CONTESTS[self.what]
        cases = {
            case.contender: case
            for case in cases_of(self.length, self.kind, self.dtype, options)
        }
        todo = [
            case
            for case in map(cases.get, self.names)
            if not results.find(self.settings(case))
        ]
        if not todo or is_over():
            return
        candidates = cases_of(self.length, self.kind, options.compare_dtype, options)
        (reference,) = contenders.choose(candidates, [self.compare])
        known = figure_tables.rows_of(results, self.what)
        turns = contest.Contest(options, len(todo), known, has_floor=False)
        for row in turns.rows(todo, reference, is_over):
            if results.find(self.settings(row)):  # the reference of another group
                continue
            results.add(self.settings(row), dataclasses.asdict(row))
            report.say(
                f"{row.passes}, {row.length:,}, {row.dtype}: " + figure_tables.line(row)
            )
        turns.bar.close()

    def options(self):
        """Returns the flags of the command."""
        module, _ = CONTESTS[self.what]
        values = flags.FlagValues()
        module.define_flags(values)
        values([self.what, "--max_seconds=30", "--rounds=3", *self.arguments])
        return values


@dataclasses.dataclass(frozen=True)
class Call:
    """A figure that a function returns.

    Args:
        found_by: what the record calls it.
        function: returns a dict.
    """

    found_by: dict
    function: Callable

    def run(self, results, is_over):
        """Calls the function unless the record has what it returns."""
        if results.find(self.found_by) or is_over():
            return
        found = self.function()
        results.add(self.found_by, found)
        report.say(
            f"{', '.join(map(str, self.found_by.values()))}: {json.dumps(found)}"
        )


def parts():
    """Returns lists of what is to be run by the names of `--only`.

    What matters most comes first, also among parts.
    """
    ours = [f"{name} (TensorFlow graph)" for name in figure_tables.OURS]
    full = [contenders.TORCH_FULL, figure_tables.KERAS_FULL]
    kmeans, dense = contenders.KMEANS, decode.REFERENCE
    expert = "expert choice (TensorFlow graph)"
    ways = [
        f"{name} ({way})"
        for name in ("token choice", "local", "expert choice")
        for way in ("TensorFlow XLA", "JAX")
    ]
    steps = [f"{name} sinusoids" for name in ("token choice", "expert choice", "dense")]
    remats = [f"{steps[1]} remat {remat}" for remat in contenders.REMATS]
    cached, whole = f"cache {ours[0]}", f"whole prefix {ours[0]}"

    def layers(length, *arguments):
        return Group("attention", length, (*ours, *full), kmeans, arguments=arguments)

    def steps_of(names):
        names = tuple(f"{name} (TensorFlow graph)" for name in names)
        return Group("train step", 8192, names, contenders.PACKAGE)

    return {
        "main job": [Call({"what": "main job"}, main_job)],
        "layer": [layers(8192, "--rounds=5")],
        "decode": [Group("decode", n, (cached,), dense) for n in (1024, 65536, 8192)],
        "train step": [steps_of(steps)],
        "step": [
            Call({"what": "step", "kind": kind}, step_of(kind))
            for kind in figure_tables.STEP_KINDS
        ],
        "lengths": [
            layers(2048),
            layers(65536, *LONG),
            layers(16384, *LONG),
            layers(4096),
        ],
        "ways": [Group("attention", 8192, (expert, *ways), kmeans)],
        "more lengths": [
            *(layers(n) for n in (512, 1024, 256)),
            layers(32768, *LONG),
        ],
        "bfloat16": [Group("attention", 8192, (*ours[:3], expert), kmeans, "bfloat16")],
        "scaling": [
            Group("scaling", n, (ours[0],), expert, arguments=LONG)
            for n in figure_tables.SCALED
        ],
        "remat": [steps_of(remats)],
        "whole prefix": [
            Group("decode", n, (whole,), dense, arguments=LONG)
            for n in (1024, 8192, 65536)
        ],
        "models": [Call({"what": "models"}, models)],
        "encoder": [Call({"what": "encoder"}, encoder)],
        "data": [Call({"what": "data"}, data)],
        "patterns": [
            Call(found_by(row, n), pattern_cost(row, n))
            for n in figure_tables.PATTERN_LENGTHS
            for row in pattern_heads.ROWS
        ],
    }


def main_job():
    """Trains the main job; returns seconds, of processors too, memory and bits."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "output")
        command = ["-m", "routing_tf.train", f"--model_dir={folder}/run"]
        start = time.perf_counter()
        with output.open("w") as file:
            process = subprocess.Popen([sys.executable, *command], stdout=file)
            _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        bits = re.findall(r"bits per byte: ([\d.]+)", output.read_text())[-1]
    return {
        "seconds": seconds,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": 1024 * usage.ru_maxrss,
        "bits_per_byte": float(bits),
    }


def step_of(kind):
    """Returns a function that runs `benchmarks.decode_cost` for a kind of heads."""

    def run():
        lengths = ",".join(map(str, figure_tables.CONTEXTS))
        arguments = [f"--kinds={kind}", f"--lengths={lengths}", "--compare=full"]
        return {"contexts": written("decode_cost", *arguments)[kind]}

    return run


def models():
    """Returns tokens per second of training steps of models with other heads."""
    names = ",".join(figure_tables.MODELS)
    arguments = [f"--patterns={names}", "--seeds=0"]
    found = written("compare_patterns", *arguments, flag="results")
    return {"models": [each for each in found if each["kind"] == "speed"]}


def data():
    """Returns the rows of the table of `benchmarks.data_speed`."""
    command = [sys.executable, "-m", "benchmarks.data_speed"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    return {"rows": [line.strip("| ").split(" | ") for line in lines[2:]]}


def encoder():
    """Returns what `benchmarks.encoder` measures, by length."""
    return {"lengths": written("encoder")}


def pattern_cost(row, length):
    """Returns a function that times a row of `benchmarks.patterns` at a length."""

    def run():
        options = flags.FlagValues()
        patterns.define_flags(options)
        options(["patterns"])
        return {"value": patterns.cost(row, options, length)}

    return run


def written(module, *arguments, flag="output"):
    """Runs a command of the benchmarks; returns what it writes, from JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "figures.json")
        command = ["-m", f"benchmarks.{module}", *arguments, f"--{flag}={path}"]
        subprocess.run(
            [sys.executable, *command], check=True, stdout=subprocess.DEVNULL
        )
        return json.loads(path.read_text())


def renew_patterns(results, path):
    """Adds the costs of all patterns to the file of `benchmarks.patterns`.

    Only where the record has all of them: those of one table are of one machine.
    """
    figures = compare_patterns.Figures(path)
    costs = {
        (f"cost at {length}", row): results.find(found_by(row, length))
        for length in figure_tables.PATTERN_LENGTHS
        for row in pattern_heads.ROWS
    }
    for (kind, row), found in costs.items() if all(costs.values()) else ():
        known = figures.find(kind=kind, row=row)
        if not known or known[-1]["value"] != found["value"]:
            figures.add(kind=kind, row=row, value=found["value"])


def found_by(row, length):
    """What the record calls the cost of a pattern."""
    return {"what": "patterns", "row": row, "length": length}


def remember_machine(results):
    """Writes into the record where it comes from.

    Raises:
        ValueError: if it comes from another machine or other versions.
    """
    about = machine.describe()
    known = results.find({"what": "machine"})
    if known is None:
        results.add({"what": "machine"}, about)
        return
    for name in ("machine", "versions"):
        if known[name] != about[name]:
            raise ValueError(
                "All rows of a --results must come from one machine and the same "
                f"versions. Received: {results.path}, measured on {known[name]}, where "
                f"this is {about[name]}. Give another --results, or delete the file"
            )


def benchmark(options):
    """Measures what is missing, prints all tables, and writes them if told to."""
    results = record.Record(options.results)
    chosen = contest.check_list("only", options.only, list(parts()))
    if not options.print_only and not options.write:
        measure(options, results, chosen)
    for name, lines in figure_tables.blocks(results).items():
        report.say(f"{figure_tables.PAGES[name]}, {name}:\n\n" + "\n".join(lines))
    if options.write:
        renew_patterns(results, figure_tables.ROOT / "benchmarks/all_patterns.json")
        figure_tables.write(results)
        draw(results, figure_tables.ROOT / "docs/attention_cost.png")


def draw(results, path):
    """Draws the times of one attention layer against the length."""
    rows = [
        row
        for row in figure_tables.rows_of(results, "attention")
        if row.dtype == "float32" and row.contender in figure_tables.layers().values()
    ]
    panels = [(f"{BOTH}, seconds", lambda row: row.seconds)]
    report.plot_lines(path, rows, panels, "8 heads of 64, window 256, causal")


def measure(options, results, chosen):
    """Runs parts until the minutes are over.

    Raises:
        ValueError: if a peer is not installed, or the record is of another machine.
    """
    missing = [name for name in PEERS if not machine.has(name)]
    if missing:
        raise ValueError(
            "All peers must be installed: pip install -e '.[bench]'. Received: no "
            + ", ".join(missing)
        )
    end = time.monotonic() + 60 * options.minutes
    remember_machine(results)
    for name, jobs in parts().items():
        if name in chosen:
            for job in jobs:
                job.run(results, lambda: time.monotonic() > end)
    if time.monotonic() > end:
        report.say("The minutes are over; the same command goes on.")


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    names = list(parts())
    flags.DEFINE_list("only", names, f"Any of: {', '.join(names)}.", **define)
    flags.DEFINE_float(
        "minutes", float("inf"), "Rows begin only before so many are over.", **define
    )
    flags.DEFINE_string(
        "results", "benchmarks/figures.json", "File of the figures.", **define
    )
    flags.DEFINE_bool("print_only", False, "Print what the file has.", **define)
    flags.DEFINE_bool("write", False, "Put what the file has into the pages.", **define)


def main(argv):
    return contest.command(argv, benchmark)


if __name__ == "__main__":
    define_flags()
    app.run(main)

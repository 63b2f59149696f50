"""Runs the tests, in parts: what XLA has compiled stays until a process ends.

Usage: python tools/run_tests.py [--backends=tensorflow,jax,torch]
           [--parts=heads,layers,models,retrofit,engines,documentation,others,golden]
           [-- PYTEST ARGUMENTS]
All parts run, also if one fails; the exit code tells whether all have passed. On torch
there are layers, those of the zoo included, and changed models.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
# They compute nothing with Keras: one backend is enough.
DATA = (
    "tests/benchmarks",
    "tests/commands_test.py",
    "tests/datagen_test.py",
    "tests/files",
    "tests/first_checks_test.py",
    "tests/main_test.py",
    "tests/output_file_test.py",
    "tests/problems",
    "tests/progress_test.py",
    "tests/promises_test.py",
    "tests/rooms_test.py",
    "tests/run_directory_test.py",
    "tests/run_tests_test.py",
    "tests/stop_strings_test.py",
    "tests/text_samples_test.py",
    "tests/tokenizers",
)
# What they compute is computed on both backends by tests of layers, models, engines
# and of `training`; `end_to_end_test` runs the commands on both.
ON_ONE_BACKEND = (
    "tests/analyse_test.py",
    "tests/analysis",
    "tests/convert_test.py",
    "tests/crash_test.py",
    "tests/evaluate_test.py",
    "tests/generate_test.py",
    "tests/readme_commands_test.py",
    "tests/sparsify_test.py",
    "tests/train_test.py",
    "tests/untrusted_test.py",
    "tests/workers_test.py",
)
# Of all layers' tests the first compiles most: with the others a worker would hold too
# much. What layers ignore, no part of their process may have.
HEADS = ("tests/layers/causality_test.py", "tests/layers/heads", "tests/zoo")
LAYERS = ("tests/layers", *(f"--ignore={path}" for path in HEADS[:2]))
MODELS = (
    "tests/models",
    "tests/optimizers",
    "tests/run_checkpoints_test.py",
    "tests/streaming_test.py",
    "tests/training_step_test.py",
    "tests/training_test.py",
)
# They are among those of layers and models, and a part of their own as well.
GOLDEN = (
    "tests/layers/golden_decoding_test.py",
    "tests/layers/golden_test.py",
    "tests/models/golden_decoding_test.py",
    "tests/models/golden_test.py",
)
# Figures, tables and examples: on TensorFlow.
DOCUMENTATION = (
    "tests/attention_patterns_test.py",
    "tests/docstring_test.py",
    "tests/documented_figures_test.py",
    "tests/hyperparameter_table_test.py",
    "tests/preset_table_test.py",
)
RETROFIT = ("tests/retrofit",)
ENGINES = ("tests/engines",)
PARTS = ("heads", "layers", "models", "retrofit", "engines", "documentation", "others")
# Parts that one process has room for, as each has to import and collect anew: on
# TensorFlow a worker of the last takes 2 to 3 GB, and what JAX compiles takes more.
PROCESSES = {
    "tensorflow": (
        *("heads", "layers"),
        "golden models retrofit engines documentation others",
    ),
    "jax": ("golden", "heads", "layers", "models", "retrofit engines others"),
    "torch": ("heads", "layers retrofit"),
}
# In the order of `tests/conftest.py`: the longest files first.
IN_PARALLEL = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")


def rest():
    """Returns the paths of the tests of both backends that no other part has."""
    found = sorted((ROOT / "tests").iterdir())
    paths = [f"tests/{path.name}" for path in found if _has_tests(path)]
    others = (*DATA, *ON_ONE_BACKEND, *HEADS, *LAYERS, *MODELS, *RETROFIT, *ENGINES)
    others += DOCUMENTATION
    return [path for path in paths if path not in others]


def _has_tests(path):
    return path.name.endswith("_test.py") or (
        path.is_dir() and any(path.glob("**/*_test.py"))
    )


def paths_of(part, backend):
    """Returns the tests of a part: TensorFlow's have those that need one backend."""
    once = (*DATA, *ON_ONE_BACKEND) if backend == "tensorflow" else ()
    return {
        "golden": GOLDEN,
        "heads": HEADS,
        "layers": LAYERS,
        "models": MODELS,
        "retrofit": RETROFIT,
        "engines": ENGINES,
        "documentation": DOCUMENTATION,
        "others": (*rest(), *once),
    }[part]


def processes(backends, parts):
    """Yields pairs of a backend and the paths of the tests that run in one process."""
    for backend in backends:
        for together in PROCESSES[backend]:
            chosen = [part for part in together.split() if part in parts]
            paths = [path for part in chosen for path in paths_of(part, backend)]
            if paths:
                yield backend, paths


def shared_cache(folder):
    """Returns settings of JAX: all processes share what one of them has compiled."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _names_in(known):
    """Returns the type of an option: names of `known` with commas between them."""

    def names(text):
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(
                f"{', '.join(sorted(unknown))}: must be of {', '.join(known)}"
            )
        return found

    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", type=_names_in(PROCESSES), default="tensorflow")
    parts = _names_in([*PARTS, "golden"])
    parser.add_argument("--parts", type=parts, default=",".join(PARTS))
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as cache:
        for backend, paths in processes(options.backends, options.parts):
            print(f"\n== {backend}: {' '.join(paths)}", flush=True)
            finished = subprocess.run(
                [sys.executable, "-m", "pytest", *IN_PARALLEL, *options.pytest, *paths],
                cwd=ROOT,
                env={**shared_cache(cache), **os.environ, "KERAS_BACKEND": backend},
            )
            # 5: all tests of this part were left out, as by `-m`
            if finished.returncode not in (0, 5):
                failed.append(f"{backend}: {' '.join(paths)}")
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

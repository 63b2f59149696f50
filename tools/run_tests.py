"""Runs the tests, in parts: what XLA has compiled stays until a process ends.

Usage: python tools/run_tests.py [--backends=tensorflow,jax,torch] [-- PYTEST ARGUMENTS]
All parts run, also if one fails; the exit code tells whether all have passed. On torch
there are layers alone, those of the zoo included.
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
    "tests/documented_figures_test.py",
    "tests/files",
    "tests/output_file_test.py",
    "tests/preset_table_test.py",
    "tests/problems",
    "tests/progress_test.py",
    "tests/promises_test.py",
    "tests/run_directory_test.py",
    "tests/text_samples_test.py",
    "tests/tokenizers",
)
# What they compute is computed on both backends by tests of layers, models, engines
# and of `training`; `end_to_end_test` runs the commands on both.
ON_ONE_BACKEND = (
    "tests/analyse_test.py",
    "tests/analysis",
    "tests/attention_patterns_test.py",
    "tests/convert_test.py",
    "tests/crash_test.py",
    "tests/evaluate_test.py",
    "tests/generate_test.py",
    "tests/readme_commands_test.py",
    "tests/train_test.py",
    "tests/untrusted_test.py",
    "tests/workers_test.py",
)
# Of all layers' tests the first compiles most: with the others a worker would hold too
# much.
HEADS = ("tests/layers/causality_test.py", "tests/layers/heads", "tests/zoo")
LAYERS = ("tests/layers", *(f"--ignore={path}" for path in HEADS[:2]))
MODELS = (
    "tests/models",
    "tests/optimizers",
    "tests/run_checkpoints_test.py",
    "tests/saved_files_test.py",
    "tests/streaming_test.py",
    "tests/training_step_test.py",
    "tests/training_test.py",
)
# In the order of `tests/conftest.py`: the longest files first.
IN_PARALLEL = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")


def rest():
    """Returns the paths of the tests of both backends that no other part has."""
    found = sorted((ROOT / "tests").iterdir())
    paths = [f"tests/{path.name}" for path in found if _has_tests(path)]
    others = (*DATA, *ON_ONE_BACKEND, *HEADS, *LAYERS, *MODELS)
    return [path for path in paths if path not in others]


def _has_tests(path):
    return path.name.endswith("_test.py") or (
        path.is_dir() and any(path.glob("**/*_test.py"))
    )


def parts(backends):
    """Yields pairs of a backend and the paths of the tests that run in one process.

    Args:
        backends: list of names; what one backend is enough for runs on TensorFlow.
    """
    for backend in backends:
        yield backend, list(HEADS)
        yield backend, list(LAYERS)
        if backend == "torch":
            continue
        if backend == "tensorflow":
            # 2 to 3 GB in a worker; what JAX compiles takes more.
            yield backend, [*MODELS, *rest(), *DATA, *ON_ONE_BACKEND]
        else:
            yield backend, list(MODELS)
            yield backend, rest()


def shared_cache(folder):
    """Returns settings of JAX: all processes share what one of them has compiled."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", default="tensorflow")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as cache:
        for backend, paths in parts(options.backends.split(",")):
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

"""Contenders in processes of their own, as the commands see them."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """One contender at one length.

    Args:
        contender: its name in the tables.
        library: what it computes with, `"tensorflow"`, `"jax"` or `"torch"`.
        build: `"module:function"`; the function returns another one that computes once
            and returns when the result is there.
        arguments: keyword arguments of the function, which JSON can hold.
        length: number of tokens.
        dtype: `"float32"` or `"bfloat16"`.
        passes: what is computed, a heading of the tables.
        operations: those that the result needs, see `benchmarks.operations`; None where
            no floor is known.
        exponent: how time grows with the length, to tell what would take too long.
        least_bytes: memory that it surely needs.
        units: what one run makes: tokens of a training step, decoded tokens.
        package: the import name of what must be installed beside the library.
    """

    contender: str
    library: str
    build: str
    arguments: dict
    length: int
    dtype: str = "float32"
    passes: str = ""
    operations: float | None = None
    exponent: float = 1.0
    least_bytes: float = 0.0
    units: int = 1
    package: str = ""


class WorkerError(Exception):
    """A contender failed; the message is one line."""


@contextlib.contextmanager
def started(case, device, timeout):
    """Starts a process of a case, which ends with the context.

    Args:
        case: the `Case`.
        device: `"cpu"` or `"gpu"`.
        timeout: seconds to wait for any one answer.

    Yields:
        A `Worker`.

    Raises:
        WorkerError: if the contender cannot be built.
    """
    spec = {
        "build": case.build,
        "arguments": case.arguments,
        "library": case.library,
        "device": device,
    }
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            cwd=ROOT,
            env=environment(case.library, device),
        ) as process,
    ):
        try:
            yield Worker(case, process, errors, timeout)
        finally:
            process.kill()


class Worker:
    """A living process of one case.

    Args:
        case: the `Case`.
        process: the `subprocess.Popen`.
        errors: file of its standard error.
        timeout: seconds to wait for any one answer.

    Attributes:
        bytes_before: memory of the process before its first run.

    Raises:
        WorkerError: from every method, if the process fails, dies or does not answer.
    """

    def __init__(self, case, process, errors, timeout):
        self.case = case
        self._process, self._errors, self._timeout = process, errors, timeout
        self.bytes_before = self._answer()["bytes_before"]

    def run(self, number=1):
        """Returns the seconds of each of some runs."""
        return self._ask(f"run {number}")["seconds"]

    def peak_bytes(self):
        """Returns the largest memory since the first run, compilation included."""
        return self._ask("memory")["peak_bytes"]

    @property
    def is_alive(self):
        """Whether the process can still answer."""
        return self._process.poll() is None

    def _ask(self, line):
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except OSError:
            raise WorkerError(self._last_words()) from None
        return self._answer()

    def _answer(self):
        # An answer is written at once, so what has begun to come comes.
        ready, _, _ = select.select([self._process.stdout], [], [], self._timeout)
        if not ready:
            self._process.kill()
            raise WorkerError(f"no answer within --timeout={self._timeout:g} seconds")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            self._process.kill()
            raise WorkerError(answer["error"])
        return answer

    def _last_words(self):
        """Says how a process ended that gave no error."""
        status = self._process.wait()
        if status < 0:
            return f"ended by signal {-status}" + " (out of memory?)" * (status == -9)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with status {status}: {lines[-1] if lines else 'no message'}"


def environment(library, device):
    """Returns the environment variables of a process.

    Args:
        library: `"tensorflow"`, `"jax"` or `"torch"`.
        device: `"cpu"` or `"gpu"`.
    """
    # The models need Keras with a backend that they know.
    backend = "jax" if library == "jax" else "tensorflow"
    chosen = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if device == "cpu":
        chosen |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    else:
        # Two processes share the GPU.
        chosen |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"}
        chosen["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return {**os.environ, **chosen}

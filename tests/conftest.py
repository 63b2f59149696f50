"""Settings of all tests."""

import ctypes
import ctypes.util
import functools
import gc
import os
import pathlib
import random

import numpy as np
import pytest

# Most of the time goes into compiling functions that run once.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false",
)
# JAX would write the lines of code that call each operation beside it.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Where it may, MKL, which computes for torch, rounds a product by where it stands in
# memory: a later token would change the last bits of earlier outputs.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# So does oneDNN, which computes for TensorFlow, where it has AVX2 and not AVX-512. With
# less than AVX, OpenVINO cannot run, which has a oneDNN of its own.
PROCESSORS = pathlib.Path("/proc/cpuinfo")
if PROCESSORS.exists() and "avx512" not in PROCESSORS.read_text():
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX")
# Small products on many threads: torch's threads would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# TensorFlow's notes on processors and accelerators drown the tests' own output.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


# A worker that gets one of these last keeps all others waiting: the longest first.
LONGEST = (
    "causality_test.py",
    "decoding_test.py",
    "equality_test.py",
    "saved_model_test.py",
    "docstring_test.py",
    "compiled_test.py",
    "workers_test.py",
    "crash_test.py",
    "readme_commands_test.py",
    "training_step_test.py",
    "training_test.py",
    "generate_test.py",
    "convert_test.py",
    "untrusted_test.py",
)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True, scope="session")
def rules_of_torch():
    import keras  # after the settings above

    if keras.backend.backend() == "torch":
        from tests import torch_rules

        torch_rules.enforce()


def pytest_collection_finish():
    """Nobody looks for garbage in what was imported: it stays, and is a lot.

    Elsewhere, too, Python looks less often than by itself, which is up to a tenth of
    the time of tests that trace much.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def weights_without_a_seed_are_the_same_in_each_run():
    """Seeds come from Python: Keras draws them there.

    `set_random_seed` makes TensorFlow forget its kernels. Each test would make them
    anew, which takes a sixth of all time.
    """
    random.seed(0)


# Until a worker holds so many bytes, what is compiled serves its later files as well.
ROOM = 1_500_000_000


@pytest.fixture(autouse=True, scope="module")
def memory_is_given_back():
    """A worker runs many files: it must not keep all that they have compiled."""
    yield
    import keras  # after the settings above

    keras.utils.clear_session(free_memory=False)
    if _bytes_held() < ROOM:
        return
    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()
    gc.collect()
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
    if trim is not None:  # glibc keeps what is freed
        trim(0)


def _bytes_held():
    statistics = pathlib.Path("/proc/self/statm").read_text()
    return int(statistics.split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def eager():
    """TensorFlow compiles nothing: to trace a step costs more than to run ten of them.

    JAX compiles as ever, which is cheaper there.
    """
    from tests import tracing  # after the settings above

    with tracing.eager():
        yield


@pytest.fixture
def compiled():
    """Compiles as a user's process does, in a module of `eager` tests."""
    from tests import tracing

    with tracing.traced():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Path of a file of 4,000 random letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = np.random.default_rng(0).integers(97, 123, 4000, "uint8")
    path.write_bytes(bytes(letters))
    return path


@pytest.fixture
def run_command(capsys):
    """Runs a command in this process: exit code, standard output and error."""
    from tests import command_line

    def run(*arguments, **options):
        return command_line.run(*arguments, **options), *capsys.readouterr()

    return run


@pytest.fixture
def works(run_command):
    """Runs a command that must end well: what it says on standard output."""

    def works(command, *arguments):
        code, out, err = run_command(command, *arguments)
        assert code == 0, err
        return out

    return works


@pytest.fixture
def refused(run_command):
    """Runs a command that must end with a mistake: what it says of that."""

    def refused(command, *arguments, quiet=False):
        code, out, err = run_command(command, *arguments)
        assert code == 1
        assert "Traceback" not in err
        assert not quiet or out == ""
        before, error, said = err.partition("error: ")
        assert error and not before.rpartition("\n")[2]
        return said.rstrip("\n")

    return refused


@pytest.fixture(scope="module")
def loaded_once():
    """Commands of a module share the models that they load, and change none."""
    from routing_tf.training import loading

    load = functools.cache(loading.load_language_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loading,
            "load_language_model",
            lambda source, which="last": load(str(source), which),
        )
        yield

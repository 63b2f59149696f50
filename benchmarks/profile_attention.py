"""Where the time of an attention pattern goes, by the profiler of the backend.

    python -m benchmarks.profile_attention --pattern='expert choice' --dtype=bfloat16
    KERAS_BACKEND=jax python -m benchmarks.profile_attention --implementation=auto
    taskset -c 0 python -m benchmarks.profile_attention --train_step

Prints the milliseconds that each kind of operation takes in one forward+backward of
`benchmarks.attention`, or in a training step, as a TensorFlow graph; on JAX those of
each kernel. Operations overlap on several cores, so they add up to more than the time
of a pass.
"""

import collections
import contextlib
import pathlib
import re
import tempfile

import keras
from absl import app
from absl import flags

from benchmarks import contenders
from benchmarks import keras_attention
from benchmarks import language_models
from routing_tf.layers.softmax.fused_attention import IMPLEMENTATIONS

PASSES = 3
# What the runtime notes beside operations.
RUNTIME = {"Process", "ParallelFor", "Run", "FunctionRun", "ExecutorDoneCallback"}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_enum(
        "pattern", "expert choice", contenders.PATTERNS, "The pattern.", **define
    )
    flags.DEFINE_bool("relative", False, "Whether positions are relative.", **define)
    flags.DEFINE_bool(
        "train_step",
        False,
        "Whether it is a step of `benchmarks.train_step`, whose routed heads have the "
        "pattern, expert choice or token choice.",
        **define,
    )
    flags.DEFINE_enum(
        "dtype", "float32", ["float32", "bfloat16"], "Type of computations.", **define
    )
    flags.DEFINE_enum(
        "implementation",
        "plain",
        IMPLEMENTATIONS,
        "`attention_implementation` of the layer.",
        **define,
    )
    flags.DEFINE_integer("length", 8192, "Tokens.", lower_bound=2, **define)
    flags.DEFINE_integer("most", 20, "Rows to print.", lower_bound=1, **define)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    options = flags.FLAGS
    run = train_step(options) if options.train_step else attention(options)
    print("| operation | times | milliseconds |\n| --- | --- | --- |")
    for name, (number, seconds) in profile(run)[: options.most]:
        print(f"| {name} | {number:g} | {1e3 * seconds:.1f} |")


def attention(options):
    """Returns a function that runs the pattern once."""
    window = min(256, options.length)
    return keras_attention.ours(
        (1, 8, options.length, 64),
        options.pattern,
        window,
        max(1, options.length // window),
        options.relative,
        options.dtype,
        "forward+backward",
        xla=False,
        implementation=options.implementation,
    )


def train_step(options):
    """Returns a function that runs a training step."""
    if options.pattern not in language_models.ROUTINGS:
        raise app.UsageError(
            "--pattern must be 'expert choice' or 'token choice' with --train_step. "
            f"Received: --pattern={options.pattern!r}"
        )
    return language_models.train_step(
        contenders.SIZES,
        options.length,
        options.pattern,
        options.relative,
        None,
        options.dtype,
        xla=False,
        implementation=options.implementation,
    )


def profile(run):
    """Returns pairs of an operation and its `(number, seconds)` in a run, slow first.

    Args:
        run: function without arguments.
    """
    for _ in range(2):
        run()
    on_jax = keras.backend.backend() == "jax"
    with tempfile.TemporaryDirectory() as folder:
        with _traced_on_jax(folder) if on_jax else _traced_on_tensorflow(folder):
            for _ in range(PASSES):
                run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        noted = list((_events_of_jax if on_jax else _events_of_tensorflow)(path))
    totals = collections.defaultdict(lambda: (0.0, 0.0))
    for name, seconds in noted:
        number, total = totals[name]
        totals[name] = number + 1 / PASSES, total + seconds / PASSES
    return sorted(totals.items(), key=lambda item: -item[1][1])


def _traced_on_tensorflow(folder):
    import tensorflow as tf

    return tf.profiler.experimental.Profile(folder)


@contextlib.contextmanager
def _traced_on_jax(folder):
    import jax

    with jax.profiler.trace(folder):
        yield


def _events_of_tensorflow(path):
    """Yields the name of an operation and its seconds, each time that it ran."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        for event in (event for line in plane.lines for event in line.events):
            # Operations are noted as "name in the graph:kind".
            name, _, kind = plane.event_metadata[event.metadata_id].name.rpartition(":")
            is_operation = kind not in RUNTIME and not kind.startswith(" ")
            if name and not name.endswith(":") and is_operation:
                yield kind, event.duration_ps / 1e12


def _events_of_jax(path):
    """The same of kernels, by their names without numbers."""
    import jax

    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            # The streams of a GPU; on a CPU, the thread pool of XLA.
            if ("Stream" if devices else "XLA") not in line.name:
                continue
            for event in line.events:
                # The pool notes its own work, too; names of kernels may have colons.
                is_own = not devices and "::" in event.name
                if not is_own and not event.name.startswith("end: "):
                    yield re.sub(r"[._]\d+", "", event.name), event.duration_ns / 1e9


if __name__ == "__main__":
    define_flags()
    app.run(main)

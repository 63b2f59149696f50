"""Compiles token choice for a TPU that need not be there, and prints what it takes.

    pip install libtpu
    python -m benchmarks.tpu --topology=v5e:2x2

Compiles forward and backward pass of routed heads, as in `benchmarks.attention`, ahead
of time for one device of the topology: with plain attention, and with the splash kernel
(`attention_implementation="splash"`). Prints the seconds that it took, the memory that
XLA plans beside inputs and outputs, and the number of kernels. Nothing runs.
"""

import os
import sys
import time

from absl import app
from absl import flags

WAYS = ("plain", "splash")


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_string("topology", "v5e:2x2", "Name as JAX knows it.", **define)
    flags.DEFINE_list("lengths", ["8192", "65536"], "Numbers of tokens.", **define)
    flags.DEFINE_list(
        "dtypes", ["float32", "bfloat16"], "Types of computations.", **define
    )
    flags.DEFINE_integer("num_heads", 8, "Heads.", lower_bound=1, **define)
    flags.DEFINE_integer("key_dim", 64, "Size of a head.", lower_bound=2, **define)
    flags.DEFINE_integer("attention_window", 256, "Tokens.", lower_bound=1, **define)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    os.environ["KERAS_BACKEND"] = "jax"
    # There is no TPU to ask what it is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        device = first_device(flags.FLAGS.topology)
    except Exception as error:
        print(
            "--topology must be one that libtpu knows, and `pip install libtpu` done. "
            f"Received: --topology={flags.FLAGS.topology}: {error}",
            file=sys.stderr,
        )
        return 1
    print("| attention | dtype | tokens | seconds to compile | memory | kernels |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype in flags.FLAGS.dtypes:
        for length in map(int, flags.FLAGS.lengths):
            for way in WAYS:
                seconds, size, kernels = compiled(way, dtype, length, device)
                print(
                    f"| {way} | {dtype} | {length:,} | {seconds:.1f} | "
                    f"{size / 2**20:,.0f} MiB | {kernels} |",
                    flush=True,
                )
    return 0


def first_device(topology):
    """Returns the first device of a topology that is not there."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[
        0
    ]


def compiled(way, dtype, length, device):
    """Compiles a forward and backward pass.

    Args:
        way: `attention_implementation` of the heads.
        dtype: `"float32"` or `"bfloat16"`.
        length: number of tokens.
        device: to compile for.

    Returns:
        Seconds, bytes beside inputs and outputs, and the number of kernels.
    """
    import jax
    import keras
    from keras import ops

    from benchmarks.keras_attention import policy
    from routing_tf import layers
    from routing_tf.layers.routing import splash_attention

    # The device that compiles is not the one that this is for.
    splash_attention.lack_of_device = lambda: None
    options = flags.FLAGS
    shape = (1, options.num_heads, length, options.key_dim)
    window = min(options.attention_window, length)
    group = layers.RoutedHeads(
        options.num_heads,
        max(1, length // window),
        window,
        attention_implementation=way,
        dtype=policy(dtype),
    )
    group.build(shape, shape, shape)

    def loss(query, value):
        with keras.StatelessScope(collect_losses=True):
            output = group(query, None, value, use_causal_mask=True)
        return ops.sum(ops.cast(output, "float32"))

    tensor = jax.ShapeDtypeStruct(
        shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    start = time.perf_counter()
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(tensor, tensor)
    size = lowered.compile().memory_analysis().temp_size_in_bytes
    seconds = time.perf_counter() - start
    return seconds, size, lowered.as_text().count("tpu_custom_call")


if __name__ == "__main__":
    define_flags()
    app.run(main)

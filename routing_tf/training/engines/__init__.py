"""Where a run computes: one device, many, many machines, TPUs.

An engine runs the same `TrainingStep` on the devices of `tf.distribute` or
`keras.distribution`. Each backend has one, in its own file.
"""

import keras

STRATEGIES = ("one", "mirrored", "multi_worker", "tpu")


def make(strategy="one", tpu=None, num_virtual_devices=None):
    """Makes the engine of the running backend.

    Make it before TensorFlow or JAX is used in the process.

    Args:
        strategy: `"one"` (the default): one device. `"mirrored"`: all devices of this
            machine. `"multi_worker"`: those of several machines; on TensorFlow
            `TF_CONFIG` names them, on JAX the environment that
            `keras.distribution.initialize` reads. `"tpu"`: the cores of a TPU.
        tpu: name or address of the TPU for TensorFlow; `"local"` for that of a TPU VM.
            None (the default): that of the environment.
        num_virtual_devices: number of devices into which the CPU is split, to try
            "mirrored" or "multi_worker" without accelerators; None (the default) for
            one.

    Returns:
        An engine, see `TensorFlowEngine`.

    Raises:
        ValueError: if there is no such strategy, or its requirements are missing.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"`strategy` must be one of {', '.join(map(repr, STRATEGIES))}. "
            f"Received: strategy={strategy!r}"
        )
    if tpu is not None and strategy != "tpu":
        raise ValueError(
            "`tpu` needs the strategy 'tpu'. Received: "
            f"tpu={tpu!r}, strategy={strategy!r}"
        )
    several = ("mirrored", "multi_worker")
    if (num_virtual_devices or 1) > 1 and strategy not in several:
        raise ValueError(
            "`num_virtual_devices` above 1 needs the strategy 'mirrored' or "
            "'multi_worker'. Received: "
            f"num_virtual_devices={num_virtual_devices}, strategy={strategy!r}"
        )
    if keras.backend.backend() == "tensorflow":
        from routing_tf.training.engines.tensorflow_engine import TensorFlowEngine

        return TensorFlowEngine.of(strategy, tpu, num_virtual_devices)
    if keras.backend.backend() == "jax":
        from routing_tf.training.engines.jax_engine import JaxEngine

        return JaxEngine.of(strategy, tpu, num_virtual_devices)
    raise ValueError(
        "The backend must be tensorflow or jax. Received: "
        f"keras.backend.backend()={keras.backend.backend()!r}. Use --backend or set "
        "KERAS_BACKEND"
    )

"""Softmax attention by kernels of JAX, which do not store the weights of pairs.

`keras.ops.dot_product_attention` also calls them, but asks cuDNN about the forward pass
only, and hands it more short sequences than CUDA launches at once.
"""

import functools
import math
import warnings

import keras
import numpy as np
from keras import ops

#: What computes the attention inside a block, a cluster or a sequence.
IMPLEMENTATIONS = ("plain", "auto", "cudnn", "splash", "xla")

# Above the number that JAX uses for masked logits, and below all others.
_LEAST_BIAS, _LEAST_BIAS_IN_FLOAT16 = -1e9, -1.5e4
# Head sizes that all devices of cuDNN accept: multiples of the first, up to the second.
_SIZE_STEP, _MAX_SIZE = 8, 128
# The largest batch that CUDA launches at once.
_MAX_BATCH = 65535


def chosen(implementation):
    """Returns the implementation to use: Keras can turn kernels off for all layers."""
    # None is Keras' word for kernels where there are some.
    is_off = keras.config.is_flash_attention_enabled() is False
    return "plain" if is_off and implementation == "auto" else implementation


def obstacle(implementation, query, key, value):
    """Returns why the kernels cannot take these inputs, in words; or None.

    Args:
        implementation: as in `attend`.
        query: as in `attend`.
        key: as in `attend`.
        value: as in `attend`.
    """
    if keras.backend.backend() != "jax":
        return f"the backend is {keras.backend.backend()}, and the kernels are JAX's"
    if not all(isinstance(length, int) for length in query.shape):
        return "kernels need a known size of the batch"
    if implementation == "xla":
        return None
    if implementation == "auto" and (lack := _lack_of_device()) is not None:
        return lack
    dtype = keras.backend.standardize_dtype(query.dtype)
    if dtype not in ("float16", "bfloat16"):
        return f"cuDNN has no attention in {dtype}"
    size = max(query.shape[-1], value.shape[-1])
    if size > _MAX_SIZE:
        return f"cuDNN takes sizes of keys and values up to {_MAX_SIZE}, not {size}"
    if query.shape[-2] % 2 or key.shape[-2] % 2:
        return "cuDNN takes even numbers of queries and keys, and one of these is odd"
    return None


def attend(implementation, query, key, value, mask=None, bias=None, is_causal=False):
    """Attends with a kernel of JAX; None where `"auto"` finds that JAX refuses.

    All leading axes form one batch of short sequences. The mask and the bias are
    broadcastable to `[..., queries, keys]`. With `is_causal`, which needs as many
    queries as keys, a query sees only keys up to its own place. The output of a query
    that sees nothing has no meaning. `"auto"` is cuDNN where possible, and one message
    elsewhere; `"xla"` is the reference of JAX. Others are an error if JAX refuses.
    """
    operands, restore = _arranged(query, key, value, mask, bias)
    kernel = functools.partial(
        _in_parts,
        is_causal=is_causal,
        implementation="xla" if implementation == "xla" else "cudnn",
    )
    refusal = _refusal(kernel, operands)
    if refusal is not None:
        return decline(implementation, refusal)
    return restore(kernel(*operands))


def decline(implementation, reason):
    """Warns once why the plain path is used; an error except for `"auto"`."""
    if implementation != "auto":
        raise ValueError(
            f'`attention_implementation` must be "auto" or "plain": {reason}. '
            f"Received: attention_implementation={implementation!r}"
        )
    warn_once(reason)


@functools.cache
def warn_once(reason):
    """Warns with a reason, the first time."""
    warnings.warn(
        f'attention_implementation="auto" is "plain" here: {reason}', stacklevel=2
    )


def _lack_of_device():
    """Returns what the device lacks, in words; None if nothing."""
    import jax

    if jax.default_backend() != "gpu":
        return "there is no GPU"
    capability = getattr(jax.local_devices()[0], "compute_capability", "none")
    if not capability.split(".")[0].isdecimal() or float(capability) < 8:
        return (
            "cuDNN's attention needs a GPU of compute capability 8.0 or more, and "
            f"this one has {capability}"
        )
    return None


def _refusal(kernel, operands):
    """Returns why JAX refuses the operands, forward or backward; or None."""
    import jax

    def sums(*operands):
        return kernel(*operands).astype("float32").sum()

    try:
        jax.eval_shape(jax.grad(sums), *operands)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).rstrip(".")
    return None


def _arranged(query, key, value, mask, bias):
    """Returns operands of `_in_parts`, and a function that undoes their order."""
    given = (x for x in (query, key, value, mask, bias) if x is not None)
    leading = np.broadcast_shapes(*(tuple(ops.shape(x)[:-2]) for x in given))
    size = max(query.shape[-1], value.shape[-1])
    size = -(-size // _SIZE_STEP) * _SIZE_STEP
    num_queries, num_keys = query.shape[-2], key.shape[-2]

    def sequences(x):
        # Zeros change neither logits nor the other entries of an output.
        missing = [(0, 0)] * (len(x.shape) - 1) + [(0, size - x.shape[-1])]
        x = ops.broadcast_to(ops.pad(x, missing), (*leading, x.shape[-2], size))
        return ops.reshape(x, (math.prod(leading), x.shape[-2], 1, size))

    def pairs(x):
        if x is None:
            return None
        x = ops.convert_to_tensor(x)
        shared = all(length == 1 for length in x.shape[:-2])
        shape = () if shared else leading
        if shared:
            x = ops.reshape(x, ((1, 1) + tuple(x.shape))[-2:])
        x = ops.broadcast_to(x, (*shape, num_queries, num_keys))
        return ops.reshape(x, (math.prod(shape), 1, num_queries, num_keys))

    def restore(output):
        output = ops.reshape(output, (*leading, num_queries, size))
        return output[..., : value.shape[-1]]

    if mask is not None:
        mask = ops.cast(mask, "bool")
    if bias is not None:
        is_float16 = keras.backend.standardize_dtype(query.dtype) == "float16"
        least = _LEAST_BIAS_IN_FLOAT16 if is_float16 else _LEAST_BIAS
        bias = ops.maximum(ops.cast(bias, query.dtype), least)
    operands = (*(sequences(x) for x in (query, key, value)), pairs(bias), pairs(mask))
    return operands, restore


def _in_parts(query, key, value, bias, mask, is_causal, implementation):
    """Attends with `[N, queries or keys, 1, size]` in launches of a size CUDA takes."""
    import jax

    outputs = []
    for start in range(0, max(query.shape[0], 1), _MAX_BATCH):
        part = slice(start, start + _MAX_BATCH)
        own = (x if x is None or len(x) == 1 else x[part] for x in (bias, mask))
        outputs.append(
            jax.nn.dot_product_attention(
                *(x[part] for x in (query, key, value)),
                *own,
                scale=1.0,
                is_causal=is_causal,
                implementation=implementation,
            )
        )
    return outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=0)

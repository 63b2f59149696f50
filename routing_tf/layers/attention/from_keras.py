"""Attention layers with the weights of layers of Keras."""

import keras

from routing_tf.layers.heads.sliding import SlidingHeads
from routing_tf.layers.support.keras_internals import attention_projections

#: Arguments of Keras's attention that mean the same here.
_SAME = (
    "use_bias",
    "use_gate",
    "kernel_initializer",
    "bias_initializer",
    "kernel_regularizer",
    "bias_regularizer",
    "kernel_constraint",
    "bias_constraint",
)


def from_keras(cls, layer, head_groups, **kwargs):
    """Makes a layer of the class `cls`; see `MixedAttention.from_keras`."""
    projections = _checked(layer)
    config = layer.get_config()
    kernels = {name: dense.kernel for name, dense in projections.items()}
    query, key, value = (kernels[name].shape for name in ("query", "key", "value"))
    if key[0] != value[0]:
        raise ValueError(
            "`layer` must make keys and values from one sequence. Received: "
            f"{layer.name!r}, built for keys of size {key[0]} and values of size "
            f"{value[0]}"
        )
    attention = cls(
        head_groups,
        **{
            "key_dim": query[2],
            "value_dim": value[2],
            "output_dim": kernels["output"].shape[-1],
            "num_key_value_heads": key[1] if key[1] < query[1] else None,
            "name": layer.name,
            "dtype": layer.dtype_policy,
            **{name: config[name] for name in _SAME},
            **kwargs,
        },
    )
    if attention.num_heads != query[1]:
        raise ValueError(
            "`head_groups` must have as many heads as `layer`. Received: "
            f"{attention.num_heads} heads for the {query[1]} of {layer.name!r}"
        )
    _check_window(layer, config, attention.head_groups)
    shared = [group.name for group in attention.head_groups if not group.needs_keys]
    if shared:
        raise ValueError(
            "`head_groups` must have keys of their own, as `layer` has. Received: "
            f"{shared}, which share queries and keys. Pass `share_query_key=False` to "
            "them"
        )
    attention.build((None, None, query[0]), (None, None, value[0]))
    for name, dense in projections.items():
        own = getattr(attention, f"{name}_kernel")
        own.assign(keras.ops.reshape(kernels[name], own.shape))
        if dense.bias is not None:
            own = getattr(attention, f"{name}_bias")
            own.assign(keras.ops.reshape(dense.bias, own.shape))
    return attention


def _checked(layer):
    """Returns the projections of a layer; refuses what has none or is quantized."""
    kinds = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    if not isinstance(layer, kinds):
        raise ValueError(
            "`layer` must be a `keras.layers.MultiHeadAttention` or a "
            f"`keras.layers.GroupQueryAttention`. Received: layer={layer!r}"
        )
    if not layer.built:
        raise ValueError(
            "`layer` must be built, because its weights are copied. Received: "
            f"{layer.name!r}, which is not. Call it once, or `build` it"
        )
    projections = attention_projections(layer)
    if any(dense.quantization_mode for dense in projections.values()):
        raise ValueError(
            f"`layer` must not be quantized. Received: {layer.name!r}. Quantize the "
            "model afterwards"
        )
    axes = (len(projections[name].kernel.shape) for name in projections)
    if any(number != 3 for number in axes) or getattr(
        layer, "attention_axes", None
    ) not in (None, (1,)):
        raise ValueError(
            "`layer` must attend along the only axis of positions, and have an output "
            f"of one axis. Received: {layer.name!r} with "
            f"attention_axes={layer.attention_axes}"
        )
    return projections


def _check_window(layer, config, head_groups):
    """Refuses groups that see more than the window of a layer."""
    window = config.get("sliding_window")
    if window is None:
        return
    for group in head_groups:
        if not isinstance(group, SlidingHeads) or group.radius >= window:
            raise ValueError(
                f"`head_groups` must not see beyond the window of `layer`, {window} "
                f"tokens. Received: {group.name!r}. Use "
                f"`SlidingHeads(num_heads, radius={window - 1})`"
            )

"""Refusals of arguments and inputs that have no meaning for some layers."""

from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.heads.head_group import of_one_length

# Arguments of `HeadGroup`, with the values that leave them out.
NEUTRAL = {
    "max_relative_position": None,
    "dropout": 0,
    "key_shift": 0,
    "rotary_positions": False,
    "token_bias_weight": None,
}
NO_WEIGHTS = "weights that could be dropped are never built"


def refuse_arguments(group, reason, *names):
    """Raises a `ValueError` if a head group was given one of these arguments.

    Args:
        group: the head group.
        reason: why they have no meaning, within a sentence.
        *names: keys of `NEUTRAL`.
    """
    for name in names:
        value, neutral = getattr(group, name), NEUTRAL[name]
        if value != neutral:
            raise ValueError(
                f"`{name}` must be {neutral}: {reason}. Received: {name}={value!r}. "
                "Leave it out, or use other heads"
            )


def refuse_bias(inputs, reason):
    """Raises a `ValueError` if `HeadInputs` have a token bias."""
    if inputs.token_bias is not None:
        raise ValueError(
            f"`token_bias` must be None: {reason}. Received: token_bias.shape="
            f"{tuple(inputs.token_bias.shape)}. Leave it out, or use other heads"
        )


def refuse_causal_mask(inputs, reason):
    """Raises a `ValueError` if `HeadInputs` have a causal mask."""
    if inputs.use_causal_mask:
        raise ValueError(
            f"`use_causal_mask` must be False: {reason}. Received: "
            "use_causal_mask=True. Take heads with a causal form, such as "
            "`FeatureMapHeads` or `LocalHeads`"
        )


def refuse_another_sequence(inputs, reason):
    """Raises a `ValueError` if `HeadInputs` are of attention to another sequence."""
    if inputs.is_cross_attention:
        raise ValueError(
            f"`value` must not be another sequence: {reason}. Received: "
            f"value.shape={tuple(inputs.value.shape)}, is_cross_attention=True. Leave "
            "`value` out, or use other heads"
        )


def refuse_cache(group, reason):
    """Raises the `ValueError` of a head group without a cache."""
    raise ValueError(
        f"Calls with a cache need heads with another pattern: {reason}. Received: "
        f"{type(group).__name__}, {group.name!r}. Take heads with a causal form, "
        "such as `FeatureMapHeads` or `LocalHeads`"
    )


class OneSequenceHeads(HeadGroup):
    """Heads that attend inside one sequence and refuse another one."""

    def prepared(self, inputs):
        inputs = super().prepared(inputs)
        if inputs.is_cross_attention:
            raise ValueError(
                f"`{type(self).__name__}` attend inside one sequence, because they "
                "compare places of queries and keys. Received: "
                "is_cross_attention=True. Call the layer without `value`, or use "
                "`FullHeads` for another sequence"
            )
        return of_one_length(
            inputs, f"`{type(self).__name__}` attend inside one sequence"
        )


def tokens_shape(layer, shape, dim=None):
    """Raises a `ValueError` unless a shape is `[batch, length, dim]` with known dim."""
    if len(shape) != 3 or shape[-1] is None:
        raise ValueError(
            f"The inputs of `{type(layer).__name__}` must have the shape [batch, "
            f"length, dim], with a known dim. Received: shape={tuple(shape)}. Reshape "
            "inputs with other axes"
        )
    if dim not in (None, shape[-1]):
        raise ValueError(
            f"The inputs of `{type(layer).__name__}` must be of the size {dim} that it "
            f"was built for. Received: shape={tuple(shape)}. Make another layer"
        )


def check_built(layer, method):
    """Raises a `ValueError` for a method that needs weights, before there are any."""
    if not layer.built:
        raise ValueError(
            f"`{method}` needs a layer that is built. Received: built=False with "
            f"name={layer.name!r}. Call it before, or `build((None, None, dim))`"
        )


def without_padding(x, mask):
    """Returns tokens with zeros at padding, and which of them are real."""
    shape = tuple(x.shape[:2])
    if shape[1] == 0:
        raise ValueError(
            f"Inputs must have at least one token. Received: shape={tuple(x.shape)}"
        )
    if mask is None:
        return x, ops.ones(ops.shape(x)[:2], dtype="bool")
    given = tuple(mask.shape)
    if len(given) != 2 or any(
        None not in pair and pair[0] != pair[1] for pair in zip(given, shape)
    ):
        raise ValueError(
            "`mask` must have the shape [batch, length] of the inputs. Received: a "
            f"mask of shape {given} with inputs of shape {tuple(x.shape)}"
        )
    real = ops.cast(mask, "bool")
    return ops.where(real[..., None], x, ops.zeros_like(x)), real

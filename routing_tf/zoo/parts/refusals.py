"""Refusals of arguments that have no meaning for some patterns."""

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

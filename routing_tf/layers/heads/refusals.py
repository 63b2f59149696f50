"""What some patterns have no meaning for, refused by one wording each."""


def refuse_relative_positions(group, reason):
    """Raises a `ValueError` if a head group was given relative positions."""
    if group.max_relative_position is not None:
        raise ValueError(
            f"`max_relative_position` must be None: {reason}. Received: "
            f"max_relative_position={group.max_relative_position}. Leave it out"
        )


def refuse_dropout(group, reason):
    """Raises a `ValueError` if a head group was given a rate of dropped weights."""
    if group.dropout:
        raise ValueError(
            f"`dropout` must be 0: {reason}. Received: dropout={group.dropout}. Leave "
            "it out, and drop outputs of the layer"
        )


def refuse_key_shift(group, reason):
    """Raises a `ValueError` if a head group was given a shift of keys."""
    if group.key_shift:
        raise ValueError(
            f"`key_shift` must be 0: {reason}. Received: key_shift={group.key_shift}. "
            "Leave it out"
        )


def refuse_rotary_positions(group, reason):
    """Raises a `ValueError` if a head group was given rotary positions."""
    if group.rotary_positions:
        raise ValueError(
            f"`rotary_positions` must be False: {reason}. Received: "
            "rotary_positions=True. Leave it out"
        )


def refuse_weight_of_bias(group, reason):
    """Raises a `ValueError` if a head group was given a weight of the token bias."""
    if group.token_bias_weight is not None:
        raise ValueError(
            f"`token_bias_weight` must be None: {reason}. Received: "
            f"token_bias_weight={group.token_bias_weight!r}. Leave it out"
        )


def refuse_bias(inputs, reason):
    """Raises a `ValueError` if `HeadInputs` have a token bias."""
    if inputs.token_bias is not None:
        raise ValueError(
            f"`token_bias` must be None: {reason}. Received: token_bias.shape="
            f"{tuple(inputs.token_bias.shape)}. Leave it out, or take other heads"
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
            "`value` out, or take other heads"
        )


def refuse_cache(group, reason):
    """Raises the `ValueError` of a head group that has no cache."""
    raise ValueError(
        f"Calls with a cache need heads of another kind: {reason}. Received: "
        f"{type(group).__name__}, {group.name!r}. Take heads with a causal form, such "
        "as `FeatureMapHeads` or `LocalHeads`"
    )

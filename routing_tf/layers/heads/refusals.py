"""What some patterns have no meaning for, refused when they are made."""


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


def refuse_key_shift(group):
    """Raises a `ValueError` if a head group without a causal form shifts keys."""
    if group.key_shift:
        raise ValueError(
            "`key_shift` must be 0: shifted keys need a causal mask, under which "
            f"{type(group).__name__} cannot attend. Received: "
            f"key_shift={group.key_shift}. Leave it out"
        )


def refuse_causal_mask(group, inputs, reason):
    """Raises a `ValueError` if a head group without a causal form has a causal mask."""
    if inputs.use_causal_mask:
        raise ValueError(
            f"`use_causal_mask` must be False for {type(group).__name__}: {reason}. "
            "Received: use_causal_mask=True. Leave it out, or take heads with a causal "
            "form, such as `FeatureMapHeads` or `LocalHeads`"
        )

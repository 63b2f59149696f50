"""Which flaws of the release a model has: none, or those of a level."""

#: All flaws; and all flaws, with the padding of the first row for the whole batch.
EXACT = ("exact", "exact_shared_padding")
LEVELS = (None, "trained", *EXACT)
# The switches of earlier versions, as they saved them.
_TRAINED = {
    "rank_mask",
    "last_block_is_centre",
    "cluster_strided_settings_are_fixed",
    "buckets_filled_up",
    "members_of_whole_sequence",
    "queries_compete",
}
_SHARED_PADDING = {"padding_of_first_row"}
_EXACT = _TRAINED | {
    "mixed_head_counts",
    "counts_start_at_zero",
    "commitment_counted_twice",
    "padding_by_zero_rows",
    "padding_is_routed",
    "uniform_when_all_masked",
    "strided_padding_is_seen",
}
_LEVELS_OF_SWITCHES = (
    (set(), None),
    (_TRAINED, "trained"),
    (_EXACT, "exact"),
    (_EXACT | _SHARED_PADDING, "exact_shared_padding"),
)


def level_of(value):
    """Returns the level of flaws that a value names; refuses other values.

    A value is one of `LEVELS`, or a dict of switches as earlier versions saved it.
    """
    if isinstance(value, dict):
        switched_on = {name for name, is_on in value.items() if is_on}
        for switches, level in _LEVELS_OF_SWITCHES:
            if switched_on == switches and set(value) <= _EXACT | _SHARED_PADDING:
                return level
    elif value is None or isinstance(value, str) and value in LEVELS:
        return value
    raise ValueError(
        f"`compatibility` must be one of {', '.join(map(repr, LEVELS))}, or a dict of "
        "switches as an earlier version saved it for one of them. Received: "
        f"compatibility={value!r}"
    )

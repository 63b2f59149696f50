"""Which flaws of the release a model has: none, or those of a level."""

#: All flaws; and all flaws, with the padding of the first row for the whole batch.
EXACT = ("exact", "exact_shared_padding")
LEVELS = (None, "trained", *EXACT)

"""Names: of splits, and suggestions for misspelt ones."""

SPLITS = ("train", "validation", "test")


def did_you_mean(name, names):
    """Returns a sentence with names similar to a misspelt one, or ""."""
    import difflib  # only for a mistake

    near = difflib.get_close_matches(str(name), list(names), n=2, cutoff=0.75)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""

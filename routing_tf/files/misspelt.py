"""Suggestions for misspelt names."""

import difflib


def did_you_mean(name, names):
    """Returns a sentence with names similar to a misspelt one, or ""."""
    near = difflib.get_close_matches(str(name), list(names), n=2, cutoff=0.75)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""

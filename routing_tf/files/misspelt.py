"""Names that are nearly right."""

import difflib


def did_you_mean(name, names):
    """Returns a sentence with the names that are near to a misspelt one, or ""."""
    near = difflib.get_close_matches(str(name), list(names), n=2, cutoff=0.75)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""

"""What settings and flags can be, by name, and the defaults that `--help` tells.

Commands read their flags with these before anything is imported that takes seconds.
"""

import difflib

BACKENDS = ("tensorflow", "jax")
SPLITS = ("train", "validation", "test")
# The layers stand alone, so they have a copy.
ROUTING_SCOPES = ("full", "prefix")
PRECISIONS = ("float32", "bfloat16", "float16")
STRATEGIES = ("one", "mirrored", "multi_worker", "tpu")
ON_NAN = ("stop", "skip")

SAMPLERS = ("greedy", "random", "top_k", "top_p", "beam", "contrastive")
WHOLE_TEXTS = ("beam", "contrastive")
DEFAULT_TOP_P = 0.95
# No weight shows how long a model's texts are.
MAX_DEFAULT_LENGTH = 2**16
DEFAULT_LABELS = 10

# Of `analyse`, by what it looks at.
DEFAULT_LENGTHS = {"jsd": 512, "maps": 256, "reads": 256}
# Token by token takes long.
DEFAULT_EXAMPLES = {"causality": 64, "decoding": 4}


def refuse_flags(given, reason):
    """Raises a `ValueError` if there are flags that are not read.

    `reason` is what they do not go together with: "with ..." or "without ...".
    """
    if given:
        names = ", ".join(f"--{name}" for name in given)
        verb, they = ("has", "it") if len(given) == 1 else ("have", "them")
        raise ValueError(f"{names} {verb} no effect {reason}; remove {they}")


def did_you_mean(name, names):
    """Returns a sentence with the names that are near to a misspelt one, or ""."""
    near = difflib.get_close_matches(str(name), list(names), n=2, cutoff=0.75)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""

"""What settings and flags can be, by name, and the defaults that `--help` tells.

Commands read their flags with these before anything is imported that takes seconds.
"""

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

    `reason` is what they do not go together with.
    """
    if given:
        names = ", ".join(f"--{name}" for name in given)
        raise ValueError(
            f"Flags must be those that are read. Received: {names} with {reason}. "
            f"Leave {'it' if len(given) == 1 else 'them'} out"
        )

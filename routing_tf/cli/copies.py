"""Copies of choices and defaults, for flags and their `--help`.

Importing the originals takes seconds, because it imports TensorFlow.
"""

ROUTING_SCOPES = ("full", "prefix")
PRECISIONS = ("float32", "bfloat16", "float16")
STRATEGIES = ("one", "mirrored", "multi_worker", "tpu")
ON_NAN = ("stop", "skip")

# For `generate`.
MAX_DEFAULT_LENGTH = 2**16
DEFAULT_LABELS = 10

# For `analyse`, by `--what`.
DEFAULT_LENGTHS = {"jsd": 512, "maps": 256, "reads": 256}
DEFAULT_EXAMPLES = {"causality": 64, "decoding": 4}

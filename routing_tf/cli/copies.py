"""Copies of what settings can be, and of defaults, for flags and their `--help`.

To import what they are copies of takes seconds, as it imports TensorFlow.
"""

SPLITS = ("train", "validation", "test")
ROUTING_SCOPES = ("full", "prefix")
PRECISIONS = ("float32", "bfloat16", "float16")
STRATEGIES = ("one", "mirrored", "multi_worker", "tpu")
ON_NAN = ("stop", "skip")

# Of `generate`.
MAX_DEFAULT_LENGTH = 2**16
DEFAULT_LABELS = 10

# Of `analyse`, by what it looks at.
DEFAULT_LENGTHS = {"jsd": 512, "maps": 256, "reads": 256}
DEFAULT_EXAMPLES = {"causality": 64, "decoding": 4}

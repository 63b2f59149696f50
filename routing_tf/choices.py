"""What settings and flags can be, by name.

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

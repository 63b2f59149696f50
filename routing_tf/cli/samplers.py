"""Samplers that the flags of `generate` describe."""

import math

from routing_tf.cli import commands

SAMPLERS = ("greedy", "random", "top_k", "top_p", "beam", "contrastive")
WHOLE_TEXTS = ("beam", "contrastive")
DEFAULT_TOP_P = 0.95
SMALLEST_TEMPERATURE = 1e-6  # divided by tiny numbers, logits overflow
# Flag: the samplers that use it, and its name in keras_hub.
SAMPLER_FLAGS = {
    "temperature": (("random", "top_k", "top_p", "beam", "contrastive"), "temperature"),
    "top_k": (("top_k", "top_p", "contrastive"), "k"),
    "top_p": (("top_p",), "p"),
    "num_beams": (("beam",), "num_beams"),
    "alpha": (("contrastive",), "alpha"),
}


def make_sampler(name, seed, vocabulary_size, **given):
    """Makes a sampler of keras_hub.

    Without a name, it is `"top_p"`. `given` has the values of `SAMPLER_FLAGS`, None for
    flags that are not given.
    """
    import keras_hub

    name = name or "top_p"
    given = {flag: value for flag, value in given.items() if value is not None}
    unread = [flag for flag in given if name not in SAMPLER_FLAGS[flag][0]]
    commands.refuse_flags(unread, f"with --sampler={name}")
    _check_ranges(vocabulary_size, **given)
    arguments = {SAMPLER_FLAGS[flag][1]: value for flag, value in given.items()}
    if name == "top_p":
        arguments.setdefault("p", DEFAULT_TOP_P)
    if name in ("random", "top_k", "top_p"):
        arguments["seed"] = seed
    classes = {
        "greedy": keras_hub.samplers.GreedySampler,
        "random": keras_hub.samplers.RandomSampler,
        "top_k": keras_hub.samplers.TopKSampler,
        "top_p": keras_hub.samplers.TopPSampler,
        "beam": keras_hub.samplers.BeamSampler,
        "contrastive": keras_hub.samplers.ContrastiveSampler,
    }
    return classes[name](**arguments)


def _check_ranges(size, temperature=1.0, top_k=1, top_p=1.0, alpha=0.0, **_):
    """Refuses values out of range; `size` is that of the vocabulary."""
    if not SMALLEST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"`--temperature` must be at least {SMALLEST_TEMPERATURE:g}, and finite. "
            f"Received: --temperature={temperature}. For the likeliest token pass "
            "--sampler=greedy"
        )
    if not 0 < top_p <= 1:
        raise ValueError(
            f"`--top_p` must be above 0 and at most 1. Received: --top_p={top_p}"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(
            f"`--alpha` must be in the range [0, 1]. Received: --alpha={alpha}"
        )
    if top_k > size:
        raise ValueError(
            f"`--top_k` must be at most the size of the vocabulary, {size}. Received: "
            f"--top_k={top_k}"
        )

"""Samplers that the flags of `generate` describe."""

import math

import keras_hub

from routing_tf import commands
from routing_tf.choices import DEFAULT_TOP_P

# Flag: the samplers that read it, and its name in keras_hub.
SAMPLER_FLAGS = {
    "temperature": (("random", "top_k", "top_p", "beam", "contrastive"), "temperature"),
    "top_k": (("top_k", "top_p", "contrastive"), "k"),
    "top_p": (("top_p",), "p"),
    "num_beams": (("beam",), "num_beams"),
    "alpha": (("contrastive",), "alpha"),
}


def make_sampler(options, seed, hyperparameters):
    """Makes the sampler that the flags describe.

    Args:
        options: the parsed flags.
        seed: its seed.
        hyperparameters: `Hyperparameters` of the model.

    Returns:
        A keras_hub sampler.

    Raises:
        ValueError: if a flag is not one of this sampler, or out of range.
    """
    name = options.sampler
    if name is None:
        name = "random" if hyperparameters.kind == "image" else "top_p"
    unread = [
        flag for flag, (readers, _) in SAMPLER_FLAGS.items() if name not in readers
    ]
    commands.refuse(options, unread, f"--sampler={name}")
    temperature, top_p = options.temperature, options.top_p
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(
            "`--temperature` must be positive and finite. Received: --temperature="
            f"{temperature}. For the likeliest token pass --sampler=greedy"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(
            f"`--top_p` must be above 0 and at most 1. Received: --top_p={top_p}"
        )
    if options.alpha is not None and not 0 <= options.alpha <= 1:
        raise ValueError(
            f"`--alpha` must be in the range [0, 1]. Received: --alpha={options.alpha}"
        )
    size = hyperparameters.vocabulary_size
    if options.top_k is not None and options.top_k > size:
        raise ValueError(
            f"`--top_k` must be at most the size of the vocabulary, {size}. Received: "
            f"--top_k={options.top_k}"
        )
    arguments = {
        keyword: options[flag].value
        for flag, (_, keyword) in SAMPLER_FLAGS.items()
        if options[flag].value is not None
    }
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

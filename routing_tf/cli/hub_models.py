"""Models of keras_hub, changed by `sparsify` or not, and its samplers, in commands."""

import math
import pathlib
import sys

from routing_tf.cli import commands

MODULES = ("keras_hub.", "routing_tf.retrofit.")

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


def is_preset(path):
    """Returns whether there is a preset directory of a model of keras_hub."""
    config = pathlib.Path(path) / "config.json"
    if not config.is_file():
        return False
    from routing_tf.files import safe_loading

    module = safe_loading.read_json(config).get("module")
    return str(module).startswith(MODULES)


def load(flag, path):
    """Returns the `CausalLM` of a preset, which must have a tokenizer."""
    import keras_hub

    from routing_tf import retrofit as retrofit  # registers changed models

    try:
        lm = keras_hub.models.CausalLM.from_preset(path)
    # Whatever keras_hub, its hosts and the network raise.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"`--{flag}` must be a preset of a language model of keras_hub. Received: "
            f"--{flag}={path!r}: {reason[0]}"
        ) from error
    if getattr(lm, "preprocessor", None) is None:
        raise ValueError(
            f"`--{flag}` must be a preset with a tokenizer. Received: --{flag}={path!r}"
        )
    return lm


def _loaded(options, *unread):
    """Returns the model of `--model_dir`; flags that nothing reads are refused."""
    commands.refuse(options, ("checkpoint", *unread), "with a model of keras_hub")
    print(f"model: {options.model_dir}", file=sys.stderr, flush=True)
    return load("model_dir", options.model_dir)


def generate(options, prompts, seed, *unread):
    """Continues prompts, as the flags of `generate` say."""
    from routing_tf.generation import display
    from routing_tf.retrofit import scoring
    from routing_tf.retrofit import texts

    lm = _loaded(options, *unread)
    given = {name: options[name].value for name in SAMPLER_FLAGS}
    size = lm.backbone.vocabulary_size
    sampler = make_sampler(options.sampler, seed, size, **given)
    continuation = texts.HubContinuation(
        lm,
        sampler,
        scoring.checked_length(lm, options.max_length, "max_length"),
        None if options.stop_at_end is False else texts.end_id(lm),
        options.batch_size,
        by_steps=False,
    )
    samples = continuation.samples(prompts, options.num_samples, options.stop)
    display.write_texts(continuation, samples, len(prompts), options.output_file)


def score_texts(options, paths, *unread):
    """Scores files, as the flags of `evaluate` say."""
    from routing_tf.models import score as scores
    from routing_tf.retrofit import scoring
    from routing_tf.training import evaluation

    lm = _loaded(options, *unread)
    length = scoring.checked_length(lm, options.length)
    print(f"windows: {length} tokens, each scored alone")
    found = evaluation.score_files(paths, lambda text: scoring.score(lm, text, length))
    total = scores.join(found)
    print(evaluation.describe_score("total", total))
    longest = max(found, key=lambda each: each.num_tokens)
    influence = scoring.influence(lm, longest.token_ids[:length])
    print(evaluation.describe_influence(influence))
    print(evaluation.final_line_of_texts(total))


def export(options, folder, *unread):
    """Writes a SavedModel, from ids to logits, and returns Python that uses it."""
    lm = _loaded(options, *unread)
    lm.export(folder, verbose=False)
    return (
        "import tensorflow as tf\n\n"
        f"served = tf.saved_model.load({options.export_dir!r})\n"
        'ids = {"token_ids": [[3, 1, 2]], "padding_mask": [[1, 1, 1]]}\n'
        'ids = {name: tf.constant(x, "int32") for name, x in ids.items()}\n'
        "print(served.serve(ids))  # logits\n"
    )


def analyse(options, *unread):
    """Says whether later tokens reach earlier scores of a text."""
    from routing_tf.retrofit import scoring
    from routing_tf.training import evaluation

    if options.what != "causality" or not options.text:
        raise ValueError(
            "`--what` must be causality, and `--text` given, with a model of "
            f"keras_hub. Received: --what={options.what}, --text={options.text!r}. "
            "`routing_tf.retrofit.sparsify` returns a report by layer"
        )
    lm = _loaded(options, *unread)
    length = scoring.checked_length(lm, options.length)
    ids = scoring.ids_of(lm, options.text)[:length]
    print(evaluation.describe_influence(scoring.influence(lm, ids)))

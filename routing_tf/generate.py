r"""Samples from a trained model: texts that continue prompts, or images.

A text, shown while it is made:

    python -m routing_tf.generate --model_dir=my_run --prompt='import os'

One without end, until Ctrl-C, in constant memory:

    python -m routing_tf.generate --model_dir=my_run --prompt='import os' --stream

A text for each line of a file:

    python -m routing_tf.generate --model_dir=my_run --prompt_file=prompts.txt \
        --output_file=texts.jsonl

With a model that has an encoder, the text that belongs to each one, such as its
translation:

    python -m routing_tf.generate --model_dir=my_pairs --prompt='Guten Tag' \
        --sampler=beam

With a model of images, a picture of samples, or of held-out images completed:

    python -m routing_tf.generate --model_dir=my_digits --output_file=samples.png
    python -m routing_tf.generate --model_dir=my_digits --num_given_rows=4 \
        --output_file=completions.png

Texts go to standard output, all that is said about them to standard error.
"""

import contextlib
import math
import os
import pathlib
import sys

from routing_tf import commands  # first: it says where Keras has no backend

# isort: split
import keras_hub
import numpy as np
from absl import app
from absl import flags

from routing_tf import models
from routing_tf.files.atomic import open_output
from routing_tf.files.atomic import open_text
from routing_tf.generation import display
from routing_tf.generation import pictures
from routing_tf.generation import texts
from routing_tf.generation.display import Lines
from routing_tf.generation.texts import TargetContinuation
from routing_tf.generation.texts import TargetSample
from routing_tf.generation.token_stream import TokenStream
from routing_tf.training import loading
from routing_tf.training.stop_request import stop_as_interrupt

SAMPLERS = ("greedy", "random", "top_k", "top_p", "beam", "contrastive")
WHOLE_TEXTS = ("beam", "contrastive")
DEFAULT_TOP_P = 0.95
# Flag: the samplers that read it, and its name in keras_hub.
SAMPLER_FLAGS = {
    "temperature": (("random", "top_k", "top_p", "beam", "contrastive"), "temperature"),
    "top_k": (("top_k", "top_p", "contrastive"), "k"),
    "top_p": (("top_p",), "p"),
    "num_beams": (("beam",), "num_beams"),
    "alpha": (("contrastive",), "alpha"),
}
MAX_SEED = 2**32 - 1
# No weight shows how long a model's texts are.
MAX_DEFAULT_LENGTH = 2**16
STREAM_FLAGS = ("stream", "num_tokens")
TEXT_FLAGS = (
    "prompt",
    "prompt_file",
    "max_length",
    "batch_size",
    "stop_at_end",
    *STREAM_FLAGS,
)
COMPLETION_FLAGS = ("num_images", "split", *commands.DATA_FLAGS)
IMAGE_FLAGS = ("labels", "num_given_rows", *COMPLETION_FLAGS)
DEFAULT_LABELS = 10


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command.

    Args:
        values: the `absl.flags.FlagValues` to define them in.
    """
    commands.define_backend_flag(values)
    commands.define_checkpoint_flag(values)
    commands.define_path(
        "model_dir",
        "Folder of the run, whose last checkpoint is taken; a .keras file or a preset "
        "directory.",
        values,
        required=True,
    )
    commands.define_path(
        "output_file",
        "File to write. Texts: a JSON object on each line (prompt, sample, "
        "continuation, tokens, ended), in the order of the prompts, as each is done; "
        "FILE.partial until all are. With --stream the text itself. Images: the "
        "picture, a .png; needed.",
        values,
    )
    flags.DEFINE_integer(
        "num_samples",
        1,
        "Texts for each prompt; images for each label, or completions of each image.",
        lower_bound=1,
        flag_values=values,
    )
    _define_sampler_flags(values)
    _define_text_flags(values)
    _define_image_flags(values)


def _define_sampler_flags(values):
    flags.DEFINE_enum(
        "sampler",
        None,
        SAMPLERS,
        "How tokens are chosen. Default: top_p; random for images.",
        flag_values=values,
    )
    floats = {
        "temperature": "Above 1 for more variety, below for less; not for greedy. "
        "Default: 1.",
        "top_p": "top_p: the likeliest tokens are drawn that have this probability "
        f"together. Default: {DEFAULT_TOP_P}.",
        "alpha": "contrastive: weight of the penalty for what is like the text so far. "
        "Default: 0.6.",
    }
    for name, text in floats.items():
        flags.DEFINE_float(name, None, text, flag_values=values)
    integers = {
        "top_k": "top_k, contrastive: number of the likeliest tokens to choose from, "
        "default 5. top_p: the same before the cut, default all.",
        "num_beams": "beam: number of texts that are followed. Default: 5.",
    }
    for name, text in integers.items():
        flags.DEFINE_integer(name, None, text, lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "seed",
        None,
        "Seed: the same one gives the same text, on one backend and with the same "
        "flags. Default: another one each time, which is shown.",
        lower_bound=0,
        upper_bound=MAX_SEED,
        flag_values=values,
    )


def _define_text_flags(values):
    flags.DEFINE_string(
        "prompt",
        None,
        "Texts: what they begin with. Default: nothing. With an encoder: the source "
        "text, needed.",
        flag_values=values,
    )
    commands.define_path(
        "prompt_file",
        "Texts: a file in UTF-8 with a prompt on each line; empty lines are skipped.",
        values,
    )
    flags.DEFINE_integer(
        "max_length",
        None,
        "Texts: tokens of each at most, its prompt and the leading id 0 included. "
        "Default: the model's max_sequence_length, at most "
        f"{MAX_DEFAULT_LENGTH:,}. With an encoder: those of the "
        "generated text and the leading id. Default: the length in training, which "
        "decides what heads see of the source.",
        lower_bound=2,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "batch_size",
        16,
        "Texts: how many are made together, if there are several.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "stop_at_end",
        None,
        "Texts: whether the end id ends them; else it is shown as a line break. "
        "Default: true; with --stream false.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "stream",
        False,
        "Texts: whether one text goes on without end, until Ctrl-C, past the length "
        "that the model was trained with. In constant memory; not with heads that "
        "remember all tokens.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_tokens",
        0,
        "With --stream: new tokens at which it ends, with heads of any kind; 0: no "
        "end.",
        lower_bound=0,
        flag_values=values,
    )


def _define_image_flags(values):
    flags.DEFINE_list(
        "labels",
        None,
        "Images: classes to sample, separated by commas; a column of the picture for "
        f"each. Default: all classes, at most {DEFAULT_LABELS}.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_given_rows",
        0,
        "Images: complete held-out images whose first rows are given; a column for "
        "each with what is given, its completions and the true image. 0: sample from "
        "scratch.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_images",
        10,
        "With --num_given_rows: how many images to complete.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_enum(
        "split",
        "test",
        ["validation", "test"],
        "With --num_given_rows: split of the data that they come from.",
        flag_values=values,
    )
    commands.define_data_flags(values)


def run(options):
    """Samples as the flags say.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if there is no model, or a flag does not fit it or another flag.
    """
    check_output_file(options)
    lm = loading.load_language_model(options.model_dir, options.checkpoint)
    kinds = {
        models.RoutingTransformerCausalLM: (generate_texts, IMAGE_FLAGS),
        models.RoutingTransformerSeq2SeqLM: (
            generate_targets,
            (*IMAGE_FLAGS, *STREAM_FLAGS),
        ),
        models.RoutingImageTransformer: (generate_images, TEXT_FLAGS),
    }
    if type(lm) not in kinds:
        raise ValueError(
            "`--model_dir` must hold a language model or a model of images. Received: "
            f"a {type(lm).__name__} in {options.model_dir!r}"
        )
    generate, others = kinds[type(lm)]
    refuse(options, others, f"a {type(lm).__name__}")
    seed = options.seed
    if seed is None:
        seed = int(np.random.default_rng().integers(2**31))
    sampler = make_sampler(options, seed, lm.hyperparameters)
    told = f", seed {seed}" if hasattr(sampler, "seed") else ""
    print(f"model: {options.model_dir}{told}", file=sys.stderr, flush=True)
    generate(lm, sampler, options)


def refuse(options, names, reason):
    """Raises a `ValueError` if any of some flags is given.

    Args:
        options: the parsed flags.
        names: names of the flags.
        reason: with what they do not go together.
    """
    given = [f"--{name}" for name in names if options[name].present]
    if given:
        raise ValueError(
            f"Flags must be those that are read. Received: {', '.join(given)} with "
            f"{reason}. Leave {'it' if len(given) == 1 else 'them'} out"
        )


def check_output_file(options):
    """Raises a `ValueError` if the output file cannot be one."""
    if options.output_file is None:
        return
    path = pathlib.Path(options.output_file).absolute()
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(
            "`--output_file` must be a file that can be written, in a folder that "
            f"exists. Received: {options.output_file!r}"
        )


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
    refuse(options, unread, f"--sampler={name}")
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


def read_prompts(options):
    """Returns the list of prompts.

    Args:
        options: the parsed flags.

    Raises:
        ValueError: if there are two kinds, or none in the file, or it is not text.
    """
    if options.prompt_file is None:
        return [options.prompt or ""]
    if options.prompt is not None:
        raise ValueError(
            "Prompts must come from `--prompt` or from `--prompt_file`. Received: "
            f"--prompt={options.prompt!r}, --prompt_file={options.prompt_file!r}"
        )
    try:
        content = pathlib.Path(options.prompt_file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            "`--prompt_file` must be a readable file of text in UTF-8. Received: "
            f"{options.prompt_file!r}: {error}"
        ) from error
    # str.splitlines also breaks lines at characters that are part of texts.
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    prompts = [line for line in lines if line]
    if not prompts:
        raise ValueError(
            "`--prompt_file` must hold a line that is not empty. Received: "
            f"{options.prompt_file!r}. To start from nothing, leave it out"
        )
    return prompts


def generate_texts(lm, sampler, options):
    """Continues prompts.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        sampler: the sampler.
        options: the parsed flags.

    Raises:
        ValueError: if the model has no tokenizer, or a flag does not fit it.
    """
    prompts, samples = make_samples(lm, texts.TextSample, options)
    if options.stream:
        stream_text(lm, sampler, samples, options)
        return
    if options["num_tokens"].present:
        raise ValueError(
            "`--num_tokens` is for `--stream`. Received: --num_tokens="
            f"{options.num_tokens} without it. Pass --stream, or --max_length"
        )
    max_length = check_max_length(lm.hyperparameters, samples, options)
    continuation = texts.Continuation(
        lm,
        sampler,
        max_length,
        stop_token_id(lm, options),
        options.batch_size,
        by_steps=options.sampler not in WHOLE_TEXTS
        and lm.hyperparameters.sees_later_tokens("prefix") is None,
    )
    write_texts(continuation, samples, len(prompts), options.output_file)


def make_samples(lm, sample_class, options):
    """Makes the texts that are to grow.

    Args:
        lm: the language model.
        sample_class: `TextSample` or `TargetSample`.
        options: the parsed flags.

    Returns:
        The list of prompts, and the list of all samples of them.

    Raises:
        ValueError: if the model has no tokenizer, or the prompts cannot be read.
    """
    if lm.preprocessor is None:
        raise ValueError(
            "The model must have a tokenizer. Received: a model of ids in "
            f"{options.model_dir!r}. Save it with a preprocessor"
        )
    prompts = read_prompts(options)
    samples = []
    for prompt in prompts:
        first = sample_class(lm.preprocessor.tokenizer, prompt)
        others = (first.another(number) for number in range(1, options.num_samples))
        samples += [first, *others]
    return prompts, samples


def stop_token_id(lm, options):
    """Returns the id that ends a text; None if `--nostop_at_end` is given."""
    if options.stop_at_end is False:
        return None
    return lm.preprocessor.tokenizer.end_token_id


def generate_targets(lm, sampler, options):
    """Generates the texts that belong to prompts, which the encoder reads.

    Args:
        lm: a `RoutingTransformerSeq2SeqLM`.
        sampler: the sampler.
        options: the parsed flags.

    Raises:
        ValueError: if the model has no tokenizer, there is no prompt or one is too
            long, or a flag does not fit the model.
    """
    prompts, samples = make_samples(lm, TargetSample, options)
    check_sources(lm.preprocessor, prompts)
    continuation = TargetContinuation(
        lm,
        sampler,
        options.max_length
        or min(lm.preprocessor.decoder_sequence_length, MAX_DEFAULT_LENGTH),
        stop_token_id(lm, options),
        options.batch_size,
    )
    write_texts(continuation, samples, len(prompts), options.output_file)


def check_sources(preprocessor, sources):
    """Raises a `ValueError` if a source text is empty or too long for the encoder.

    Args:
        preprocessor: a `RoutingTransformerSeq2SeqLMPreprocessor`.
        sources: list of strings.
    """
    if not all(sources):
        raise ValueError(
            "A model with an encoder needs a source text. Received: an empty prompt. "
            "Pass --prompt or --prompt_file"
        )
    # The end id follows them.
    longest = max(len(preprocessor.tokenizer.tokenize(text)) for text in sources) + 1
    if longest > preprocessor.encoder_sequence_length:
        raise ValueError(
            "Prompts must fit into the model's encoder, which takes "
            f"{preprocessor.encoder_sequence_length} tokens. Received: one of "
            f"{longest} tokens, the end id included. Pass a shorter one"
        )


def check_max_length(hyperparameters, samples, options):
    """Returns how long texts may be.

    Args:
        hyperparameters: `Hyperparameters` of the model.
        samples: list of `TextSample`.
        options: the parsed flags.

    Raises:
        ValueError: if a prompt is too long, or the model cuts what is so long.
    """
    h = hyperparameters
    longest = max(len(sample.token_ids) for sample in samples)
    limit = min(h.max_sequence_length, h.truncate_length or h.max_sequence_length)
    max_length = options.max_length or min(limit, MAX_DEFAULT_LENGTH)
    if h.truncate_length is not None and max_length > h.truncate_length:
        raise ValueError(
            "`--max_length` must not exceed the length to which this model cuts its "
            f"inputs, {h.truncate_length}. Received: --max_length={max_length}"
        )
    if longest >= max_length:
        default = "" if options.max_length else ", the model's length, by default"
        raise ValueError(
            "`--max_length` must be longer than every prompt, of which the longest has "
            f"{longest} tokens (the leading id included). Received: --max_length="
            f"{max_length}{default}. Pass a larger one or a shorter prompt"
        )
    return max_length


def write_texts(continuation, samples, num_prompts, output_file):
    """Makes texts, shows them and writes them to a file.

    Args:
        continuation: `Continuation`.
        samples: list of `TextSample`.
        num_prompts: number of prompts.
        output_file: path of the file; None for none.
    """
    output, speed = display.Output(), display.Speed()
    with stop_as_interrupt(), open_output(output_file) as file:
        lines = Lines(samples, file)
        try:
            parts = lines.follow(continuation.run(samples, speed))
            display.show(parts, samples, output, num_prompts)
        finally:
            # What there is when somebody has lost patience.
            lines.write_rest()
    print(speed, file=sys.stderr)


def stream_text(lm, sampler, samples, options):
    """Continues a prompt until Ctrl-C, or for `--num_tokens`.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        sampler: the sampler.
        samples: list of one `TextSample`.
        options: the parsed flags.

    Raises:
        ValueError: if the model or the flags do not fit.
    """
    refuse(options, ["max_length", "batch_size"], "--stream, which reads --num_tokens")
    if options.sampler in WHOLE_TEXTS:
        raise ValueError(
            "`--stream` needs a sampler that draws one token after the other: "
            f"{', '.join(name for name in SAMPLERS if name not in WHOLE_TEXTS)}. "
            f"Received: --sampler={options.sampler}, which chooses among whole texts"
        )
    if len(samples) > 1:
        raise ValueError(
            f"`--stream` makes one text. Received: {len(samples)} prompts and samples. "
            "Pass one --prompt and no --num_samples"
        )
    (sample,) = samples
    num_tokens = None
    if options.num_tokens:
        num_tokens = len(sample.token_ids) + options.num_tokens
    stream = TokenStream(lm, sampler, num_tokens)
    stop = lm.preprocessor.tokenizer.end_token_id if options.stop_at_end else None
    speed = display.Speed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_as_interrupt())
        outputs = [display.Output()]
        if options.output_file is not None:
            # Without an end there is no complete file: whoever reads it follows it.
            file = stack.enter_context(open_text(options.output_file))
            outputs.append(display.Output(file))
        try:
            for text in texts.stream_parts(stream, sample, stop, speed):
                for output in outputs:
                    output.write(text)
        except KeyboardInterrupt:
            pass  # the way to end it
        for output in outputs:
            output.end_line()
    print(speed, file=sys.stderr)


def generate_images(model, sampler, options):
    """Samples or completes images.

    Args:
        model: a `RoutingImageTransformer`.
        sampler: the sampler.
        options: the parsed flags.

    Raises:
        ValueError: if the flags do not fit the model, or there is no data to complete.
    """
    path = options.output_file
    if path is None or pathlib.Path(path).suffix.lower() != ".png":
        raise ValueError(
            "`--output_file` must be the path of a .png for a model of images. "
            f"Received: --output_file={path}"
        )
    if options.num_given_rows:
        refuse(options, ["labels"], "--num_given_rows; images have their own labels")
        _, problem = commands.open_run(options)
        picture = pictures.completion_grid(
            model,
            sampler,
            problem.images(options.split)[: options.num_images],
            problem.labels(options.split)[: options.num_images],
            options.num_given_rows,
            options.num_samples,
        )
    else:
        refuse(options, COMPLETION_FLAGS, "no --num_given_rows")
        labels = read_labels(options, model.hyperparameters.num_classes)
        picture = pictures.sample_grid(model, sampler, labels, options.num_samples)
    pathlib.Path(path).write_bytes(picture)
    print(f"wrote {path}", file=sys.stderr)


def read_labels(options, num_classes):
    """Returns the classes to sample; None for a model without classes.

    Args:
        options: the parsed flags.
        num_classes: number of classes of the model, or None.

    Raises:
        ValueError: if the model has none of these classes.
    """
    if num_classes is None:
        refuse(options, ["labels"], "a model without classes")
        return None
    if options.labels is None:
        return list(range(min(DEFAULT_LABELS, num_classes)))
    labels = [int(x) if x.strip().isdecimal() else -1 for x in options.labels]
    if not labels or not all(0 <= label < num_classes for label in labels):
        raise ValueError(
            f"`--labels` must be integers in the range [0, {num_classes}), separated "
            f"by commas. Received: --labels={','.join(options.labels)}"
        )
    return labels


def main(argv):
    """Generates; returns the exit code, as `absl.app.run` expects."""
    return commands.command(run, flags.FLAGS, argv)


if __name__ == "__main__":
    define_flags()
    sys.stdout.reconfigure(errors="replace")
    app.run(main)

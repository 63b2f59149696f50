r"""Samples from a trained model: texts that continue prompts, or images.

A text, shown while it is generated:

    python -m routing_tf.generate --model_dir=my_run --prompt='import os'

An endless text, until Ctrl-C, in constant memory:

    python -m routing_tf.generate --model_dir=my_run --prompt='import os' --stream

A text for each line of a file (-: standard input), which ends before an empty line:

    python -m routing_tf.generate --model_dir=my_run --prompt_file=prompts.txt \
        --stop=$'\n\n' --output_file=texts.jsonl

With an encoder, the text that belongs to each prompt, such as its translation:

    python -m routing_tf.generate --model_dir=my_pairs --prompt='Guten Tag' \
        --sampler=beam

With a model of images, a picture of samples, or of completed held-out images:

    python -m routing_tf.generate --model_dir=my_digits --output_file=samples.png
    python -m routing_tf.generate --model_dir=my_digits --num_given_rows=4 \
        --output_file=completions.png

Texts go to standard output, and messages to standard error.
"""

import os
import pathlib
import sys

from absl import flags

from routing_tf.cli import commands
from routing_tf.cli import flag_kinds
from routing_tf.cli import hub_models
from routing_tf.cli.flag_kinds import DEFAULT_LABELS
from routing_tf.cli.flag_kinds import MAX_DEFAULT_LENGTH

MAX_SEED = 2**32 - 1
STREAM_FLAGS = ("stream", "num_tokens")
TEXT_FLAGS = (
    "prompt",
    "prompt_file",
    "max_length",
    "batch_size",
    "stop_at_end",
    "stop",
    *STREAM_FLAGS,
)
IMAGE_FLAGS = ("labels", "num_given_rows", *commands.COMPLETION_FLAGS)


FLAGS = {
    **commands.BACKEND,
    **commands.CHECKPOINT,
    "model_dir": flag_kinds.path(
        "Folder of a run, whose last checkpoint is used, or a .keras file or a preset "
        "directory, also one of keras_hub or of `sparsify`.",
        required=True,
    ),
    "output_file": flag_kinds.path(
        "File to write. Texts: a JSON object on each line (prompt, sample, "
        "continuation, tokens, ended), in the order of the prompts; FILE.partial until "
        "all are done. With --stream: the text itself. Images: the picture, a .png; "
        "required."
    ),
    "num_samples": flag_kinds.integer(
        1,
        1,
        "Number of texts for each prompt; of images for each label, or of completions "
        "of each image.",
    ),
    # How tokens are chosen.
    "sampler": flag_kinds.choice(
        None,
        hub_models.SAMPLERS,
        "How tokens are chosen. Default: top_p; random for images.",
    ),
    "temperature": flag_kinds.number(
        None,
        "Above 1 for more variety, below 1 for less; not for greedy. Default: 1.",
    ),
    "top_p": flag_kinds.number(
        None,
        "top_p: total probability of the likeliest tokens, from which one is drawn. "
        f"Default: {hub_models.DEFAULT_TOP_P}.",
    ),
    "alpha": flag_kinds.number(
        None,
        "contrastive: weight of the penalty for similarity to the text so far. "
        "Default: 0.6.",
    ),
    "top_k": flag_kinds.integer(
        None,
        1,
        "top_k, contrastive: number of likeliest tokens to choose from; default: 5. "
        "top_p: the same, before its own cut; default: all.",
    ),
    "num_beams": flag_kinds.integer(None, 1, "beam: number of beams. Default: 5."),
    "seed": flag_kinds.integer(
        None,
        0,
        "Seed of the sampler: the same seed gives the same text, on one backend and "
        "with the same flags. Default: a new one each time, which is printed.",
        largest=MAX_SEED,
    ),
    # Texts.
    "prompt": flag_kinds.string(
        None,
        "Texts: their beginning. Default: nothing. With an encoder: the source text, "
        "which is required.",
    ),
    "prompt_file": flag_kinds.path(
        "Texts: a file in UTF-8 with a prompt on each line; empty lines are skipped. "
        "-: standard input."
    ),
    "max_length": flag_kinds.integer(
        None,
        2,
        "Texts: largest number of tokens, including the prompt and the leading id 0. "
        "Default: the model's max_sequence_length, at most "
        f"{MAX_DEFAULT_LENGTH:,}. With an encoder: number of tokens of the "
        "generated text and the leading id. Default: the length in training, which "
        "decides what heads see of the source.",
    ),
    "batch_size": flag_kinds.integer(
        16, 1, "Texts: number of texts that are generated together."
    ),
    "stop_at_end": flag_kinds.switch(
        None,
        "Texts: whether a text ends at the end id, which is otherwise shown as a line "
        "break. Default: true, and false with --stream.",
    ),
    "stop": flag_kinds.repeated(
        "Texts: a string that ends a text and is not shown. Prompts may contain it"
    ),
    "stream": flag_kinds.switch(
        False,
        "Texts: whether to generate one endless text, until Ctrl-C, beyond the length "
        "that the model was trained with. Memory stays constant; not for heads that "
        "remember all tokens.",
    ),
    "num_tokens": flag_kinds.integer(
        0,
        0,
        "With --stream: number of new tokens, with any heads; 0: no end.",
    ),
    # Images.
    "labels": flag_kinds.strings(
        "Images: classes to sample, separated by commas; a column of the picture for "
        f"each. Default: all classes, at most {DEFAULT_LABELS}."
    ),
    "num_given_rows": flag_kinds.integer(
        0,
        0,
        "Images: number of first rows that are given of held-out images, whose rest is "
        "completed. The picture has a column for each image: the given rows, its "
        "completions and the true image. 0: sample from scratch.",
    ),
    "num_images": flag_kinds.integer(
        10, 1, "With --num_given_rows: number of images to complete."
    ),
    "split": flag_kinds.choice(
        "test",
        ["validation", "test"],
        "With --num_given_rows: split of the data that the images come from.",
    ),
    **commands.DATA,
}


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `absl.flags.FlagValues`."""
    flag_kinds.define(values, FLAGS)


def run(options):
    """Samples as the flags say."""
    import numpy as np

    from routing_tf import models
    from routing_tf.training import loading

    check_output_file(options)
    seed = options.seed
    if seed is None:
        seed = int(np.random.default_rng().integers(2**31))
    if hub_models.is_preset(options.model_dir):
        unread = (*IMAGE_FLAGS, *STREAM_FLAGS)
        hub_models.generate(options, read_prompts(options), seed, *unread)
        return
    lm = loading.load_language_model(options.model_dir, options.checkpoint)
    # By the class of the model: its function, and flags of other models.
    kinds = {
        models.RoutingTransformerCausalLM: (generate_texts, IMAGE_FLAGS),
        models.RoutingTransformerSeq2SeqLM: (
            generate_texts,
            (*IMAGE_FLAGS, *STREAM_FLAGS),
        ),
        models.RoutingImageTransformer: (generate_images, TEXT_FLAGS),
    }
    if type(lm) not in kinds:
        raise ValueError(
            "`--model_dir` must contain a language model or a model of images. "
            f"Received: a {type(lm).__name__} in {options.model_dir!r}"
        )
    generate, others = kinds[type(lm)]
    commands.refuse(options, others, f"with a {type(lm).__name__}")
    given = {name: options[name].value for name in hub_models.SAMPLER_FLAGS}
    name, size = options.sampler, lm.hyperparameters.vocabulary_size
    if name is None and generate is generate_images:
        name = "random"
    sampler = hub_models.make_sampler(name, seed, size, **given)
    told = f", seed {seed}" if hasattr(sampler, "seed") else ""
    print(f"model: {options.model_dir}{told}", file=sys.stderr, flush=True)
    generate(lm, sampler, options)


def generate_texts(lm, sampler, options):
    """Continues prompts, or generates the texts that belong to them."""
    from routing_tf.generation import display
    from routing_tf.generation import texts

    prompts = read_prompts(options)
    if not all(options.stop):
        raise ValueError(
            "`--stop` must not be empty. Received: --stop=''. Leave it out for no such "
            "string"
        )
    samples = texts.make_samples(lm, prompts, options.num_samples, options.stop)
    end_id = lm.preprocessor.tokenizer.end_token_id
    if options.stream:
        stream_text(lm, sampler, samples, options)
        return
    if options["num_tokens"].present:
        raise ValueError(
            "`--num_tokens` is for `--stream`. Received: --num_tokens="
            f"{options.num_tokens} without it. Pass --stream, or --max_length"
        )
    h = lm.hyperparameters
    is_exact = h.kind == "text" and h.sees_later_tokens("prefix") is None
    continuation = texts.Continuation(
        lm,
        sampler,
        texts.length_of_texts(lm, samples, options.max_length),
        None if options.stop_at_end is False else end_id,
        options.batch_size,
        by_steps=is_exact and options.sampler not in hub_models.WHOLE_TEXTS,
    )
    display.write_texts(continuation, samples, len(prompts), options.output_file)


def stream_text(lm, sampler, samples, options):
    """Continues a prompt, the one of `samples`, until Ctrl-C, or for `--num_tokens`."""
    from routing_tf.generation import display
    from routing_tf.generation.token_stream import TokenStream

    commands.refuse(
        options,
        ["max_length", "batch_size"],
        "with --stream, which reads --num_tokens",
    )
    if options.sampler in hub_models.WHOLE_TEXTS:
        by_token = [x for x in hub_models.SAMPLERS if x not in hub_models.WHOLE_TEXTS]
        raise ValueError(
            "`--stream` needs a sampler that draws token by token: "
            f"{', '.join(by_token)}. Received: --sampler={options.sampler}, which "
            "chooses among whole texts"
        )
    if len(samples) > 1:
        raise ValueError(
            f"`--stream` generates one text. Received: {len(samples)} prompts and "
            "samples. Pass one --prompt and no --num_samples"
        )
    (sample,) = samples
    num_tokens = None
    if options.num_tokens:
        num_tokens = len(sample.token_ids) + options.num_tokens
    stream = TokenStream(lm, sampler, num_tokens)
    stop = lm.preprocessor.tokenizer.end_token_id if options.stop_at_end else None
    display.write_stream(stream, sample, stop, options.output_file)


def read_prompts(options):
    """Returns the list of prompts: that of `--prompt`, or the lines of a file."""
    if options.prompt_file is None:
        prompt = options.prompt or ""
        # A byte that is no UTF-8 comes as half of a pair of code units.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ValueError(
                f"`--prompt` must be text in UTF-8. Received: --prompt={prompt!r}. "
                "Check the encoding of the terminal, or use `--prompt_file`"
            )
        return [prompt]
    if options.prompt is not None:
        raise ValueError(
            "Prompts must come from either `--prompt` or `--prompt_file`. Received: "
            f"--prompt={options.prompt!r}, --prompt_file={options.prompt_file!r}"
        )
    try:
        if options.prompt_file == "-":
            content = sys.stdin.buffer.read()
        else:
            content = pathlib.Path(options.prompt_file).read_bytes()
        content = content.decode("utf-8-sig")
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
            "`--prompt_file` must contain a line that is not empty. Received: "
            f"{options.prompt_file!r}. To start from nothing, leave it out"
        )
    return prompts


def generate_images(model, sampler, options):
    """Samples or completes images."""
    from routing_tf.generation import display

    path = options.output_file
    if path is None or pathlib.Path(path).suffix.lower() != ".png":
        raise ValueError(
            "`--output_file` must be the path of a .png for a model of images. "
            f"Received: --output_file={path}"
        )
    if options.num_given_rows:
        commands.refuse(
            options, ["labels"], "with --num_given_rows: images have their own labels"
        )
        _, problem = commands.open_run(options)
        picture = display.completion_grid(
            model,
            sampler,
            problem.images(options.split)[: options.num_images],
            problem.labels(options.split)[: options.num_images],
            options.num_given_rows,
            options.num_samples,
        )
    else:
        commands.refuse(options, commands.COMPLETION_FLAGS, "without --num_given_rows")
        num_classes, labels = model.hyperparameters.num_classes, None
        if num_classes is None:
            commands.refuse(options, ["labels"], "with a model without classes")
        else:
            labels = display.labels_to_sample(options.labels, num_classes)
        picture = display.sample_grid(model, sampler, labels, options.num_samples)
    pathlib.Path(path).write_bytes(picture)
    print(f"wrote {path}", file=sys.stderr)


def check_output_file(options):
    """Raises a `ValueError` if the output file cannot be written."""
    if options.output_file is None:
        return
    path = pathlib.Path(options.output_file).absolute()
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(
            "`--output_file` must be a file that can be written, in a folder that "
            f"exists. Received: {options.output_file!r}"
        )


def main():
    """Runs the command, whose flags are those of the process."""
    commands.main(run, define_flags)

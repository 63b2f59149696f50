"""Texts that the flags of `generate` ask for."""

import contextlib
import pathlib
import sys

from routing_tf import commands
from routing_tf.choices import MAX_DEFAULT_LENGTH
from routing_tf.choices import SAMPLERS
from routing_tf.choices import WHOLE_TEXTS
from routing_tf.files.atomic import open_output
from routing_tf.files.atomic import open_text
from routing_tf.generation import display
from routing_tf.generation import texts
from routing_tf.generation.token_stream import TokenStream
from routing_tf.training.stop_request import stop_as_interrupt


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
    prompts, samples = make_samples(lm, texts.TargetSample, options)
    check_sources(lm.preprocessor, prompts)
    continuation = texts.TargetContinuation(
        lm,
        sampler,
        options.max_length
        or min(lm.preprocessor.decoder_sequence_length, MAX_DEFAULT_LENGTH),
        stop_token_id(lm, options),
        options.batch_size,
    )
    write_texts(continuation, samples, len(prompts), options.output_file)


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
    commands.refuse(
        options, ["max_length", "batch_size"], "--stream, which reads --num_tokens"
    )
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
        lines = display.Lines(samples, file)
        try:
            parts = lines.follow(continuation.run(samples, speed))
            display.show(parts, samples, output, num_prompts)
        finally:
            # What there is when somebody has lost patience.
            lines.write_rest()
    print(speed, file=sys.stderr)

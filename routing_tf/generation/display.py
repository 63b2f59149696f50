"""Showing texts while they are generated, and writing texts and pictures to files."""

import contextlib
import json
import signal
import sys
import time

import keras_hub
import numpy as np

from routing_tf.files.atomic import open_output
from routing_tf.files.atomic import open_text
from routing_tf.files.progress import StopRequest
from routing_tf.files.progress import stop_as_interrupt
from routing_tf.models import steps
from routing_tf.problems import image
from routing_tf.training import loading

PROMPT_TOKENS = 64

COLUMNS = 10
DEFAULT_LABELS = 10


class Speed:
    """Counts tokens; the first ones separately, because they include compiling."""

    def __init__(self):
        self._start = time.perf_counter()
        self._first, self._num_first, self._num_tokens = None, 0, 0

    def add(self, num_tokens):
        """Counts tokens that have just been generated."""
        self._num_tokens += num_tokens
        if self._first is None and num_tokens:
            self._first, self._num_first = time.perf_counter(), num_tokens

    def __str__(self):
        now = time.perf_counter()
        if self._first is None:
            return f"no tokens in {now - self._start:.1f} s"
        text = f"{self._num_tokens:,} tokens in {now - self._start:.1f} s"
        later = self._num_tokens - self._num_first
        if not later:
            return text
        return (
            f"{text}: the first after {self._first - self._start:.1f} s, then "
            f"{later / max(now - self._first, 1e-9):,.1f} tokens/s"
        )


class Output:
    """The output of texts: a text file, or standard output.

    On a terminal, control characters are shown as U+FFFD.
    """

    def __init__(self, file=None):
        self._file = file or sys.stdout
        self._is_terminal = self._file.isatty()
        self._ends_line = True

    def write(self, text):
        """Writes a text at once."""
        if not text:
            return
        self._ends_line = text.endswith("\n")
        self._file.write(printable(text) if self._is_terminal else text)
        self._file.flush()

    def end_line(self):
        """Ends the line, unless it has ended."""
        if not self._ends_line:
            self.write("\n")


def printable(text):
    """Returns a text without control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def show(parts, samples, output, num_prompts):
    """Shows texts: a single text while it grows, several texts when each is done.

    `parts` is the iterator of `Continuation.run`.
    """
    if len(samples) == 1:
        output.write(samples[0].beginning)
        for _, text in parts:
            output.write(text)
        output.end_line()
        return
    per_prompt = len(samples) // num_prompts
    order = {id(sample): index for index, sample in enumerate(samples)}
    for sample, text in parts:
        if text is None:
            names = []
            if num_prompts > 1:
                names.append(f"prompt {order[id(sample)] // per_prompt + 1}")
            if per_prompt > 1:
                names.append(f"sample {sample.number + 1}")
            output.write(f"--- {', '.join(names)}\n")
            output.write(sample.beginning + sample.continuation)
            output.end_line()


class Lines:
    """Writes texts as lines of JSON, in their order, as soon as they are done.

    Without a file it writes nothing.
    """

    def __init__(self, samples, file):
        self._samples, self._file = samples, file
        self._num_written = 0

    def follow(self, parts):
        """Passes the items of `Continuation.run` on."""
        for part in parts:
            yield part
            self._write_done()

    def _write_done(self):
        first = self._num_written
        while first < len(self._samples) and self._samples[first].is_done:
            first += 1
        self._write(self._samples[self._num_written : first])
        self._num_written = first

    def write_rest(self):
        """Writes texts that have begun and are not done or wait for others."""
        rest = self._samples[self._num_written :]
        self._write([sample for sample in rest if sample.num_tokens])
        self._num_written = len(self._samples)

    def _write(self, samples):
        if self._file is None or not samples:
            return
        for sample in samples:
            line = json.dumps(sample.to_dict(), ensure_ascii=False)
            self._file.write(f"{line}\n")
        self._file.flush()


def write_texts(continuation, samples, num_prompts, output_file=None):
    """Generates texts, shows them, and writes them to a file if there is one."""
    output, speed = Output(), Speed()
    with stop_as_interrupt(), open_output(output_file) as file:
        lines = Lines(samples, file)
        try:
            parts = lines.follow(continuation.run(samples, speed))
            show(parts, samples, output, num_prompts)
        finally:
            # The texts so far, if the user stops the command.
            lines.write_rest()
    print(speed, file=sys.stderr)


def write_stream(stream, sample, stop_token_id=None, output_file=None):
    """Continues a prompt until the stream ends or Ctrl-C, without keeping the text."""
    speed = Speed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_as_interrupt())
        outputs = [Output()]
        if output_file is not None:
            # An endless text has no complete file, so readers follow it.
            outputs.append(Output(stack.enter_context(open_text(output_file))))
        # Ctrl-C ends it: the first after a token, the second at once. A shell may let
        # background processes ignore it.
        heard = (signal.SIGINT, signal.SIGTERM)
        heard = [n for n in heard if signal.getsignal(n) != signal.SIG_IGN]
        with contextlib.suppress(KeyboardInterrupt), StopRequest("", heard) as stop:
            for text in _stream_parts(stream, sample, stop_token_id, speed, stop):
                for output in outputs:
                    output.write(text)
        for output in outputs:
            output.end_line()
    print(speed, file=sys.stderr)


def _stream_parts(stream, sample, stop_token_id, speed, stop):
    yield sample.prompt
    for position, tokens in stream([sample.token_ids]):
        if position >= len(sample.token_ids):
            speed.add(1)
            text = sample.add(int(tokens[0]), stop_token_id)
            sample.continuation = ""
            yield text
        if sample.has_ended or stop.signal is not None:
            break
    yield sample.end()


def sample_grid(model, sampler, labels, num_samples):
    """Samples images: `num_samples` of each class in `labels`.

    Without classes `labels` is None. Returns a PNG file as bytes: a column for each
    class; without classes up to ten columns.
    """
    levels = model.hyperparameters.vocabulary_size
    if labels is None:
        images = model.generate(num_samples, sampler=sampler)
        return image.picture(images, min(COLUMNS, num_samples), levels)
    images = model.generate(labels=list(labels) * num_samples, sampler=sampler)
    return image.picture(images, len(labels), levels)


def completion_grid(model, sampler, images, labels, num_given_rows, num_samples):
    """Completes images `<int>[number, height, width, channels]` from their first rows.

    Returns a PNG file as bytes: a column for each image, with the given rows on grey,
    its `num_samples` completions, and the true image.
    """
    levels = model.hyperparameters.vocabulary_size
    completed = complete(model, sampler, images, labels, num_given_rows, num_samples)
    given = np.array(images)
    given[:, num_given_rows:] = levels // 2
    rows = np.concatenate([given, completed, images])
    return image.picture(rows, len(images), levels)


def complete(model, sampler, images, labels, num_given_rows, num_samples=1):
    """Returns the completions of images; `labels` are for a model with classes."""
    if model.hyperparameters.num_classes is None:
        labels = None
    return model.generate(
        labels=None if labels is None else np.tile(labels, num_samples),
        images=np.tile(images, (num_samples, 1, 1, 1)),
        num_given_rows=num_given_rows,
        sampler=sampler,
    )


def labels_to_sample(labels, num_classes):
    """Returns the classes to sample, as integers.

    `labels` are strings; None for all classes, at most `DEFAULT_LABELS`.
    """
    if labels is None:
        return list(range(min(DEFAULT_LABELS, num_classes)))
    numbers = [int(x) if x.strip().isdecimal() else -1 for x in labels]
    if not numbers or not all(0 <= number < num_classes for number in numbers):
        raise ValueError(
            f"`--labels` must be integers in the range [0, {num_classes}), separated "
            f"by commas. Received: --labels={','.join(labels)}"
        )
    return numbers


def model_to_sample_from(trainer):
    """Returns the trained model on one device."""
    if trainer.engine.num_devices == 1:
        return trainer.lm
    lm = loading.load_language_model(trainer.model_dir)
    if trainer.config.hyperparameters.kind != "image":
        sampler = keras_hub.samplers.TopPSampler(p=0.9, seed=trainer.config.seed)
        lm.compile(optimizer=None, sampler=sampler)
    return lm


def show_samples(lm, trainer, num_tokens, num_images):
    """Samples from the trained model: a text on standard output, images as files.

    The model is that of `model_to_sample_from`.
    """
    problem = trainer.problem
    if problem.kind == "image":
        if num_images:
            files = sample_images(lm, problem, num_images, trainer.config.seed)
            for name, content in files.items():
                path = trainer.model_dir / f"{name}.png"
                path.write_bytes(content)
                print(f"{name}: {path}")
    elif num_tokens and problem.tokenizer is not None:
        sample = sample_target if problem.kind == "seq2seq" else sample_continuation
        for name, text in sample(lm, problem, num_tokens).items():
            print(f"--- {name}\n{printable(text)}")
        print("---")


def sample_continuation(lm, problem, num_tokens):
    """Continues a held-out text by `num_tokens`; returns texts by their titles.

    By fewer tokens if the model has no room for all.
    """
    ids = problem.ids(problem.eval_split)
    start = len(ids) // 2
    end = start + min(PROMPT_TOKENS, problem.sequence_length // 2)
    prompt = problem.tokenizer.detokenize(ids[start:end])
    # The model's sequences have one more leading id.
    length = 1 + len(problem.tokenizer.tokenize(prompt)) + num_tokens
    length = min(length, steps.longest_row(lm.hyperparameters) or length)
    text = lm.generate(prompt, max_length=length)
    return {
        "prompt from held-out text": prompt,
        "sampled continuation": text.removeprefix(prompt),
    }


def sample_target(lm, problem, num_tokens):
    """Generates the target of a held-out source; returns texts by their titles."""
    tokenizer = problem.tokenizer
    source, target = (ids[:-1] for ids in problem.pair(problem.eval_split, 0))
    # As long as in training, because the lengths decide which tokens meet.
    sampled = tokenizer.tokenize(lm.generate(tokenizer.detokenize(source)))
    found = {
        "held-out source": source,
        "its target": target,
        "sampled target": np.asarray(sampled),
    }
    return {name: tokenizer.detokenize(ids[:num_tokens]) for name, ids in found.items()}


def sample_images(model, problem, number, seed=0):
    """Samples images, and completes half as many held-out ones, given their upper half.

    Returns PNG files as bytes by their names. In the file of completions, each row of
    completed images is below the row of the true ones; incomplete rows are left out.
    """
    sampler = keras_hub.samplers.RandomSampler(seed=seed)
    labels = None
    if model.hyperparameters.num_classes is not None:
        labels = np.arange(number) % problem.num_classes
    samples = model.generate(number, labels, sampler=sampler)
    true = problem.images(problem.eval_split)[: -(-number // 2)]
    labels = problem.labels(problem.eval_split)[: len(true)]
    num_given_rows = problem.image_shape[0] // 2
    completed = complete(model, sampler, true, labels, num_given_rows)
    columns = min(COLUMNS, len(true))
    pairs = [
        images[start : start + columns]
        for start in range(0, len(true) // columns * columns, columns)
        for images in (true, completed)
    ]
    levels = problem.vocabulary_size
    return {
        "samples": image.picture(samples, min(COLUMNS, number), levels),
        "completions": image.picture(np.concatenate(pairs), columns, levels),
    }

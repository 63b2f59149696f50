"""Growing texts that continue prompts or belong to source texts."""

import copy
import dataclasses
import functools

import numpy as np
from keras import ops

from routing_tf.generation.token_stream import TokenStream
from routing_tf.models import steps
from routing_tf.tokenizers.text_stream import text_stream

# No weight shows the length of a model's texts.
MAX_DEFAULT_LENGTH = 2**16


class StopStrings:
    r"""Passes a text on, piece by piece, up to one of several strings.

    It ends before the string that is complete first. A possible beginning of a string
    is held back until that is clear.

    Args:
        strings: the strings, none of them empty; without any, everything is passed on.

    Attributes:
        is_found: whether one of them was found, after which nothing is passed on.

    Example:

    ```python
    from routing_tf.generation.texts import StopStrings

    stop = StopStrings(["\n\n"])
    shown = [stop.add(text) for text in ("one\n", "two\n", "\nthree")]
    assert shown == ["one", "\ntwo", ""] and stop.is_found
    ```
    """

    def __init__(self, strings=()):
        if not all(strings):
            raise ValueError(
                f"Stop strings must not be empty. Received: {list(strings)}"
            )
        self._strings = tuple(strings)
        self._held = ""
        self.is_found = False

    def add(self, text):
        """Takes the next piece; returns the text that can be passed on."""
        if self.is_found:
            return ""
        text = self._held + text
        found = [string for string in self._strings if string in text]
        self.is_found = bool(found)
        if found:
            self._held = ""
            # The string that is complete first, so that the division into pieces has no
            # effect.
            return text[: min((text.find(s) + len(s), text.find(s)) for s in found)[1]]
        end = len(text) - self._length_of_beginning(text)
        self._held = text[end:]
        return text[:end]

    def end(self):
        """Returns the text that was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _length_of_beginning(self, text):
        """The length of the longest end of a text with which a string begins."""
        longest = max(map(len, self._strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0


class TextSample:
    """A prompt and the text that continues it, token by token.

    If the prompt is a source text for an encoder (`is_source`), its text starts empty.
    `number` counts the texts of a prompt. The continuation ends where one of
    `stop_strings` begins.

    Attributes:
        beginning: the beginning of the text: the prompt, unless it is a source text.
        token_ids: ids of the beginning, after the leading id.
        continuation: the text so far.
        num_tokens: number of its tokens.
        has_ended: whether the model ended it, or a stop string.
        is_done: whether the text is complete.
    """

    def __init__(self, tokenizer, prompt, number=0, is_source=False, stop_strings=()):
        self.prompt, self.number = prompt, number
        self.beginning = text = "" if is_source else prompt
        ids = np.asarray(tokenizer.tokenize(text)).tolist() if text else []
        self.token_ids = [tokenizer.start_token_id, *ids]
        self.continuation, self.num_tokens = "", 0
        self.has_ended = self.is_done = False
        self._tokenizer, self._stop_strings = tokenizer, stop_strings

    @functools.cached_property
    def _stop(self):
        return StopStrings(self._stop_strings)

    @functools.cached_property
    def _stream(self):
        # Made when the text grows, because thousands of others may wait.
        return text_stream(self._tokenizer, self.token_ids[1:])

    def another(self, number):
        """Returns another text of the same prompt, before this one has grown."""
        other = copy.copy(self)
        other.number = number
        return other

    def add(self, token_id, stop_token_id=None):
        """Adds a token, and returns the text that it completes."""
        self.num_tokens += 1
        self.has_ended = token_id == stop_token_id
        if self.has_ended:
            return ""
        text = self._take(self._stop.add(self._stream.add(token_id)))
        self.has_ended = self._stop.is_found
        return text

    def end(self):
        """Ends the text, and returns the incomplete rest."""
        text = self._take(self._stop.add(self._stream.end()) + self._stop.end())
        self.is_done = True
        del self._stream  # may know a whole vocabulary
        return text

    def _take(self, text):
        self.continuation += text
        return text

    def to_dict(self):
        """Returns its line of JSON, as a dict."""
        return {
            "prompt": self.prompt,
            "sample": self.number,
            "continuation": self.continuation,
            "tokens": self.num_tokens,
            "ended": self.has_ended,
        }


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Continues prompts, or generates the texts of source texts.

    Args:
        lm: a `RoutingTransformerCausalLM` or `RoutingTransformerSeq2SeqLM`.
        sampler: a keras_hub sampler.
        max_length: largest number of tokens of a text, including its beginning and the
            leading id.
        stop_token_id: the id that ends a text, or None.
        batch_size: number of texts that are generated together.
        by_steps: whether tokens come one by one, to be shown, and end with the text;
            otherwise whole texts come from `lm.generate_step`, the only way with an
            encoder and with samplers that choose among whole texts.
    """

    lm: object
    sampler: object
    max_length: int
    stop_token_id: int | None = None
    batch_size: int = 16
    by_steps: bool = True

    def run(self, samples, speed):
        """Continues texts in batches; they grow, and `speed` counts the tokens.

        Yields pairs of a sample and its new text, None when it is done.
        """
        batch_size = min(self.batch_size, len(samples))
        if self.by_steps:
            stream = TokenStream(self.lm, self.sampler, self.max_length)
            tokens_of = functools.partial(self._step_by_step, stream)
        else:
            self.lm.compile(
                optimizer=None, loss=None, weighted_metrics=None, sampler=self.sampler
            )
            tokens_of = self._at_once
        for start in range(0, len(samples), batch_size):
            batch = samples[start : start + batch_size]
            # Batches have one size; otherwise the last one would be compiled again.
            filled = batch + batch[-1:] * (batch_size - len(batch))
            for sample, token in tokens_of(batch, filled, speed):
                if token is not None:
                    yield sample, sample.add(token, self.stop_token_id)
                if token is None or sample.has_ended:
                    yield sample, sample.end()
                    yield sample, None

    def _step_by_step(self, stream, batch, filled, speed):
        """Yields pairs of a sample and its next token, None after the last one."""
        for position, tokens in stream([sample.token_ids for sample in filled]):
            new = [
                (sample, token)
                for sample, token in zip(batch, map(int, tokens))
                if position >= len(sample.token_ids) and not sample.is_done
            ]
            speed.add(len(new))
            yield from new
            if all(sample.is_done for sample in batch):
                return
        yield from ((sample, None) for sample in batch if not sample.is_done)

    def _at_once(self, batch, filled, speed):
        """Yields what `_step_by_step` does, text after text."""
        inputs = self._inputs(filled)
        stop = None if self.stop_token_id is None else [self.stop_token_id]
        outputs = self.lm.make_generate_function()(inputs, stop_token_ids=stop)
        prefix = "decoder_" if self._takes_sources else ""
        token_ids, mask = (
            np.array(ops.convert_to_numpy(outputs[prefix + name]))
            for name in ("token_ids", "padding_mask")
        )
        for row, sample in enumerate(batch):
            mask[row, : len(sample.token_ids)] = False
        speed.add(int(mask[: len(batch)].sum()))
        for sample, ids, is_new in zip(batch, token_ids, mask):
            for token in [*ids[is_new].tolist(), None]:
                if not sample.is_done:
                    yield sample, token

    @property
    def _takes_sources(self):
        return self.lm.hyperparameters.kind == "seq2seq"

    def _inputs(self, samples):
        """Returns the inputs of `lm.generate_step`."""
        if self._takes_sources:
            sources = [sample.prompt for sample in samples]
            return self.lm.preprocessor.generate_preprocess(
                {"encoder_text": sources, "decoder_text": [""] * len(sources)},
                decoder_sequence_length=self.max_length,
            )
        token_ids = np.zeros((len(samples), self.max_length), "int32")
        mask = np.zeros(token_ids.shape, "bool")
        for row, sample in enumerate(samples):
            token_ids[row, : len(sample.token_ids)] = sample.token_ids
            mask[row, : len(sample.token_ids)] = True
        return {"token_ids": token_ids, "padding_mask": mask}


def make_samples(lm, prompts, num_samples, stop_strings=()):
    """Makes the texts that will grow, `num_samples` for each prompt.

    Prompts are source texts if the model has an encoder. The texts end where one of
    `stop_strings` begins.
    """
    if lm.preprocessor is None:
        raise ValueError(
            "The model must have a tokenizer. Received: a model of ids. Save it with a "
            "preprocessor"
        )
    is_source = lm.hyperparameters.kind == "seq2seq"
    if is_source:
        check_sources(lm.preprocessor, prompts)
    samples = []
    for prompt in prompts:
        first = TextSample(
            lm.preprocessor.tokenizer,
            prompt,
            is_source=is_source,
            stop_strings=stop_strings,
        )
        samples += [first, *map(first.another, range(1, num_samples))]
    return samples


def check_sources(preprocessor, sources):
    """Raises a `ValueError` if a source text is empty or too long for the encoder."""
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


def length_of_texts(lm, samples, max_length=None):
    """Returns the largest number of tokens, by default at most `MAX_DEFAULT_LENGTH`.

    If `max_length` is None, it is the length of the model's sequences, or with an
    encoder that of its preprocessor.

    Raises:
        ValueError: if a prompt is too long, or the model cuts texts of this length.
    """
    h = lm.hyperparameters
    if h.kind == "seq2seq":
        limit = lm.preprocessor.decoder_sequence_length
        return max_length or min(limit, MAX_DEFAULT_LENGTH)
    longest = max(len(sample.token_ids) for sample in samples)
    default = "" if max_length else ", the model's length, by default"
    max_length = max_length or min(steps.longest_input(h), MAX_DEFAULT_LENGTH)
    steps.check_not_cut(h, max_length, "--max_length")
    if longest >= max_length:
        raise ValueError(
            "`--max_length` must be longer than every prompt, of which the longest has "
            f"{longest} tokens (the leading id included). Received: --max_length="
            f"{max_length}{default}. Pass a larger one or a shorter prompt"
        )
    return max_length

"""Texts that continue prompts or belong to source texts."""

import copy
import dataclasses
import functools

import numpy as np
from keras import ops

from routing_tf.generation.token_stream import TokenStream
from routing_tf.tokenizers.text_stream import text_stream


class TextSample:
    """A prompt and the text that continues it, token by token.

    Args:
        tokenizer: a `ByteTokenizer`, `SubwordTokenizer` or `WordTokenizer`.
        prompt: string.
        number: number of this text among those of its prompt.

    Attributes:
        token_ids: ids of the prompt, behind the one that starts a text.
        continuation: the text so far.
        num_tokens: number of its tokens.
        has_ended: whether the model ended it.
        is_done: whether nothing more is added to it.
    """

    def __init__(self, tokenizer, prompt, number=0):
        self.prompt, self.number = prompt, number
        ids = np.asarray(tokenizer.tokenize(prompt)).tolist() if prompt else []
        self.token_ids = [tokenizer.start_token_id, *ids]
        self.continuation, self.num_tokens = "", 0
        self.has_ended = self.is_done = False
        self._tokenizer = tokenizer

    @functools.cached_property
    def _stream(self):
        # Not before the text grows: others may be waiting, by the thousand.
        return text_stream(self._tokenizer, self.token_ids[1:])

    def another(self, number):
        """Returns a further text of the same prompt, before this one has grown.

        Args:
            number: its number among those of the prompt.
        """
        other = copy.copy(self)
        other.number = number
        return other

    def add(self, token_id, stop_token_id=None):
        """Adds a token, and returns the text that is complete with it.

        Args:
            token_id: the id.
            stop_token_id: the id that ends a text; None (the default) for none.
        """
        self.num_tokens += 1
        self.has_ended = token_id == stop_token_id
        return "" if self.has_ended else self._take(self._stream.add(token_id))

    def end(self):
        """Ends the text; returns what was not complete."""
        text = self._take(self._stream.end())
        self.is_done = True
        del self._stream  # may know a whole vocabulary
        return text

    def _take(self, text):
        self.continuation += text
        return text

    def to_dict(self):
        """Returns what a line of JSON says about it."""
        return {
            "prompt": self.prompt,
            "sample": self.number,
            "continuation": self.continuation,
            "tokens": self.num_tokens,
            "ended": self.has_ended,
        }


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How prompts are continued.

    Args:
        lm: a `RoutingTransformerCausalLM`.
        sampler: a keras_hub sampler.
        max_length: number of tokens of a text at most, the prompt and the leading id
            included.
        stop_token_id: the id that ends a text; None for none.
        batch_size: number of texts that are made together.
        by_steps: whether tokens come one by one; else whole texts from
            `lm.generate_step`.
    """

    lm: object
    sampler: object
    max_length: int
    stop_token_id: int | None = None
    batch_size: int = 16
    by_steps: bool = True

    def run(self, samples, speed):
        """Continues texts in batches.

        Args:
            samples: list of `TextSample`, which grow.
            speed: `Speed`, which counts the tokens.

        Yields:
            Pairs of a sample and text that it has grown by, or None where it is done.
        """
        batch_size = min(self.batch_size, len(samples))
        batches = self._step_by_step if self.by_steps else self._at_once
        stream = None
        if self.by_steps:
            stream = TokenStream(self.lm, self.sampler, self.max_length)
        else:
            self.lm.compile(
                optimizer=None, loss=None, weighted_metrics=None, sampler=self.sampler
            )
        for start in range(0, len(samples), batch_size):
            batch = samples[start : start + batch_size]
            # Batches of one size, or the last would be compiled anew.
            prompts = [sample.token_ids for sample in batch]
            prompts += [prompts[-1]] * (batch_size - len(batch))
            yield from batches(batch, prompts, speed, stream)

    def _step_by_step(self, batch, prompts, speed, stream):
        growing = list(batch)
        rows = {id(sample): row for row, sample in enumerate(batch)}
        for position, tokens in stream(prompts):
            new = [each for each in growing if position >= len(each.token_ids)]
            speed.add(len(new))
            for sample in new:
                token = int(tokens[rows[id(sample)]])
                yield sample, sample.add(token, self.stop_token_id)
                if sample.has_ended:
                    growing.remove(sample)
                    yield from _finish(sample)
            if not growing:
                return
        for sample in growing:
            yield from _finish(sample)

    def _at_once(self, batch, prompts, speed, stream):
        token_ids = np.zeros((len(prompts), self.max_length), "int32")
        mask = np.zeros(token_ids.shape, "bool")
        for row, prompt in enumerate(prompts):
            token_ids[row, : len(prompt)] = prompt
            mask[row, : len(prompt)] = True
        stop = None if self.stop_token_id is None else [self.stop_token_id]
        outputs = self.lm.make_generate_function()(
            {"token_ids": token_ids, "padding_mask": mask}, stop_token_ids=stop
        )
        token_ids, mask = (
            ops.convert_to_numpy(outputs[name])
            for name in ("token_ids", "padding_mask")
        )
        for row, sample in enumerate(batch):
            mask[row, : len(sample.token_ids)] = False
        speed.add(int(mask[: len(batch)].sum()))
        for row, sample in enumerate(batch):
            for token in token_ids[row][mask[row]].tolist():
                yield sample, sample.add(token, self.stop_token_id)
            yield from _finish(sample)


def stream_parts(stream, sample, stop_token_id, speed):
    """Continues one prompt without keeping what there is.

    Args:
        stream: `TokenStream`.
        sample: `TextSample` of the prompt.
        stop_token_id: the id that ends the text; None for none.
        speed: `Speed`, which counts the tokens.

    Yields:
        The prompt, and the texts that follow it.
    """
    yield sample.prompt
    for position, tokens in stream([sample.token_ids]):
        if position < len(sample.token_ids):
            continue
        speed.add(1)
        text = sample.add(int(tokens[0]), stop_token_id)
        sample.continuation = ""
        yield text
        if sample.has_ended:
            break
    yield sample.end()


def _finish(sample):
    yield sample, sample.end()
    yield sample, None


class TargetSample(TextSample):
    """A source text and the text that is generated for it, which starts from nothing.

    Args:
        tokenizer: a tokenizer such as `ByteTokenizer`.
        source: string.
        number: number of this text among those of its source.
    """

    def __init__(self, tokenizer, source, number=0):
        super().__init__(tokenizer, "", number)
        self.source = source

    def to_dict(self):
        """Returns what a line of JSON says about it."""
        return {**super().to_dict(), "prompt": self.source}


@dataclasses.dataclass(frozen=True)
class TargetContinuation:
    """How texts are generated for source texts: whole ones, in batches.

    Args:
        lm: a `RoutingTransformerSeq2SeqLM`.
        sampler: a keras_hub sampler.
        max_length: number of tokens of a text at most, the leading id included.
        stop_token_id: the id that ends a text; None for none.
        batch_size: number of texts that are made together.
    """

    lm: object
    sampler: object
    max_length: int
    stop_token_id: int | None = None
    batch_size: int = 16

    def run(self, samples, speed):
        """Generates texts.

        Args:
            samples: list of `TargetSample`, which grow.
            speed: `Speed`, which counts the tokens.

        Yields:
            Pairs of a sample and text that it has grown by, or None where it is done.
        """
        batch_size = min(self.batch_size, len(samples))
        self.lm.compile(
            optimizer=None, loss=None, weighted_metrics=None, sampler=self.sampler
        )
        generate = self.lm.make_generate_function()
        stop = None if self.stop_token_id is None else [self.stop_token_id]
        for start in range(0, len(samples), batch_size):
            batch = samples[start : start + batch_size]
            # Batches of one size, or the last would be compiled anew.
            sources = [sample.source for sample in batch]
            sources += [sources[-1]] * (batch_size - len(batch))
            inputs = self.lm.preprocessor.generate_preprocess(
                {"encoder_text": sources, "decoder_text": [""] * batch_size},
                decoder_sequence_length=self.max_length,
            )
            outputs = generate(inputs, stop_token_ids=stop)
            token_ids, mask = (
                np.array(ops.convert_to_numpy(outputs[f"decoder_{name}"]))
                for name in ("token_ids", "padding_mask")
            )
            mask[:, 0] = False  # the id that sequences start behind
            speed.add(int(mask[: len(batch)].sum()))
            for sample, ids, is_new in zip(batch, token_ids, mask):
                for token in ids[is_new].tolist():
                    yield sample, sample.add(token, self.stop_token_id)
                yield sample, sample.end()
                yield sample, None

"""Texts that models with an encoder generate for source texts."""

import dataclasses

import numpy as np
from keras import ops

from routing_tf.text_samples import TextSample


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

"""Texts that models of keras_hub continue."""

from routing_tf.generation.texts import Continuation
from routing_tf.generation.texts import TextSample


def end_id(lm):
    """Returns the id that ends a text, or None."""
    return getattr(lm.preprocessor.tokenizer, "end_token_id", None)


class HubContinuation(Continuation):
    """Continues prompts with the `generate` of keras_hub.

    Args: as of `Continuation`; `lm` is a `CausalLM` of keras_hub.
    """

    _takes_sources = False

    def samples(self, prompts, num_samples, stop_strings=()):
        """Returns the texts that will grow, `num_samples` for each prompt.

        Raises:
            ValueError: if a prompt is too long, or has no token to begin with.
        """
        samples = []
        for prompt in prompts:
            first = _sample(self.lm.preprocessor, prompt, stop_strings)
            self._check(first)
            samples += [first, *map(first.another, range(1, num_samples))]
        return samples

    def _check(self, sample):
        number = len(sample.token_ids)
        if not number:
            raise ValueError(
                "A prompt must not be empty: this model has no id that starts a text. "
                "Received: an empty prompt"
            )
        if number >= self.max_length:
            raise ValueError(
                "`--max_length` must be longer than every prompt. Received: "
                f"--max_length={self.max_length} and a prompt of {number} tokens. Pass "
                "a larger one or a shorter prompt"
            )


def _sample(preprocessor, prompt, stop_strings):
    sample = TextSample(preprocessor.tokenizer, prompt, stop_strings=stop_strings)
    start, *ids = sample.token_ids
    if start is None or not getattr(preprocessor, "add_start_token", True):
        sample.token_ids = ids
    return sample

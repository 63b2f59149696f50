"""How well a model predicts a text, and whether later tokens influence that."""

import dataclasses
import math

import numpy as np

# Changes of a score, in nats, that rounding explains.
ROUNDING = 1e-5
# Places from which tokens are replaced, if there are as many.
NUM_CUTS = 4
MASKS = {
    "images": "padding_mask",
    "token_ids": "padding_mask",
    "decoder_token_ids": "decoder_padding_mask",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """How well a model predicts a text, or a span of it.

    Args:
        log_likelihoods: NumPy array `<float64>[tokens]`, the natural logarithm of the
            probability of each token that is scored.
        token_ids: NumPy array `<int32>[tokens]`, the ids of these tokens.
        tokens: their names in the tokenizer's vocabulary; None if the input was ids.
        offsets: NumPy array `<int64>[tokens, 2]`, start and end of the characters of
            each token in the text; places of the tokens if the input was ids.
        routing_scope: `"full"` or `"prefix"`; see `score`.
        num_left_out: number of tokens of the text or span that were cut off and not
            scored.
        num_bytes: UTF-8 bytes of the text that these tokens stand for; None if the
            input was ids.
        num_words: number of words for `perplexity_per_word`: the given number, or that
            of `str.split` for the text of these tokens, which leaves out newlines even
            if they are tokens. None if the input was ids and no number was given.
        misaligned_prefix_length: number of tokens that were dropped from the start of a
            sub-string until it was found; None unless the span is a sub-string.
        num_unknown: number of tokens that stand for words which the vocabulary does not
            have. They tell less than the text does. 0 if the input was ids.
    """

    log_likelihoods: np.ndarray
    token_ids: np.ndarray
    tokens: tuple | None
    offsets: np.ndarray
    routing_scope: str
    num_left_out: int = 0
    num_bytes: int | None = None
    num_words: int | None = None
    misaligned_prefix_length: int | None = None
    num_unknown: int = 0

    @property
    def num_tokens(self):
        """Number of tokens that are scored."""
        return len(self.token_ids)

    @property
    def log_likelihood(self):
        """Natural logarithm of the probability of all these tokens."""
        return float(np.sum(self.log_likelihoods))

    @property
    def loss(self):
        """Mean negative log-likelihood of a token, in nats."""
        return -self.log_likelihood / self.num_tokens

    @property
    def perplexity(self):
        """Perplexity per token."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self):
        """Bits per byte of UTF-8; None if the input was ids, or has unknown words."""
        if self.num_bytes is None or self.num_unknown:
            return None
        return -self.log_likelihood / math.log(2) / self.num_bytes

    @property
    def perplexity_per_word(self):
        """Perplexity per word; None if there are none or their number is unknown."""
        return _exp(-self.log_likelihood / self.num_words) if self.num_words else None


def join(scores):
    """Returns the joint `Score` of several texts or spans of one routing scope.

    Offsets still refer to their own texts.
    """
    scopes = {score.routing_scope for score in scores}
    if len(scopes) != 1:
        raise ValueError(
            "`scores` must contain at least one score, all of the same routing scope. "
            f"Received: {len(scores)} scores of routing scopes {sorted(scopes)}"
        )

    def total(name):
        values = [getattr(score, name) for score in scores]
        return None if None in values else sum(values)

    tokens = [score.tokens for score in scores]
    return Score(
        log_likelihoods=np.concatenate([score.log_likelihoods for score in scores]),
        token_ids=np.concatenate([score.token_ids for score in scores]),
        tokens=None if None in tokens else sum(tokens, ()),
        offsets=np.concatenate([score.offsets for score in scores]),
        routing_scope=scores[0].routing_scope,
        num_left_out=total("num_left_out"),
        num_bytes=total("num_bytes"),
        num_words=total("num_words"),
        misaligned_prefix_length=total("misaligned_prefix_length"),
        num_unknown=total("num_unknown"),
    )


def _exp(value):
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def influence_of_later_tokens(scorer, inputs, targets, scores=None):
    """Replaces later tokens of a batch and compares the scores of earlier ones.

    Each row has a place of its own from which all its tokens are others. All calls have
    one shape, so the scorer compiles at most once.

    Args:
        scorer: a `TokenScorer`.
        inputs: dict of NumPy arrays, as for a call of the model.
        targets: NumPy array of the tokens to score.
        scores: those of the batch; None to compute them.

    Returns:
        The largest change of the score of an earlier token, in nats; None if no row has
        an earlier and a later token.
    """
    name = next(name for name in MASKS if name in inputs)
    tokens = np.asarray(inputs[name])
    real = np.asarray(inputs[MASKS[name]]).astype(bool)
    num_words = scorer.vocabulary_size
    rows = len(tokens)
    lengths = real.reshape(rows, -1).sum(axis=1)
    if num_words < 2 or lengths.max(initial=0) < 2:
        return None
    places = np.arange(targets.shape[1])
    if name == "images":  # each is seen at the next place
        places = scorer.model.places()
    places = np.broadcast_to(places, tokens.shape)
    if scores is None:
        scores = scorer.score(inputs, targets)
    generator, largest = np.random.default_rng(0), 0.0
    num_calls = -(-NUM_CUTS // rows)
    for call in range(num_calls):
        shares = (np.arange(rows) + (call + 0.5) / num_calls) / rows
        cuts = 1 + (shares * np.maximum(lengths - 1, 0)).astype(int)
        cuts = cuts.reshape(-1, *[1] * (tokens.ndim - 1))
        shifts = generator.integers(1, num_words, tokens.shape)
        others = ((tokens + shifts) % num_words).astype(tokens.dtype)
        replaced = np.where((places >= cuts) & real, others, tokens)
        changed = scorer.score({**inputs, name: replaced}, targets)
        is_earlier = (places < cuts) & real
        moved = np.abs(changed - scores)[is_earlier]
        largest = max(largest, float(moved.max(initial=0.0)))
    return largest


def influence_in_text(scorer, token_ids):
    """Does what `influence_of_later_tokens` does for the ids of a text."""
    length = scorer.hyperparameters.max_sequence_length
    targets = np.asarray(token_ids, "int32")[None, :length]
    inputs = {
        "token_ids": np.pad(targets[:, :-1], [(0, 0), (1, 0)]),
        "padding_mask": np.ones(targets.shape, bool),
    }
    return influence_of_later_tokens(scorer, inputs, targets)

"""Whether later tokens influence scores, tried on the model itself."""

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

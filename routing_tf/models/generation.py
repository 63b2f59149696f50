"""Continuing prompts with the samplers of keras_hub, one token at each step."""

import keras_hub
from keras import ops


def continue_prompts(lm, token_ids, prompt_mask, stop_token_ids=None, memory=()):
    """Continues one batch of prompts with the sampler of a language model.

    Each step computes one token with a cache, and logits are those of the routing scope
    `"prefix"`. With settings of the release that let later tokens decide who is a
    member, each step computes the whole buffer anew instead, in which the positions
    behind the prefix are padding.

    Args:
        lm: the language model.
        token_ids: `<int>[batch, length]`.
        prompt_mask: `<bool>[batch, length]`, True on the prompts.
        stop_token_ids: ids that end a sequence; None (the default) for no such ids.
        memory: the output of an encoder and its padding mask; empty (the default)
            without one.

    Returns:
        Token ids and their mask, now True on prompt and new tokens.

    Raises:
        ValueError: if the model cuts its inputs to less than the buffer.
    """
    _check_buffer(lm.hyperparameters, token_ids.shape[1])
    prompt_mask = ops.cast(prompt_mask, "bool")
    if stop_token_ids is not None:
        # keras_hub would stop at ids that lie in the buffer behind the prompt.
        stops = set(stop_token_ids)
        filler = min(set(range(len(stops) + 1)) - stops)
        token_ids = ops.where(prompt_mask, token_ids, filler)
    # A sequence starts behind its first id, which is there in any case.
    lengths = ops.maximum(ops.sum(ops.cast(prompt_mask, "int32"), axis=-1), 1)
    start = _recompute if lm.hyperparameters.sees_later_tokens("prefix") else _steps
    next_logits, index, hidden, cache = start(lm, token_ids, ops.min(lengths), memory)
    token_ids = lm.sampler(
        next=next_logits,
        prompt=token_ids,
        cache=cache,
        index=index,
        mask=prompt_mask,
        stop_token_ids=stop_token_ids,
        hidden_states=hidden,
        model=lm,
    )
    return token_ids, _until_stop(token_ids, prompt_mask, stop_token_ids)


def check_draws_one_by_one(sampler):
    """Refuses samplers that choose among whole sequences.

    Args:
        sampler: a keras_hub sampler.

    Raises:
        ValueError: if it does not draw one token, or value, after the other.
    """
    # Such samplers have a loop of their own.
    if type(sampler).get_next_token is keras_hub.samplers.Sampler.get_next_token:
        raise ValueError(
            "`sampler` must draw one token or value after the other, such as greedy, "
            f"random, top_k or top_p. Received: sampler={sampler!r}"
        )


def _steps(lm, token_ids, index, memory):
    """What the sampler needs, with a cache that holds the common start of the prompts.

    Returns:
        The function of next logits, the place of the first new token, hidden states of
        the tokens before it, and the cache.
    """
    batch, length = ops.shape(token_ids)
    cache = lm.make_cache(batch, length, *memory)
    h = lm.hyperparameters
    if memory or h.padding_has_influence:
        hidden, cache = _feed(lm, token_ids, index, cache)
    else:
        mask = ops.arange(length, dtype="int32") < index
        mask = ops.broadcast_to(mask, (batch, length))
        _, hidden, cache = lm.call_with_cache(token_ids, cache, 0, mask)

    def next_logits(prompt, cache, index):
        # The loop feeds the last token of the start again: the cache replaces it.
        token = ops.take(prompt, index - 1, axis=1)[:, None]
        logits, hidden, cache = lm.call_with_cache(token, cache, index - 1)
        return logits[:, 0], hidden[:, 0], cache

    return next_logits, index, hidden, cache


def _feed(lm, token_ids, number, cache):
    """Computes the first tokens one by one; returns hidden states and cache."""

    def step(place, hidden, cache):
        token = ops.take(token_ids, place, axis=1)[:, None]
        _, new, cache = lm.call_with_cache(token, cache, place)
        new = ops.cast(new, hidden.dtype)
        return place + 1, ops.slice_update(hidden, (0, place, 0), new), cache

    size = lm.hyperparameters.hidden_dim
    hidden = ops.zeros((*ops.shape(token_ids), size), lm.compute_dtype)
    _, hidden, cache = ops.while_loop(
        lambda place, hidden, cache: place < number,
        step,
        (ops.zeros((), "int32"), hidden, cache),
    )
    return hidden, cache


def _recompute(lm, token_ids, index, memory):
    """What `_steps` returns, with a function that computes the whole buffer."""
    positions = ops.arange(token_ids.shape[1], dtype="int32")

    def hidden_states(prompt, memory, index):
        mask = ops.broadcast_to(positions[None] < index, ops.shape(prompt))
        return lm.backbone.decode(prompt, mask, *memory, routing_scope="prefix")

    def next_logits(prompt, memory, index):
        hidden = hidden_states(prompt, memory, index)
        hidden = ops.take(hidden, index - 1, axis=1)
        return lm.logits_of(hidden), hidden, memory

    memory = tuple(memory)
    return next_logits, index, hidden_states(token_ids, memory, index), memory


def _check_buffer(hyperparameters, length):
    limit = hyperparameters.truncate_length
    if limit is not None and length > limit:
        raise ValueError(
            "`max_length` must not exceed the length to which this model cuts its "
            f"inputs, {limit}. Received: {length}"
        )


def _until_stop(token_ids, prompt_mask, stop_token_ids):
    """Returns a mask, True up to the first stop token behind the prompt, included."""
    if stop_token_ids is None:
        return ops.ones_like(prompt_mask)
    stops = ops.zeros_like(prompt_mask)
    for stop in stop_token_ids:
        stops = ops.logical_or(stops, token_ids == stop)
    stops = ops.cast(ops.logical_and(stops, ops.logical_not(prompt_mask)), "int32")
    return ops.cumsum(stops, axis=-1) - stops == 0

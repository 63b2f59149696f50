"""The decoding loop shared by all models.

A row of tokens starts after an id 0; those of an image are its sub-pixels. All given
tokens except the last are read at once, where that is exact. Then each step feeds one
token to a cache and computes the logits of the next one, in the routing scope
`"prefix"`, so each token is fed once. With settings of the release that let later
tokens decide who is a member, each step computes the whole row again instead, with
padding after the prefix.

`continue_rows` continues rows in a compiled function, for `generate` and SavedModels;
`stream` does so in Python, for endless texts and for progress that is shown. They are
two because the loop is compiled in one and yields tokens in the other; also, that of a
sampler may choose among beams.
"""

import math
import numbers

import keras
import keras_hub
import numpy as np
from keras import ops

from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import large_negative
from routing_tf.models.compiled import compiled
from routing_tf.models.compiled import compiled_once


class Steps:
    """How a model reads a prefix and steps on; subclasses do so for texts and images.

    `begin` makes the state of no tokens: what steps carry along, such as a cache, with
    the batch on axis 0. `read` adds the first tokens of rows to it; it also returns
    hidden states, or None, of which those of later places are invalid. `step` feeds the
    tokens at the next place, and `recompute` whole rows up to a place; both return
    logits of the next tokens `<float>[batch, vocabulary_size]`, hidden states
    `<float>[batch, hidden_dim]` or None, and the state.

    Attributes:
        are_exact: whether a step computes one token; otherwise it computes the whole
            row.
        reads_at_once: whether a prefix is read in one parallel pass.
    """

    def __init__(self, model):
        h = model.hyperparameters
        self.model = model
        self.are_exact = h.sees_later_tokens("prefix") is None
        # With an encoder, the lengths of both sides decide which tokens meet.
        has_influence = h.padding_has_influence
        self.reads_at_once = not has_influence and h.kind != "seq2seq"

    def next_logits(self, tokens, state, index):
        """Returns what `step` does for the tokens before `index`, in rows of all."""
        if not self.are_exact:
            return self.recompute(tokens, state, index - 1)
        return self.step(ops.take(tokens, index - 1, axis=1), state, index - 1)


class TextSteps(Steps):
    """The steps of a language model, with or without an encoder."""

    def begin(self, batch_size, length, memory=()):
        """Returns the state of no tokens; `memory` is an encoder's output and mask."""
        if not self.are_exact:
            return tuple(memory)
        return self.model.make_cache(batch_size, length, *memory)

    def read(self, tokens, number, state):
        if not self.are_exact:
            return self._hidden_states(tokens, state, number), state
        if not self.reads_at_once:
            return self._feed(tokens, number, state)
        mask = _first(number, tokens)
        return self.model.call_with_cache(tokens, state, 0, mask)[1:]

    def _feed(self, tokens, number, state):
        """Reads the first tokens one by one."""

        def step(place, hidden, state):
            token = ops.take(tokens, place, axis=1)
            _, new, state = self.step(token, state, place)
            new = ops.cast(new, hidden.dtype)[:, None]
            return place + 1, ops.slice_update(hidden, (0, place, 0), new), state

        size = self.model.hyperparameters.hidden_dim
        hidden = ops.zeros((*ops.shape(tokens), size), self.model.compute_dtype)
        start = (ops.zeros((), "int32"), hidden, state)
        return ops.while_loop(lambda place, *_: place < number, step, start)[1:]

    def step(self, tokens, state, place):
        logits, hidden, state = self.model.call_with_cache(
            tokens[:, None], state, place
        )
        return logits[:, 0], hidden[:, 0], state

    def recompute(self, tokens, state, place):
        hidden = self._hidden_states(tokens, state, place + 1)
        hidden = ops.take(hidden, place, axis=1)
        return self.model.logits_of(hidden), hidden, state

    def _hidden_states(self, tokens, memory, number):
        mask = _first(number, tokens)
        return self.model.backbone.decode(tokens, mask, *memory, routing_scope="prefix")


class ImageSteps(Steps):
    """The steps of an image model: a token is a sub-pixel, in the model's order."""

    def __init__(self, model):
        super().__init__(model)
        self._places = model.places().astype("int32")
        self._order = np.argsort(self._places, axis=None).astype("int32")

    def begin(self, batch_size, labels=None):
        """Returns the state before the first token.

        `labels` are `<int>[batch]`, or None.
        """
        cache = self.model.make_cache(batch_size) if self.are_exact else ()
        if labels is None:
            return cache, {}
        return cache, {"labels": ops.convert_to_tensor(labels, "int32")}

    def rows_of(self, images):
        """Returns the rows of NumPy images `<int>[batch, height, width, channels]`."""
        values = images.reshape(len(images), -1)[:, self._order]
        return np.pad(values, [(0, 0), (1, 0)])

    def images_of(self, tokens):
        """Returns the images of rows; missing sub-pixels are 0."""
        missing = self.model.num_subpixels + 1 - tokens.shape[1]
        tokens = ops.pad(tokens, [(0, 0), (0, missing)])
        values = ops.take(tokens, self._places.reshape(-1) + 1, axis=1)
        return ops.reshape(values, (-1, *self.model.image_shape))

    def read(self, tokens, number, state):
        cache, labels = state
        images = self.images_of(tokens)
        _, cache = self.model.start_cache(images, cache, number, **labels)
        return None, (cache, labels)

    def step(self, tokens, state, place):
        cache, labels = state
        logits, cache = self.model.call_with_cache(tokens, cache, place, **labels)
        return logits, None, (cache, labels)

    def recompute(self, tokens, state, place):
        images = self.images_of(tokens)
        visible = self._places <= place
        mask = ops.broadcast_to(visible, ops.shape(images))
        inputs = {"images": images, "padding_mask": mask, **state[1]}
        logits = self.model(inputs, training=False, routing_scope="prefix")
        shape = (-1, self.model.num_subpixels, logits.shape[-1])
        here = ops.take(self._order, place)
        return ops.take(ops.reshape(logits, shape), here, axis=1), None, state


def continue_rows(
    steps,
    sampler,
    tokens,
    is_given,
    state,
    stop_token_ids=None,
    num_inputs=None,
    reads=True,
):
    """Continues rows of tokens, with the loop of a sampler of keras_hub.

    `is_given`, `<bool>[batch, length]`, is True for the `tokens` that are given;
    `state` is the one before the first token. The model sees at most `num_inputs`
    tokens of a row, None for all. With `reads`, the tokens that all rows have are read
    before the first step; without it, only the first token of each row may be given.
    Returns token ids and their mask, which is True for given and new tokens, up to the
    first of `stop_token_ids` (None for no such ids); ids after it are 0.
    """
    check_sampler(sampler)
    is_given = ops.cast(is_given, "bool")
    # keras_hub would stop at ids in the buffer after the prompt.
    stops = set(stop_token_ids or ())
    filler = min(set(range(len(stops) + 1)) - stops)
    tokens = ops.where(is_given, tokens, filler)
    index, hidden = 1, None
    if reads:
        # A row starts after its first id, which is there in any case.
        lengths = ops.maximum(ops.sum(ops.cast(is_given, "int32"), axis=-1), 1)
        index = ops.minimum(tensors.smallest(lengths), tokens.shape[1])
        # The last of these tokens goes through the first step.
        number = index - 1 if steps.are_exact else index
        hidden, state = steps.read(tokens[:, :num_inputs], number, state)

    def next_logits(tokens, state, index):
        return steps.next_logits(tokens[:, :num_inputs], state, index)

    next_logits = _certain(next_logits, is_given, stop_token_ids)
    if isinstance(sampler, keras_hub.samplers.ContrastiveSampler) and steps.are_exact:
        # It compares with the hidden states of all tokens: the last one's, too.
        _, last, _ = next_logits(tokens, state, index)
        last = ops.cast(last, hidden.dtype)[:, None]
        hidden = ops.slice_update(hidden, (0, index - 1, 0), last)
    tokens = sampler(
        next=next_logits,
        prompt=tokens,
        cache=state,
        index=index,
        mask=is_given,
        stop_token_ids=stop_token_ids,
        hidden_states=hidden,
        model=steps.model,
    )
    if stop_token_ids is None:
        return tokens, ops.ones_like(is_given)
    mask = _until_stop(tokens, is_given, stop_token_ids)
    # Other rows may have continued after the end of a row.
    return ops.where(mask, tokens, 0), mask


def stream(steps, draw, prompts, state, num_tokens):
    """Continues prompts token by token, with one compiled step.

    `draw` is what `drawing` returns; `prompts` are `<int>[batch, length]`, -1 for
    tokens that are not given; `state` is the one before the first token; rows end at
    `num_tokens` tokens.

    Yields a position and the tokens there, a NumPy array `<int>[batch]`: the given
    ones, or else new ones. It leaves out the tokens that all prompts have if it reads
    them at once.
    """
    prompts = np.asarray(prompts, "int32")
    batch_size, length = prompts.shape
    key = (batch_size, num_tokens)
    compute = steps.step if steps.are_exact else steps.recompute
    compute = compiled_once(steps.model, compute, key)
    # The last token that all prompts have goes through the step, for the next one.
    first = int(np.append((prompts < 0).any(axis=0), True).argmax()) - 1
    if not steps.reads_at_once:
        first = 0
    if first and steps.are_exact:
        # The last token is read by nobody.
        width = min(2 ** (first - 1).bit_length(), num_tokens - 1)
        read = compiled_once(steps.model, steps.read, (*key, width))
        tokens = np.pad(prompts[:, :first], [(0, 0), (0, width - first)])
        _, state = read(*map(ops.convert_to_tensor, (tokens, np.int32(first))), state)
    # `recompute` needs whole rows.
    rows = np.zeros((batch_size, 0 if steps.are_exact else num_tokens), "int32")
    rows[:, :first] = prompts[:, : min(first, rows.shape[1])]
    tokens = prompts[:, first]
    for place in range(first, num_tokens - 1):
        given = np.full(batch_size, -1, "int32")
        if place + 1 < length:
            given = prompts[:, place + 1]
        is_drawn = (given < 0).any()
        if not steps.are_exact:
            rows[:, place] = tokens
        if steps.are_exact or is_drawn:
            seen = ops.convert_to_tensor(tokens if steps.are_exact else rows)
            # A Python integer would compile the step again at each place.
            index = ops.convert_to_tensor(place, dtype="int32")
            logits, _, state = compute(seen, state, index)
        tokens = np.where(given < 0, draw(logits), given) if is_drawn else given
        yield place + 1, tokens


def drawing(model, sampler):
    """Returns a compiled function of logits that draws tokens.

    It is compiled as `model` says. Each call advances the sampler's random state.
    """
    # Others choose among whole sequences, in a loop of their own.
    if type(sampler).get_next_token is keras_hub.samplers.Sampler.get_next_token:
        raise ValueError(
            "`sampler` must draw one token or value after the other, such as greedy, "
            f"random, top_k or top_p. Received: sampler={sampler!r}"
        )

    check_sampler(sampler)

    def draw(logits, values):
        variables = list(zip(sampler.variables, values, strict=True))
        with keras.StatelessScope(variables) as scope:
            probabilities = sampler.compute_probabilities(logits)
            tokens = ops.cast(sampler.get_next_token(probabilities), "int32")
        return tokens, [scope.get_current_value(v) for v in sampler.variables]

    compiled_draw = compiled(model, draw)

    def call(logits):
        values = [ops.convert_to_tensor(v) for v in sampler.variables]
        tokens, values = compiled_draw(logits, values)
        for variable, value in zip(sampler.variables, values, strict=True):
            variable.assign(value)
        return ops.convert_to_numpy(tokens)

    return call


def check_sampler(sampler):
    """Refuses settings of samplers of keras_hub with which texts would be nonsense."""
    temperature = getattr(sampler, "temperature", 1.0)
    is_number = isinstance(temperature, numbers.Real)
    if is_number and not 0.0 < temperature < math.inf:
        raise ValueError(
            "`temperature` of a sampler must be a positive number. Received: "
            f"temperature={temperature}. For the most probable tokens, take the "
            'sampler "greedy"'
        )
    if getattr(sampler, "return_all_beams", False):
        raise ValueError(
            "`sampler` must return one text for each prompt. Received: "
            "return_all_beams=True. Leave it out to get the best beam"
        )


def check_not_cut(hyperparameters, length, name="max_length"):
    """Refuses rows longer than a model cuts its inputs to, or has positions for."""
    limit = hyperparameters.truncate_length
    if limit is not None and length > limit:
        raise ValueError(
            f"`{name}` must not exceed the length to which this model cuts its inputs, "
            f"{limit}. Received: {name}={length}"
        )
    if hyperparameters.coordinate_embeddings:
        # The last token is read by nobody.
        limit = hyperparameters.max_sequence_length + 1
        if length > limit:
            raise ValueError(
                f"`{name}` must be at most {limit} for a model with embeddings of "
                f"coordinates, which has no more. Received: {name}={length}"
            )


def longest_row(hyperparameters):
    """Returns the largest length that `check_not_cut` takes; None for any."""
    limits = [hyperparameters.truncate_length]
    if hyperparameters.coordinate_embeddings:
        limits.append(hyperparameters.max_sequence_length + 1)
    return min((limit for limit in limits if limit is not None), default=None)


def check_prompt_mask(name, mask):
    """Refuses a mask of prompts with padding before or between tokens.

    A mask that is being traced has no values, and passes.
    """
    try:
        mask = ops.convert_to_numpy(mask).astype("bool")
    except (AttributeError, NotImplementedError, TypeError):
        return
    is_behind_padding = mask[..., 1:] & ~mask[..., :-1]
    if not is_behind_padding.any():
        return
    row = mask[tuple(np.argwhere(is_behind_padding)[0][:-1])]
    shown = f"{row[:20].astype(int).tolist()}{'...' if len(row) > 20 else ''}"
    raise ValueError(
        f"`{name}` must be True for the first tokens of each row, and False after "
        f"them. Received: {name}={shown} in a row. Move the padding to the end"
    )


def longest_input(hyperparameters):
    """Returns the largest number of tokens that a text model sees at once."""
    limits = hyperparameters.max_sequence_length, hyperparameters.truncate_length
    return min(limit for limit in limits if limit is not None)


def _certain(next_logits, is_given, stop_token_ids):
    """Returns `next_logits` that give all probability to tokens that are no choice.

    These are the given ones, and an id 0 after the end of a row. Otherwise samplers
    would score beams by tokens that do not count.
    """

    def certain(tokens, state, index):
        logits, hidden, state = next_logits(tokens, state, index)
        logits = ops.cast(logits, "float32")
        given = is_given
        if tokens.shape[0] != given.shape[0]:  # with beams
            given = ops.repeat(given, tokens.shape[0] // given.shape[0], axis=0)
        # Contrastive search asks for a token after the last place.
        place = ops.minimum(index, tokens.shape[1] - 1)
        token, is_sure = (ops.take(x, place, axis=1) for x in (tokens, given))
        if stop_token_ids is not None:
            has_ended = ops.any(_stops(tokens, given, stop_token_ids), axis=-1)
            token = ops.where(has_ended, 0, token)
            is_sure = ops.logical_or(is_sure, has_ended)
        others = token[:, None] != ops.arange(logits.shape[-1], dtype=token.dtype)
        sure = ops.where(others, large_negative("float32"), 0.0)
        return ops.where(is_sure[:, None], sure, logits), hidden, state

    return certain


def _first(number, tokens):
    """Returns a mask of rows, True for their first tokens."""
    mask = ops.arange(tokens.shape[1], dtype="int32") < number
    return ops.broadcast_to(mask, ops.shape(tokens))


def _stops(tokens, is_given, stop_token_ids):
    """Returns where new tokens are among `stop_token_ids`."""
    stops = ops.zeros_like(is_given)
    for stop in stop_token_ids:
        stops = ops.logical_or(stops, tokens == stop)
    return ops.logical_and(stops, ops.logical_not(is_given))


def _until_stop(tokens, is_given, stop_token_ids):
    """Returns a mask, True up to and with the first stop token after the prompt."""
    stops = ops.cast(_stops(tokens, is_given, stop_token_ids), "int32")
    return ops.cumsum(stops, axis=-1) - stops == 0

"""Continuing prompts with a cache gives what computing all anew at each step gives."""

import itertools

import keras
import keras_hub
import numpy as np
import pytest

from routing_tf.models import steps
from tests import golden_cases
from tests.layers import helpers
from tests.models import small_models
from tests.models import small_seq2seq

LENGTH, PROMPTS = 7, (3, 5)
SAMPLERS = {
    "greedy": keras_hub.samplers.GreedySampler,
    "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.6, seed=3),
    "beam": lambda: keras_hub.samplers.BeamSampler(num_beams=3),
    "contrastive": lambda: keras_hub.samplers.ContrastiveSampler(k=3, alpha=0.5),
}


def generate(lm, sampler, x, **options):
    lm.compile(sampler=SAMPLERS[sampler](), **options)
    return lm.generate(x, stop_token_ids=None)


def recompute(monkeypatch):
    """Makes steps compute all anew, as settings that look ahead do."""

    class Recomputing(steps.TextSteps):
        def __init__(self, lm):
            super().__init__(lm)
            self.are_exact = False

    monkeypatch.setattr(steps, "TextSteps", Recomputing)


def model(routing):
    return small_models.language_model(
        num_local_only_layers=1, routing=routing, timing_signal=True
    )


@pytest.mark.parametrize(
    "sampler, routing",
    [
        pytest.param("beam", "token_choice", marks=pytest.mark.thorough),
        pytest.param("top_p", "expert_choice", marks=small_models.FURTHER),
        pytest.param("contrastive", "token_choice", marks=small_models.FURTHER),
    ],
)
def test_steps_continue_as_recomputing_does(sampler, routing, monkeypatch):
    lm, x = model(routing), small_models.inputs(PROMPTS, LENGTH)
    tokens = generate(lm, sampler, x)["token_ids"]
    for row, length in enumerate(PROMPTS):
        np.testing.assert_array_equal(
            tokens[row, :length], x["token_ids"][row, :length]
        )
    recompute(monkeypatch)
    np.testing.assert_array_equal(tokens, generate(lm, sampler, x)["token_ids"])
    assert not np.array_equal(tokens, generate(lm, "greedy", x)["token_ids"])


@pytest.mark.thorough
def test_beams_go_on_from_the_prompt_of_their_row():
    lm, x = model("token_choice"), small_models.inputs((1, 5), 14, seed=2)
    tokens = generate(lm, "beam", x)["token_ids"]
    alone = generate(lm, "beam", {name: rows[1:] for name, rows in x.items()})
    np.testing.assert_array_equal(tokens[1:], alone["token_ids"])


@pytest.mark.parametrize(
    "options",
    [
        {"return_all_beams": True},
        {"temperature": 0.0},
        {"temperature": -1},
        {"temperature": np.nan},
    ],
)
def test_settings_of_samplers_that_give_no_text_are_refused(options):
    lm, ((name, value),) = model("token_choice"), options.items()
    samplers = [keras_hub.samplers.BeamSampler(**options)]
    if name == "temperature":
        samplers.append(keras_hub.samplers.RandomSampler(**options))
        with pytest.raises(ValueError, match=f"Received: {name}={value}"):
            steps.drawing(lm, samplers[-1])
    for sampler in samplers:
        lm.compile(sampler=sampler)
        with pytest.raises(ValueError, match=f"Received: {name}={value}"):
            lm.generate(small_models.inputs((1, 5), 6), stop_token_ids=None)


def texts_that_can_follow(prompt, length, size, stops):
    """Returns all rows that continue a prompt, up to a stop or `length`, and masks."""
    rows = itertools.product(range(size), repeat=length - len(prompt))
    rows = np.array([[*prompt, *row] for row in rows], "int32")
    is_stop = np.isin(rows, stops) & (np.arange(length) >= len(prompt))
    mask = np.cumsum(is_stop, axis=-1) - is_stop == 0
    rows, first = np.unique(np.where(mask, rows, 0), axis=0, return_index=True)
    return rows, mask[first]


def log_likelihoods(lm, inputs, rows, mask, prefix):
    """Returns those of rows, which are given before `mask` begins, in one pass."""
    names = {f"{prefix}token_ids": rows, f"{prefix}padding_mask": mask}
    x = {name: np.repeat(row[None], len(rows), 0) for name, row in inputs.items()}
    logits = small_models.output(lm, {**x, **names})[:, :-1]
    best = keras.ops.log_softmax(logits.astype("float32"))
    found = np.take_along_axis(small_models.array(best), rows[:, 1:, None], axis=2)
    return (found[..., 0] * mask[:, 1:]).sum(axis=-1)


@helpers.further_on_jax
@pytest.mark.parametrize(
    "stops, kind",
    [
        ([1], "text"),
        pytest.param([3, 0, 99], "text", marks=small_models.FURTHER),
        pytest.param([2, 1], "seq2seq", marks=small_models.FURTHER),
    ],
)
def test_beams_find_the_most_probable_of_all_texts(stops, kind):
    """So nothing counts that comes after the end of a text."""
    size, length, lengths = 4, 5, (1, 2, 3)
    sizes = {"vocabulary_size": size}
    if kind == "text":
        x = small_models.inputs(lengths, length)
        lm, prefix = small_models.language_model(**sizes, routing="token_choice"), ""
    else:
        x = small_seq2seq.inputs((9, 9, 9), lengths, (9, length))
        x["encoder_token_ids"] %= size
        lm = small_seq2seq.language_model(**sizes, **small_seq2seq.LOCAL)
        prefix = "decoder_"
    names = f"{prefix}token_ids", f"{prefix}padding_mask"
    x[names[0]] %= size
    lm.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=size ** (length - 1)))
    found = lm.generate(dict(x), stop_token_ids=stops)
    num_ended = 0
    for row, prompt_length in enumerate(lengths):
        prompt = x[names[0]][row, :prompt_length]
        rows, mask = texts_that_can_follow(prompt, length, size, stops)
        inputs = {name: value[row] for name, value in x.items()}
        best = log_likelihoods(lm, inputs, rows, mask, prefix).argmax()
        np.testing.assert_array_equal(found[names[0]][row], rows[best])
        np.testing.assert_array_equal(found[names[1]][row], mask[best])
        num_ended += not mask[best].all()
    assert num_ended > 0, "no text ends early: take another seed"


@small_models.FURTHER
def test_settings_that_look_ahead_compute_all_anew(monkeypatch):
    lm = small_models.language_model(
        num_routed_heads=0, num_cluster_strided_heads=2, compatibility="trained"
    )
    monkeypatch.setattr(steps.TextSteps, "step", None)
    x = small_models.inputs(PROMPTS, LENGTH)
    tokens = generate(lm, "greedy", x)["token_ids"]
    for place in range(max(PROMPTS), LENGTH):
        mask = np.tile(np.arange(LENGTH) < place, (2, 1))
        logits = small_models.array(lm({"token_ids": tokens, "padding_mask": mask}))
        best = logits[:, place - 1].argmax(axis=-1)
        np.testing.assert_array_equal(tokens[:, place], best)


@small_models.FURTHER
def test_padding_of_the_release_has_no_influence():
    lm = small_models.language_model(num_local_only_layers=1, compatibility="exact")
    x = small_models.inputs(PROMPTS, LENGTH)
    tokens = generate(lm, "greedy", x)["token_ids"]
    x = {"token_ids": tokens, "padding_mask": np.ones((2, LENGTH), "bool")}
    best = small_models.array(lm(x, routing_scope="prefix")).argmax(axis=-1)
    for row, length in enumerate(PROMPTS):
        np.testing.assert_array_equal(
            tokens[row, length:], best[row, length - 1 : LENGTH - 1]
        )


class CountedSampler(keras_hub.samplers.GreedySampler):
    """Counts how often its choice is traced."""

    traces = 0

    def get_next_token(self, probabilities):
        self.traces += 1
        return super().get_next_token(probabilities)


@pytest.mark.thorough
def test_compiled_once_for_prompts_of_all_lengths(compiled):
    lm, sampler = model("token_choice"), CountedSampler()
    lm.compile(sampler=sampler)
    prompts = [small_models.inputs(lengths, LENGTH) for lengths in (PROMPTS, (2, 6))]
    tokens, traces = [], []
    for x in prompts:
        tokens.append(lm.generate(x, stop_token_ids=None)["token_ids"])
        traces.append(sampler.traces)
    assert traces[0] == traces[1] > 0
    # What is compiled continues as the whole buffer, computed anew, does.
    for x, chosen in zip(prompts, tokens):
        mask = np.ones_like(x["padding_mask"])
        logits = golden_cases.run(lm, {"token_ids": chosen, "padding_mask": mask})[0]
        expected = logits.argmax(axis=-1)[:, :-1]
        is_new = ~x["padding_mask"][:, 1:]
        np.testing.assert_array_equal(chosen[:, 1:][is_new], expected[is_new])


class AskingSampler(keras_hub.samplers.Sampler):
    """Asks for a value, which AutoGraph allows."""

    def get_next_token(self, probabilities):
        if keras.ops.max(probabilities) > 0:
            return keras.ops.argmax(probabilities, axis=-1)
        return keras.ops.argmin(probabilities, axis=-1)


@pytest.mark.thorough
@pytest.mark.skipif(small_models.ON_JAX, reason="AutoGraph is TensorFlow's")
def test_samplers_may_ask_for_values(compiled):
    lm, x = model("token_choice"), small_models.inputs(PROMPTS, LENGTH)
    tokens = []
    for sampler in (AskingSampler(), keras_hub.samplers.GreedySampler()):
        lm.compile(sampler=sampler)
        tokens.append(lm.generate(x, stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*tokens)

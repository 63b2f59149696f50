import itertools

import keras_hub
import numpy as np
import pytest

from routing_tf.generation import token_stream
from routing_tf.generation.token_stream import TokenStream
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.presets import preset_hyperparameters
from tests.models import small_models

pytestmark = pytest.mark.usefixtures("eager")

PROMPTS = [[0, 5, 3, 9, 2, 7, 7, 11, 4], [0, 8, 1, 4, 20, 6]]
SMALL = {**small_models.GENERATING, "attention_window": 4}
GREEDY = keras_hub.samplers.GreedySampler()


def small_model(**changes):
    return small_models.language_model(**{**SMALL, **changes})


@pytest.fixture(scope="module")
def lm():
    return small_model(routing="token_choice")


def take(stream, prompts, number):
    """The first tokens of a stream `[prompts, number]`, after the leading ones."""
    steps = list(itertools.islice(stream(prompts), number))
    positions = [position for position, _ in steps]
    assert positions == list(range(positions[0], positions[0] + len(steps)))
    return positions[0], np.stack([tokens for _, tokens in steps], axis=1)


def generate(lm, sampler, prompts, length):
    """The same by `generate_step`: whole rows `[prompts, length]`."""
    token_ids = np.zeros((len(prompts), length), "int32")
    mask = np.zeros(token_ids.shape, "bool")
    for row, prompt in enumerate(prompts):
        token_ids[row, : len(prompt)] = prompt
        mask[row, : len(prompt)] = True
    lm.compile(sampler=sampler)
    inputs = {"token_ids": token_ids, "padding_mask": mask}
    outputs = lm.make_generate_function()(inputs, stop_token_ids=None)
    return np.asarray(outputs["token_ids"])


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": "token_choice"},
        pytest.param(
            {"routing": "full", "num_local_only_layers": 0, "num_layers": 1},
            marks=pytest.mark.thorough,
        ),
        pytest.param({"compatibility": "exact"}, marks=pytest.mark.thorough),
    ],
    ids=lambda changes: changes.get("compatibility") or changes["routing"],
)
def test_greedy_tokens_are_those_of_generate(changes):
    lm = small_model(**changes)
    # It ends at 11 tokens, whatever more is asked for.
    first, tokens = take(TokenStream(lm, GREEDY, 11), PROMPTS, 13)
    # What all prompts have goes in one pass, unless padding would be seen.
    assert first == (1 if "compatibility" in changes else 6)
    np.testing.assert_array_equal(tokens, generate(lm, GREEDY, PROMPTS, 11)[:, first:])
    assert len(np.unique(tokens[:, 9 - first :])) > 1


@pytest.mark.thorough
def test_seeds(lm):
    def sample(seed):
        stream = TokenStream(lm, keras_hub.samplers.RandomSampler(seed=seed))
        return [take(stream, [[0]], 12)[1].tolist() for _ in range(2)]

    first, second = sample(3)
    assert sample(3) == [first, second]
    # The random state moves on, in a stream and from one to the next.
    assert first != second
    assert sample(4)[0] != first


@pytest.mark.usefixtures("compiled")
def test_one_step_is_compiled_for_any_length(monkeypatch):
    lm, lengths = small_model(routing="token_choice"), []
    call = type(lm).call_with_cache

    def counting(self, token_ids, *arguments):
        lengths.append(token_ids.shape[1])
        return call(self, token_ids, *arguments)

    monkeypatch.setattr(type(lm), "call_with_cache", counting)
    stream = TokenStream(lm, GREEDY)
    cells = stream.cache_length
    for length in (6, 7, 8, 60):
        take(stream, [[1] * length], 8 * cells if length == 8 else 2)
    # Prompts are padded to powers of two; one token goes alone.
    assert sorted(lengths) == [1, 8, 64]


@pytest.mark.thorough
def test_the_cache_is_all_that_is_seen(lm):
    """Far beyond the cache's size, tokens are those of a cache for all of them."""
    length = 3 * TokenStream(lm, GREEDY).cache_length
    prompt = np.random.default_rng(0).integers(0, 31, length).tolist()
    expected = generate(lm, GREEDY, [prompt], length + 20)[0, length:]
    stream = TokenStream(lm, GREEDY)
    # Read in one pass, and token by token.
    for other in (prompt, prompt[:1]):
        first, tokens = take(stream, [prompt, other], length + 20 - len(other))
        np.testing.assert_array_equal(tokens[0, length - first :], expected)


@pytest.mark.parametrize(
    "changes, setting",
    [
        ({}, None),
        ({"routing": "expert_choice"}, None),
        ({"routing": "hashed"}, None),
        ({"routing": "full"}, "routing='full'"),
        ({"routing": "random"}, "routing='random'"),
        ({"routing": "linear"}, None),
        ({"routing": "block_top_k"}, "routing='block_top_k'"),
        ({"routing": "full", "num_local_only_layers": 2}, None),
        ({"num_cluster_strided_heads": 4}, "num_cluster_strided_heads=4"),
        ({"num_strided_heads": 4, "num_local_only_layers": 2}, "num_strided_heads=4"),
    ],
)
def test_which_heads_remember_all_tokens(changes, setting):
    h = preset_hyperparameters("byte_tiny").replace(**changes)
    assert token_stream.remembers_all_tokens(h) == setting
    if setting is None:
        # As far as two local blocks, or a window.
        assert token_stream.cache_length(h) == token_stream.cache_length(h, 9) == 32
        return
    assert token_stream.cache_length(h, 1000) == 1000
    with pytest.raises(ValueError, match=f"Received: .*{setting}"):
        token_stream.cache_length(h)


def test_inputs_that_are_cut():
    h = Hyperparameters(truncate_length=8)
    assert token_stream.cache_length(h, 8)
    for number, received in ((None, ""), (9, "9 ")):
        with pytest.raises(
            ValueError, match=rf"truncate_length=8\. Received: {received}"
        ):
            token_stream.cache_length(h, number)


def test_what_cannot_be_streamed(lm):
    flaw = {"routing": "hashed", "compatibility": "trained"}
    with pytest.raises(ValueError, match="Received: .*`compatibility`"):
        TokenStream(small_model(**flaw), GREEDY, 10)
    with pytest.raises(ValueError, match="`sampler`.*BeamSampler"):
        TokenStream(lm, keras_hub.samplers.BeamSampler())
    with pytest.raises(ValueError, match="`num_tokens`.*num_tokens=1"):
        TokenStream(lm, GREEDY, 1)
    for prompts in ([], [[0], []], [[0] * 10]):
        with pytest.raises(ValueError, match="`prompts`.*num_tokens=10"):
            next(TokenStream(lm, GREEDY, 10)(prompts))

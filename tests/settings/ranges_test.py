"""Each hyperparameter has a range, the same in Python and in command lines."""

import math

import numpy as np
import pytest

from routing_tf.layers.attention.mixed_attention import REMATS
from routing_tf.layers.blocks.feed_forward import ACTIVATIONS
from routing_tf.layers.heads.clustered import QUERY_CLUSTERS
from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.heads.routed import ROUTINGS
from routing_tf.layers.routing.online_kmeans import CENTROID_INITIALIZATIONS
from routing_tf.layers.softmax.fused_attention import IMPLEMENTATIONS
from routing_tf.models import Hyperparameters
from routing_tf.optimizers.schedules import FACTORS
from routing_tf.settings import hyperparameters as settings
from routing_tf.settings import ranges
from routing_tf.settings.hyperparameters import HYPERPARAMETERS

INSIDE = Hyperparameters()
# No range has one of these.
NOWHERE = (math.nan, math.inf, -math.inf, 1e39, -1, -0.5, "", "word ", [], b"1")


def refusal(name, value):
    with pytest.raises(ValueError) as error:
        INSIDE.replace(**{name: value})
    return str(error.value)


def refusal_of_text(name, text):
    with pytest.raises(ValueError) as error:
        settings.read(name, text, " in `--hparams`")
    return str(error.value)


@pytest.mark.parametrize("name", [n for n in HYPERPARAMETERS if n != "routed_heads"])
def test_no_value_outside_gets_through(name):
    for value in NOWHERE:
        assert refusal(name, value).startswith(f"`{name}` must be "), value
        own = HYPERPARAMETERS[name].values
        if isinstance(value, float) and own.kind is not str:
            told = f"`{name}` in `--hparams` must be {own.rule}. "
            assert refusal_of_text(name, str(value)).startswith(told)


def test_defaults_and_all_words_are_inside():
    for name, own in HYPERPARAMETERS.items():
        for value in (own.default, *own.values.words.values()):
            assert settings.check(name, value) == value
        for word, value in own.values.words.items():
            if word is not None:  # of one that command lines do not have
                assert settings.read(name, word) == value


@pytest.mark.parametrize(
    "name, values",
    [
        ("adam_beta_1", (1, 2, 1 - 1e-9)),
        ("adam_beta_2", (1.0, 2.0)),
        ("adam_epsilon", (0, 1e-50)),
        ("centroid_decay", (1.01,)),
        ("residual_dropout", (1,)),
        ("entmax_alpha", (1, 2.1, "soft")),
        ("logit_soft_cap", (0,)),
        ("routed_key_shift", (2,)),
        ("num_layers", (0, 1.0, True)),
        ("ema", (None,)),
        ("learning_rate_schedule", ("constant*linear_warmupp", "noam*constant", "*")),
    ],
)
def test_ends_of_ranges(name, values):
    for value in values:
        assert refusal(name, value).startswith(
            f"`{name}` must be {HYPERPARAMETERS[name].values.rule}"
        )
        assert refusal_of_text(name, str(value))


@pytest.mark.parametrize(
    "name, values",
    [
        ("num_layers", (2.0, True, None)),
        ("vocabulary_size", (0,)),
        ("key_dim", ("8",)),
        ("ema", (1,)),
        ("learning_rate", (True,)),
        ("relative_key_stddev", (-1, True)),
        ("routed_relative_key_stddev", (-1, True, "2", math.nan)),
        ("logit_soft_cap", (-1.0,)),
        ("local_key_shift", (True,)),
        ("remat_attention", (1,)),
        ("feed_forward", ("gelu",)),
        ("factorized_pattern", ("all",)),
        ("factorized_arrangement", ("x",)),
        ("initializer", ("normal",)),
        ("routing", ("nearest", 3)),
        ("compatibility", ({"rank_mask": True}, True, ["exact"], "release")),
    ],
)
def test_refusals_have_the_value(name, values):
    for value in values:
        rule, _, received = refusal(name, value).partition(" Received: ")
        assert rule.startswith(f"`{name}` must be ")
        assert received.startswith(f"{name}={value!r}")


@pytest.mark.parametrize(
    "name, text",
    [("num_layers", "none"), ("key_dim", "many"), ("learning_rate", "fast")]
    + [("ema", "yes"), ("entmax_alpha", "soft")],
)
def test_refusals_of_texts_have_the_text(name, text):
    told = refusal_of_text(name, text)
    assert told.startswith(f"`{name}` in `--hparams` must be ")
    assert f"Received: {name}={text!r}" in told


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("adam_beta_1", 0, 0.0),
        ("centroid_decay", 1, 1.0),
        ("entmax_alpha", 2, 2.0),
        ("train_steps", np.int64(3), 3),
        ("learning_rate", np.float32(0.5), 0.5),
        ("learning_rate_schedule", "constant * rsqrt_decay", "constant * rsqrt_decay"),
    ],
)
def test_values_inside_are_those_of_python(name, value, expected):
    found = getattr(INSIDE.replace(**{name: value}), name)
    assert (found, type(found)) == (expected, type(expected))


def test_hints():
    told = refusal_of_text("learning_rate_schedule", "constant*linear_warmupp")
    assert told.endswith("Did you mean 'linear_warmup'?")
    assert refusal("optimizer", "adamm").endswith("Did you mean 'adam' or 'adamw'?")
    assert refusal("adam_beta_1", 1 - 1e-9).endswith("float32, with 1.0")


def test_choices_are_those_of_layers():
    own = {
        "routing": (*ROUTINGS, "expert_threshold", "hashed", "random", "full"),
        "feed_forward": (*ACTIVATIONS, "none"),
        "remat_attention": REMATS,
        "query_cluster": QUERY_CLUSTERS,
        "routing_scope": ROUTING_SCOPES,
        "centroid_initialization": CENTROID_INITIALIZATIONS,
        "attention_implementation": IMPLEMENTATIONS,
    }
    for name, choices in own.items():
        assert set(HYPERPARAMETERS[name].values.words.values()) == set(choices)
    assert tuple(FACTORS) == ranges.SCHEDULE_FACTORS

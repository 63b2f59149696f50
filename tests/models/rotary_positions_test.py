"""Rotary positions as a hyperparameter; heads have tests of their own."""

import numpy as np
import pytest

from routing_tf import models
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.models import hyperparameters
from tests import golden_cases
from tests.models import small_models
from tests.models import small_seq2seq

ROTARY = {"rotary_positions": True, "routing": "token_choice"}


@small_models.FURTHER
def test_tokens_one_by_one():
    lm = small_models.language_model(**ROTARY)
    paths = [weight.path for weight in lm.weights]
    assert not any("relative" in path for path in paths)
    x = small_models.inputs((9, 9), buffer=9)
    expected, _ = golden_cases.run(lm, x)
    cache = lm.make_cache(2, 9)
    first, _, cache = lm.call_with_cache(x["token_ids"][:, :7], cache, 0)
    last, _, _ = lm.call_with_cache(x["token_ids"][:, 7:], cache, 7)
    found = np.concatenate([small_models.array(y) for y in (first, last)], axis=1)
    golden_cases.assert_close(found, expected, 3e-5)


def test_positions_show():
    """Without any, heads of one block would not tell orders of tokens apart."""
    x = small_models.inputs((8, 8), buffer=8)
    x["token_ids"][:, :2] = [[3, 4], [4, 3]]
    x["token_ids"][:, 2:] = x["token_ids"][0, 2:]
    for rotary in (True, False):
        lm = small_models.language_model(
            num_routed_heads=0,
            rotary_positions=rotary,
            local_relative_positions=False,
            num_layers=1,
        )
        logits, _ = golden_cases.run(lm, x)
        difference = np.abs(logits[0, -1] - logits[1, -1]).max()
        assert (difference > 1e-3) == rotary


@pytest.mark.thorough
def test_attention_to_an_encoder_has_none():
    model = small_seq2seq.language_model(**ROTARY)
    groups = [x for x in layers_inside(model) if hasattr(x, "rotary_positions")]
    assert {
        "cross" in group.path for group in groups if not group.rotary_positions
    } <= {True}
    assert any(group.rotary_positions for group in groups)


def test_refused():
    for changes in ({"key_dim": 3}, {"compatibility": "trained"}):
        with pytest.raises(ValueError, match="`rotary_positions=True` must come"):
            small_models.hyperparameters(rotary_positions=True, **changes)
    changes = hyperparameters.parse_overrides("rotary_positions=true")
    assert models.Hyperparameters(**changes).rotary_positions

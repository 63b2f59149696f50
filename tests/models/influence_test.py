"""Whether later tokens influence scores is tried on the model."""

import keras
import numpy as np
import pytest

from routing_tf import layers
from routing_tf.models import build
from routing_tf.models import feed_forwards
from routing_tf.models.score import ROUNDING
from routing_tf.models.score import TokenScorer
from routing_tf.models.score import influence_in_text
from routing_tf.models.score import influence_of_later_tokens
from tests.engines import small_runs
from tests.layers import kinds
from tests.models import small_models

pytestmark = pytest.mark.usefixtures("eager")


@keras.saving.register_keras_serializable("routing_tf_tests")
class Leaky(layers.HeadGroup):
    """Heads that ignore the mask."""

    def attend(self, inputs, training=None):
        logits = keras.ops.matmul(inputs.query, keras.ops.swapaxes(inputs.key, -1, -2))
        return keras.ops.matmul(keras.ops.softmax(logits), inputs.value)


@keras.saving.register_keras_serializable("routing_tf_tests")
class NextToken(keras.layers.Layer):
    """A feed-forward layer that sees only one token more."""

    def call(self, x):
        return x + 0.01 * keras.ops.roll(x, -1, axis=1)


feed_forwards.register("next_token", lambda place, **options: NextToken())
IDS = np.random.default_rng(0).integers(1, 31, (3, small_models.LENGTH))


def influence(lm, lengths=(24, 3, 9)):
    mask = np.arange(small_models.LENGTH) < np.array(lengths)[:, None]
    inputs = {"token_ids": IDS, "padding_mask": mask}
    return influence_of_later_tokens(TokenScorer(lm), inputs, np.roll(IDS, -1, axis=1))


def test_sound_heads():
    lm = small_models.language_model(routing=None)
    assert influence(lm) <= ROUNDING
    assert influence_in_text(TokenScorer(lm), IDS[0]) <= ROUNDING
    assert influence(lm, (1, 0, 1)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"routed_heads": Leaky(2)},
        pytest.param({"feed_forward": "next_token"}, marks=pytest.mark.thorough),
        {"routing": "expert_choice"},
    ],
)
def test_what_ignores_the_mask(changes):
    lm = small_models.language_model(**{"routing": None, **changes})
    assert influence(lm) > 10 * ROUNDING
    assert influence_in_text(TokenScorer(lm), IDS[0]) > 10 * ROUNDING


@pytest.mark.parametrize("kind", kinds.some(("image", "seq2seq"), ["image"]))
def test_other_models(kind):
    x, targets, _ = small_runs.make_batch(kind, 2)
    for routing, leaks in ((None, False), ("expert_choice", True)):
        lm = build.make_model(small_runs.hyperparameters(kind, routing=routing))
        small_models.randomize(lm, 0)
        found = influence_of_later_tokens(TokenScorer(lm), x, targets)
        assert (found > ROUNDING) == leaks

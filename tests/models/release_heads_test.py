"""Tests of the layers with the release's flaws; golden cases test what they compute."""

import pytest

from routing_tf import layers
from routing_tf.models.release import heads
from routing_tf.settings.ranges import COMPATIBILITY
from tests.layers import helpers

EXACT = {
    heads.ExactRoutedHeads: {"num_clusters": 3, "attention_window": 4},
    heads.ExactHashedHeads: {"num_buckets": 4, "attention_window": 4},
    heads.ExactClusterStridedHeads: {"num_clusters": 3, "attention_window": 4},
    heads.ExactLocalHeads: {"block_shape": (4,)},
    heads.ExactStridedHeads: {"block_shape": (4,)},
}
TRAINED = {
    heads.TrainedRoutedHeads: EXACT[heads.ExactRoutedHeads],
    heads.TrainedHashedHeads: EXACT[heads.ExactHashedHeads],
    heads.TrainedClusterStridedHeads: EXACT[heads.ExactClusterStridedHeads],
    heads.TrainedLocalHeads: EXACT[heads.ExactLocalHeads],
}


@pytest.mark.parametrize("kind", [*TRAINED, *EXACT], ids=lambda kind: kind.__name__)
def test_survives_saving(kind, tmp_path):
    options = {**TRAINED, **EXACT}[kind]
    if kind in EXACT:
        options = {**options, "cache_padding_bias": True}
    group = kind(2, dropout=0.1, **options)
    helpers.assert_keeps_settings(group)
    attention = layers.MixedAttention(
        [group], key_dim=4, kernel_initializer="ones", name="attention"
    )
    x = helpers.normal(2, 12, 6)
    helpers.assert_survives_saving(attention, tmp_path, x, use_causal_mask=True)


@pytest.mark.parametrize("kind", [*TRAINED, *EXACT], ids=lambda kind: kind.__name__)
def test_knows_no_shifted_keys(kind):
    options = {**TRAINED, **EXACT}[kind]
    with pytest.raises(ValueError, match="`key_shift`.*key_shift=1"):
        kind(2, key_shift=1, **options)
    kind(2, key_shift=0, **options)


@pytest.mark.parametrize(
    "kind", [heads.TrainedRoutedHeads, heads.ExactHashedHeads], ids=str
)
def test_knows_no_exploring_queries(kind):
    with pytest.raises(ValueError, match="`exploring_queries`.*exploring_queries=1"):
        kind(2, 4, 4, exploring_queries=1)
    assert kind(2, 4, 4, exploring_queries=0).exploring_queries == 0


def test_kinds_that_the_release_does_not_have_are_sound():
    for level in COMPATIBILITY.words.values():
        for cls in (layers.FullHeads, layers.FixedHeads, layers.RandomHeads):
            assert heads.class_at(level, cls) == (cls, {})
    sound = layers.RoutedHeads
    assert heads.class_at(None, sound) == (sound, {})
    assert heads.class_at("trained", sound) == (heads.TrainedRoutedHeads, {})
    assert heads.class_at("exact", sound) == (heads.ExactRoutedHeads, {})
    assert heads.class_at("exact_shared_padding", sound) == (
        heads.ExactRoutedHeads,
        {"cache_padding_bias": True},
    )
    assert heads.class_at("trained", layers.StridedHeads)[0] is layers.StridedHeads

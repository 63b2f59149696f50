"""Tests of the switches for the release's flaws; golden cases test their effects."""

import dataclasses
import json

import pytest

from routing_tf.layers import Compatibility


def test_default_is_sound_and_release_is_not():
    assert Compatibility() == Compatibility.of(None) == Compatibility.of({})
    assert set(Compatibility().to_dict().values()) == {False}
    release = Compatibility.release().to_dict()
    assert release.pop("padding_of_first_row") is False
    assert set(release.values()) == {True}
    assert {"strided_padding_is_seen", "buckets_filled_up"} <= release.keys()
    release = Compatibility.release(padding_of_first_row=True)
    assert set(release.to_dict().values()) == {True}


def test_comes_from_itself_or_a_dict():
    flaws = Compatibility(rank_mask=True, buckets_filled_up=True)
    assert Compatibility.of(flaws) is flaws
    assert Compatibility.of(flaws.to_dict()) == flaws
    assert json.loads(json.dumps(flaws.to_dict())) == flaws.to_dict()
    assert Compatibility.of({"rank_mask": True}) == Compatibility(rank_mask=True)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Compatibility().rank_mask = True


@pytest.mark.parametrize(
    "received", [{"rank_masks": True}, {"routing_length_multiple": 4}, "release", True]
)
def test_refuses_what_names_no_switches(received):
    with pytest.raises(ValueError) as error:
        Compatibility.of(received)
    assert f"Received: compatibility={received!r}" in str(error.value)
    assert "mixed_head_counts" in str(error.value)

"""Tests of ready lists of head groups."""

import pytest

from routing_tf import layers
from routing_tf import zoo


def settings(groups):
    """Returns the classes of groups and their settings, without their names."""
    return [(type(group), {**group.get_config(), "name": None}) for group in groups]


CASES = {
    "longformer": (
        zoo.longformer_heads(
            5, 8, (0, 3), dilation=2, num_dilated_heads=2, dropout=0.1
        ),
        [
            zoo.GlobalHeads(3, (0, 3), 8, dropout=0.1),
            layers.LocalHeads(2, (4,), dilation=2, dropout=0.1),
        ],
    ),
    "etc": (
        zoo.etc_heads(2, 3, 5),
        [zoo.GlobalHeads(2, (0, 1, 2), 10, max_relative_position=12)],
    ),
    **{
        f"bigbird of {heads}": (
            zoo.bigbird_heads(heads, given, 2, 4, seed=7),
            [
                zoo.GlobalHeads(heads - random, (0, 1), 6),
                zoo.RandomBlockHeads(random, 2, 4, seed=7),
            ],
        )
        for heads, given, random in ((8, None, 2), (2, None, 1), (6, 4, 4))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_settings(name):
    found, expected = CASES[name]
    assert settings(found) == settings(expected)
    assert len(zoo.longformer_heads(5)) == 1


@pytest.mark.parametrize(
    "make, options, message",
    [
        (
            zoo.longformer_heads,
            {"num_dilated_heads": 2},
            "num_dilated_heads=2 .*num_heads=2",
        ),
        (zoo.longformer_heads, {"dilation": 2}, "dilation=2 .*num_dilated_heads=0"),
        (zoo.longformer_heads, {"attention_window": 0}, "attention_window=0"),
        (zoo.etc_heads, {"num_global_tokens": 0}, "num_global_tokens=0"),
        (
            zoo.bigbird_heads,
            {"num_random_heads": 2},
            "num_random_heads=2 .*num_heads=2",
        ),
        (zoo.bigbird_heads, {"block_length": 0}, "block_length=0"),
    ],
)
def test_refuses(make, options, message):
    with pytest.raises(ValueError, match=f"Received: {message}"):
        make(2, **options)

"""Tests of ready lists of head groups."""

import pytest

from routing_tf import zoo


def settings(groups):
    """Returns the classes of groups, with those arguments that lists may choose."""
    names = ("num_heads", "global_positions", "attention_window", "dilation")
    names += ("block_shape", "block_length", "num_random_blocks", "seed", "dropout")
    names += ("max_relative_position",)
    return [
        (
            type(group).__name__,
            {name: getattr(group, name) for name in names if hasattr(group, name)},
        )
        for group in groups
    ]


def sizes(name, **options):
    return (name, {"dropout": 0.0, "max_relative_position": None, **options})


def test_longformer():
    groups = zoo.longformer_heads(
        5, 8, (0, 3), dilation=2, num_dilated_heads=2, dropout=0.1
    )
    window = {"global_positions": (0, 3), "attention_window": 8}
    assert settings(groups) == [
        sizes("GlobalHeads", num_heads=3, **window, dropout=0.1),
        sizes("LocalHeads", num_heads=2, block_shape=(4,), dilation=2, dropout=0.1),
    ]
    assert len(zoo.longformer_heads(5)) == 1


def test_etc():
    window = {"global_positions": (0, 1, 2), "attention_window": 10}
    window["max_relative_position"] = 12
    expected = [sizes("GlobalHeads", num_heads=2, **window)]
    assert settings(zoo.etc_heads(2, 3, 5)) == expected


@pytest.mark.parametrize(
    "heads, given, random", [(8, None, 2), (2, None, 1), (6, 4, 4)]
)
def test_bigbird(heads, given, random):
    near = {"global_positions": (0, 1), "attention_window": 6}
    far = {"block_length": 2, "num_random_blocks": 4, "seed": 7}
    assert settings(zoo.bigbird_heads(heads, given, 2, 4, seed=7)) == [
        sizes("GlobalHeads", num_heads=heads - random, **near),
        sizes("RandomBlockHeads", num_heads=random, **far),
    ]


@pytest.mark.parametrize(
    "make, options, message",
    [
        (zoo.longformer_heads, {"num_dilated_heads": 2}, "num_dilated_heads=2 with"),
        (zoo.longformer_heads, {"dilation": 2}, "dilation=2 with"),
        (zoo.longformer_heads, {"attention_window": 0}, "attention_window=0"),
        (zoo.etc_heads, {"num_global_tokens": 0}, "num_global_tokens=0"),
        (zoo.bigbird_heads, {"num_random_heads": 2}, "num_random_heads=2 with"),
        (zoo.bigbird_heads, {"block_length": 0}, "block_length=0"),
    ],
)
def test_refuses(make, options, message):
    with pytest.raises(ValueError, match=f"Received: {message}"):
        make(2, **options)

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


def test_longformer():
    groups = zoo.longformer_heads(
        5, 8, (0, 3), dilation=2, num_dilated_heads=2, dropout=0.1
    )
    shared = {"dropout": 0.1, "max_relative_position": None}
    assert settings(groups) == [
        (
            "GlobalHeads",
            {
                "num_heads": 3,
                "global_positions": (0, 3),
                "attention_window": 8,
                **shared,
            },
        ),
        ("LocalHeads", {"num_heads": 2, "block_shape": (4,), "dilation": 2, **shared}),
    ]
    assert len(zoo.longformer_heads(5)) == 1


def test_etc():
    (group,) = zoo.etc_heads(2, 3, 5)
    assert settings([group])[0][1] == {
        "num_heads": 2,
        "global_positions": (0, 1, 2),
        "attention_window": 10,
        "dropout": 0.0,
        "max_relative_position": 12,
    }


@pytest.mark.parametrize(
    "heads, given, random", [(8, None, 2), (2, None, 1), (6, 4, 4)]
)
def test_bigbird(heads, given, random):
    near, far = settings(zoo.bigbird_heads(heads, given, 2, 4, seed=7))
    shared = {"dropout": 0.0, "max_relative_position": None}
    assert near[1] == {
        "num_heads": heads - random,
        "global_positions": (0, 1),
        "attention_window": 6,
        **shared,
    }
    assert far[1] == {
        "num_heads": random,
        "block_length": 2,
        "num_random_blocks": 4,
        "seed": 7,
        **shared,
    }


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

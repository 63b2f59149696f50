"""Each way of each kind of heads against plain NumPy; `fuzz_test` draws other cases."""

import collections

import pytest

from tests.layers import fuzz_cases
from tests.layers import fuzzing
from tests.layers import kinds

BATCH, DIM, LENGTH = 2, 8, 12
CAUSAL = {"causal": True}
SHIFTED = {"key_shift": 1, **CAUSAL}
SEPARATE = {"share_query_key": False}
# With separate keys, queries read the clusters of keys, as they did once.
OF_KEYS = {**SEPARATE, "query_cluster": "key"}


def case(
    kind, length=LENGTH, memory=None, causal=False, padded=True, seed=0, **options
):
    """Returns a case of one group with padding and a token bias.

    Lengths are pairs on two axes. `seed` is one with which no rounding chooses members.
    """
    lengths, memories = (x if isinstance(x, tuple) else (x,) for x in (length, memory))
    masks = {"token_bias": "normal"}
    if padded:
        masks |= {"query_mask": "holes"} | ({"value_mask": "holes"} if memory else {})
    return fuzz_cases.Case(
        options={"key_dim": 6, "kernel_initializer": "zeros"},
        groups=[(f"{kind}Heads", {"num_heads": 2, **options})],
        query=(BATCH, *lengths, DIM),
        value=(BATCH, *memories, DIM) if memory else None,
        masks=masks,
        call={"use_causal_mask": causal},
        seed=seed,
    )


def relative(limit):
    return {"max_relative_position": limit}


ROUTED = {"num_clusters": 3, "attention_window": 3}
CHOICE = {**ROUTED, "routing": "token_choice"}
EXPERT = {**ROUTED, "routing": "expert_choice"}
PREFIX = {"attention_window": 5, "prefix_block_size": 5, "seed": 1}
HASHED = {"num_buckets": 4, "attention_window": 3}
SCOPE, ALL_OF_IT = {"routing_scope": "prefix"}, {"attention_window": 30}
WIDE = {**ROUTED, "attention_window": 5, **SEPARATE, **relative(3)}
TWO_READS = {"attention_window": 6, "clusters_per_query": 2, "seed": 1, **SEPARATE}
ROTARY = {"rotary_positions": True, "rotary_wavelength": 50}
GLOBAL = {"global_positions": (0, 7), "attention_window": 4}
FIXED = {"block_shape": (4,), "num_summary_columns": 1, "arrangement": "separate"}
DISTINCT = {"block_shape": (5,), "num_summary_columns": 2, "distinct_summaries": True}
RECTANGLE = {"block_shape": (1, 2), "flange_blocks": (1, 0)}
CASES = {
    "full": case("Full", **relative(3), **CAUSAL),
    "full, capped distances": case(
        "Full", 128, logit_soft_cap=1.5, **relative(3), **CAUSAL
    ),
    "local": case("Local", 10, block_shape=(4,), **relative(3), **CAUSAL),
    "local, shifted": case("Local", 10, block_shape=(4,), **relative(3), **SHIFTED),
    "local, dilation": case(
        "Local", 11, block_shape=(2,), dilation=3, **relative(3), **CAUSAL
    ),
    "local, memory": case("Local", 8, 21, block_shape=(4,)),
    "local, flange of one entry": case(
        "Local", 10, block_shape=(3,), flange_blocks=(2,), **relative(3)
    ),
    "local on two axes": case("Local", (3, 8), **RECTANGLE, **relative(5), **CAUSAL),
    "local, capped": case("Local", 15, block_shape=(4,), logit_soft_cap=1.5, **CAUSAL),
    "local, rotary, shifted": case("Local", 15, block_shape=(4,), **ROTARY, **SHIFTED),
    "local, rotary on two axes": case(
        "Local", (4, 5), block_shape=(2, 2), **ROTARY, **CAUSAL
    ),
    "local, entmax": case("EntmaxLocal", 15, block_shape=(4,), **CAUSAL),
    "strided": case("Strided", 10, block_shape=(3,), **relative(2), **CAUSAL),
    "strided, memory": case("Strided", 12, 14, block_shape=(4,), **relative(1)),
    "fixed": case("Fixed", 11, block_shape=(3,), num_summary_columns=3),
    "fixed, separate": case("Fixed", **FIXED, **CAUSAL),
    "fixed, distinct": case("Fixed", 13, num_heads=4, **DISTINCT, **CAUSAL),
    "global": case("Global", **GLOBAL, **relative(3)),
    "global, causal": case("Global", **GLOBAL, **relative(3), **CAUSAL),
    "random blocks": case(
        "RandomBlock", 19, block_length=2, num_random_blocks=2, **relative(5)
    ),
    "random blocks, causal": case(
        "RandomBlock", 20, block_length=3, num_random_blocks=1, **relative(5), **CAUSAL
    ),
    "block pairs": case(
        "BlockPair", num_blocks=3, permutations=[(1, 2, 0), (0, 2, 1)], **relative(3)
    ),
    "block pairs, uneven": case("BlockPair", 11, num_blocks=4, **relative(3)),
    "block pairs, few tokens": case("BlockPair", 3, num_blocks=5, **relative(3)),
    "axial": case("Axial", 11, width=4, axis=None),
    "best blocks": case(
        "BlockTopK", block_length=4, num_blocks=2, **relative(5), **CAUSAL
    ),
    "best blocks, shifted": case(
        "BlockTopK", 23, block_length=3, num_blocks=4, **relative(5), **SHIFTED
    ),
    "best blocks, memory": case(
        "BlockTopK", 11, 14, block_length=3, num_blocks=2, **relative(5)
    ),
    "best blocks, rotary": case(
        "BlockTopK", 15, block_length=3, num_blocks=2, **ROTARY, **CAUSAL
    ),
    "sliding": case("Sliding", 11, radius=3, **relative(2), **CAUSAL),
    "sliding, strided": case("Sliding", 11, radius=3, is_strided=True),
    "sliding, strided, capped": case(
        "Sliding", 15, radius=3, is_strided=True, logit_soft_cap=1.5, **CAUSAL
    ),
    "Routed": case("Routed", **EXPERT, **relative(2)),
    "Routed, memory": case(
        "Routed", memory=7, **{**EXPERT, **ALL_OF_IT}, **SEPARATE, **relative(2)
    ),
    "Routed, causal": case(
        "Routed", **{**EXPERT, "attention_window": 5}, **relative(2), **CAUSAL
    ),
    "Routed, prefix, apart": case(
        "Routed", **{**EXPERT, **PREFIX, **SCOPE}, **SEPARATE, **relative(4), **CAUSAL
    ),
    "Routed, prefix, shifted": case(
        "Routed", **{**EXPERT, **PREFIX, **SCOPE}, **relative(4), **SHIFTED
    ),
    "Routed, prefix, normalised": case(
        "Routed", 15, qk_norm=True, **EXPERT, **SCOPE, **CAUSAL
    ),
    "last members, apart, shifted": case(
        "Routed", **CHOICE, **SEPARATE, **relative(30), **SHIFTED
    ),
    "last members, by the key": case(
        "Routed", **CHOICE, **OF_KEYS, **relative(30), **CAUSAL
    ),
    "last members, two reads, capped": case(
        "Routed", 15, logit_soft_cap=1.5, **{**CHOICE, **TWO_READS}, **CAUSAL
    ),
    "last members, apart, normalised": case(
        "Routed", 15, qk_norm=True, **CHOICE, **SEPARATE, **CAUSAL
    ),
    "last members, rotary, shifted": case("Routed", 15, **CHOICE, **ROTARY, **SHIFTED),
    "last members, apart, entmax": case(
        "EntmaxRouted", 15, entmax_alpha="learned", **CHOICE, **SEPARATE, **CAUSAL
    ),
    "thresholds, apart": case(
        "Threshold", 100, seed=3, **{**WIDE, "attention_window": 17}, **CAUSAL
    ),
    "thresholds, by the key": case(
        "Threshold", seed=3, **ROUTED, **OF_KEYS, **relative(30), **CAUSAL
    ),
    "thresholds, in one cluster": case(
        "Threshold", max_clusters_per_token=1, **WIDE, **CAUSAL
    ),
    # The sound routing is the default.
    "Routed by default": case("Routed", **ROUTED, **SEPARATE),
    "Routed by default, memory": case("Routed", memory=7, **ROUTED, **SEPARATE),
    "last members by default": case("Routed", **ROUTED, **SEPARATE, **CAUSAL),
    "ClusterStrided": case("ClusterStrided", **ROUTED, **relative(2)),
    "ClusterStrided, memory": case("ClusterStrided", memory=7, **ROUTED, **relative(2)),
    "ClusterStrided, prefix": case(
        "ClusterStrided", **{**ROUTED, **PREFIX}, **relative(4), **CAUSAL
    ),
    "Hashed": case("Hashed", **HASHED, **relative(2)),
    "Hashed, memory": case("Hashed", memory=7, **HASHED, **relative(2)),
    "Hashed, apart": case("Hashed", **HASHED, **SEPARATE, **relative(30), **CAUSAL),
    # Buckets are those of vectors without the scales of the norms.
    "Hashed, normalised": case("Hashed", qk_norm=True, **HASHED, **CAUSAL),
    "Random, apart": case("Random", **ROUTED, **SEPARATE, **relative(2)),
    "Random, memory": case("Random", memory=7, **ROUTED, **relative(2)),
}


LOCAL = ("LocalHeads", {"num_heads": 1, "block_shape": (4,), "flange_blocks": 2})
EXPERTS = ("RoutedHeads", {"num_clusters": 3, "attention_window": 5})
EXPERTS[1].update(num_heads=2, routing="expert_choice")
APART = ("RoutedHeads", {**EXPERTS[1], **SEPARATE})
ALL = ("FullHeads", {"num_heads": 2})
RECTANGLES = (
    ("LocalHeads", {"num_heads": 1, "block_shape": (2, 4), **relative(5)}),
    ("StridedHeads", {"num_heads": 2, "block_shape": (2, 4)}),
)


def groups(kinds, lengths, memory=None, memory_dim=DIM, causal=False, **options):
    """Returns a case of several groups, whose attention maps are compared, too."""
    found = case("Full", lengths, memory, causal, seed=int(causal))
    found.groups = [(kind, dict(own)) for kind, own in kinds]
    found.options.update(options)
    found.call["return_attention_scores"] = True
    if memory:
        found.value = (*found.value[:-1], memory_dim)
    return found


PROJECTIONS = {"shared_head_projection": True, "project_shared_keys": True}
SMALL = {"num_heads": 1, "num_clusters": 2, "attention_window": 5}
KINDS = (LOCAL, EXPERTS, APART, ALL)
OTHERS = (
    ("ClusterStridedHeads", SMALL),
    ("StridedHeads", {"num_heads": 1, "block_shape": (4,)}),
    ("FixedHeads", {"num_heads": 1, "block_shape": (4,), "num_summary_columns": 2}),
    ("RandomHeads", SMALL),
    ("HashedHeads", {"num_heads": 1, "num_buckets": 4, "attention_window": 3}),
)
CASES |= {
    "groups": groups(KINDS, 12, causal=True, output_dim=9),
    "groups, memory": groups(KINDS, 12, 12, memory_dim=7, **PROJECTIONS),
    "groups, image": groups((*RECTANGLES, EXPERTS, LOCAL), (5, 7), causal=True),
    "groups, image, smaller memory": groups((RECTANGLES[1], ALL), (5, 7), (3, 4)),
    "groups, blocks on one axis": groups((*OTHERS, *KINDS), 12, block_shape=(5,)),
}


# Each class of heads, and what its way to compute depends on.
FEW = [name for name in CASES if "," not in name]
FEW += ["last members, apart, shifted", "last members, by the key", "thresholds, apart"]
FEW += ["Routed, prefix, apart", "Hashed, apart", "best blocks, shifted"]
FEW += ["groups, image", "groups, memory", "local, rotary on two axes"]


@pytest.mark.parametrize("name", kinds.some(CASES, FEW))
def test_equals_plain_numpy(name):
    counts = collections.Counter()
    fuzzing.check(CASES[name], counts)
    assert counts["rows compared"] == BATCH

"""Every kind of heads, for the tests of what holds for all of them.

Their windows and blocks are small: of 9 to 50 tokens most queries see a few.
"""

from functools import partial

import pytest

from routing_tf import layers
from routing_tf import zoo
from tests.zoo import cases

HEADS = cases.HEADS
RELATIVE = cases.RELATIVE
SEPARATE = {"share_query_key": False}
SIZES = {"num_clusters": 3, "attention_window": 5}
routed = partial(layers.RoutedHeads, HEADS, **SIZES, **RELATIVE)
experts = partial(routed, routing="expert_choice")
hashed = partial(
    layers.HashedHeads, HEADS, num_buckets=4, attention_window=5, **RELATIVE
)
reformer = partial(
    zoo.ReformerHeads, HEADS, num_buckets=4, attention_window=5, **RELATIVE
)
thresholds = partial(zoo.ThresholdHeads, HEADS, **SIZES, **RELATIVE)
strided = partial(layers.ClusterStridedHeads, HEADS, **SIZES, **RELATIVE)
random = partial(layers.RandomHeads, HEADS, **SIZES, **RELATIVE)
fixed = partial(layers.FixedHeads, HEADS, 5, 2)
multipole = partial(
    *(layers.MultipoleHeads, HEADS),
    **{"num_clusters": 3, "attention_window": 4, "clusters_per_query": 2},
    **{"num_recent": 3, "num_sinks": 1, "share_query_key": True},
)
REFORMER = {"hash": "rotation", "normalization": "unit_keys", "attends_to_self": False}

# What each class of the core must be given, besides the number of heads.
REQUIRED = {
    "FullHeads": {},
    **dict.fromkeys(("LocalHeads", "StridedHeads"), {"block_shape": (4,)}),
    "FixedHeads": {"block_shape": (4,), "num_summary_columns": 2},
    "SlidingHeads": {"radius": 4},
    **dict.fromkeys(
        ("RoutedHeads", "ClusterStridedHeads", "RandomHeads"),
        {"num_clusters": 2, "attention_window": 4},
    ),
    "HashedHeads": {"num_buckets": 4, "attention_window": 4},
    "MultipoleHeads": {"num_clusters": 4, "attention_window": 4},
}
POSITIONAL = {
    "full": partial(layers.FullHeads, HEADS, **RELATIVE),
    "local": partial(layers.LocalHeads, HEADS, (4,), flange_blocks=2, **RELATIVE),
    "local_one_block": partial(layers.LocalHeads, HEADS, (100,), **RELATIVE),
    "dilated": partial(layers.LocalHeads, HEADS, (2,), dilation=3, **RELATIVE),
    "strided": partial(layers.StridedHeads, HEADS, (5,), **RELATIVE),
    "fixed": fixed,
    "fixed_separate": partial(fixed, arrangement="separate"),
    "fixed_summaries": partial(fixed, arrangement="summaries"),
    "fixed_distinct": partial(fixed, distinct_summaries=True),
    "sliding": partial(layers.SlidingHeads, HEADS, 4, **RELATIVE),
    "sliding_strided": partial(layers.SlidingHeads, HEADS, 4, True),
}
# Their queries may have projections, and so clusters, apart from keys.
CLUSTERED = {
    "token_choice": partial(routed, routing="token_choice"),
    "two_clusters": partial(routed, attention_window=6, clusters_per_query=2),
    "threshold": thresholds,
    "prefix": partial(experts, routing_scope="prefix", prefix_block_size=12),
    "cluster_strided": partial(strided, prefix_block_size=12),
    "hashed": hashed,
    "rounds": partial(reformer, num_rounds=2),
    "random": random,
    "multipole": multipole,
}
APART = {f"{kind}_apart": partial(make, **SEPARATE) for kind, make in CLUSTERED.items()}
UNSHIFTED = {"reformer": partial(reformer, num_rounds=2, **REFORMER), **cases.UNSHIFTED}
# One or two of each way to read keys beside the values of the next positions.
MAY_SHIFT = (
    *("full", "local", "dilated", "strided", "fixed", "sliding", "sliding_strided"),
    *("token_choice", "token_choice_apart", "two_clusters_apart", "threshold_apart"),
    *("threshold", "prefix", "prefix_apart", "cluster_strided", "hashed_apart"),
    *("multipole", "multipole_apart"),
    *("rounds", "random", "linear", "performer", "random_features", "global", "row"),
    *("column", "learned", "best_blocks", "mixed_blocks", "indexed", "indexed_copies"),
)
SHIFTED = {
    f"{kind}_shifted": partial(make, key_shift=1)
    for kind, make in {**POSITIONAL, **CLUSTERED, **APART, **cases.CAUSAL}.items()
    if kind in MAY_SHIFT
}
CAUSAL = {**POSITIONAL, **CLUSTERED, **APART, **cases.CAUSAL, **UNSHIFTED, **SHIFTED}
# Without a causal mask.
WHOLE = {
    **POSITIONAL,
    "experts": experts,
    "experts_apart": partial(experts, **SEPARATE),
    "cluster_strided": strided,
    "cluster_strided_apart": partial(strided, **SEPARATE),
    "hashed": hashed,
    "hashed_apart": partial(hashed, **SEPARATE),
    "random": random,
    "random_apart": partial(random, **SEPARATE),
    "multipole": multipole,
    "multipole_apart": partial(multipole, **SEPARATE),
    **{
        kind: make
        for kind, make in {**UNSHIFTED, **cases.CAUSAL}.items()
        if not kind.startswith("native_sparse")
    },
    **cases.NOT_CAUSAL,
}
# Of another sequence.
MEMORIES = {
    **{kind: WHOLE[kind] for kind in ("full", "local", "local_one_block", "strided")},
    "local_alone": partial(layers.LocalHeads, HEADS, (3,), flange_blocks=0),
    **{kind: WHOLE[kind] for kind in WHOLE if kind.startswith("expert")},
    **{kind: WHOLE[kind] for kind in ("cluster_strided", "hashed", "random")},
    **{kind: WHOLE[kind] for kind in ("multipole", "multipole_apart")},
    "one_hash": partial(reformer, hash="rotation", attends_to_self=False),
    **{kind: cases.ALL[kind] for kind in cases.OF_TWO},
}
# What a query can see is bounded, and so is what they remember: of tokens with shifted
# keys if queries have projections of their own.
BOUNDED = {"token_choice", "threshold", "two_clusters", "hashed", "prefix", "reformer"}
BOUNDED |= {"multipole", "multipole_shifted", "multipole_apart_shifted"}
BOUNDED |= {"local", "dilated", "sliding", *cases.BOUNDED}
BOUNDED |= {
    f"{kind}_apart"
    for kind in ("token_choice", "threshold", "hashed", "rounds", "multipole")
}
BOUNDED |= {
    f"{kind}_shifted"
    for kind in ("token_choice_apart", "threshold_apart", "prefix", "local", "dilated")
}
BOUNDED |= {f"{kind}_shifted" for kind in ("sliding", *cases.BOUNDED)}


def exported():
    """Returns the classes of head groups of the package, by their names there.

    Those with entmax, which differ from others by their weights alone, are left out.
    """
    return {
        name: x
        for name, x in {**vars(layers), **vars(zoo)}.items()
        if isinstance(x, type) and issubclass(x, layers.HeadGroup)
        if x is not layers.HeadGroup and not issubclass(x, zoo.EntmaxHeads)
    }


def some(kinds, few):
    """Returns parameters, or tuples of them: all but a few are thorough."""
    assert set(few) <= set(kinds)
    return [
        pytest.param(
            *(kind if isinstance(kind, tuple) else (kind,)),
            marks=() if kind in few else pytest.mark.thorough,
        )
        for kind in kinds
    ]

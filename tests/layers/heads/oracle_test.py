"""Each kind of heads against plain NumPy, in named cases; `fuzz_test` draws others."""

import collections

import pytest

from tests.layers import fuzz_cases
from tests.layers import fuzzing

BATCH, DIM, LENGTH, LONG = 2, 8, 12, 100
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


def full():
    yield "full", case("Full", **relative(3), **CAUSAL)
    yield "full, shifted", case("Full", **relative(3), **SHIFTED)
    yield "full, memory", case("Full", memory=7)


def local():
    for length, block, flange in ((12, 4, 0), (10, 4, 1), (10, 3, 2), (10, 32, 1)):
        for causal in (False, True):
            yield (
                f"local, {flange} of {block} in {length}, {causal=}",
                case(
                    "Local",
                    length,
                    causal=causal,
                    block_shape=(block,),
                    flange_blocks=flange,
                    **relative(3),
                ),
            )
    yield (
        "local, shifted",
        case("Local", 10, block_shape=(4,), **relative(3), **SHIFTED),
    )
    sizes = {"block_shape": (3,), "flange_blocks": (2,)}
    yield "local, flange of one entry", case("Local", 10, **sizes, **relative(3))
    for length, block, dilation, way in (
        (12, 2, 3, {}),
        (11, 2, 3, CAUSAL),
        (11, 1, 4, SHIFTED),
        (7, 8, 2, CAUSAL),
        (5, 2, 9, {}),
    ):
        sizes = {"block_shape": (block,), "dilation": dilation}
        yield (
            f"local, {block} in {length} with dilation {dilation}",
            case("Local", length, **sizes, **relative(3), **way),
        )
    for length, memory, block, memory_block in (
        (11, 6, 4, 2),
        (5, 9, 16, None),
        (12, 7, 4, None),
        (12, 2, 3, None),
        (8, 21, 4, None),
    ):
        given = {"memory_block_shape": (memory_block,)} if memory_block else {}
        yield (
            f"local, {length} and {memory} in blocks of {block}",
            case("Local", length, memory, block_shape=(block,), **given),
        )


def rectangles():
    for lengths, block, flange, limit in (
        ((6, 8), (2, 2), 1, 9),
        ((3, 8), (1, 2), (1, 0), 5),
        ((4, 5), (2, 1), (0, 2), 2),
        ((2, 8), (2, 3), 0, 2),
    ):
        for causal in (False, True):
            yield (
                f"local, {flange} of {block} in {lengths}, {causal=}",
                case(
                    "Local",
                    lengths,
                    causal=causal,
                    block_shape=block,
                    flange_blocks=flange,
                    **relative(limit),
                ),
            )


def strided():
    for length, block, limit in ((12, 4, 1), (10, 3, 2), (5, 8, 2), (6, 1, 2)):
        for causal in (False, True):
            yield (
                f"strided, {block} in {length}, {causal=}",
                case(
                    "Strided",
                    length,
                    causal=causal,
                    block_shape=(block,),
                    **relative(limit),
                ),
            )
    for memory in (3, 14):
        name = f"strided, memory of {memory}"
        yield name, case("Strided", 12, memory, block_shape=(4,), **relative(1))


def fixed():
    for length, block, columns in ((12, 4, 1), (11, 3, 3), (5, 8, 4), (6, 1, 1)):
        for arrangement in ("merged", "separate", "summaries"):
            yield (
                f"fixed, {columns} of {block} in {length}, {arrangement}",
                case(
                    "Fixed",
                    length,
                    block_shape=(block,),
                    num_summary_columns=columns,
                    arrangement=arrangement,
                    causal=block != 3,
                ),
            )
    for arrangement in ("merged", "separate", "summaries"):
        for length, block, columns in ((13, 5, 2), (11, 4, 1)):
            yield (
                f"fixed, distinct {columns} of {block} in {length}, {arrangement}",
                case(
                    "Fixed",
                    length,
                    block_shape=(block,),
                    num_summary_columns=columns,
                    arrangement=arrangement,
                    distinct_summaries=True,
                    causal=block != 4,
                    num_heads=4,
                ),
            )


def global_tokens():
    for length, window, positions in (
        (12, 4, (0, 7)),
        (11, 3, (5,)),
        (10, None, (2, 0, 40)),
        (9, 1, ()),
        (5, 32, range(2)),
    ):
        for causal in (False, True):
            yield (
                f"global, {window} and {positions} in {length}, {causal=}",
                case(
                    "Global",
                    length,
                    causal=causal,
                    global_positions=positions,
                    attention_window=window,
                    **relative(3),
                ),
            )
    options = {"global_positions": (0, 4), "attention_window": 3}
    yield "global, shifted", case("Global", 10, **options, **SHIFTED)
    yield "global on two axes", case("Global", (3, 4), **options, **CAUSAL)


def random_blocks():
    for length, block, number in ((19, 2, 2), (20, 3, 1), (12, 1, 30), (5, 2, 2)):
        sizes = {"block_length": block, "num_random_blocks": number}
        for name, way in (("", {}), (", causal", CAUSAL), (", shifted", SHIFTED)):
            yield (
                f"{number} random blocks of {block} in {length}{name}",
                case("RandomBlock", length, **sizes, **relative(5), **way),
            )


def axial():
    for axis in (None, 0, 1):
        options = {"axis": axis} | ({} if axis is None else relative(1))
        for name, way in (("", {}), (", causal", CAUSAL), (", shifted", SHIFTED)):
            own = {**options, **way}
            if axis is None:
                own.pop("max_relative_position", None)
            yield (f"axial, {axis} of (3, 5){name}", case("Axial", (3, 5), **own))
            yield (f"axial, {axis} of 11{name}", case("Axial", 11, width=4, **own))
    blocks = groups((("AxialHeads", {"num_heads": 1}), *RECTANGLES[:1]), (5, 7))
    yield "axial in blocks", blocks


def block_top_k():
    for length, block, number, memory in (
        (12, 4, 2, None),
        (23, 3, 4, None),
        (10, 4, 1, None),
        (5, 8, 3, None),
        (11, 3, 2, 14),
        (8, 2, 40, 5),
    ):
        sizes = {"block_length": block, "num_blocks": number, **relative(5)}
        for name, way in (("", CAUSAL), (", shifted", SHIFTED), (", not causal", {})):
            if memory is None or not way:
                yield (
                    f"best {number} blocks of {block} in {memory or length}{name}",
                    case("BlockTopK", length, memory, **sizes, **way),
                )


def sliding():
    for length, radius in ((12, 4), (11, 3), (5, 8), (6, 1)):
        for causal in (False, True):
            name = f"sliding, {radius} in {length}, {causal=}"
            own = {"radius": radius, "causal": causal}
            yield name, case("Sliding", length, **own, **relative(2))
            yield f"{name}, strided", case("Sliding", length, is_strided=True, **own)
    for causal in (False, True):
        yield f"sliding, itself, {causal=}", case("Sliding", 5, radius=0, causal=causal)
    own = {"radius": 3, "is_strided": True}
    yield "sliding, shifted", case("Sliding", 11, radius=3, **relative(2), **SHIFTED)
    yield "sliding, strided, shifted", case("Sliding", 11, **own, **SHIFTED)


def members(kind, **options):
    """Cases of clusters without a causal mask: of a sequence, and of another one."""
    for window, limit in ((3, 2), (5, 30), (32, 2)):
        # Tokens in several clusters have no relative positions to those in all.
        for shares in ({}, SEPARATE):
            apart = ", apart" if shares else ""
            own = {**options, **shares, "attention_window": window}
            name = f"{kind}, window of {window}{apart}"
            yield name, case(kind, **own, **relative(limit))
    for memory, window, shares in ((7, 3, {}), (7, 30, SEPARATE), (20, 8, {})):
        own = {**options, **shares, "attention_window": window}
        name = f"{kind}, window of {window} in a memory of {memory}"
        yield name, case(kind, memory=memory, **own, **relative(2))


def last_members(kind, name_of_rule=None, **options):
    """Cases of tokens that see the last members of the clusters that they read."""
    rule = name_of_rule or kind
    for length, window, limit in ((LENGTH, 1, 2), (LENGTH, 3, 30), (LONG, 17, 4)):
        for name, way in (
            ("", CAUSAL),
            (", shifted", SHIFTED),
            (", apart", {**SEPARATE, **CAUSAL}),
            (", apart, shifted", {**SEPARATE, **SHIFTED}),
            (", by the key", {**OF_KEYS, **CAUSAL}),
        ):
            own = {**options, **way, "attention_window": window}
            yield (
                f"{rule}, last {window} of {length}{name}",
                case(kind, length, **own, **relative(limit)),
            )


def prefixes(kind, **options):
    """Cases of members judged among the tokens up to the query."""
    for length, window, block in ((LENGTH, 5, 5), (LENGTH, 1, 12), (40, 9, 17)):
        for name, way in (
            ("", CAUSAL),
            (", shifted", SHIFTED),
            (", apart", {**SEPARATE, **CAUSAL}),
        ):
            own = {**options, **way, "attention_window": window, "seed": 1}
            yield (
                f"{kind}, {window} of a prefix of {length}{name}",
                case(kind, length, prefix_block_size=block, **own, **relative(4)),
            )


def clustered():
    experts = {"num_clusters": 3, "routing": "expert_choice"}
    yield from members("Routed", **experts)
    yield from last_members("Routed", num_clusters=3, routing="token_choice")
    thresholds = {"num_clusters": 3, "routing": "expert_threshold"}
    yield from last_members("Routed", "Thresholds", seed=3, **thresholds)
    for limit in (1, 3):
        for name, way in ((", shifted", SHIFTED), (", apart", {**SEPARATE, **CAUSAL})):
            own = {**thresholds, **way, "max_clusters_per_token": limit}
            yield (
                f"Thresholds, in at most {limit}{name}",
                case("Routed", attention_window=5, **own, **relative(3)),
            )
    yield from prefixes("Routed", routing_scope="prefix", **experts)
    for name, way in (
        ("", CAUSAL),
        (", shifted", SHIFTED),
        (", apart", {**SEPARATE, **CAUSAL}),
        (", apart, shifted", {**SEPARATE, **SHIFTED}),
    ):
        own = {**experts, **way, "attention_window": 5}
        yield f"Routed, 5 of the whole{name}", case("Routed", **own, **relative(2))
    yield from members("ClusterStrided", num_clusters=3)
    yield from prefixes("ClusterStrided", num_clusters=3)
    for kind, number in (
        ("Hashed", {"num_buckets": 4}),
        ("Random", {"num_clusters": 3}),
    ):
        yield from members(kind, **number)
        yield from last_members(kind, **number)
    plain = {"num_clusters": 3, "attention_window": 5, "padded": False}
    yield "Routed, no padding", case("Routed", **plain, **CAUSAL)
    yield "ClusterStrided, no padding", case("ClusterStrided", **plain, **CAUSAL)


def options_of_all():
    """Cases of what any heads may have: rotary positions, other logits and weights."""
    sizes = {"num_clusters": 3, "attention_window": 6}
    experts = {**sizes, "routing": "expert_choice"}
    kinds = {
        "full": ("Full", {}),
        "local": ("Local", {"block_shape": (4,)}),
        "strided": ("Strided", {"block_shape": (3,)}),
        "fixed": ("Fixed", {"block_shape": (4,), "num_summary_columns": 2}),
        "sliding": ("Sliding", {"radius": 3}),
        "merged": ("Sliding", {"radius": 3, "is_strided": True}),
        "global": ("Global", {"global_positions": (0, 9), "attention_window": 4}),
        "axial": ("Axial", {"width": 4}),
        "best blocks": ("BlockTopK", {"block_length": 3, "num_blocks": 2}),
        "random blocks": ("RandomBlock", {"block_length": 3, "num_random_blocks": 2}),
        "token choice": ("Routed", sizes),
        "apart": ("Routed", {**sizes, **SEPARATE}),
        "two reads": ("Routed", {**sizes, **SEPARATE, "clusters_per_query": 2}),
        "hashed": ("Hashed", {"num_buckets": 4, "attention_window": 6}),
        "random": ("Random", sizes),
        "expert choice": ("Routed", experts),
        "prefix": ("Routed", {**experts, "routing_scope": "prefix"}),
        "cluster-strided": ("ClusterStrided", sizes),
    }
    rotary = {"rotary_positions": True, "rotary_wavelength": 50}
    ways = {
        "capped": {"logit_soft_cap": 1.5},
        "normalised": {"qk_norm": True},
        "rotary": rotary,
        "rotary, shifted": {**rotary, "key_shift": 1},
        "entmax": {"entmax_alpha": 1.5},
        "learned entmax": {"entmax_alpha": "learned"},
    }
    for name, (kind, own) in kinds.items():
        for way, more in ways.items():
            # Heads with several reads or maps of a query refuse it.
            sparse = ("full", "local", "strided", "fixed", "hashed", "token choice")
            if "entmax" in way and name not in (*sparse, "apart"):
                continue
            seed = int(name == "two reads")
            yield f"{name}, {way}", case(kind, 15, seed=seed, **own, **more, **CAUSAL)
    relative_and_capped = {**relative(3), "logit_soft_cap": 1.5}
    yield "full, capped distances", case("Full", 128, **relative_and_capped, **CAUSAL)
    yield (
        "rotary on two axes",
        case("Local", (4, 5), block_shape=(2, 2), **rotary, **CAUSAL),
    )


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


def several_groups():
    kinds = (LOCAL, EXPERTS, APART, ALL)
    projections = {"shared_head_projection": True, "project_shared_keys": True}
    yield "groups", groups(kinds, 12)
    yield "groups, causal", groups(kinds, 12, causal=True, output_dim=9)
    yield "groups, other projections", groups(kinds, 12, **projections, output_dim=9)
    for memory_dim in (DIM, 7):
        for name, own in (("", {}), (", other projections", projections)):
            yield (
                f"groups, memory of {memory_dim}{name}",
                groups(kinds, 12, 12, memory_dim, **own),
            )
    blocks = {"block_shape": (5,)}
    clusters = {"num_heads": 1, "num_clusters": 2, "attention_window": 5}
    others = (
        ("ClusterStridedHeads", clusters),
        ("StridedHeads", {"num_heads": 1, "block_shape": (4,)}),
        ("FixedHeads", {"num_heads": 1, "block_shape": (4,), "num_summary_columns": 2}),
        ("RandomHeads", clusters),
        ("HashedHeads", {"num_heads": 1, "num_buckets": 4, "attention_window": 3}),
    )
    for causal in (False, True):
        name = ", causal" * causal
        yield (
            f"groups of an image{name}",
            groups((*RECTANGLES, EXPERTS, LOCAL), (5, 7), causal=causal),
        )
        yield f"image without blocks{name}", groups(kinds, (3, 4), causal=causal)
        yield (
            f"blocks on one axis{name}",
            groups((*others, *kinds), 12, causal=causal, **blocks),
        )
    yield "image, smaller memory", groups((RECTANGLES[1], ALL), (5, 7), (3, 4))


CASES = dict(
    pair
    for cases in (
        full,
        local,
        rectangles,
        strided,
        fixed,
        global_tokens,
        random_blocks,
        axial,
        block_top_k,
        sliding,
        clustered,
        options_of_all,
        several_groups,
    )
    for pair in cases()
)
# Of each way one: the others differ in sizes or in a projection.
FEW = {
    *("full", "local, 1 of 4 in 10, causal=True", "local, shifted"),
    *("local, 2 in 11 with dilation 3", "local, 8 and 21 in blocks of 4"),
    "local, flange of one entry",
    "local, (1, 0) of (1, 2) in (3, 8), causal=True",
    *("strided, 3 in 10, causal=True", "strided, memory of 14"),
    *("fixed, 3 of 3 in 11, merged", "fixed, 1 of 4 in 12, separate"),
    "global, 4 and (0, 7) in 12, causal=False",
    *("global, 4 and (0, 7) in 12, causal=True", "2 random blocks of 2 in 19"),
    *("1 random blocks of 3 in 20, causal", "axial, None of 11"),
    *("best 2 blocks of 4 in 12", "best 4 blocks of 3 in 23, shifted"),
    *("best 2 blocks of 3 in 14, not causal", "fixed, distinct 2 of 5 in 13, merged"),
    *("sliding, 3 in 11, causal=True", "sliding, 3 in 11, causal=False, strided"),
    *("Routed, window of 3", "Routed, window of 30 in a memory of 7"),
    *("Routed, last 3 of 12, apart, shifted", "Routed, last 3 of 12, by the key"),
    *("Thresholds, last 17 of 100, apart", "Thresholds, last 3 of 12, by the key"),
    *("Thresholds, in at most 1, apart", "Routed, 5 of a prefix of 12, apart"),
    *("Routed, 5 of a prefix of 12, shifted", "Routed, 5 of the whole"),
    *("ClusterStrided, window of 3", "ClusterStrided, window of 3 in a memory of 7"),
    *("ClusterStrided, 5 of a prefix of 12", "Hashed, window of 3 in a memory of 7"),
    *("Hashed, last 3 of 12, apart", "Random, window of 3, apart"),
    *("Random, window of 3 in a memory of 7", "local, capped", "merged, capped"),
    *("two reads, capped", "full, capped distances", "apart, normalised"),
    *("prefix, normalised", "best blocks, rotary", "local, rotary, shifted"),
    *("token choice, rotary, shifted", "rotary on two axes", "local, entmax"),
    *("apart, learned entmax", "groups, causal"),
    *("groups, memory of 7, other projections", "groups of an image, causal"),
    *("blocks on one axis", "image, smaller memory"),
}
assert CASES.keys() >= FEW


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.thorough)
        for name in CASES
    ],
)
def test_equals_plain_numpy(name):
    counts = collections.Counter()
    fuzzing.check(CASES[name], counts)
    assert counts["rows compared"] == BATCH

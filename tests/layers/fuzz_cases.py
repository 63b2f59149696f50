"""Random settings and inputs of `RoutingAttention` and `MixedAttention`.

A `Case` is plain data: its `repr` makes it again. About a quarter of the cases have one
thing wrong, and name the arguments that the error may blame.
"""

import dataclasses

from hypothesis import strategies as st

nan, inf = float("nan"), float("inf")

CLUSTERED = ("RoutedHeads", "ClusterStridedHeads", "HashedHeads", "RandomHeads")
BLOCKED = ("LocalHeads", "StridedHeads", "FixedHeads")
# These attend inside one sequence only.
OF_ONE_SEQUENCE = ("GlobalHeads", "RandomBlockHeads", "AxialHeads")
KINDS = ("FullHeads", *BLOCKED, "SlidingHeads", "BlockTopKHeads", *CLUSTERED)
LENGTHS = (1, 2, 3, 5, 7, 8, 12, 16, 19, 24, 33)
SIDES = (1, 2, 3, 4, 6)
MASKS = (
    "tail",
    "holes",
    "one row of padding",
    "all padding",
    "integers",
    "one for all",
)


@dataclasses.dataclass
class Case:
    """A layer, what it is called with, and what is wrong with it.

    `options` are arguments of the layer, those of `RoutingAttention` without `groups`,
    which are else pairs of a kind and its arguments. `masks` are styles by the names of
    arguments; `content` says what the numbers of `magnitude` are like. Of the names in
    `blames` the error must contain one; a case that works has none.
    """

    options: dict
    groups: list | None
    query: tuple
    value: tuple | None
    masks: dict
    call: dict
    content: str = "normal"
    magnitude: float = 1.0
    seed: int = 0
    compiled: bool = False
    blames: tuple = ()

    @property
    def is_valid(self):
        """Whether the call must work."""
        return not self.blames


def cases():
    """Returns the strategy that draws a `Case`."""
    return _cases()


@st.composite
def _cases(draw):
    case = draw(st.one_of(_mixed(), _mixed(), _mixed(), _routing()))
    if draw(st.integers(0, 99)) < 27:
        draw(_mistake(case))
    return case


def _pick(*values):
    return st.sampled_from(values)


def _chance(draw, percent):
    return draw(st.integers(0, 99)) < percent


@st.composite
def _situation(draw, axes=None):
    """Draws shapes, masks and numbers, for groups that are drawn to fit."""
    axes = axes or (2 if _chance(draw, 22) else 1)
    cross = _chance(draw, 30)
    causal = _chance(draw, 40 if cross else 75)
    batch, dim = draw(st.integers(1, 3)), draw(_pick(3, 4, 6, 8))
    lengths = _lengths(draw, axes)
    value = None
    if cross:
        memory = lengths
        if not causal and _chance(draw, 80):
            memory = _lengths(draw, axes)
        value = (batch, *memory, draw(_pick(dim, dim, 5)))
    masks = {}
    for name in ("query_mask", "value_mask"):
        if _chance(draw, 40 if name == "query_mask" or cross else 15):
            masks[name] = draw(st.sampled_from(MASKS))
    if _chance(draw, 30):
        masks["token_bias"] = draw(_pick("normal", "normal", "one hidden", "one -inf"))
    call = {"use_causal_mask": causal}
    if _chance(draw, 20):
        call["training"] = True
    if _chance(draw, 12):
        call["return_attention_scores"] = True
    return Case(
        options={},
        groups=None,
        query=(batch, *lengths, dim),
        value=value,
        masks=masks,
        call=call,
        content=draw(
            _pick(*["normal"] * 7, "zeros", "constant", "repeated", "far from zero")
        ),
        magnitude=draw(_pick(*[1.0] * 7, 0.1, 1e-4, 1e-20, 30.0, 1e4, 1e15)),
        seed=draw(st.integers(0, 10**6)),
        compiled=_chance(draw, 2),
    )


def _lengths(draw, axes):
    if axes == 1:
        return (draw(st.sampled_from(LENGTHS)),)
    return (draw(st.sampled_from(SIDES)), draw(st.sampled_from(SIDES)))


def _finish(draw, case):
    """Adds what layers of both kinds take."""
    options = case.options
    options["key_dim"] = draw(_pick(2, 3, 4, 4, 5, 8))
    if _chance(draw, 25):
        options["value_dim"] = draw(_pick(1, 3, 6))
    if _chance(draw, 20):
        options["output_dim"] = draw(_pick(1, 5))
    if _chance(draw, 15):
        options["shared_head_projection"] = True
    if _chance(draw, 15):
        options["project_shared_keys"] = True
    if not _chance(draw, 4):
        options["kernel_initializer"] = "zeros"
    if _chance(draw, 15):
        options["dtype"] = "mixed_bfloat16"
        case.magnitude = draw(_pick(0.1, 0.3, 1e-3))
    return case


@st.composite
def _routing(draw):
    case = draw(_situation(axes=1))
    heads = draw(st.integers(1, 3))
    options = {
        "num_heads": heads,
        "num_clusters": draw(_pick(1, 2, 3, 5, 40)),
        "attention_window": draw(_pick(1, 2, 3, 5, 8, 17, 100)),
        "num_local_heads": draw(st.integers(0, heads)),
    }
    if _chance(draw, 30):
        options["local_block_size"] = draw(_pick(1, 2, 3, 5, 64))
    _choose_routing(draw, case, options)
    _choose_key_shift(draw, case, options)
    if _chance(draw, 40):
        options["routing_scope"] = draw(_pick("full", "prefix"))
    if _chance(draw, 20):
        options["prefix_block_size"] = draw(_pick(1, 2, 5, 64))
    if _chance(draw, 35):
        options["max_relative_position"] = draw(_pick(1, 2, 5, 50))
    if _chance(draw, 30):
        options["share_query_key"] = False
        if _chance(draw, 20):
            options["clustering"] = {"query_cluster": "key"}
    if not case.call.get("training"):
        options["dropout"] = draw(_pick(0.0, 0.5))
    case.options = options
    return _finish(draw, case)


def _is_causal_self_attention(case):
    return case.call["use_causal_mask"] and case.value is None


def _choose_routing(draw, case, options):
    """Draws who chooses; under a causal mask over another sequence that is named."""
    routings = [None, "expert_choice"]
    if _is_causal_self_attention(case):
        routings += ["token_choice", "expert_threshold"]
    elif case.call["use_causal_mask"]:
        routings.remove(None)
    routing = draw(st.sampled_from(routings))
    if routing is not None or draw(st.booleans()):
        options["routing"] = routing


def _choose_key_shift(draw, case, options):
    if _is_causal_self_attention(case) and _chance(draw, 50):
        options["key_shift"] = 1
    elif _chance(draw, 10):
        options["key_shift"] = 0


@st.composite
def _mixed(draw):
    case = draw(_situation())
    axes = len(case.query) - 2
    rectangle = None
    if axes == 2 and _chance(draw, 70):
        rectangle = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
        if _chance(draw, 30):
            case.options["block_shape"] = rectangle
    elif axes == 1 and _chance(draw, 15):
        case.options["block_shape"] = draw(_pick((1,), (3,), (5,), (40,)))
    number = draw(_pick(1, 1, 1, 2, 2, 3))
    every = KINDS if case.value is not None else (*KINDS, *OF_ONE_SEQUENCE)
    kinds = [draw(st.sampled_from(every)) for _ in range(number)]
    places_pair = {"FixedHeads", "SlidingHeads"} & set(kinds) or (
        rectangle and "LocalHeads" in kinds
    )
    if case.value is not None and places_pair:
        case.value = (*case.query[:-1], case.value[-1])
    case.groups = [(kind, _group(draw, kind, case, rectangle)) for kind in kinds]
    if rectangle and not any(
        len(options.get("block_shape", ())) == 2 for _, options in case.groups
    ):
        case.options["block_shape"] = rectangle
    case.options["block_shape"] = case.options.get("block_shape")
    _add_memory_blocks(draw, case, rectangle)
    return _finish(draw, case)


def _group(draw, kind, case, rectangle):
    """Draws the arguments of a group."""
    options = {"num_heads": draw(_pick(1, 1, 2))}
    if kind != "FixedHeads" and _chance(draw, 35):
        options["max_relative_position"] = draw(_pick(1, 2, 5, 50))
    if not case.call.get("training"):
        options["dropout"] = draw(_pick(0.0, 0.0, 0.5))
    if case.masks.get("token_bias") == "normal" and _chance(draw, 30):
        options["token_bias_weight"] = draw(_pick("fixed", "trainable"))
    _choose_key_shift(draw, case, options)
    if kind in BLOCKED:
        options["block_shape"] = draw(_pick((1,), (2,), (3,), (5,), (8,), (64,)))
        if rectangle and _chance(draw, 70):
            options["block_shape"] = rectangle
    if kind == "LocalHeads" and _chance(draw, 60):
        flanges = [st.integers(0, 3)]
        flanges.append(st.tuples(*[st.integers(0, 2)] * len(options["block_shape"])))
        options["flange_blocks"] = draw(st.one_of(flanges))
    is_line = len(options.get("block_shape", ())) == 1
    if kind == "LocalHeads" and is_line and case.value is None and _chance(draw, 20):
        options["dilation"] = draw(_pick(2, 3, 50))
    if kind == "GlobalHeads":
        options["global_positions"] = draw(_pick((0,), (3, 0), (1, 7, 40)))
        options["attention_window"] = draw(_pick(None, 1, 2, 5, 8, 100))
    if kind == "AxialHeads":
        options["axis"] = draw(_pick(None, 0, 1))
        if options["axis"] is None:
            options.pop("max_relative_position", None)
        if len(case.query) == 3:
            options["width"] = draw(_pick(1, 2, 5, 64))
    if kind == "RandomBlockHeads":
        options["block_length"] = draw(_pick(1, 2, 3, 5, 64))
        options["num_random_blocks"] = draw(_pick(1, 2, 3))
        options["seed"] = draw(_pick(0, 1, 12345))
    if kind == "FixedHeads":
        block = 1
        for size in options["block_shape"]:
            block *= size
        options["num_summary_columns"] = draw(st.integers(1, min(block, 9)))
        if _chance(draw, 40):
            options["arrangement"] = draw(_pick("separate", "summaries"))
            options["num_heads"] = 2
        if _chance(draw, 30):
            options["distinct_summaries"] = True
    if kind == "BlockTopKHeads":
        options["block_length"] = draw(_pick(1, 2, 3, 5, 64))
        options["num_blocks"] = draw(_pick(1, 2, 3, 40))
    if kind == "SlidingHeads":
        options["radius"] = draw(_pick(1, 2, 3, 5, 64))
        if "max_relative_position" not in options:
            options["is_strided"] = draw(st.booleans())
    if kind in CLUSTERED:
        options["attention_window"] = draw(_pick(1, 2, 3, 5, 8, 17, 100))
        options["share_query_key"] = draw(st.booleans())
        if _chance(draw, 20):
            options["query_cluster"] = draw(_pick("query", "key"))
    if kind == "HashedHeads":
        options["num_buckets"] = draw(_pick(2, 3, 4, 9, 64))
    elif kind in CLUSTERED:
        options["num_clusters"] = draw(_pick(1, 2, 3, 5, 40))
    if kind == "RandomHeads":
        options["seed"] = draw(_pick(0, 1, 12345))
    if kind in ("RoutedHeads", "ClusterStridedHeads"):
        if _chance(draw, 30):
            options["prefix_block_size"] = draw(_pick(1, 2, 5, 64))
        if _chance(draw, 20):
            options["update_rule"] = "paper"
        elif _chance(draw, 20):
            options["ema"] = False
        if _chance(draw, 20):
            options["decay"] = draw(_pick(0, 0.0, 0.5, 1))
            options["commitment_weight"] = draw(_pick(0, 0.0, 2.0))
    if kind == "RoutedHeads":
        _choose_routing(draw, case, options)
        if _chance(draw, 50):
            options["routing_scope"] = draw(_pick("full", "prefix"))
        _choose_clusters_per_query(draw, options)
    return options


def _choose_clusters_per_query(draw, options):
    """Lets queries of token choice read several clusters, where they can."""
    chooses = options.get("routing") in (None, "token_choice")
    if not chooses or "entmax_alpha" in options or not _chance(draw, 30):
        return
    window, clusters = options["attention_window"], options["num_clusters"]
    numbers = [n for n in (2, 3, 4) if n <= clusters and window % n == 0]
    if numbers:
        options["clusters_per_query"] = draw(_pick(*numbers))


def _sequence_lengths(case, rectangle):
    """Lengths of query and memory, with what fills up the blocks of the order."""
    blocks = rectangle or case.options["block_shape"]
    lengths = []
    for shape in (case.query, case.value or case.query):
        product = 1
        for axis, size in enumerate(shape[1:-1]):
            block = blocks[axis] if blocks else 1
            product *= -(-size // block) * block
        lengths.append(product)
    return lengths


def _add_memory_blocks(draw, case, rectangle):
    length, memory_length = _sequence_lengths(case, rectangle)
    for kind, options in case.groups:
        if kind != "LocalHeads" or not _chance(draw, 30):
            continue
        if len(options["block_shape"]) > 1:
            options["memory_block_shape"] = options["block_shape"]
            continue
        block = min(options["block_shape"][0], length)
        num_blocks = -(-length // block)
        fitting = [
            size
            for size in range(1, memory_length + 1)
            if -(-memory_length // size) == num_blocks
            and (size == block or not case.call["use_causal_mask"])
        ]
        if fitting:
            options["memory_block_shape"] = (draw(st.sampled_from(fitting)),)


SIZES = (0, -1, 1.5, 2.0, "3", None, True, nan, [4])
OPTIONAL_SIZES = tuple(size for size in SIZES if size is not None)
INITIALIZERS = ("nope", 3.5)
SEEDS = (-1, 1.5, "a", None, True)
# What some heads have no meaning for.
NO_DISTANCES, NO_SHIFT = {"max_relative_position": (4,)}, {"key_shift": (1,)}
NO_BIAS, NO_DROPOUT = {"token_bias_weight": ("fixed",)}, {"dropout": (0.5, -0.1, "0.1")}
KEY_SHIFTS = (2, -1, 0.5, 1.0, "1", None, True, nan, [1])
GROUP = {
    "num_heads": SIZES,
    "dropout": (-0.1, 1, 1.0, "0.1", None, nan, True, [0.1]),
    "max_relative_position": OPTIONAL_SIZES,
    "token_bias_weight": ("free", 1.0, True),
    "embeddings_initializer": INITIALIZERS,
    "relative_key_initializer": INITIALIZERS,
    "key_shift": KEY_SHIFTS,
    "entmax_alpha": (1, 1.0, 0.5, 2.5, "free", True, nan, [1.5]),
    "rotary_positions": ("yes", None, 2),
    "rotary_wavelength": (0, -1.5, "a", None, True, nan, float("inf")),
    "logit_soft_cap": (0, -1.5, "a", True, nan, float("inf")),
    "qk_norm": ("yes", None, 2),
}
BLOCKS = (0, -3, (), (2, 0), (1.5,), "ab", "4", None, (2, 2, 2), (True,), nan)
OPTIONAL_BLOCKS = tuple(block for block in BLOCKS if block is not None)
CLUSTERS = {
    "attention_window": SIZES,
    "exploring_queries": (-1, 1.5, None, True),
    "query_cluster": ("value", None, 1),
}
CENTROIDS = {
    **CLUSTERS,
    "num_clusters": SIZES,
    "decay": (-0.1, 1.5, nan, "0.9", None, [0.5]),
    "commitment_weight": (-1.0, "1", None, nan, [1.0]),
    "update_rule": ("sgd", None, 3),
    "revive_after": (0, -1, 1.5, "1", True),
    "centroid_initialization": ("zeros", None, 3),
    "prefix_block_size": OPTIONAL_SIZES,
}
WRONG = {
    "FullHeads": {},
    "FeatureMapHeads": {
        "feature_map": ("relu", None, 1),
        **dict.fromkeys(("num_features", "chunk_length"), SIZES),
        "seed": SEEDS,
        **{**NO_DISTANCES, **NO_DROPOUT},
    },
    "ClusteredQueryHeads": {
        "num_clusters": SIZES,
        "num_keys": OPTIONAL_SIZES,
        "num_bits": SIZES,
        "num_iterations": SIZES,
        "seed": SEEDS,
        **{**NO_DISTANCES, **NO_SHIFT},
    },
    "CompressedHeads": {
        "compression": ("sum", None, 1),
        "ratio": SIZES,
        "attention_window": OPTIONAL_SIZES,
        "kernel_initializer": INITIALIZERS,
        **{**NO_SHIFT, **NO_BIAS},
    },
    "LongShortHeads": {
        "attention_window": SIZES,
        "segment_length": OPTIONAL_SIZES,
        "num_landmarks": SIZES,
        "projection_initializer": INITIALIZERS,
        **NO_SHIFT,
    },
    "InducedHeads": {
        "num_points": SIZES,
        "kernel_initializer": INITIALIZERS,
        **{**NO_DISTANCES, **NO_SHIFT},
    },
    "LunaHeads": {
        "num_packed": SIZES,
        "packing_initializer": INITIALIZERS,
        "chunk_length": SIZES,
        **{**NO_DISTANCES, **NO_SHIFT},
    },
    "LinformerHeads": {
        "max_length": SIZES,
        "num_projected": SIZES,
        "sharing": ("keys", True, 1),
        "projection_initializer": INITIALIZERS,
        **{**{**NO_DISTANCES, **NO_SHIFT}, **NO_BIAS},
    },
    "LocalHeads": {
        "block_shape": BLOCKS,
        "flange_blocks": (-1, 1.5, "1", None, (1, 1, 1), True, (-1,)),
        "memory_block_shape": OPTIONAL_BLOCKS,
        "dilation": SIZES,
    },
    "NystromHeads": {
        "num_landmarks": SIZES,
        "num_iterations": SIZES,
        "convolution_size": (*OPTIONAL_SIZES, 2),
        **{**{**NO_DISTANCES, **NO_SHIFT}, **NO_BIAS},
        **NO_DROPOUT,
    },
    "SinkhornHeads": {
        "block_length": SIZES,
        "num_iterations": SIZES,
        "temperature": (0, -1.0, "1", None, True, nan, inf),
        "gumbel_noise": ("yes", None, 2),
        **{**{**NO_DISTANCES, **NO_SHIFT}, **NO_BIAS},
    },
    "StridedHeads": {"block_shape": BLOCKS},
    "SynthesizerHeads": {
        "kind": ("fixed", None, 1),
        "max_length": SIZES,
        "rank": OPTIONAL_SIZES,
        "logits_initializer": INITIALIZERS,
        **{**NO_DISTANCES, **NO_SHIFT},
    },
    "BlockPairHeads": {
        "num_blocks": SIZES,
        "permutations": ([(0, 1)], [(0, 1), (1, 1)], [(0, 1), (0, 2)], "ab", 3, [0, 1]),
        "seed": SEEDS,
        **NO_SHIFT,
    },
    "BlockTopKHeads": {
        "block_length": SIZES,
        "num_blocks": SIZES,
        "mix": ("mean", None, 1),
    },
    "FixedHeads": {
        "block_shape": BLOCKS,
        "num_summary_columns": (*SIZES, 1000),
        "arrangement": ("alternating", None, 1),
        "distinct_summaries": ("yes", None, 2),
        **NO_DISTANCES,
    },
    "GlobalHeads": {
        "global_positions": ((), (0, -1), (1.5,), (0, 0), "0", None, 5, (True,), nan),
        "attention_window": OPTIONAL_SIZES,
        "num_learned_tokens": (-1, 1.5, "1", None, True, nan),
    },
    "AxialHeads": {
        "axis": (2, -1, "0", True, 1.0, nan, (0, 1)),
        "width": OPTIONAL_SIZES,
    },
    "RandomBlockHeads": {
        "block_length": SIZES,
        "num_random_blocks": SIZES,
        "seed": SEEDS,
    },
    "NativeSparseHeads": {
        **dict.fromkeys(
            (
                "compression_length",
                "compression_stride",
                "block_length",
                "num_blocks",
                "num_local_blocks",
                "attention_window",
            ),
            SIZES,
        ),
        "num_initial_blocks": (-1, 1.5, "1", None, True),
        "compression_dim": OPTIONAL_SIZES,
        "kernel_initializer": INITIALIZERS,
    },
    "SlidingHeads": {"radius": SIZES[1:], "is_strided": ("yes", None, 2)},
    "RoutedHeads": {
        "max_clusters_per_token": SIZES,
        "threshold_decay": (1, -0.1, 1.5, "0.1", None, nan),
        **CENTROIDS,
        "routing": ("experts", 3, True),
        "routing_scope": ("half", None, 3),
    },
    "ClusterStridedHeads": CENTROIDS,
    "HashedHeads": {
        **CLUSTERS,
        "num_buckets": (*SIZES, 1),
        "hash": ("minhash", None, 1),
        "num_rounds": SIZES,
        "normalization": ("batch", None, 1),
        "attends_to_self": ("yes", None, 2),
    },
    "RandomHeads": {
        **CLUSTERS,
        "num_clusters": SIZES,
        "seed": SEEDS,
    },
}
LAYER = {
    "key_dim": SIZES,
    "value_dim": OPTIONAL_SIZES,
    "output_dim": OPTIONAL_SIZES,
    "kernel_initializer": INITIALIZERS,
}
WRONG_MIXED = {
    **LAYER,
    "block_shape": OPTIONAL_BLOCKS,
    # Names stand for objects, see `fuzzing.build`.
    "head_groups": ([], None, 5, "routed", [5], [None], "one group", "twice", "Dense"),
}
WRONG_ROUTING = {
    **LAYER,
    "num_heads": SIZES,
    "num_clusters": SIZES,
    "attention_window": SIZES,
    "num_local_heads": (-1, 4, 1.5, "1", None, True, nan),
    "local_block_size": OPTIONAL_SIZES,
    "routing": ("experts", 3, True),
    "routing_scope": ("half", None, 3),
    "prefix_block_size": OPTIONAL_SIZES,
    "max_relative_position": OPTIONAL_SIZES,
    "dropout": GROUP["dropout"],
    "key_shift": KEY_SHIFTS,
    "rotary_positions": GROUP["rotary_positions"],
}


@st.composite
def _mistake(draw, case):
    """Makes one thing wrong with a case that works."""
    if case.groups is not None and _chance(draw, 80):
        kind, options = draw(st.sampled_from(case.groups))
        _set_wrong(draw, case, options, {**GROUP, **WRONG[kind]})
    elif case.groups is not None:
        _set_wrong(draw, case, case.options, WRONG_MIXED)
    else:
        if case.options["num_local_heads"] == case.options["num_heads"]:
            case.options["num_local_heads"] = 0  # all arguments have a meaning
        _set_wrong(draw, case, case.options, WRONG_ROUTING)


def _set_wrong(draw, case, options, table):
    name = draw(st.sampled_from(sorted(table)))
    options[name] = draw(st.sampled_from(table[name]))
    case.blames = (name,)
    if name == "update_rule":
        options.pop("ema", None)

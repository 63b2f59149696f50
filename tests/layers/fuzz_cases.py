"""Random settings and inputs of `MixedAttention`.

A `Case` is plain data: its `repr` makes it again.
"""

import dataclasses
import functools
import math

from hypothesis import strategies as st

CLUSTERED = ("RoutedHeads", "ClusterStridedHeads", "HashedHeads", "RandomHeads")
CLUSTERED += ("ThresholdHeads",)
BLOCKED = ("LocalHeads", "StridedHeads", "FixedHeads")
# A query of them has one softmax over all that it sees, for which entmax may stand.
SOFTMAX_OF_ALL = ("FullHeads", *BLOCKED)
# These attend inside one sequence only.
OF_ONE_SEQUENCE = ("GlobalHeads", "RandomBlockHeads", "AxialHeads")
KINDS = ("FullHeads", *BLOCKED, "SlidingHeads", "BlockTopKHeads", *CLUSTERED[:-1])
LENGTHS = (1, 2, 3, 5, 7, 8, 12, 16, 19, 24, 33)
SIDES = (1, 2, 3, 4, 6)
SEEDS, BLOCKS = (0, 1, 12345), (1, 2, 3, 5, 64)
WINDOWS = {"attention_window": (1, 2, 3, 5, 8, 17, 100)}
WINDOWS |= {"share_query_key": (False, True)}
CLUSTERS = {**WINDOWS, "num_clusters": (1, 2, 3, 5, 40)}
# What each group of a kind is given.
OF_KIND = {
    "AxialHeads": {"axis": (None, 0, 1)},
    "BlockTopKHeads": {"block_length": BLOCKS, "num_blocks": (1, 2, 3, 40)},
    "ClusterStridedHeads": CLUSTERS,
    "GlobalHeads": {
        "global_positions": ((0,), (3, 0), (1, 7, 40)),
        "attention_window": (None, 1, 2, 5, 8, 100),
    },
    "HashedHeads": {**WINDOWS, "num_buckets": (2, 3, 4, 9, 64)},
    "RandomBlockHeads": {
        **{"block_length": BLOCKS, "num_random_blocks": (1, 2, 3), "seed": SEEDS}
    },
    "RandomHeads": {**CLUSTERS, "seed": SEEDS},
    "RoutedHeads": CLUSTERS,
    "SlidingHeads": {"radius": BLOCKS},
    "ThresholdHeads": CLUSTERS,
}
MASKS = ("tail", "holes", "one row of padding", "all padding", "integers")
MASKS += ("one for all",)


@dataclasses.dataclass
class Case:
    """A layer, and what it is called with.

    `options` are arguments of the layer, `groups` pairs of a kind and its arguments.
    `masks` are styles by the names of arguments; `content` says what the numbers of
    `magnitude` are like.
    """

    options: dict
    groups: list
    query: tuple
    value: tuple | None
    masks: dict
    call: dict
    content: str = "normal"
    magnitude: float = 1.0
    seed: int = 0
    compiled: bool = False


def _pick(*values):
    return st.sampled_from(values)


def _chance(draw, percent):
    return draw(st.integers(0, 99)) < percent


def _sometimes(draw, options, percent, **values):
    """Adds to options, with a chance, one of the values of each name."""
    if _chance(draw, percent):
        options |= {name: draw(_pick(*each)) for name, each in values.items()}


@st.composite
def _situation(draw):
    """Draws shapes, masks and numbers, for groups that are drawn to fit."""
    axes = 2 if _chance(draw, 22) else 1
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
    biases = ("normal", "normal", "one hidden", "one -inf")
    _sometimes(draw, masks, 30, token_bias=biases)
    call = {"use_causal_mask": causal}
    _sometimes(draw, call, 20, training=(True,))
    _sometimes(draw, call, 12, return_attention_scores=(True,))
    contents = *["normal"] * 7, "zeros", "constant", "repeated", "far from zero"
    return Case(
        *({}, [], (batch, *lengths, dim), value, masks, call),
        content=draw(_pick(*contents)),
        magnitude=draw(_pick(*[1.0] * 7, 0.1, 1e-4, 1e-20, 30.0, 1e4, 1e15)),
        seed=draw(st.integers(0, 10**6)),
        compiled=_chance(draw, 2),
    )


def _lengths(draw, axes):
    if axes == 1:
        return (draw(st.sampled_from(LENGTHS)),)
    return (draw(st.sampled_from(SIDES)), draw(st.sampled_from(SIDES)))


def _finish(draw, case):
    """Adds projections and the dtype."""
    sometimes = functools.partial(_sometimes, draw, case.options)
    sizes = (2, 3, 4, 4, 5, 8)
    if any(own.get("rotary_positions") for _, own in case.groups):
        sizes = (2, 4, 4, 8)
    case.options["key_dim"] = draw(_pick(*sizes))
    sometimes(25, value_dim=(1, 3, 6))
    sometimes(20, output_dim=(1, 5))
    sometimes(15, shared_head_projection=(True,))
    sometimes(15, project_shared_keys=(True,))
    sometimes(96, kernel_initializer=("zeros",))
    sometimes(15, dtype=("mixed_bfloat16",))
    if "dtype" in case.options:
        case.magnitude = draw(_pick(0.1, 0.3, 1e-3))
    return case


def _is_causal_self_attention(case):
    return case.call["use_causal_mask"] and case.value is None


def _choose_routing(draw, case, options):
    """Draws who chooses; under a causal mask over another sequence that is named."""
    routings = [None, "expert_choice"]
    if _is_causal_self_attention(case):
        routings.append("token_choice")
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
def cases(draw):
    """Draws a `Case`."""
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
    if _is_causal_self_attention(case):
        every = (*every, "ThresholdHeads")
    kinds = [draw(st.sampled_from(every)) for _ in range(number)]
    places_pair = {"FixedHeads", "SlidingHeads"} & set(kinds) or (
        rectangle and "LocalHeads" in kinds
    )
    if case.value is not None and places_pair:
        case.value = (*case.query[:-1], case.value[-1])
    case.groups = [
        _with_entmax(kind, _group(draw, kind, case, rectangle)) for kind in kinds
    ]
    if rectangle and not any(
        len(options.get("block_shape", ())) == 2 for _, options in case.groups
    ):
        case.options["block_shape"] = rectangle
    case.options["block_shape"] = case.options.get("block_shape")
    _add_memory_blocks(draw, case, rectangle)
    return _finish(draw, case)


def _with_entmax(kind, options):
    return f"Entmax{kind}" if "entmax_alpha" in options else kind, options


def _group(draw, kind, case, rectangle):
    """Draws the arguments of a group."""
    options = {"num_heads": draw(_pick(1, 1, 2))}
    sometimes = functools.partial(_sometimes, draw, options)
    if kind != "FixedHeads":
        sometimes(35, max_relative_position=(1, 2, 5, 50))
    if not case.call.get("training"):
        options["dropout"] = draw(_pick(0.0, 0.0, 0.5))
    if case.masks.get("token_bias") == "normal":
        sometimes(30, token_bias_weight=("fixed", "trainable"))
    _choose_key_shift(draw, case, options)
    sometimes(12, logit_soft_cap=(0.5, 2.0, 30.0))
    sometimes(12, qk_norm=(True,))
    if case.value is None:
        sometimes(12, rotary_positions=(True,), rotary_wavelength=(50, 10_000))
    if kind in (*SOFTMAX_OF_ALL, "HashedHeads"):
        sometimes(12, entmax_alpha=(1.2, 1.5, 2, "learned"))
    if kind in BLOCKED:
        options["block_shape"] = draw(_pick((1,), (2,), (3,), (5,), (8,), (64,)))
        sometimes(70 if rectangle else 0, block_shape=(rectangle,))
    if kind == "LocalHeads" and _chance(draw, 60):
        flanges = [st.integers(0, 3)]
        flanges.append(st.tuples(*[st.integers(0, 2)] * len(options["block_shape"])))
        options["flange_blocks"] = draw(st.one_of(flanges))
    is_line = len(options.get("block_shape", ())) == 1
    if kind == "LocalHeads" and is_line and case.value is None:
        sometimes(20, dilation=(2, 3, 50))
    for name, values in OF_KIND.get(kind, {}).items():
        options[name] = draw(_pick(*values))
    if kind == "AxialHeads":
        if options["axis"] is None:
            options.pop("max_relative_position", None)
        if len(case.query) == 3:
            options["width"] = draw(_pick(1, 2, 5, 64))
    if kind == "FixedHeads":
        block = math.prod(options["block_shape"])
        options["num_summary_columns"] = draw(st.integers(1, min(block, 9)))
        sometimes(40, arrangement=("separate", "summaries"), num_heads=(2,))
        sometimes(30, distinct_summaries=(True,))
    if kind == "SlidingHeads" and "max_relative_position" not in options:
        options["is_strided"] = draw(st.booleans())
    if kind in CLUSTERED:
        sometimes(20, query_cluster=("query", "key"))
    if kind in ("RoutedHeads", "ClusterStridedHeads"):
        sometimes(30, prefix_block_size=(1, 2, 5, 64))
    if kind in ("RoutedHeads", "ClusterStridedHeads", "ThresholdHeads"):
        sometimes(20, update_rule=("paper",))
        if "update_rule" not in options:
            sometimes(20, ema=(False,))
        sometimes(20, decay=(0, 0.0, 0.5, 1), commitment_weight=(0, 0.0, 2.0))
    if kind == "RoutedHeads":
        _choose_routing(draw, case, options)
        sometimes(50, routing_scope=("full", "prefix"))
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
        sizes = shape[1:-1]
        pairs = zip(sizes, blocks or [1] * len(sizes))
        lengths.append(math.prod(-(-size // block) * block for size, block in pairs))
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

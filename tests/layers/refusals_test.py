"""Each wrong argument of each layer is refused: the name, and what was received.

An argument is tried by its name. `heads/refusals_test` has arguments that do not fit
each other or the call.
"""

import functools

import pytest

from routing_tf import layers
from routing_tf import zoo
from tests.layers import kinds
from tests.zoo import cases

nan, inf = float("nan"), float("inf")
SIZES = (0, -1, 1.5, 2.0, "3", None, True, nan, [4])
NUMBERS = (-0.5, nan, inf, "1", None)
POSITIVE = (0, -1.5, "a", None, True, nan, inf)
RATES = (-0.1, 1, 1.0, 1.5, "0.1", None, nan, True, [0.1])
FLAGS = ("yes", None, 2)
BLOCKS = (0, -3, (), (2, 0), (1.5,), "ab", "4", None, (2, 2, 2), (True,), nan)
# By the end of a name.
ENDINGS = {
    ("_dim", "_length", "_size", "_window"): SIZES,
    ("_initializer",): ("nope", 3.5, [1]),
    ("_weight",): NUMBERS,
    ("_regularizer", "_constraint"): ("nope", 3),
}
# None is no wrong value where it is the default.
BY_NAME = {
    **dict.fromkeys(("block_shape", "memory_block_shape"), BLOCKS),
    **dict.fromkeys(
        ("capacity", "compression_rate", "compression_stride", "dilation")
        + ("max_clusters_per_token", "max_relative_position", "radius", "rank")
        + ("ratio", "revive_after", "width"),
        SIZES,
    ),
    **dict.fromkeys(("balance_rate", "hard_probability"), NUMBERS),
    **dict.fromkeys(("logit_soft_cap", "rotary_wavelength"), POSITIVE),
    **dict.fromkeys(("dropout", "input_dropout", "rate", "router_jitter"), RATES),
    **dict.fromkeys(
        ("attends_to_self", "causal", "distinct_summaries", "ema", "gumbel_noise")
        + ("hash_bias", "is_strided", "project_shared_keys", "qk_norm")
        + ("remat_feed_forward", "restart", "rotary_positions", "same_length")
        + ("scale", "separate_cls", "share_branches", "share_query_key")
        + ("share_weights", "shared_head_projection", "use_bias", "use_causal_mask")
        + ("use_gate", "use_layer_norm", "use_output_projection"),
        FLAGS,
    ),
    "arrangement": ("alternating", None, 1),
    "axis": (2, -1, "0", True, 1.0, nan, (0, 1)),
    "block_sizes": ((),),
    "centroid_initialization": ("zeros", None, 3),
    "clustering": (3, "decay"),
    "commitment_weight": (-1.0, "1", None, nan, [1.0]),
    "decay": (-0.1, 1.5, nan, "0.9", None, [0.5]),
    "entmax_alpha": (1, 1.0, 0.5, 2.5, 3, "free", True, nan, [1.5], None),
    "exploring_queries": (-1, 1.5, None, True),
    "feature_map": ("relu", None, 1),
    "flange_blocks": (-1, 1.5, "1", None, (1, 1, 1), True, (-1,)),
    "global_positions": ((), (0, -1), (1.5,), (0, 0), "0", None, 5, (True,), nan),
    "grid_shape": ((), 4, None),
    "hash": ("minhash", None, 1),
    "key_shift": (2, -1, 0.5, 1.0, "1", None, True, nan, [1]),
    "kind": ("fixed", None, 1),
    "mix": ("mean", None, 1),
    "norm_position": ("mid", None),
    "permutations": ([(0, 1)], [(0, 1), (1, 1)], [(0, 1), (0, 2)], "ab", 3, [0, 1]),
    "places": ("by_length", None),
    "query_cluster": ("value", None, 1),
    "query_norm": ("group", True),
    "routing": ("experts", 3, True),
    "routing_scope": ("half", None, 3),
    "second_choice": ("never", None),
    "seed": (-1, 1.5, "a", None, True),
    "sharing": ("keys", True, 1),
    "smoothing_epsilon": NUMBERS,
    "steps": ("none", "dax"),
    "threshold_decay": (1, -0.1, 1.5, "0.1", None, nan),
    "token_bias_weight": ("free", 1.0, True),
    "update_rule": ("sgd", None, 3),
    "warm_up_steps": (-1, 1.5, None),
}
ALLOWED = {
    **dict.fromkeys(("convolution_size", "num_keys", "segment_length"), None),
    **dict.fromkeys(("num_decoder_layers", "num_initial_blocks"), 0),
    **dict.fromkeys(("num_learned_tokens", "num_local_heads", "radius"), 0),
    **dict.fromkeys(("num_recent", "num_sinks"), 0),
}
FULL = layers.FullHeads(2)
# What layers besides heads must be given.
REQUIRED = {
    "CompressiveAttention": {
        **{"num_heads": 2, "key_dim": 4, "segment_length": 4},
        **{"memory_length": 4, "compressed_length": 4},
    },
    "FeedForward": {"intermediate_dim": 8},
    "FunnelBackbone": {"hidden_dim": 6, "num_heads": 3},
    "GridEmbedding": {"grid_shape": (2,)},
    "MixedAttention": {"head_groups": [FULL], "key_dim": 4},
    "MixtureOfExperts": {"num_experts": 3, "intermediate_dim": 4, "capacity": 2},
    "MovingThresholds": {},
    "OnlineKMeans": {"num_clusters": 4},
    "PerceiverBackbone": {"num_latents": 3, "latent_dim": 8},
    "ProductKeyMemory": {},
    "ProjectionConfig": {},
    "RelativePosition": {"max_relative_position": 3},
    "RoutingAttention": {
        **{"num_heads": 4, "key_dim": 6, "num_clusters": 3, "attention_window": 5}
    },
    "ScaledDotProduct": {},
    "SparseFeedForward": {"intermediate_dim": 64},
    "SparseProjectionAttention": {"head_groups": [FULL], "key_dim": 4},
    "SublayerSteps": {"steps": "dan"},
    "TokenDropout": {"rate": 0.5},
    "TokenEmbedding": {"vocabulary_size": 5, "embedding_dim": 3},
    "TokenLearner": {},
    "TransformerBlock": {
        "attention": layers.MixedAttention([FULL], 4),
        "feed_forward": None,
    },
    "TransformerXLAttention": {"num_heads": 2, "key_dim": 4, "memory_length": 4},
}
# What heads must be given, besides their number.
OF_HEADS = {
    **kinds.REQUIRED,
    **dict.fromkeys(cases.SMALL, {}),
    "AxialHeads": {"axis": 0},
    "BlockTopKHeads": {"block_length": 4, "num_blocks": 2},
    "GlobalHeads": {"global_positions": (1, 0)},
    "EntmaxFullHeads": {},
    "LinformerHeads": {"max_length": 8},
    "ReformerHeads": {"num_buckets": 4, "attention_window": 4},
    "ThresholdHeads": {"num_clusters": 2, "attention_window": 4},
}
REQUIRED |= {name: {"num_heads": 2, **given} for name, given in OF_HEADS.items()}
# Values that a class refuses besides those of the name.
MORE = {
    "CompressedHeads": {"compression": ("sum", None, 1)},
    "CompressiveAttention": {
        **{"segment_length": (None,), "same_length": (True,)},
        **{"compression": ("mean", None), "memory_length": (6,)},
    },
    "FeedForward": {"activation": ("swish", None)},
    "FixedHeads": {"num_summary_columns": (1000,)},
    "FunnelBackbone": {"hidden_dim": (9,)},
    "HashedHeads": {"num_buckets": (1,)},
    "IndexedHeads": {"indexer_rotary_dim": (3, 34)},
    "MixedAttention": {
        **{"head_groups": ([], None, 5, "routed", FULL), "remat": ("logits",)},
    },
    "MixtureOfExperts": {"activation": ("tanh", None), "top_k": (3, 2.0, True, None)},
    "MovingThresholds": {"decay": RATES},
    "MultipoleHeads": {
        **{"normalization": ("unit", 1), "choice": ("score", None)},
        "far_distance": (0, 1.5, 9),
        **{"block_length": (0, 1.5, 129), "clusters_per_query": (*SIZES, 5)},
        "members_per_cluster": (0, 1.5, 5),
        **{"query_cluster": ("key",), "max_relative_position": (4,)},
        **dict.fromkeys(("summaries", "keeps_all", "sink_logits"), FLAGS),
    },
    "NativeSparseHeads": {
        **{"compression_length": (24, 128), "block_length": (72,), "num_blocks": (2,)},
    },
    "NystromHeads": {"convolution_size": (2,)},
    "PerceiverBackbone": {"heads": ([3], FULL)},
    "ProductKeyMemory": {"key_dim": (7,), "num_keys": (None,), "top_k": (*SIZES, 200)},
    "ReformerHeads": {"normalization": ("batch", None, 1), "num_buckets": (1,)},
    "RoutingAttention": {
        **{"num_local_heads": (5,), "remat": ("logits",)},
        "projection_config": ("biases",),
    },
    "SinkhornHeads": {"temperature": POSITIVE},
    "SparseFeedForward": {
        **{"block_size": (5,), "hard_probability": (1.5,), "temperature": NUMBERS},
    },
    "SparseProjectionAttention": {
        **{"module_kernel_size": (4,), "value_dim": (5,), "num_key_value_heads": (1,)},
    },
    "TokenLearner": {"normalization": ("mean", None)},
    "TransformerBlock": {
        **dict.fromkeys(("attention", "cross_attention", "feed_forward"), (3, "dense")),
        "remat": FLAGS,
    },
}
# Values that these heads have no meaning for.
PRODUCTS = "FeatureMap ClusteredQuery Compressed LongShort Induced Luna Nystrom "
PRODUCTS += "Synthesizer NativeSparse"
MEANINGLESS = {
    "dropout": (0.5, "FeatureMap Nystrom"),
    "key_shift": (
        1,
        "BlockPair ClusteredQuery Compressed Induced Linformer LongShort Luna "
        "NativeSparse Nystrom Sinkhorn Synthesizer",
    ),
    "logit_soft_cap": (3, PRODUCTS),
    "qk_norm": (True, PRODUCTS),
    "max_relative_position": (
        4,
        "ClusteredQuery Compressed FeatureMap Fixed Induced Linformer Luna Nystrom "
        "Sinkhorn Synthesizer",
    ),
    "rotary_positions": (
        True,
        "ClusteredQuery Compressed Induced LongShort Luna NativeSparse Sinkhorn "
        "Synthesizer",
    ),
    "token_bias_weight": (
        "fixed",
        "Compressed Linformer NativeSparse Nystrom Sinkhorn",
    ),
}


def of_name(argument):
    """Returns values that no argument of the name may be."""
    if argument in BY_NAME:
        return BY_NAME[argument]
    if argument.startswith("num_"):
        return SIZES
    for endings, values in ENDINGS.items():
        if argument.endswith(endings):
            return values
    return ()


def wrong_values(name, layer):
    """Yields arguments of a layer and values that they must not have."""
    config = layer.get_config() if hasattr(layer, "get_config") else layer.to_dict()
    for together in ("projection_config", "clustering"):
        config |= config.get(together) or {}
    for argument, default in config.items():
        allowed = default if default is None else ALLOWED.get(argument, default)
        for value in of_name(argument):
            if value is not allowed:
                yield argument, value
        for value in MORE.get(name, {}).get(argument, ()):
            yield argument, value
        value, meaningless = MEANINGLESS.get(argument, (None, ""))
        if name.removesuffix("Heads") in meaningless.split():
            yield argument, value


@pytest.mark.parametrize("name", REQUIRED)
def test_refuses_wrong_arguments(name):
    make = functools.partial(
        getattr(zoo if hasattr(zoo, name) else layers, name), **REQUIRED[name]
    )
    tried = list(wrong_values(name, make()))
    assert tried
    for argument, value in tried:
        with pytest.raises(ValueError) as error:
            make(**{argument: value})
        received = -1 if value == (-1,) else value  # the entry that is wrong
        rule, _, rest = str(error.value).partition(" Received: ")
        assert f"`{argument}`" in rule and " must " in rule
        assert rest.startswith(f"{argument}={received!r}")

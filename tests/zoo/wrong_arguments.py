"""Wrong arguments of the zoo: a new layer has its row here, as in `cases`.

Each class has arguments that it must be given, and values that others must not have.
"""

from routing_tf import layers

nan, inf = float("nan"), float("inf")

SIZES = (0, -1, 1.5, 2.0, "3", None, True, nan, [4])
OPTIONAL_SIZES = tuple(size for size in SIZES if size is not None)
NUMBERS = (-0.5, nan, inf, "1", None)
RATES = (-0.1, 1, 1.0, "0.1", None, nan, True, [0.1])
FLAGS = ("yes", None, 2)
INITIALIZERS = ("nope", 3.5, [1])
SEEDS = (-1, 1.5, "a", None, True)
# What some heads have no meaning for.
NO_DISTANCES, NO_SHIFT = {"max_relative_position": (4,)}, {"key_shift": (1,)}
NO_BIAS, NO_DROPOUT = {"token_bias_weight": ("fixed",)}, {"dropout": (0.5, -0.1, "0.1")}
NO_ENTMAX = {"entmax_alpha": (1.5,)}
# Their weights are no softmax of products of queries and keys.
NO_PRODUCTS = {"logit_soft_cap": (3,), "qk_norm": (True,)}
NO_POSITION = {"rotary_positions": (True,)}

HEADS = {
    "FeatureMapHeads": {
        "feature_map": ("relu", None, 1),
        **dict.fromkeys(("num_features", "chunk_length"), SIZES),
        "seed": SEEDS,
        **{**NO_DISTANCES, **NO_DROPOUT, **NO_PRODUCTS},
    },
    "ClusteredQueryHeads": {
        **dict.fromkeys(("num_clusters", "num_bits", "num_iterations"), SIZES),
        "num_keys": OPTIONAL_SIZES,
        "seed": SEEDS,
        **{**NO_DISTANCES, **NO_SHIFT, **NO_PRODUCTS, **NO_POSITION},
    },
    "CompressedHeads": {
        "compression": ("sum", None, 1),
        "ratio": SIZES,
        "attention_window": OPTIONAL_SIZES,
        "kernel_initializer": INITIALIZERS,
        **{**NO_SHIFT, **NO_BIAS, **NO_PRODUCTS, **NO_POSITION},
        **NO_DISTANCES,  # without a window
    },
    "IndexedHeads": {
        **dict.fromkeys(("num_selected", "num_indexer_heads", "indexer_dim"), SIZES),
        "warm_up_steps": (-1, 1.5, None),
        "indexer_loss_weight": NUMBERS,
        "indexer_rotary_dim": (3, 34),
        "gather_length": OPTIONAL_SIZES,
        "kernel_initializer": INITIALIZERS,
        **NO_ENTMAX,
    },
    "LongShortHeads": {
        **dict.fromkeys(("attention_window", "num_landmarks"), SIZES),
        "segment_length": OPTIONAL_SIZES,
        "projection_initializer": INITIALIZERS,
        **{**NO_SHIFT, **NO_PRODUCTS, **NO_POSITION},
    },
    "InducedHeads": {
        "num_points": SIZES,
        "kernel_initializer": INITIALIZERS,
        **{**NO_DISTANCES, **NO_SHIFT, **NO_PRODUCTS, **NO_POSITION},
    },
    "LunaHeads": {
        **dict.fromkeys(("num_packed", "chunk_length"), SIZES),
        "packing_initializer": INITIALIZERS,
        **{**NO_DISTANCES, **NO_SHIFT, **NO_PRODUCTS, **NO_POSITION},
    },
    "LinformerHeads": {
        **dict.fromkeys(("max_length", "num_projected"), SIZES),
        "sharing": ("keys", True, 1),
        "projection_initializer": INITIALIZERS,
        **{**NO_DISTANCES, **NO_SHIFT, **NO_BIAS},
    },
    "NystromHeads": {
        **dict.fromkeys(("num_landmarks", "num_iterations"), SIZES),
        "convolution_size": (*OPTIONAL_SIZES, 2),
        **{**NO_DISTANCES, **NO_SHIFT, **NO_BIAS, **NO_DROPOUT, **NO_PRODUCTS},
    },
    "SinkhornHeads": {
        **dict.fromkeys(("block_length", "num_iterations"), SIZES),
        "temperature": (0, -1.0, "1", None, True, nan, inf),
        "gumbel_noise": FLAGS,
        **{**NO_DISTANCES, **NO_SHIFT, **NO_BIAS, **NO_POSITION},
    },
    "SynthesizerHeads": {
        "kind": ("fixed", None, 1),
        "max_length": SIZES,
        "rank": OPTIONAL_SIZES,
        "logits_initializer": INITIALIZERS,
        **{**NO_DISTANCES, **NO_SHIFT, **NO_PRODUCTS, **NO_POSITION},
    },
    "BlockPairHeads": {
        "num_blocks": SIZES,
        "permutations": ([(0, 1)], [(0, 1), (1, 1)], [(0, 1), (0, 2)], "ab", 3, [0, 1]),
        "seed": SEEDS,
        **NO_SHIFT,
    },
    "BlockTopKHeads": {
        **dict.fromkeys(("block_length", "num_blocks"), SIZES),
        "mix": ("mean", None, 1),
        **NO_ENTMAX,
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
        **dict.fromkeys(("block_length", "num_random_blocks"), SIZES),
        "seed": SEEDS,
    },
    "NativeSparseHeads": {
        **dict.fromkeys(
            ("compression_length", "compression_stride", "block_length", "num_blocks")
            + ("num_local_blocks", "attention_window"),
            SIZES,
        ),
        "num_initial_blocks": (-1, 1.5, "1", None, True),
        "compression_dim": OPTIONAL_SIZES,
        "kernel_initializer": INITIALIZERS,
        **{**NO_SHIFT, **NO_BIAS, **NO_ENTMAX, **NO_PRODUCTS, **NO_POSITION},
    },
}
REQUIRED = {
    "LinformerHeads": {"max_length": 8},
    "GlobalHeads": {"global_positions": (1, 0)},
    "AxialHeads": {"axis": 0},
    "BlockTopKHeads": {"block_length": 4, "num_blocks": 2},
}

EXPERTS = {"num_experts": 3, "intermediate_dim": 4, "capacity": 2}
PROJECTIONS = {"head_groups": [layers.FullHeads(2)], "key_dim": 4}
RECURRENT = {"num_heads": 2, "key_dim": 4, "segment_length": 4, "memory_length": 4}
OTHERS = {
    "MixtureOfExperts": (
        EXPERTS,
        {
            **dict.fromkeys(EXPERTS, SIZES),
            "top_k": (3, None),
            "activation": ("tanh", None),
            "second_choice": ("never", None),
            "places": ("by_length", None),
            **dict.fromkeys(("load_balancing_weight", "z_loss_weight"), NUMBERS),
            **dict.fromkeys(("router_jitter", "dropout"), RATES),
        },
    ),
    "ProductKeyMemory": (
        {},
        {
            **dict.fromkeys(("num_heads", "num_keys", "top_k"), SIZES),
            "key_dim": (*SIZES, 7),
            "value_dim": OPTIONAL_SIZES,
            "query_norm": ("group", True),
            "input_dropout": RATES,
        },
    ),
    "SparseFeedForward": (
        {"intermediate_dim": 64},
        {
            **dict.fromkeys(
                ("intermediate_dim", "block_size", "controller_dim"), SIZES
            ),
            **dict.fromkeys(("temperature", "hard_probability"), NUMBERS),
            "dropout": RATES,
        },
    ),
    "SparseProjectionAttention": (
        PROJECTIONS,
        {
            "num_modules": OPTIONAL_SIZES,
            "module_kernel_size": (*SIZES, 4),
            "length_kernel_size": SIZES,
            "value_dim": (5,),
            "num_key_value_heads": (1,),
            "use_output_projection": (3,),
        },
    ),
    "TokenLearner": (
        {},
        {
            **dict.fromkeys(("num_tokens", "bottleneck_dim"), SIZES),
            "normalization": ("mean", None),
            "dropout": RATES,
        },
    ),
    "PerceiverBackbone": (
        {"num_latents": 3, "latent_dim": 8},
        {
            "num_cross_attentions": SIZES,
            "heads": ([3], layers.FullHeads(2)),
        },
    ),
    "FunnelBackbone": (
        {"hidden_dim": 6, "num_heads": 3},
        {"block_sizes": ((),), "hidden_dim": (*SIZES, 9)},
    ),
    "TransformerXLAttention": (
        {"num_heads": 2, "key_dim": 4, "memory_length": 4},
        {
            "memory_length": SIZES,
            "segment_length": OPTIONAL_SIZES,
            "same_length": FLAGS,
        },
    ),
    "CompressiveAttention": (
        {**RECURRENT, "compressed_length": 4},
        {
            **dict.fromkeys(("segment_length", "compressed_length"), SIZES),
            "same_length": (True,),
            "compression": ("mean", None),
            "reconstruction_weight": NUMBERS,
        },
    ),
    "MovingThresholds": ({}, {"num_streams": SIZES, "decay": RATES}),
}

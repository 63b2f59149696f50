"""Each wrong argument of each layer is refused: the name, and what was received.

`heads/refusals_test` has arguments that do not fit each other or the call.
"""

import pytest

from routing_tf import layers
from routing_tf import zoo
from tests.layers import kinds
from tests.zoo import wrong_arguments as wrong
from tests.zoo.wrong_arguments import FLAGS
from tests.zoo.wrong_arguments import INITIALIZERS
from tests.zoo.wrong_arguments import NO_DISTANCES
from tests.zoo.wrong_arguments import NUMBERS
from tests.zoo.wrong_arguments import OPTIONAL_SIZES
from tests.zoo.wrong_arguments import RATES
from tests.zoo.wrong_arguments import SEEDS
from tests.zoo.wrong_arguments import SIZES
from tests.zoo.wrong_arguments import nan

# Of all heads.
GROUP = {
    "num_heads": SIZES,
    "dropout": RATES,
    "max_relative_position": OPTIONAL_SIZES,
    "token_bias_weight": ("free", 1.0, True),
    **dict.fromkeys(
        ("embeddings_initializer", "relative_key_initializer"), INITIALIZERS
    ),
    "key_shift": (2, -1, 0.5, 1.0, "1", None, True, nan, [1]),
    "entmax_alpha": (1, 1.0, 0.5, 2.5, 3, "free", True, nan, [1.5]),
    **dict.fromkeys(("rotary_positions", "qk_norm"), FLAGS),
    "rotary_wavelength": (0, -1.5, "a", None, True, nan, float("inf")),
    "logit_soft_cap": (0, -1.5, "a", True, nan, float("inf")),
}
BLOCKS = (0, -3, (), (2, 0), (1.5,), "ab", "4", None, (2, 2, 2), (True,), nan)
OPTIONAL_BLOCKS = tuple(block for block in BLOCKS if block is not None)
CLUSTERS = {
    "attention_window": SIZES,
    "exploring_queries": (-1, 1.5, None, True),
    "query_cluster": ("value", None, 1),
}
KMEANS = {
    "num_clusters": SIZES,
    "decay": (-0.1, 1.5, nan, "0.9", None, [0.5]),
    "commitment_weight": (-1.0, "1", None, nan, [1.0]),
    "update_rule": ("sgd", None, 3),
    "revive_after": (0, -1, 1.5, "1", True),
    "centroid_initialization": ("zeros", None, 3),
    **dict.fromkeys(("balance_rate", "anchor_weight"), NUMBERS),
}
CENTROIDS = {**CLUSTERS, **KMEANS, "prefix_block_size": OPTIONAL_SIZES}
HEADS = {
    "FullHeads": {},
    "LocalHeads": {
        "block_shape": BLOCKS,
        "flange_blocks": (-1, 1.5, "1", None, (1, 1, 1), True, (-1,)),
        "memory_block_shape": OPTIONAL_BLOCKS,
        "dilation": SIZES,
    },
    "StridedHeads": {"block_shape": BLOCKS},
    "FixedHeads": {
        "block_shape": BLOCKS,
        "num_summary_columns": (*SIZES, 1000),
        "arrangement": ("alternating", None, 1),
        "distinct_summaries": FLAGS,
        **NO_DISTANCES,
    },
    "SlidingHeads": {"radius": SIZES[1:], "is_strided": FLAGS},
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
        "attends_to_self": FLAGS,
    },
    "RandomHeads": {**CLUSTERS, "num_clusters": SIZES, "seed": SEEDS},
    **wrong.HEADS,
}
REQUIRED = {**kinds.REQUIRED, **wrong.REQUIRED}
# Of attention layers.
PROJECTIONS = {
    "key_dim": SIZES,
    **dict.fromkeys(("value_dim", "output_dim", "num_key_value_heads"), OPTIONAL_SIZES),
    "kernel_initializer": INITIALIZERS,
    "kernel_regularizer": ("nope", 3),
    "bias_constraint": ("nope", 3),
    "use_gate": FLAGS,
    "remat": ("logits",),
    "logit_soft_cap": GROUP["logit_soft_cap"],
    "qk_norm": FLAGS,
}
FULL = layers.FullHeads(2)
ROUTING = {"num_heads": 4, "key_dim": 6, "num_clusters": 3, "attention_window": 5}
OTHERS = {
    "MixedAttention": (
        {"head_groups": [FULL], "key_dim": 4},
        {
            **PROJECTIONS,
            "block_shape": OPTIONAL_BLOCKS,
            "head_groups": ([], None, 5, "routed", FULL),
        },
    ),
    "RoutingAttention": (
        ROUTING,
        {
            **PROJECTIONS,
            **dict.fromkeys(("num_heads", "num_clusters", "attention_window"), SIZES),
            "num_local_heads": (-1, 5, 1.5, "1", None, True, nan),
            **dict.fromkeys(
                ("local_block_size", "prefix_block_size", "max_relative_position"),
                OPTIONAL_SIZES,
            ),
            "routing": ("experts", 3, True),
            "routing_scope": ("half", None, 3),
            "dropout": RATES,
            "key_shift": GROUP["key_shift"],
            "rotary_positions": FLAGS,
            "exploring_queries": CLUSTERS["exploring_queries"],
            "seed": (-1,),
            "clustering": (3, "decay"),
            "projection_config": ("biases",),
        },
    ),
    "ProjectionConfig": ({}, {"use_gate": (2,), "bias_constraint": ("nope",)}),
    "OnlineKMeans": ({"num_clusters": 4}, KMEANS),
    "RelativePosition": (
        {"max_relative_position": 3},
        {"max_relative_position": SIZES},
    ),
    "ScaledDotProduct": (
        {},
        {name: GROUP[name] for name in ("entmax_alpha", "logit_soft_cap", "dropout")},
    ),
    "FeedForward": (
        {"intermediate_dim": 8},
        {
            "intermediate_dim": SIZES,
            "activation": ("swish", None),
            "dropout": RATES,
        },
    ),
    "TransformerBlock": (
        {"attention": layers.MixedAttention([FULL], 4), "feed_forward": None},
        {"norm_position": ("mid", None), "dropout": RATES},
    ),
    "SublayerSteps": ({"steps": "dan"}, {"steps": ("none", "dax"), "dropout": RATES}),
    "TokenEmbedding": (
        {"vocabulary_size": 5, "embedding_dim": 3},
        dict.fromkeys(("vocabulary_size", "embedding_dim"), SIZES),
    ),
    "TokenDropout": ({"rate": 0.5}, {"rate": (*RATES, 1.5)}),
    "GridEmbedding": ({"grid_shape": (2,)}, {"grid_shape": ((), 4, None)}),
    **wrong.OTHERS,
}
WRONG = {
    **{
        name: ({"num_heads": 2, **REQUIRED.get(name, {})}, {**GROUP, **own})
        for name, own in HEADS.items()
    },
    **OTHERS,
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_wrong_arguments(name):
    make = getattr(zoo if hasattr(zoo, name) else layers, name)
    required, wrong_values = WRONG[name]
    make(**required)
    for argument, values in wrong_values.items():
        for value in values:
            with pytest.raises(ValueError) as error:
                make(**{**required, argument: value})
            received = -1 if value == (-1,) else value  # the entry that is wrong
            rule, _, rest = str(error.value).partition(" Received: ")
            assert f"`{argument}`" in rule and " must " in rule
            assert rest.startswith(f"{argument}={received!r}")

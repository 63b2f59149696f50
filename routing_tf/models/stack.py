"""Makes the blocks of all models from hyperparameters."""

import functools
import math

import keras

from routing_tf import layers
from routing_tf.layers.heads.routed import TOKEN_CHOICE
from routing_tf.layers.support.serialization import class_of_the_zoo
from routing_tf.models import bridge
from routing_tf.models import feed_forwards
from routing_tf.models import patterns
from routing_tf.models.pattern_checks import refuse_option
from routing_tf.models.routed_heads import groups_of
from routing_tf.models.routed_heads import name_of
from routing_tf.settings.hyperparameters import arguments_of


def decoder_block(hyperparameters, index, policy):
    """Makes a block of a decoder: causal, with cross-attention after an encoder."""
    h = hyperparameters
    output_initializer = _output_initializer(h, h.num_layers)
    cross_attention = None
    if h.num_encoder_layers:
        cross_attention = _attention(
            h,
            _cross_groups(h, index, policy),
            "cross_attention",
            policy,
            output_initializer,
        )
    return layers.TransformerBlock(
        _attention(
            h, _self_groups(h, index, policy), "attention", policy, output_initializer
        ),
        _feed_forward(h, index, policy, output_initializer),
        cross_attention,
        **arguments_of("TransformerBlock", h),
        name=f"block_{index}",
        dtype=policy,
    )


def encoder_block(hyperparameters, index, policy):
    """Makes a block of an encoder: every token sees tokens on both sides.

    Queries and keys are projected separately, as in the release, except in patterns
    whose queries are their keys.
    """
    h = hyperparameters
    groups = _self_groups(h, index, policy, is_causal=False)
    output_initializer = _output_initializer(h, h.num_encoder_layers)
    return layers.TransformerBlock(
        _attention(h, groups, "attention", policy, output_initializer),
        _feed_forward(h, index, policy, output_initializer, is_decoder=False),
        **arguments_of("TransformerBlock", h),
        use_causal_mask=False,
        name=f"encoder_block_{index}",
        dtype=policy,
    )


def initializer(hyperparameters, num_summed=1):
    """Returns the initializer of kernels.

    For the last kernels of `num_summed` parts that write into one sum, weights are
    divided by the square root of this number.
    """
    h = hyperparameters
    if h.initializer == "fan_in_normal":
        return keras.initializers.VarianceScaling(
            scale=h.initializer_gain**2 / num_summed,
            mode="fan_in",
            distribution="untruncated_normal",
        )
    return keras.initializers.VarianceScaling(
        scale=h.initializer_gain / num_summed, mode="fan_avg", distribution="uniform"
    )


def embeddings_initializer(hyperparameters, size, num_summed=1):
    """Returns the initializer of tables of vectors of a size.

    The vectors of `num_summed` tables are added up.
    """
    h = hyperparameters
    if h.initializer == "fan_in_normal":
        stddev = h.initializer_gain / math.sqrt(size * num_summed)
        return keras.initializers.RandomNormal(stddev=stddev)
    return initializer(h)


def logits_initializer(hyperparameters):
    """Returns the initializer of the kernel of the logits."""
    if hyperparameters.initializer == "fan_in_normal":
        return keras.initializers.Zeros()
    return initializer(hyperparameters)


def _output_initializer(hyperparameters, num_layers):
    """The initializer of the last kernel of each part; None for the usual one."""
    if not hyperparameters.scale_residual_initializer:
        return None
    return initializer(hyperparameters, num_summed=2 * num_layers)


def dropout(rate, name, policy):
    """Makes a dropout layer."""
    return keras.layers.Dropout(rate, name=name, dtype=policy)


def _attention(hyperparameters, groups, name, policy, output_initializer):
    h = hyperparameters
    make = layers.MixedAttention
    if h.sparse_projections and name == "attention":
        make = class_of_the_zoo("SparseProjectionAttention")
    return make(
        groups,
        key_dim=h.size_of_key,
        block_shape=None if h.local_block_width is None else h.local_block_shape,
        kernel_initializer=initializer(h),
        output_initializer=output_initializer,
        **arguments_of("MixedAttention", h),
        name=name,
        dtype=policy,
    )


def _feed_forward(hyperparameters, index, policy, output_initializer, is_decoder=True):
    h = hyperparameters
    return feed_forwards.make_layer(
        h.feed_forward,
        feed_forwards.Place(
            h.intermediate_dim,
            h.max_sequence_length if is_decoder else h.max_input_length,
            index,
            h.num_layers if is_decoder else h.num_encoder_layers,
        ),
        dropout=h.feed_forward_dropout,
        kernel_initializer=initializer(h),
        output_initializer=output_initializer,
        name="feed_forward",
        dtype=policy,
    )


def _self_groups(hyperparameters, index, policy, is_causal=True):
    """The head groups of self-attention, in the order of the release."""
    h = hyperparameters
    make = functools.partial(_heads, h, policy, rotary_positions=h.rotary_positions)
    # Keys can be shifted only if no later key is seen.
    routed_shift, local_shift = h.routed_key_shift, h.local_key_shift
    if not is_causal:
        routed_shift = local_shift = 0
    shared = {
        "share_query_key": h.share_query_key and is_causal,
        **arguments_of("ClusteredHeads", h),
    }
    routed, cluster_strided, local = _counts(h, index)
    groups = []
    if routed:
        groups += _routed_groups(
            h, index, is_causal, routed, make, shared, key_shift=routed_shift
        )
    if cluster_strided:
        settings = _clustering(h) | shared
        if h.compatibility is not None:
            settings |= bridge.release().cluster_strided_settings
        groups.append(
            make(
                layers.ClusterStridedHeads,
                cluster_strided,
                h.cluster_strided_relative_positions,
                key_shift=routed_shift,
                **settings,
            )
        )
    if h.num_strided_heads:
        groups.append(
            make(
                layers.StridedHeads,
                h.num_strided_heads,
                h.strided_relative_positions,
                key_shift=routed_shift,
                block_shape=h.local_block_shape,
            )
        )
    if local:
        groups.append(
            make(
                layers.LocalHeads,
                local,
                h.local_relative_positions,
                key_shift=local_shift,
                block_shape=h.local_block_shape,
                flange_blocks=h.local_flange_blocks,
                dilation=h.local_dilation,
            )
        )
    for cls, number, settings in _factorized_kinds(h, index):
        groups.append(make(cls, number, key_shift=local_shift, **settings))
    return groups


def _routed_groups(
    hyperparameters, index, is_causal, num_heads, make, shared, key_shift
):
    """The head groups of `routed_heads`, or that `routing` or `encoder_routing` names.

    `make` makes heads; those in clusters also have the arguments `shared`.
    """
    h = hyperparameters
    if is_causal and h.routed_heads is not None:
        return groups_of(h.routed_heads, index)
    relative = h.routed_relative_positions
    make = functools.partial(make, relative_key_stddev=h.routed_relative_key_stddev)
    routing = patterns.routing_of(h, is_decoder=is_causal)
    pattern = patterns.find(routing)
    if pattern is None:
        cls, settings = _routed_kind(h, index, routing)
        if cls is not layers.FullHeads:
            settings |= shared
        return [make(cls, num_heads, relative, key_shift=key_shift, **settings)]
    sizes = patterns.sizes_of(h, index, is_decoder=is_causal)
    further = {}
    if pattern.has_centroids:
        further = arguments_of("Clustering", h) | shared
    elif pattern.is_clustered:
        further = {"exploring_queries": h.exploring_queries}
    try:
        return make(
            functools.partial(pattern.groups, sizes),
            num_heads,
            relative and pattern.has_relative_positions,
            key_shift=key_shift,
            name=name_of(pattern.heads.__name__),
            **further,
        )
    except ValueError as error:
        refuse_option(h, routing, error)
        raise


def _factorized_kinds(hyperparameters, index):
    """The classes of the factorized heads of a block, with numbers and arguments.

    Reference: Child et al. (2019), sections 4.3 and 5.2.
    """
    h = hyperparameters
    number, length = h.num_factorized_heads, h.local_block_length
    if not number:
        return []
    merges = h.factorized_arrangement == "merged"
    if h.factorized_pattern == "strided":
        near = layers.SlidingHeads, {"radius": length}
        far = layers.StridedHeads, {"block_shape": (length,)}
        merged = layers.SlidingHeads, {"radius": length, "is_strided": True}
    else:
        fixed = {
            "block_shape": (length,),
            "num_summary_columns": h.num_summary_columns,
            "distinct_summaries": h.distinct_summaries,
        }
        near = layers.LocalHeads, {"block_shape": (length,), "flange_blocks": 0}
        far = layers.FixedHeads, {**fixed, "arrangement": "summaries"}
        merged = layers.FixedHeads, fixed
    if merges:
        return [(merged[0], number, merged[1])]
    if h.factorized_arrangement == "interleaved":
        cls, settings = (near, far)[index % 2]
        return [(cls, number, settings)]
    halves = {"near": near, "far": far}
    return [
        (cls, number // 2, {**settings, "name": f"{name}_heads"})
        for name, (cls, settings) in halves.items()
    ]


def _cross_groups(hyperparameters, index, policy):
    """The head groups of attention to the encoder's output: no relative positions."""
    h = hyperparameters
    routed, _, _ = _counts(h, index)
    local = h.num_heads - routed
    groups = []
    if routed:
        cls, settings = _routed_kind(h, index, _cross_routing(h))
        if cls is not layers.FullHeads:
            settings["share_query_key"] = False
        groups.append(_heads(h, policy, cls, routed, **settings))
    if local:
        flange = h.memory_flange_blocks
        if flange is None:
            flange = h.local_flange_blocks
        groups.append(
            _heads(
                h,
                policy,
                layers.LocalHeads,
                local,
                block_shape=h.local_block_shape,
                flange_blocks=flange,
                memory_block_shape=h.memory_block_length and (h.memory_block_length,),
            )
        )
    return groups


def _counts(hyperparameters, index):
    """Numbers of routed, cluster-strided and local heads of a block."""
    h = hyperparameters
    if index < h.num_local_only_layers:
        clustered = h.num_routed_heads + h.num_cluster_strided_heads
        return 0, 0, h.num_local_heads + clustered
    return h.num_routed_heads, h.num_cluster_strided_heads, h.num_local_heads


def _cross_routing(hyperparameters):
    """The pattern of routed heads that attend to the encoder's output."""
    routing = hyperparameters.routing
    return routing if routing in ("hashed", "random", "full") else "expert_choice"


def _routed_kind(hyperparameters, index, routing):
    """The class of a pattern, and its arguments besides the common ones."""
    h = hyperparameters
    window = {"attention_window": h.attention_window}
    if routing == "hashed":
        return layers.HashedHeads, {"num_buckets": h.num_clusters, **window}
    if routing == "random":
        settings = {"num_clusters": h.num_clusters, "seed": index, **window}
        return layers.RandomHeads, settings
    if routing == "full":
        return layers.FullHeads, {}
    reads = {}
    if routing in TOKEN_CHOICE:
        reads = {"clusters_per_query": h.clusters_per_query}
    return layers.RoutedHeads, {
        "routing": routing,
        **reads,
        "routing_scope": h.routing_scope,
        "prefix_block_size": h.prefix_block_size,
        **_clustering(h),
    }


def _clustering(hyperparameters):
    h = hyperparameters
    sizes = {"num_clusters": h.num_clusters, "attention_window": h.attention_window}
    return sizes | arguments_of("Clustering", h)


def _heads(
    hyperparameters,
    policy,
    cls,
    num_heads,
    relative=False,
    rotary_positions=False,
    relative_key_stddev=None,
    **settings,
):
    """Makes heads of a class, with the flaws of the hyperparameters."""
    h = hyperparameters
    relative = relative and not rotary_positions
    if "name" not in settings:
        settings["name"] = name_of(cls.__name__)
    if h.compatibility is not None:
        cls, flaws = bridge.release().class_at(h.compatibility, cls)
        settings |= flaws
    return cls(
        num_heads,
        embeddings_initializer=embeddings_initializer(h, h.size_of_key),
        relative_key_initializer=_relative_key_initializer(h, relative_key_stddev),
        max_relative_position=h.max_relative_position if relative else None,
        rotary_positions=rotary_positions,
        dtype=policy,
        **arguments_of("HeadGroup", h),
        **settings,
    )


def _relative_key_initializer(hyperparameters, stddev=None):
    if stddev is None:
        stddev = hyperparameters.relative_key_stddev
    return keras.initializers.RandomNormal(stddev=stddev) if stddev else None

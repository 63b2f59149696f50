"""The head groups of a block as configs: what `routing` and the flat names stand for.

Models know heads only by these configs, so this is the one place that reads the
hyperparameters of heads.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras

from routing_tf import layers
from routing_tf.layers.heads.routed import TOKEN_CHOICE
from routing_tf.models import initializers
from routing_tf.models import patterns
from routing_tf.models import presets
from routing_tf.models.pattern_checks import refuse_option
from routing_tf.models.patterns import groups_of
from routing_tf.models.patterns import name_of
from routing_tf.settings.hyperparameters import arguments_of


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """One or more head groups, before they are made.

    Args:
        heads: class of the heads, or a function that returns a list of groups.
        num_heads: number of heads.
        arguments: dict of all other arguments but `dtype`.
        routing: the name of a pattern, for messages; None if nothing names it.
    """

    heads: Callable
    num_heads: int
    arguments: dict
    routing: str | None = None

    def groups(self, hyperparameters, policy):
        """Returns the list of groups; a `ValueError` names the hyperparameter."""
        try:
            made = self.heads(self.num_heads, dtype=policy, **self.arguments)
        except ValueError as error:
            if self.routing is not None:
                refuse_option(hyperparameters, self.routing, error)
            raise
        return made if isinstance(made, list) else [made]


def self_attention(hyperparameters, index, is_causal=True):
    """Returns the configs of a block's self-attention, in the order of the release."""
    h = hyperparameters
    config = functools.partial(_config, h, rotary_positions=h.rotary_positions)
    # Keys can be shifted only if no later key is seen.
    routed_shift, local_shift = h.routed_key_shift, h.local_key_shift
    if not is_causal:
        routed_shift = local_shift = 0
    shared = {
        "share_query_key": h.share_query_key and is_causal,
        **arguments_of("ClusteredHeads", h),
    }
    routed, cluster_strided, local = _counts(h, index)
    configs = []
    if routed and is_causal and h.routed_heads is not None:
        configs.append(_of_data(h, index))
    elif routed:
        configs.append(_routed(h, index, is_causal, config, shared, routed_shift))
    if cluster_strided:
        settings = _clustering(h) | shared
        if h.compatibility is not None:
            settings |= presets.release().cluster_strided_settings
        configs.append(
            config(
                layers.ClusterStridedHeads,
                cluster_strided,
                h.cluster_strided_relative_positions,
                key_shift=routed_shift,
                **settings,
            )
        )
    if h.num_strided_heads:
        configs.append(
            config(
                layers.StridedHeads,
                h.num_strided_heads,
                h.strided_relative_positions,
                key_shift=routed_shift,
                block_shape=h.local_block_shape,
            )
        )
    if local:
        configs.append(
            config(
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
        configs.append(config(cls, number, key_shift=local_shift, **settings))
    return configs


def cross_attention(hyperparameters, index):
    """Returns the configs of attention to an encoder: without relative positions."""
    h = hyperparameters
    routed, _, _ = _counts(h, index)
    local = h.num_heads - routed
    configs = []
    if routed:
        cls, settings = _routed_kind(h, index, _cross_routing(h))
        if cls is not layers.FullHeads:
            settings["share_query_key"] = False
        configs.append(_config(h, cls, routed, **settings))
    if local:
        flange = h.memory_flange_blocks
        if flange is None:
            flange = h.local_flange_blocks
        configs.append(
            _config(
                h,
                layers.LocalHeads,
                local,
                block_shape=h.local_block_shape,
                flange_blocks=flange,
                memory_block_shape=h.memory_block_length and (h.memory_block_length,),
            )
        )
    return configs


def _of_data(hyperparameters, index):
    """The config of `routed_heads`, whose arguments are their own."""
    h = hyperparameters

    def made(num_heads, dtype):  # which is None in data, for that of the layer
        return groups_of(h.routed_heads, index)

    return GroupConfig(made, h.num_routed_heads, {})


def _routed(hyperparameters, index, is_causal, config, shared, key_shift):
    """The config of what `routing` or `encoder_routing` names.

    `config` makes it; heads in clusters also have the arguments `shared`.
    """
    h = hyperparameters
    relative, num_heads = h.routed_relative_positions, h.num_routed_heads
    config = functools.partial(
        config, relative_key_stddev=h.routed_relative_key_stddev, key_shift=key_shift
    )
    routing = patterns.routing_of(h, is_decoder=is_causal)
    pattern = patterns.find(routing)
    if pattern is None:
        cls, settings = _routed_kind(h, index, routing)
        if cls is not layers.FullHeads:
            settings |= shared
        return config(cls, num_heads, relative, **settings)
    further = {}
    if pattern.has_centroids:
        further = arguments_of("Clustering", h) | shared
    elif pattern.is_clustered:
        further = {"exploring_queries": h.exploring_queries}
    sizes = patterns.sizes_of(h, index, is_causal)

    def groups(*arguments, **options):
        return _with_entmax(h, pattern).groups(sizes, *arguments, **options)

    made = config(
        groups,
        num_heads,
        relative and pattern.has_relative_positions,
        name=name_of(pattern.heads.__name__),
        **further,
    )
    return dataclasses.replace(made, routing=routing)


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
    if routing == "expert_threshold":
        return patterns.of_the_zoo("ThresholdHeads"), _clustering(h)
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


def _config(
    hyperparameters,
    cls,
    num_heads,
    relative=False,
    rotary_positions=False,
    relative_key_stddev=None,
    **settings,
):
    """The config of heads of a class, with the flaws of the hyperparameters."""
    h = hyperparameters
    relative = relative and not rotary_positions
    if "name" not in settings:
        settings["name"] = name_of(cls.__name__)
    if h.compatibility is not None:
        cls, flaws = presets.release().class_at(h.compatibility, cls)
        settings |= flaws
    if h.entmax_alpha is not None:
        settings["entmax_alpha"] = h.entmax_alpha
        cls = _class_with_entmax(cls) if isinstance(cls, type) else cls
    arguments = {
        "embeddings_initializer": initializers.of_embeddings(h, h.size_of_key),
        "relative_key_initializer": _relative_key_initializer(h, relative_key_stddev),
        "max_relative_position": h.max_relative_position if relative else None,
        "rotary_positions": rotary_positions,
        **arguments_of("HeadGroup", h),
        **settings,
    }
    return GroupConfig(cls, num_heads, arguments)


def _with_entmax(hyperparameters, pattern):
    """The pattern, with entmax if the hyperparameters have it."""
    if hyperparameters.entmax_alpha is None:
        return pattern
    heads = _class_with_entmax(pattern.heads)
    return dataclasses.replace(pattern, heads=heads)


def _class_with_entmax(heads):
    return patterns.of_the_zoo("entmax").with_entmax(heads)


def _relative_key_initializer(hyperparameters, stddev=None):
    if stddev is None:
        stddev = hyperparameters.relative_key_stddev
    return keras.initializers.RandomNormal(stddev=stddev) if stddev else None

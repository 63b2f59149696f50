"""Attention patterns of other systems as heads of a model, by name.

Their sizes follow from `Hyperparameters.attention_window`, so that a query sees about
as many keys as in a cluster of that window.
"""

import dataclasses
from collections.abc import Callable

from routing_tf import layers
from routing_tf.layers.heads.routed import CAUSAL_ROUTINGS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the arguments of a pattern's heads follow from.

    Args:
        attention_window: number of keys that a query sees, about.
        max_length: length of the longest sequence.
        num_clusters: number of clusters of a head.
        index: number of the block, for seeds. Defaults to 0.
        row_length: tokens in a row of an image that is a sequence; None (the default)
            where the grid is known.
    """

    attention_window: int
    max_length: int
    num_clusters: int
    index: int = 0
    row_length: int | None = None


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern that `Hyperparameters.routing` or `encoder_routing` names.

    Args:
        heads: the class of its heads, or a function that returns a list of groups.
        settings: function of `Sizes` that returns arguments of these, beside those that
            all heads have.
        has_relative_positions: whether the heads may have relative positions. Defaults
            to True.
        of_images: whether it is a pattern of images alone. Defaults to False.
        is_bounded: whether the heads remember as much for a text of any length.
            Defaults to False.
        of_decoders: whether it has a causal form. Defaults to True.
        of_encoders: whether it has a form without a causal mask. Defaults to True.
        shares_query_key: whether its queries are its keys. Defaults to False.
        is_clustered: whether its heads are `ClusteredHeads`. Defaults to False.
    """

    heads: Callable
    settings: Callable
    has_relative_positions: bool = True
    of_images: bool = False
    is_bounded: bool = False
    of_decoders: bool = True
    of_encoders: bool = True
    shares_query_key: bool = False
    is_clustered: bool = False

    def groups(self, sizes, num_heads, **options):
        """Returns the list of head groups.

        Args:
            sizes: `Sizes`.
            num_heads: number of heads in all.
            **options: arguments that all heads have.
        """
        made = self.heads(num_heads, **options, **self.settings(sizes))
        return made if isinstance(made, list) else [made]


def _share(sizes, number):
    """The length of one of some blocks that make up a window."""
    return max(1, sizes.attention_window // number)


def _global_tokens(sizes):
    chosen = _share(sizes, 4)
    window = max(1, sizes.attention_window - chosen)
    return {"global_positions": tuple(range(chosen)), "attention_window": window}


def _longformer(sizes):
    return {"attention_window": sizes.attention_window}


def _etc(sizes):
    chosen = _share(sizes, 4)
    radius = max(1, (sizes.attention_window - chosen) // 2)
    return {"num_global_tokens": chosen, "local_radius": radius}


def _random_blocks(sizes):
    # The near heads of BigBird see four blocks too, a window of three and the first.
    return {
        "block_length": _share(sizes, 4),
        "num_random_blocks": 4,
        "seed": sizes.index,
    }


def _axial(sizes):
    return {"width": sizes.row_length}


def _block_top_k(sizes):
    return {"block_length": _share(sizes, 4), "num_blocks": 4}


def _native_sparse(sizes):
    stride = _share(sizes, 16)
    return {
        "compression_length": 2 * stride,
        "compression_stride": stride,
        "block_length": 2 * stride,
        "num_blocks": 4,
        "attention_window": _share(sizes, 2),
    }


def _features(feature_map):
    def settings(sizes):
        return {
            "feature_map": feature_map,
            "num_features": sizes.attention_window,
            "seed": sizes.index,
        }

    return settings


def _synthesizer(kind):
    return lambda sizes: {"kind": kind, "max_length": sizes.max_length}


def _compressed(sizes):
    window = _share(sizes, 2)
    # As many blocks as the other half of the window has tokens.
    ratio = -(-sizes.max_length // window)
    return {"ratio": ratio, "attention_window": window}


def _long_short(sizes):
    window = _share(sizes, 2)
    segment = -(-sizes.max_length // window)
    return {"attention_window": window, "segment_length": segment}


def _sinkhorn(sizes):
    return {"block_length": _share(sizes, 2), "dropout_seed": sizes.index}


def _luna(sizes):
    return {"num_packed": sizes.attention_window}


def _reformer(sizes):
    return {
        # Half of the buckets are directions, the others their opposites.
        "num_buckets": sizes.num_clusters + sizes.num_clusters % 2,
        "attention_window": _share(sizes, 2),
        "hash": "rotation",
        "num_rounds": 2,
        "normalization": "unit_keys",
        "attends_to_self": False,
    }


def _block_pair(sizes):
    num_blocks = -(-sizes.max_length // sizes.attention_window)
    return {"num_blocks": num_blocks, "seed": sizes.index}


def _clustered_queries(sizes):
    # A query sees the best keys of its cluster, and all keys as its cluster does.
    return {
        "num_clusters": sizes.num_clusters,
        "num_keys": _share(sizes, 2),
        "seed": sizes.index,
    }


def _induced(sizes):
    return {"num_points": sizes.attention_window}


def _linformer(sizes):
    return {"max_length": sizes.max_length, "num_projected": sizes.attention_window}


def _nystrom(sizes):
    return {"num_landmarks": sizes.attention_window}


PATTERNS = {
    "axial": Pattern(layers.AxialHeads, _axial, False, of_images=True),
    "bigbird": Pattern(layers.bigbird_heads, _random_blocks),
    "block_top_k": Pattern(layers.BlockTopKHeads, _block_top_k),
    "compressed": Pattern(layers.CompressedHeads, _compressed),
    "etc": Pattern(layers.etc_heads, _etc),
    "global_tokens": Pattern(layers.GlobalHeads, _global_tokens),
    "linear": Pattern(layers.FeatureMapHeads, _features("elu"), False, is_bounded=True),
    "long_short": Pattern(layers.LongShortHeads, _long_short),
    "longformer": Pattern(layers.longformer_heads, _longformer),
    "luna": Pattern(layers.LunaHeads, _luna, False, is_bounded=True),
    "native_sparse": Pattern(
        layers.NativeSparseHeads, _native_sparse, of_encoders=False
    ),
    "performer": Pattern(
        layers.FeatureMapHeads, _features("positive"), False, is_bounded=True
    ),
    "random_blocks": Pattern(layers.RandomBlockHeads, _random_blocks),
    "random_features": Pattern(
        layers.FeatureMapHeads, _features("fourier"), False, is_bounded=True
    ),
    "random_synthesizer": Pattern(
        layers.SynthesizerHeads, _synthesizer("random"), False
    ),
    "reformer": Pattern(
        layers.HashedHeads,
        _reformer,
        is_bounded=True,
        shares_query_key=True,
        is_clustered=True,
    ),
    "sinkhorn": Pattern(layers.SinkhornHeads, _sinkhorn, False),
    "synthesizer": Pattern(layers.SynthesizerHeads, _synthesizer("dense"), False),
    "block_pair": Pattern(layers.BlockPairHeads, _block_pair, of_decoders=False),
    "clustered_queries": Pattern(
        layers.ClusteredQueryHeads, _clustered_queries, False, of_decoders=False
    ),
    "induced": Pattern(layers.InducedHeads, _induced, False, of_decoders=False),
    "linformer": Pattern(layers.LinformerHeads, _linformer, False, of_decoders=False),
    "nystrom": Pattern(layers.NystromHeads, _nystrom, False, of_decoders=False),
}


def sizes_of(h, index, is_decoder):
    """Returns the `Sizes` of a block of the decoder, or of one of the encoder."""
    is_row_by_row = h.kind == "image" and h.local_block_width is None
    return Sizes(
        attention_window=h.attention_window,
        max_length=h.max_sequence_length if is_decoder else h.max_input_length,
        num_clusters=h.num_clusters,
        index=index,
        row_length=h.image_width * h.num_channels if is_row_by_row else None,
    )


def routing_of(h, is_decoder):
    """Returns the name of the routed heads of the decoder, or of the encoder."""
    if is_decoder:
        return h.routing
    name = h.encoder_routing or h.routing
    return name if is_of_encoders(name) else "expert_choice"


def is_of_encoders(name):
    """Tells whether the heads of a name need neither a causal mask nor an image."""
    pattern = PATTERNS.get(name)
    if pattern is None:
        return name is not None and name not in CAUSAL_ROUTINGS
    return pattern.of_encoders and not pattern.of_images

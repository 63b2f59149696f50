"""Attention patterns of other systems as heads of a decoder, by name.

Their sizes follow from `Hyperparameters.attention_window`, so that a query sees about
as many keys as in a cluster of that window.
"""

import dataclasses
from collections.abc import Callable

from routing_tf import layers


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern that `Hyperparameters.routing` names.

    Args:
        heads: the class of its heads.
        settings: function of the hyperparameters and the index of the block that
            returns arguments of the class, beside those that all heads have.
        has_relative_positions: whether the heads may have relative positions. Defaults
            to True.
        of_images: whether it is a pattern of images alone. Defaults to False.
        is_bounded: whether the heads remember as much for a text of any length.
            Defaults to False.
    """

    heads: type
    settings: Callable
    has_relative_positions: bool = True
    of_images: bool = False
    is_bounded: bool = False


def _share(h, number):
    """The length of one of some blocks that make up a window."""
    return max(1, h.attention_window // number)


def _global_tokens(h, index):
    chosen = _share(h, 4)
    window = max(1, h.attention_window - chosen)
    return {"global_positions": tuple(range(chosen)), "attention_window": window}


def _random_blocks(h, index):
    return {"block_length": _share(h, 4), "num_random_blocks": 4, "seed": index}


def _axial(h, index):
    # Rectangles of an image tell where a row ends, a sequence does not.
    is_sequence = h.local_block_width is None
    return {"width": h.image_width * h.num_channels if is_sequence else None}


def _block_top_k(h, index):
    return {"block_length": _share(h, 4), "num_blocks": 4}


def _native_sparse(h, index):
    stride = _share(h, 16)
    return {
        "compression_length": 2 * stride,
        "compression_stride": stride,
        "block_length": 2 * stride,
        "num_blocks": 4,
        "attention_window": _share(h, 2),
    }


def _features(feature_map):
    def settings(h, index):
        return {
            "feature_map": feature_map,
            "num_features": h.attention_window,
            "seed": index,
        }

    return settings


def _synthesizer(kind):
    return lambda h, index: {"kind": kind, "max_length": h.max_sequence_length}


def _compressed(h, index):
    window = _share(h, 2)
    # As many blocks as the other half of the window has tokens.
    ratio = -(-h.max_sequence_length // window)
    return {"ratio": ratio, "attention_window": window}


def _long_short(h, index):
    window = _share(h, 2)
    segment = -(-h.max_sequence_length // window)
    return {"attention_window": window, "segment_length": segment}


def _sinkhorn(h, index):
    return {"block_length": _share(h, 2), "dropout_seed": index}


def _luna(h, index):
    return {"num_packed": h.attention_window}


def _reformer(h, index):
    return {
        # Half of the buckets are directions, the others their opposites.
        "num_buckets": h.num_clusters + h.num_clusters % 2,
        "attention_window": _share(h, 2),
        "hash": "rotation",
        "num_rounds": 2,
        "normalization": "unit_keys",
        "attends_to_self": False,
        "share_query_key": h.share_query_key,
    }


PATTERNS = {
    "axial": Pattern(layers.AxialHeads, _axial, False, of_images=True),
    "block_top_k": Pattern(layers.BlockTopKHeads, _block_top_k),
    "compressed": Pattern(layers.CompressedHeads, _compressed),
    "global_tokens": Pattern(layers.GlobalHeads, _global_tokens),
    "linear": Pattern(layers.FeatureMapHeads, _features("elu"), False, is_bounded=True),
    "long_short": Pattern(layers.LongShortHeads, _long_short),
    "luna": Pattern(layers.LunaHeads, _luna, False, is_bounded=True),
    "native_sparse": Pattern(layers.NativeSparseHeads, _native_sparse),
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
    "reformer": Pattern(layers.HashedHeads, _reformer, is_bounded=True),
    "sinkhorn": Pattern(layers.SinkhornHeads, _sinkhorn, False),
    "synthesizer": Pattern(layers.SynthesizerHeads, _synthesizer("dense"), False),
}


def check_pattern(h):
    """Raises a `ValueError` if `routing` names a pattern that makes no sense here."""
    pattern = PATTERNS.get(h.routing)
    if pattern is None:
        return
    received = f"Received: routing={h.routing!r}"
    if h.num_encoder_layers or h.compatibility is not None:
        raise ValueError(
            f"`routing={h.routing!r}` is for decoders without an encoder and without "
            f"flaws of the release. {received} with num_encoder_layers="
            f"{h.num_encoder_layers}, compatibility={h.compatibility!r}. Choose "
            "another `routing`, or leave these out"
        )
    if pattern.of_images and h.kind != "image":
        raise ValueError(
            f"`routing={h.routing!r}` needs rows and columns. {received} for a "
            "model of text. Give `image_height` and `image_width`, or choose another "
            "`routing`"
        )

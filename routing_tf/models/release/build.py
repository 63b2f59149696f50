"""Builds layers and models with the settings and the flaws of the release."""

from routing_tf import layers
from routing_tf.models.encoder_decoder import RoutingTransformerEncoderDecoder
from routing_tf.models.image_transformer import RoutingImageTransformer
from routing_tf.models.language_models import RoutingTransformerCausalLM
from routing_tf.models.language_models import RoutingTransformerSeq2SeqLM
from routing_tf.models.release import heads
from routing_tf.models.release.conversion import hyperparameters_from_release
from routing_tf.models.release.conversion import read_hparams
from routing_tf.models.routing_transformer import RoutingTransformer

# Defaults of a release attention call.
_DEFAULTS = {
    "local_num_heads": 0,
    "local_relative": False,
    "sparsity_cluster_num_heads": 0,
    "sparsity_cluster_relative": False,
    "sparsity_cluster_strided_num_heads": 0,
    "sparsity_cluster_strided_relative": False,
    "sparsity_strided_num_heads": 0,
    "sparsity_strided_relative": False,
    "hash_items": False,
    "token_bias_wt_trainable": False,
    "max_relative_position": None,
    "cache_padding_bias": True,
    "ema": False,
    "beta": 1e-4,
    "decay": 0.99,
    "share_qk": False,
}
_REQUIRED = (
    "depth",
    "output_depth",
    "total_key_depth",
    "total_value_depth",
    "query_shape",
    "memory_flange",
)


def attention_layer(config):
    """Builds the attention layer of one call in the release.

    Args:
        config: dict with the arguments of `multihead_attention_nd`, such as
            `local_num_heads`, `query_shape` and `total_key_depth`, and the depth of
            the query, `depth`. Arguments that do not concern the layer are ignored.

    Returns:
        A `MixedAttention`, called as
        `layer(query, use_causal_mask=masked, training=...)`. In attention to another
        sequence (`memory_length` is not None), `assign_variables` or the first call
        builds it, because the settings do not have the depth of that sequence.

    Raises:
        ValueError: for a setting that is not supported.
    """
    config = {**_DEFAULTS, "memory_query_shape": config.get("query_shape"), **config}
    _check_attention(config)
    groups = _head_groups(config)
    num_heads = sum(group.num_heads for group in groups)
    layer = layers.MixedAttention(
        groups,
        key_dim=_per_head(config, "total_key_depth", num_heads),
        value_dim=_per_head(config, "total_value_depth", num_heads),
        output_dim=config["output_depth"],
        shared_head_projection=True,
        project_shared_keys=True,
        block_shape=config["query_shape"],
        name=config.get("name", "self_attention"),
    )
    layer.release_depth = config["depth"]
    if config.get("memory_length") is None:
        layer.build((None, None, config["depth"]))
    return layer


def language_model(hparams, vocabulary_size):
    """Builds a decoder-only text model of the release.

    Args:
        hparams: dict of the release's hyperparameters, or the path of an
            `hparams.json`. Those that do not concern the model are ignored.
        vocabulary_size: number of token ids.

    Returns:
        A built `RoutingTransformerCausalLM`, not compiled. It takes the release's
        targets, shifted right by one with a leading 0, and cuts inputs to
        `max_target_length`, as the release does.
    """
    settings = _text_settings(hparams, vocabulary_size, has_encoder=False)
    return RoutingTransformerCausalLM(RoutingTransformer(settings), compile=False)


def seq2seq_model(hparams, vocabulary_size):
    """Builds a text model of the release that has an encoder.

    For the arguments, see `language_model`.

    Returns:
        A built `RoutingTransformerSeq2SeqLM`, not compiled. It takes a dict of
        `encoder_embeddings` `<float>[batch, input length, hidden_size]`, the release's
        inputs, which are zero at padding; `decoder_token_ids`, the release's targets,
        shifted right by one with a leading 0; and `decoder_padding_mask`.
    """
    settings = _text_settings(hparams, vocabulary_size, has_encoder=True)
    backbone = RoutingTransformerEncoderDecoder(settings)
    return RoutingTransformerSeq2SeqLM(backbone, compile=False)


def _text_settings(hparams, vocabulary_size, has_encoder):
    settings = hyperparameters_from_release(
        read_hparams(hparams), faithful=True, vocabulary_size=vocabulary_size
    )
    if (settings.num_encoder_layers > 0) != has_encoder:
        raise ValueError(
            "`num_encoder_layers` must be 0 in a `language_model` and positive in a "
            f"`seq2seq_model`. Received: num_encoder_layers="
            f"{settings.num_encoder_layers}"
        )
    return settings


def image_model(hparams, num_channels, vocabulary_size=256, num_classes=None):
    """Builds an image model of the release.

    Args:
        hparams: see `language_model`.
        num_channels: number of channels of a pixel.
        vocabulary_size: number of intensities that are predicted. Defaults to 256; the
            embedding tables always have 256 rows for each channel.
        num_classes: number of classes, for a model with `unconditional=False`;
            None (the default) otherwise.

    Returns:
        A built `RoutingImageTransformer`, not compiled. It takes the release's targets
        without a shift, or with classes `{"images": targets, "labels": inputs}`.
    """
    hparams = read_hparams(hparams)
    if hparams.get("unconditional", True) != (num_classes is None):
        raise ValueError(
            "`num_classes` must be given with `unconditional=False`, and only then. "
            f"Received: num_classes={num_classes}, "
            f"unconditional={hparams.get('unconditional', True)}"
        )
    # Sets of the release may leave out the frame of the base set.
    hparams = {"frame_height": 32, "frame_width": 32, **hparams}
    settings = hyperparameters_from_release(
        hparams,
        faithful=True,
        num_channels=num_channels,
        vocabulary_size=vocabulary_size,
        num_classes=num_classes,
    )
    return RoutingImageTransformer(settings)


def _head_groups(config):
    """The head groups of a call, in the order in which the release joins them."""
    groups = []
    for kind, settings_of in _KINDS.items():
        if config[f"{kind}_num_heads"]:
            cls, settings = settings_of(config)
            groups.append(cls(**{**_shared(config, kind), **settings}))
    return groups


def _shared(config, kind):
    """The arguments that all patterns have."""
    weight = "trainable" if config["token_bias_wt_trainable"] else "fixed"
    is_relative = config[f"{kind}_relative"]
    return {
        "num_heads": config[f"{kind}_num_heads"],
        "max_relative_position": (
            config["max_relative_position"] if is_relative else None
        ),
        "dropout": config.get("dropout_rate", 0.0),
        "token_bias_weight": weight,
        "cache_padding_bias": bool(config["cache_padding_bias"]),
    }


def _clustered(config):
    settings = {"share_query_key": config["share_qk"]}
    if not config["hash_items"]:
        settings |= {"name": "routed_heads", "routing": "expert_choice"}
        return heads.ExactRoutedHeads, {**settings, **_clustering(config)}
    return heads.ExactHashedHeads, {
        **settings,
        "name": "hashed_heads",
        "num_buckets": config["sparsity_cluster_size"],
        "attention_window": config["sparsity_cluster_attention_window"],
    }


def _cluster_strided(config):
    settings = {**_clustering(config), **heads.CLUSTER_STRIDED_SETTINGS}
    return heads.ExactClusterStridedHeads, {"name": "cluster_strided_heads", **settings}


def _strided(config):
    return heads.ExactStridedHeads, {
        "name": "strided_heads",
        "block_shape": config["query_shape"],
        "token_bias_weight": None,
    }


def _local(config):
    memory_block = config["query_shape"]
    if config.get("memory_length") is not None:
        memory_block = config["memory_query_shape"]
    pairs = list(zip(config["memory_flange"], memory_block, strict=True))
    if any(flange % length for flange, length in pairs):
        raise ValueError(
            "`memory_flange` must be a multiple of the block. Received: "
            f"memory_flange={config['memory_flange']!r} with blocks of {memory_block}"
        )
    return heads.ExactLocalHeads, {
        "name": "local_heads",
        "block_shape": config["query_shape"],
        "flange_blocks": [flange // length for flange, length in pairs],
        "memory_block_shape": memory_block,
    }


def _clustering(config):
    return {
        "num_clusters": config["sparsity_cluster_size"],
        "attention_window": config["sparsity_cluster_attention_window"],
        "decay": config["decay"],
        "commitment_weight": config["beta"],
        "ema": config["ema"],
    }


# The start of the release's settings of a pattern, and the function for our arguments.
_KINDS = {
    "sparsity_cluster": _clustered,
    "sparsity_cluster_strided": _cluster_strided,
    "sparsity_strided": _strided,
    "local": _local,
}


def _per_head(config, name, num_heads):
    if not num_heads or config[name] % num_heads:
        raise ValueError(
            f"`{name}` must be a multiple of the number of heads. Received: "
            f"{name}={config[name]}, {num_heads} heads"
        )
    return config[name] // num_heads


def _check_attention(config):
    missing = [name for name in _REQUIRED if config.get(name) is None]
    clustered = config["sparsity_cluster_num_heads"]
    if clustered:
        sizes = ("sparsity_cluster_size", "sparsity_cluster_attention_window")
        missing += [name for name in sizes if not config.get(name)]
    if missing:
        raise ValueError(
            "`config` must contain the arguments of a release attention call. Missing: "
            f"{', '.join(missing)}"
        )
    strided = config["sparsity_cluster_strided_num_heads"]
    if strided > clustered:
        raise ValueError(
            "`sparsity_cluster_strided_num_heads` must not exceed "
            "`sparsity_cluster_num_heads`, as in the release. Received: "
            f"{strided} and {clustered}"
        )
    if clustered and config["total_key_depth"] != config["total_value_depth"]:
        raise ValueError(
            "`total_key_depth` and `total_value_depth` must be equal with routed "
            f"heads, as in the release. Received: {config['total_key_depth']}, "
            f"{config['total_value_depth']}"
        )
    axes = len(config["query_shape"])
    for name in ("memory_query_shape", "memory_flange"):
        if len(config[name]) != axes:
            raise ValueError(
                f"`{name}` must have as many entries as `query_shape`. Received: "
                f"{name}={config[name]!r}, query_shape={config['query_shape']!r}"
            )

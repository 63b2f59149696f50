"""The bridge to the original release: its settings, its variable names, its flaws.

The release is TF1/tensor2tensor code (google-research/routing_transformer). What is
built here computes what it computed, flaws included, to float32 precision.
"""

import json
import pathlib

import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf.models.causal_lm import RoutingTransformerCausalLM
from routing_tf.models.encoder_decoder import RoutingTransformerEncoderDecoder
from routing_tf.models.image_transformer import RoutingImageTransformer
from routing_tf.models.presets import hyperparameters_from_release
from routing_tf.models.routing_transformer import RoutingTransformer
from routing_tf.models.seq2seq_lm import RoutingTransformerSeq2SeqLM

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
# Settings of cluster-strided heads that the release never passes on.
_CLUSTER_STRIDED = {"share_qk": False, "beta": 1e-4, "decay": 0.99}
# Variables of one model or layer, by the release's name -> a part of our layers.
_KMEANS_NAMES = {"means": "centroids", "ema_count": "counts", "ema_means": "sums"}
_FEED_FORWARD_NAMES = {
    "geglu": {
        "weight1": "input_dense",
        "weight2": "gate_dense",
        "weight3": "output_dense",
    },
    "relu": {"conv1": "input_dense", "conv2": "output_dense"},
}
_GROUP_SCOPES = {
    layers.RoutedHeads: "cluster_attention/cluster_attention",
    layers.HashedHeads: "cluster_attention/cluster_attention",
    layers.ClusterStridedHeads: "cluster_strided_attention/cluster_strided_attention",
    layers.StridedHeads: "strided_attention/strided_attention",
    layers.LocalHeads: "local_nd",
}
TOKEN_BIAS_WEIGHT = "token_bias_weight"
MODEL_SCOPE = "sparse_transformer/body"
IMAGE_MODEL_SCOPE = "sparse_imagetransformer/body"


def attention_layer(config):
    """Builds the attention layer of one call in the release.

    Args:
        config: dict with the arguments of `multihead_attention_nd`, such as
            `local_num_heads`, `query_shape` and `total_key_depth`, and the depth of
            the query, `depth`. Arguments that do not concern the layer are ignored.

    Returns:
        A `MixedAttention`, called as `layer(query, use_causal_mask=masked,
        training=...)`. In attention to another sequence (`memory_length` is not None)
        `assign_variables` or the first call build it, as the settings leave the depth
        of that sequence open.

    Raises:
        ValueError: for a setting that is not supported.
    """
    config = {**_DEFAULTS, "memory_query_shape": config.get("query_shape"), **config}
    _check_attention(config)
    groups = _head_groups(config)
    heads = sum(group.num_heads for group in groups)
    layer = layers.MixedAttention(
        groups,
        key_dim=_per_head(config, "total_key_depth", heads),
        value_dim=_per_head(config, "total_value_depth", heads),
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
        A built `RoutingTransformerCausalLM`, not compiled. The release's targets,
        shifted right by one behind a 0, give the release's logits; like the release
        it cuts inputs to `max_target_length`.

    Raises:
        ValueError: for a setting that is not supported, or if there is an encoder.
    """
    settings = _text_settings(hparams, vocabulary_size, has_encoder=False)
    return RoutingTransformerCausalLM(RoutingTransformer(settings), compile=False)


def seq2seq_model(hparams, vocabulary_size):
    """Builds a text model of the release that has an encoder.

    Args:
        hparams: dict of the release's hyperparameters, or the path of an
            `hparams.json`. Those that do not concern the model are ignored.
        vocabulary_size: number of token ids.

    Returns:
        A built `RoutingTransformerSeq2SeqLM`, not compiled. It is called with a dict of
        `encoder_embeddings` `<float>[batch, input length, hidden_size]`, the release's
        inputs, which are embedded outside of its model and zero where they are padding;
        `decoder_token_ids`, the release's targets, shifted right by one behind a 0;
        and `decoder_padding_mask`. It returns the release's logits.

    Raises:
        ValueError: for a setting that is not supported, or if there is no encoder.
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
        hparams: dict of the release's hyperparameters, or the path of an
            `hparams.json`. Those that do not concern the model are ignored.
        num_channels: number of channels of a pixel.
        vocabulary_size: number of intensities that are predicted. Defaults to 256; the
            embedding tables always have 256 rows for each channel.
        num_classes: number of classes, for a model with `unconditional=False`;
            None (the default) otherwise.

    Returns:
        A built `RoutingImageTransformer`, not compiled. Called with the release's
        targets it returns the release's logits; the shift is inside. With classes it
        is called with `{"images": targets, "labels": inputs}`.

    Raises:
        ValueError: for a setting that is not supported, or classes that do not fit
            `unconditional`.
    """
    hparams = read_hparams(hparams)
    if hparams.get("unconditional", True) != (num_classes is None):
        raise ValueError(
            "`num_classes` must be given with `unconditional=False`, and only then. "
            f"Received: num_classes={num_classes}, "
            f"unconditional={hparams.get('unconditional', True)}"
        )
    # Sets of the release that keep the frame of the base set need not name it.
    hparams = {"frame_height": 32, "frame_width": 32, **hparams}
    settings = hyperparameters_from_release(
        hparams,
        faithful=True,
        num_channels=num_channels,
        vocabulary_size=vocabulary_size,
        num_classes=num_classes,
    )
    return RoutingImageTransformer(settings)


def read_hparams(hparams):
    """Returns hyperparameters as a dict; reads those that are the path of a file."""
    if isinstance(hparams, dict):
        return hparams
    return json.loads(pathlib.Path(hparams).read_text())


def assign_variables(layer, values):
    """Writes variables of the release into a layer or model.

    Args:
        layer: what a function of this module built.
        values: dict of arrays by the release's variable names. The weights of token
            biases may be left out: the release makes them only where a bias is fed.

    Raises:
        ValueError: if a variable is missing, left over or of another shape; every one
            is named, and nothing is written.
    """
    layer.release_feeds_token_bias = any(map(_is_token_bias_weight, values))
    if isinstance(layer, layers.MixedAttention) and not layer.built:
        memory_depth = np.shape(values.get(f"{layer.name}/v/kernel", (0,)))[0]
        depth = (None, None, layer.release_depth)
        layer.build(depth, (None, None, memory_depth or layer.release_depth))
    variables = variables_by_name(layer)
    check_shapes(variables, {name: np.shape(array) for name, array in values.items()})
    for name, variable in variables.items():
        variable.assign(values[name])


def check_shapes(variables, shapes):
    """Raises a `ValueError` unless variables and shapes match one to one.

    Args:
        variables: dict of variables by the release's names.
        shapes: dict of tuples by the release's names.

    Raises:
        ValueError: if a variable is missing, left over or of another shape; every one
            is named.
    """
    problems = [f"missing: {name}" for name in variables if name not in shapes]
    problems += [f"left over: {name}" for name in shapes if name not in variables]
    for name in variables.keys() & shapes.keys():
        expected, received = tuple(variables[name].shape), tuple(shapes[name])
        if expected != received:
            problems.append(f"shape: {name} is {expected}, received {received}")
    if problems:
        raise ValueError(
            "The values must match the variables one to one. Received:\n  "
            + "\n  ".join(sorted(problems))
        )


def read_variables(layer):
    """Returns all variables as arrays by the release's names, centroids included."""
    return {
        name: ops.convert_to_numpy(variable)
        for name, variable in variables_by_name(layer).items()
    }


def variables_by_name(layer):
    """Returns the Keras variables of a layer or model by the release's names.

    Weights of token biases are among them after `assign_variables` was given some.
    """
    if isinstance(layer, (RoutingTransformerCausalLM, RoutingTransformerSeq2SeqLM)):
        variables = _language_model_variables(layer)
    elif isinstance(layer, RoutingImageTransformer):
        variables = _image_model_variables(layer)
    elif isinstance(layer, layers.MixedAttention) and _is_of_the_release(layer):
        variables = _attention_variables(layer, layer.name)
    else:
        raise ValueError(
            "The bridge knows what the functions of this module build: "
            "`RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` and "
            "`RoutingImageTransformer` models, and built `MixedAttention` layers "
            "with the release's kinds of heads and `shared_head_projection=True`. "
            f"Received: {layer!r}"
        )
    if getattr(layer, "release_feeds_token_bias", False):
        return variables
    return {k: v for k, v in variables.items() if not _is_token_bias_weight(k)}


def _is_token_bias_weight(name):
    return name.endswith(f"/{TOKEN_BIAS_WEIGHT}")


def _is_of_the_release(layer):
    kinds = {type(group) for group in layer.head_groups}
    return layer.built and layer.shared_head_projection and kinds <= set(_GROUP_SCOPES)


def _head_groups(config):
    """The head groups of a call, in the order in which the release joins them."""
    counts = (
        (config["sparsity_cluster_num_heads"], _clustered_heads),
        (config["sparsity_cluster_strided_num_heads"], _cluster_strided_heads),
        (config["sparsity_strided_num_heads"], _strided_heads),
        (config["local_num_heads"], _local_heads),
    )
    return [make(config, number) for number, make in counts if number]


def _clustered_heads(config, num_heads):
    options = _shared(config, "sparsity_cluster_relative")
    options["share_query_key"] = config["share_qk"]
    if config["hash_items"]:
        return layers.HashedHeads(
            num_heads,
            num_buckets=config["sparsity_cluster_size"],
            attention_window=config["sparsity_cluster_attention_window"],
            name="hashed_heads",
            **options,
        )
    return layers.RoutedHeads(
        num_heads, name="routed_heads", **_clustering(config), **options
    )


def _cluster_strided_heads(config, num_heads):
    return layers.ClusterStridedHeads(
        num_heads,
        share_query_key=_CLUSTER_STRIDED["share_qk"],
        name="cluster_strided_heads",
        **_clustering({**config, **_CLUSTER_STRIDED}),
        **_shared(config, "sparsity_cluster_strided_relative"),
    )


def _strided_heads(config, num_heads):
    return layers.StridedHeads(
        num_heads,
        block_shape=config["query_shape"],
        name="strided_heads",
        **{**_shared(config, "sparsity_strided_relative"), "token_bias_weight": None},
    )


def _local_heads(config, num_heads):
    memory_block = config["query_shape"]
    if config.get("memory_length") is not None:
        memory_block = config["memory_query_shape"]
    pairs = list(zip(config["memory_flange"], memory_block, strict=True))
    if any(flange % length for flange, length in pairs):
        raise ValueError(
            "`memory_flange` must be a multiple of the block. Received: "
            f"memory_flange={config['memory_flange']!r} with blocks of {memory_block}"
        )
    return layers.LocalHeads(
        num_heads,
        block_shape=config["query_shape"],
        flange_blocks=[flange // length for flange, length in pairs],
        memory_block_shape=memory_block,
        name="local_heads",
        **_shared(config, "local_relative"),
    )


def _clustering(config):
    return {
        "num_clusters": config["sparsity_cluster_size"],
        "attention_window": config["sparsity_cluster_attention_window"],
        "decay": config["decay"],
        "commitment_weight": config["beta"],
        "ema": config["ema"],
    }


def _shared(config, relative):
    """The arguments that all kinds of heads have."""
    return {
        "max_relative_position": _limit(config, relative),
        "dropout": config.get("dropout_rate", 0.0),
        "token_bias_weight": (
            "trainable" if config["token_bias_wt_trainable"] else "fixed"
        ),
        "compatibility": layers.Compatibility.release(config["cache_padding_bias"]),
    }


def _limit(config, switch):
    return config["max_relative_position"] if config[switch] else None


def _per_head(config, name, heads):
    if not heads or config[name] % heads:
        raise ValueError(
            f"`{name}` must be a multiple of the number of heads. Received: "
            f"{name}={config[name]}, {heads} heads"
        )
    return config[name] // heads


def _check_attention(config):
    missing = [name for name in _REQUIRED if config.get(name) is None]
    clustered = config["sparsity_cluster_num_heads"]
    if clustered:
        sizes = ("sparsity_cluster_size", "sparsity_cluster_attention_window")
        missing += [name for name in sizes if not config.get(name)]
    if missing:
        raise ValueError(
            "`config` must hold the arguments of a release attention call. "
            f"Missing: {', '.join(missing)}"
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


def _language_model_variables(lm):
    variables, outside = {}, {}
    norms = [lm.backbone.final_norm]
    if isinstance(lm, RoutingTransformerSeq2SeqLM):
        variables |= _encoder_variables(lm.backbone)
        outside = _encoder_embedding_variables(lm.backbone)
        norms.insert(0, lm.backbone.encoder_final_norm)
    for layer in lm.backbone.embedding_layers:
        if isinstance(layer, layers.TokenEmbedding):
            variables["embeddings/embedding"] = layer.embeddings
        elif layer.name == "embedding_projection":
            variables |= _dense_variables(layer, "emb_dense")
    for index, block in enumerate(lm.backbone.blocks):
        variables |= _block_variables(block, f"decoder_layer_{index}/self_attention")
    for norm, suffix in zip(norms, ("", "_1"), strict=False):
        if norm is not None:
            variables |= _norm_variables(norm, f"layer_prepostprocess{suffix}")
    if lm.output_projection is not None:
        variables |= _dense_variables(lm.output_projection, "final_dense_1")
    variables |= _dense_variables(lm.logits_dense, "final_dense_2")
    inside = {f"{MODEL_SCOPE}/{name}": value for name, value in variables.items()}
    return {**outside, **inside}


def _encoder_variables(backbone):
    variables = {}
    for index, block in enumerate(backbone.encoder_blocks):
        variables |= _block_variables(block, f"encoder_layer_{index}/self_attention")
    return variables


def _encoder_embedding_variables(backbone):
    """The table of ids, which tensor2tensor looks up outside of the release's model."""
    scope = MODEL_SCOPE.partition("/")[0]
    return {
        f"{scope}/symbol_modality_{layer.vocabulary_size}_{layer.embedding_dim}"
        "/shared/weights_0": layer.embeddings
        for layer in backbone.encoder_embedding_layers
        if isinstance(layer, layers.TokenEmbedding)
    }


def _image_model_variables(model):
    table = model.embedding.channel_embedding.embeddings
    variables = {"rgb_target_emb_channel": table}
    positions = model.embedding.position_embedding
    if positions is not None:
        variables["pos_emb_0"] = positions.row_embeddings
        variables["pos_emb_1"] = positions.column_embeddings
    if model.class_embedding is not None:
        table = model.class_embedding.embeddings
        variables["class_conditional_embedding/embedding"] = table
    for index, block in enumerate(model.blocks):
        variables |= _block_variables(block, f"decoder_layer_{index}/self_attention")
    if model.final_norm is not None:
        variables |= _norm_variables(model.final_norm, "layer_prepostprocess")
    variables |= _dense_variables(model.logits_dense, "final_dense")
    return {f"{IMAGE_MODEL_SCOPE}/{name}": value for name, value in variables.items()}


def _block_variables(block, scope):
    variables = _attention_variables(block.attention, f"{scope}/self_attention")
    if block.cross_attention is not None:
        variables |= _attention_variables(
            block.cross_attention, f"{scope}/enc_dec_attention"
        )
    if block.feed_forward is not None:
        names = _FEED_FORWARD_NAMES[block.feed_forward.activation]
        for name, attribute in names.items():
            dense = getattr(block.feed_forward, attribute)
            variables |= _dense_variables(dense, f"{scope}/ffn/{name}")
    sides = {
        "pre": ("input", "layer_prepostprocess"),
        "post": ("output", "layer_postprocess"),
    }
    side, name = sides[block.norm_position]
    for part, suffix in zip(block.parts, ("", "_1", "_2"), strict=False):
        (norm,) = getattr(block, f"{part}_{side}").norms
        variables |= _norm_variables(norm, f"{scope}/{name}{suffix}")
    return variables


def _attention_variables(attention, scope):
    variables = {f"{scope}/q/kernel": attention.query_kernel}
    if attention.key_kernel is not None:
        variables[f"{scope}/k/kernel"] = attention.key_kernel
    variables[f"{scope}/v/kernel"] = attention.value_kernel
    for group in attention.head_groups:
        variables |= _group_variables(group, f"{scope}/attention_nd")
    variables[f"{scope}/attention_nd/dense/kernel"] = attention.head_kernel
    variables[f"{scope}/output_transform/kernel"] = attention.output_kernel
    return variables


def _group_variables(group, scope):
    group_scope = f"{scope}/{_GROUP_SCOPES[type(group)]}"
    variables = {}
    if isinstance(group, layers.HashedHeads):
        variables[f"{group_scope}/projection_tensors"] = group.projections
    kmeans = getattr(group, "kmeans", None)
    for name, attribute in _KMEANS_NAMES.items():
        if hasattr(kmeans, attribute):
            variables[f"{group_scope}/{name}"] = getattr(kmeans, attribute)
    relative = group.dot_product.relative_position
    if relative is not None:
        tables = (relative.key_embeddings, relative.value_embeddings)
        for kind, table in zip(("keys", "values"), tables, strict=True):
            variables[f"{group_scope}/relative_positions_{kind}/embeddings"] = table
    if group.token_bias_weight is not None:
        helper = group_scope.rpartition("/")[0]
        variables[f"{helper}/{TOKEN_BIAS_WEIGHT}"] = group.bias_weight
    return variables


def _dense_variables(dense, scope):
    variables = {f"{scope}/kernel": dense.kernel}
    if dense.bias is not None:
        variables[f"{scope}/bias"] = dense.bias
    return variables


def _norm_variables(norm, scope):
    return {
        f"{scope}/layer_norm/layer_norm_scale": norm.gamma,
        f"{scope}/layer_norm/layer_norm_bias": norm.beta,
    }

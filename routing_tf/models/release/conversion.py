"""Translating hyperparameters of the release to ours."""

from routing_tf.files import safe_loading
from routing_tf.layers.support.validation import is_integer
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.release.variable_names import HEAD_SCOPES
from routing_tf.settings.presets import BASE
from routing_tf.settings.presets import IMAGE_BASE

_HEADS = tuple(f"{kind}_num_heads" for kind in HEAD_SCOPES)
# The release's step letters of a sublayer's input and output -> `norm_position`.
_NORM_POSITIONS = {("none", "dan"): "post", ("n", "da"): "pre"}
# Settings of the release that no layer here reproduces, with their neutral values.
_NEUTRAL = {
    "norm_type": "layer",
    "norm_epsilon": 1e-6,
    "activation_dtype": "float32",
    "weight_dtype": "float32",
}
_NEUTRAL_IN_TRAINING = {
    "initializer": "uniform_unit_scaling",
    "optimizer_adafactor_beta1": 0.0,
    "optimizer_adafactor_clipping_threshold": 1.0,
    "optimizer_adafactor_decay_type": "pow",
    "optimizer_adafactor_memory_exponent": 0.8,
    "optimizer_adafactor_multiply_by_parameter_scale": True,
    "optimizer_adafactor_factored": True,
}


def read_hparams(hparams):
    """Returns hyperparameters as a dict, read from a file if they are its path."""
    hparams = hparams if isinstance(hparams, dict) else _read_file(hparams)
    _check_numbers(hparams)
    return hparams


def _read_file(hparams):
    try:
        found = safe_loading.read_json(hparams)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            "`hparams` must be a dict or the path of a JSON file. Received: "
            f"hparams={hparams!r}: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            "`hparams` must be a JSON object of names and values. Received: a "
            f"{type(found).__name__} in {str(hparams)!r}"
        )
    return found


def _check_numbers(hparams):
    """Refuses other values where the release has whole numbers, or a list of them."""
    usual = {**IMAGE_BASE, **BASE}
    for name, value in hparams.items():
        is_list = isinstance(usual.get(name), tuple)
        if not is_list and not is_integer(usual.get(name)):
            continue
        wanted = "a list of integers" if is_list else "an integer"
        if is_list != isinstance(value, (list, tuple)) or not all(
            map(is_integer, value if is_list else [value])
        ):
            raise ValueError(
                f"`{name}` must be {wanted}, as in the release's sets: "
                f"{usual[name]!r}, for example. Received: {name}={value!r}"
            )


def hyperparameters_from_release(hparams, faithful=False, **fields):
    """Translates a dict of the release's hyperparameters to `Hyperparameters`.

    Those of an image model have a `frame_height`. Missing ones have the values of
    `sparse_transformer_local` or `sparse_imagetransformer_base`; those that do not
    concern the model are ignored. `faithful` turns on all flaws of the release; the
    model then serves to reproduce the release's results, so unsupported settings of its
    training are ignored. `fields` are settings that the release takes from elsewhere,
    by our names: `vocabulary_size` (hard-wired to 98302 for texts), `num_channels` and
    `num_classes`.
    """
    is_image = "frame_height" in hparams
    hparams = {**(IMAGE_BASE if is_image else BASE), **hparams}
    _refuse_unsupported(hparams)
    trains = _training_is_supported(hparams)
    if not trains and not faithful:
        raise ValueError(
            "The optimizer, its settings and the initializer must be those of the "
            f"release's sets: {_NEUTRAL_IN_TRAINING}, optimizer adafactor or adam. "
            f"Received: {_received(hparams)}"
        )
    compatibility = None
    if faithful:
        shares_padding = hparams["cache_padding_bias"]
        compatibility = "exact_shared_padding" if shares_padding else "exact"
    image_fields = _image_fields(hparams, faithful) if is_image else {}
    return Hyperparameters(
        **{
            **_size_fields(hparams),
            **(image_fields or _text_fields(hparams, faithful)),
            **_head_fields(hparams),
            **_dropout_fields(hparams),
            **(_training_fields(hparams) if trains else {}),
            "compatibility": compatibility,
            **_with_length(fields, hparams, image_fields),
        }
    )


def _size_fields(hparams):
    heads = _num_heads(hparams)
    hidden = hparams["hidden_size"]
    feed_forward = hparams["ffn_layer"]
    if feed_forward not in ("geglu", "none"):
        feed_forward = "relu"
    return {
        "num_layers": hparams["num_decoder_layers"],
        "hidden_dim": hidden,
        "intermediate_dim": hparams["filter_size"],
        "feed_forward": feed_forward,
        "norm_position": _norm_position(hparams),
        "key_dim": (hparams["attention_key_channels"] or hidden) // heads,
        "value_dim": (hparams["attention_value_channels"] or hidden) // heads,
        "shared_head_projection": True,
        "project_shared_keys": True,
    }


def _text_fields(hparams, faithful):
    fields = {
        "vocabulary_size": 98302,
        "max_sequence_length": hparams["max_length"],
        "num_encoder_layers": hparams["num_encoder_layers"],
        "embedding_dim": hparams["embedding_dims"],
        "timing_signal": hparams["add_timing_signal"],
    }
    if hparams["num_encoder_layers"]:
        fields["max_input_length"] = hparams["max_length"]
        fields["max_sequence_length"] = hparams["max_target_length"]
    if faithful:
        fields["truncate_length"] = hparams["max_target_length"]
        if hparams["num_encoder_layers"]:
            fields["encoder_inputs"] = "embeddings"
            fields |= _memory_fields(hparams)
    return fields


def _memory_fields(hparams):
    (length,) = hparams["memory_query_shape"]
    (flange,) = hparams["memory_flange"]
    if flange % length:
        raise ValueError(
            "`memory_flange` must be a multiple of `memory_query_shape` with an "
            f"encoder. Received: memory_flange={hparams['memory_flange']!r}, "
            f"memory_query_shape={hparams['memory_query_shape']!r}"
        )
    return {"memory_block_length": length, "memory_flange_blocks": flange // length}


def _image_fields(hparams, faithful):
    return {
        "vocabulary_size": 256,
        "image_height": hparams["frame_height"],
        "image_width": hparams["frame_width"],
        "num_channels": hparams["num_channels"],
        "position_embeddings": hparams["add_positional_emb"],
        "channel_vocabulary_size": 256 if faithful else None,
    }


def _with_length(fields, hparams, image_fields):
    """Adds settings that depend on image channels: the release counts images."""
    if not image_fields:
        return fields
    sizes = {**image_fields, **fields}
    length = sizes["image_height"] * sizes["image_width"] * sizes["num_channels"]
    batch_tokens = hparams["batch_size"] * length
    return {"batch_tokens": batch_tokens, **fields, "max_sequence_length": length}


def _num_heads(hparams):
    return sum(hparams[name] for name in _HEADS)


def _head_fields(hparams):
    routed = hparams["sparsity_cluster_num_heads"]
    blocks = {"local_block_length": hparams["query_shape"][0]}
    if len(hparams["query_shape"]) > 1:
        blocks["local_block_width"] = hparams["query_shape"][1]
    return {
        **blocks,
        "num_local_heads": hparams["local_num_heads"],
        "local_flange_blocks": hparams["memory_flange"][0] // hparams["query_shape"][0],
        "local_relative_positions": hparams["local_relative"],
        "num_routed_heads": routed,
        "num_cluster_strided_heads": hparams["sparsity_cluster_strided_num_heads"],
        "num_strided_heads": hparams["sparsity_strided_num_heads"],
        "num_local_only_layers": hparams["sparsity_skip_first"] if routed else 0,
        "routing": "hashed" if hparams["hash_items"] else "expert_choice",
        "num_clusters": hparams["sparsity_cluster_size"] if routed else 1,
        "attention_window": (
            hparams["sparsity_cluster_attention_window"] if routed else 1
        ),
        "routed_relative_positions": hparams["sparsity_cluster_relative"],
        "cluster_strided_relative_positions": (
            hparams["sparsity_cluster_strided_relative"]
        ),
        "strided_relative_positions": hparams["sparsity_strided_relative"],
        "share_query_key": hparams["share_qk"],
        "ema": hparams["ema"],
        "centroid_decay": hparams["decay"],
        "commitment_weight": hparams["beta"],
        # 0 in the image sets, which have no relative positions.
        "max_relative_position": hparams["max_relative_position"] or 1,
    }


def _received(hparams):
    names = ("optimizer", *_NEUTRAL_IN_TRAINING)
    return {name: hparams[name] for name in names if name in hparams}


def _training_is_supported(hparams):
    return hparams["optimizer"] in ("adafactor", "adam") and all(
        hparams.get(name, neutral) == neutral
        for name, neutral in _NEUTRAL_IN_TRAINING.items()
    )


def _dropout_fields(hparams):
    return {
        "input_dropout": hparams["input_dropout"],
        "token_dropout": hparams["target_dropout"],
        "embedding_dropout": hparams["dropout"],
        "residual_dropout": hparams["layer_prepostprocess_dropout"],
        "attention_dropout": hparams["attention_dropout"],
        "feed_forward_dropout": hparams["relu_dropout"],
        "initializer_gain": hparams["initializer_gain"],
    }


def _training_fields(hparams):
    noam = hparams["learning_rate_schedule"] == "legacy"
    return {
        "optimizer": hparams["optimizer"],
        "learning_rate": hparams["learning_rate" if noam else "learning_rate_constant"],
        "learning_rate_schedule": "noam" if noam else hparams["learning_rate_schedule"],
        "warmup_steps": hparams["learning_rate_warmup_steps"],
        "adam_beta_1": hparams["optimizer_adam_beta1"],
        "adam_beta_2": hparams["optimizer_adam_beta2"],
        "adam_epsilon": hparams["optimizer_adam_epsilon"],
        "weight_decay": hparams["weight_decay"],
        "gradient_clip_norm": hparams["clip_grad_norm"] or 0.0,
        "batch_tokens": hparams["batch_size"],
    }


def _refuse_unsupported(hparams):
    for name, neutral in _NEUTRAL.items():
        if hparams.get(name, neutral) != neutral:
            raise ValueError(
                f"`{name}` must be {neutral!r} in the models of this package. "
                f"Received: {name}={hparams[name]!r}"
            )
    _check_blocks(hparams)
    heads = _num_heads(hparams)
    if not heads:
        raise ValueError(
            f"{' and '.join(f'`{name}`' for name in _HEADS)} must not all be zero. "
            f"Received: {[hparams[name] for name in _HEADS]}"
        )
    for name in ("hidden_size", "attention_key_channels", "attention_value_channels"):
        if hparams[name] % heads:
            raise ValueError(
                f"`{name}` must be a multiple of the number of heads. Received: "
                f"{name}={hparams[name]!r}, {heads} heads"
            )


def _check_blocks(hparams):
    query_shape, flange = hparams["query_shape"], hparams["memory_flange"]
    if not all(isinstance(shape, (list, tuple)) for shape in (query_shape, flange)):
        raise ValueError(
            "`query_shape` and `memory_flange` must be lists of integers. Received: "
            f"query_shape={query_shape!r}, memory_flange={flange!r}"
        )
    most_axes = 2 if "frame_height" in hparams else 1
    if not 1 <= len(query_shape) == len(flange) <= most_axes:
        raise ValueError(
            "`query_shape` and `memory_flange` must have one entry in a text model, "
            f"one or two in an image model. Received: query_shape={query_shape!r}, "
            f"memory_flange={flange!r}"
        )
    counts = {f // q for f, q in zip(flange, query_shape, strict=True)}
    rests = [f % q for f, q in zip(flange, query_shape, strict=True)]
    if any(rests) or len(counts) > 1:
        raise ValueError(
            "`memory_flange` must be a multiple of `query_shape`, the same one on each "
            f"axis. Received: memory_flange={flange!r}, query_shape={query_shape!r}"
        )


def _norm_position(hparams):
    before = hparams["layer_preprocess_sequence"] or "none"
    after = hparams["layer_postprocess_sequence"] or "none"
    if (before, after) not in _NORM_POSITIONS:
        raise ValueError(
            "`layer_preprocess_sequence` and `layer_postprocess_sequence` must be one "
            f"of {sorted(_NORM_POSITIONS)}. Received: {(before, after)}"
        )
    return _NORM_POSITIONS[before, after]

"""Presets as data: the release's hyperparameter sets by their own names, and ours."""

from routing_tf.layers.compatibility import Compatibility
from routing_tf.models.hyperparameters import Hyperparameters

# Hyperparameters of the release, by its names. What concerns neither the model nor
# its training is left out.
_BASE = {
    "max_length": 4096,
    "max_target_length": 4096,
    "batch_size": 4096,
    "num_encoder_layers": 0,
    "num_decoder_layers": 24,
    "hidden_size": 512,
    "embedding_dims": 512,
    "filter_size": 2048,
    "ffn_layer": "geglu",
    "attention_key_channels": 0,
    "attention_value_channels": 0,
    "local_num_heads": 8,
    "query_shape": (512,),
    "memory_query_shape": (512,),
    "memory_flange": (512,),
    "local_relative": True,
    "sparsity_cluster_num_heads": 0,
    "sparsity_cluster_size": 0,
    "sparsity_cluster_attention_window": 0,
    "sparsity_cluster_relative": True,
    "sparsity_cluster_strided_num_heads": 0,
    "sparsity_strided_num_heads": 0,
    "sparsity_skip_first": 0,
    "share_qk": True,
    "hash_items": False,
    "ema": True,
    "beta": 1e-4,
    "decay": 0.999,
    "max_relative_position": 1024,
    "add_timing_signal": False,
    "cache_padding_bias": False,
    "layer_preprocess_sequence": "none",
    "layer_postprocess_sequence": "dan",
    "norm_type": "layer",
    "norm_epsilon": 1e-6,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "relu_dropout": 0.0,
    "target_dropout": 0.0,
    "layer_prepostprocess_dropout": 0.1,
    "initializer": "uniform_unit_scaling",
    "initializer_gain": 0.2,
    "optimizer": "adafactor",
    "optimizer_adam_beta1": 0.85,
    "optimizer_adam_beta2": 0.997,
    "optimizer_adam_epsilon": 1e-6,
    "learning_rate": 0.1,
    "learning_rate_constant": 0.01,
    "learning_rate_schedule": "constant*rsqrt_normalized_decay",
    "learning_rate_decay_scheme": "none",
    "learning_rate_warmup_steps": 10000,
    "weight_decay": 0.0,
    "clip_grad_norm": 0.0,
}
_ENWIK8_8K = {
    **_BASE,
    "max_length": 8192,
    "batch_size": 8192,
    "hidden_size": 1024,
    "embedding_dims": 1024,
    "num_decoder_layers": 22,
    "filter_size": 3072,
    "query_shape": (256,),
    "memory_flange": (256,),
    "max_relative_position": 513,
    "attention_dropout": 0.4,
    "relu_dropout": 0.4,
}
_ENWIK8_12K = {
    **_ENWIK8_8K,
    "max_length": 12288,
    "batch_size": 12288,
    "query_shape": (128,),
    "memory_flange": (128,),
    "max_relative_position": 257,
}
_ENWIK8_CLUSTER = {
    "local_num_heads": 4,
    "sparsity_cluster_num_heads": 4,
    "num_decoder_layers": 12,
    "attention_dropout": 0.0,
    "relu_dropout": 0.0,
}
_WIKITEXT103_4K = {
    **_BASE,
    "hidden_size": 1024,
    "embedding_dims": 256,
    "filter_size": 3072,
    "local_num_heads": 16,
    "num_decoder_layers": 14,
    "query_shape": (256,),
    "memory_flange": (256,),
    "max_relative_position": 513,
    "attention_dropout": 0.4,
    "relu_dropout": 0.4,
    "dropout": 0.4,
    "target_dropout": 0.25,
    "weight_decay": 2e-5,
}
_WIKITEXT103_CLUSTER_4K = {
    **_WIKITEXT103_4K,
    "local_num_heads": 8,
    "sparsity_cluster_num_heads": 8,
    "sparsity_cluster_size": 8,
    "sparsity_cluster_attention_window": 512,
}
_PG19_CLUSTER_8K = {
    **_WIKITEXT103_4K,
    "max_length": 8192,
    "max_target_length": 8192,
    "batch_size": 8192,
    "hidden_size": 1032,
    "embedding_dims": 1032,
    "filter_size": 4096,
    "local_num_heads": 6,
    "sparsity_cluster_num_heads": 2,
    "sparsity_cluster_size": 16,
    "sparsity_cluster_attention_window": 512,
    "sparsity_skip_first": 21,
    "num_decoder_layers": 22,
    "attention_dropout": 0.0,
    "relu_dropout": 0.0,
    "dropout": 0.0,
    "target_dropout": 0.0,
    "weight_decay": 0.0,
}

# name -> (description, hyperparameters by the release's names)
RELEASE_SETS = {
    "sparse_transformer_local": (
        "The release's base set: local heads only, 24 layers, length 4096.",
        _BASE,
    ),
    "enwik8_local8k": (
        "Local heads on bytes, 22 layers, length 8192.",
        _ENWIK8_8K,
    ),
    "enwik8_local_cluster8k": (
        "Local and routed heads on bytes, 12 layers, length 8192.",
        {
            **_ENWIK8_8K,
            **_ENWIK8_CLUSTER,
            "sparsity_cluster_size": 16,
            "sparsity_cluster_attention_window": 512,
        },
    ),
    "enwik8_local12k": (
        "Local heads on bytes, 22 layers, length 12288.",
        _ENWIK8_12K,
    ),
    "enwik8_local_cluster12k": (
        "Local and routed heads on bytes, 12 layers, length 12288.",
        {
            **_ENWIK8_12K,
            **_ENWIK8_CLUSTER,
            "sparsity_cluster_size": 48,
            "sparsity_cluster_attention_window": 256,
        },
    ),
    "wikitext103_local4k": (
        "Local heads on words, 14 layers, length 4096.",
        _WIKITEXT103_4K,
    ),
    "wikitext103_local_cluster4k": (
        "Local and routed heads on words, 14 layers, length 4096.",
        _WIKITEXT103_CLUSTER_4K,
    ),
    "wikitext103_local_cluster1k": (
        "Local and routed heads on words, 20 layers, length 1024.",
        {
            **_WIKITEXT103_CLUSTER_4K,
            "max_length": 1024,
            "batch_size": 1024,
            "sparsity_cluster_size": 2,
            "num_decoder_layers": 20,
            "target_dropout": 0.2,
        },
    ),
    "pg19_local8k": (
        "Local-base of PG-19: local heads on subwords, 24 layers, length 8192.",
        {
            **_PG19_CLUSTER_8K,
            "local_num_heads": 8,
            "sparsity_cluster_num_heads": 0,
            "num_decoder_layers": 24,
        },
    ),
    "pg19_local_cluster8k": (
        "PG-19 as registered: routed heads in the last of 22 layers, length 8192.",
        _PG19_CLUSTER_8K,
    ),
    "pg19_rt_base": (
        "RT-base as trained for PG-19: ReLU feed-forward, routed heads in the last "
        "two of 22 layers, length 8192.",
        {
            **_PG19_CLUSTER_8K,
            "ffn_layer": "conv_hidden_relu",
            "sparsity_skip_first": 20,
            "memory_query_shape": (512,),
        },
    ),
}

# name -> (description, hyperparameters)
OWN_SETS = {
    "python_small": (
        "The main job: bytes of Python source on two cores in minutes.",
        Hyperparameters(
            vocabulary_size=258,
            max_sequence_length=2048,
            num_layers=4,
            hidden_dim=128,
            intermediate_dim=256,
            num_local_heads=2,
            local_block_length=16,
            num_routed_heads=2,
            num_local_only_layers=2,
            num_clusters=16,
            attention_window=128,
            max_relative_position=32,
            relative_key_stddev=2.0,
            scale_embeddings=True,
            learning_rate=4e-3,
            warmup_steps=80,
            gradient_clip_norm=1.0,
            batch_tokens=2048,
            train_steps=1000,
        ),
    ),
    "byte_tiny": (
        "A byte model of 39 thousand weights, for tests and first steps.",
        Hyperparameters(
            vocabulary_size=258,
            max_sequence_length=64,
            num_layers=2,
            hidden_dim=32,
            intermediate_dim=64,
            num_local_heads=2,
            local_block_length=16,
            num_routed_heads=2,
            num_clusters=4,
            attention_window=16,
            max_relative_position=16,
            learning_rate=3e-3,
            warmup_steps=10,
            batch_tokens=512,
            train_steps=100,
        ),
    ),
}

# The release's step letters of a sublayer's input and output -> `norm_position`.
_NORM_POSITIONS = {("none", "dan"): "post", ("n", "da"): "pre"}
# Settings of the release that no layer here reproduces yet, with their neutral value.
_NEUTRAL = {
    "num_encoder_layers": 0,
    "hash_items": False,
    "sparsity_cluster_strided_num_heads": 0,
    "sparsity_strided_num_heads": 0,
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


def preset_names():
    """Returns the names of all presets."""
    return [*OWN_SETS, *RELEASE_SETS]


def preset_description(name):
    """Returns one sentence about a preset."""
    return {**OWN_SETS, **RELEASE_SETS}[_known(name)][0]


def preset_hyperparameters(name):
    """Returns the `Hyperparameters` of a preset.

    The sets of the release have its shapes and its training, and sound behaviour
    where the release has flaws; `routing_tf.models.release` builds them with flaws.

    Args:
        name: name of a preset.

    Raises:
        ValueError: for an unknown name, with the list of valid ones.
    """
    if _known(name) in OWN_SETS:
        return OWN_SETS[name][1]
    return hyperparameters_from_release(RELEASE_SETS[name][1])


def hyperparameters_from_release(hparams, vocabulary_size=98302, faithful=False):
    """Translates hyperparameters of the release.

    Args:
        hparams: dict of hyperparameters by the release's names. Missing ones have the
            values of `sparse_transformer_local`; those that do not concern a
            decoder-only model are ignored.
        vocabulary_size: number of token ids. The release hard-wires the default.
        faithful: whether to turn on the flaws of the release, see `Compatibility`.
            The model is then for computing what the release computed, so settings of
            its training that are not supported are ignored.

    Returns:
        `Hyperparameters`.

    Raises:
        ValueError: for a setting that is not supported.
    """
    hparams = {**_BASE, **hparams}
    _refuse_unsupported(hparams)
    trains = _training_is_supported(hparams)
    if not trains and not faithful:
        raise ValueError(
            "The optimizer, its settings and the initializer must be those of the "
            f"release's sets: {_NEUTRAL_IN_TRAINING}, optimizer adafactor or adam. "
            f"Received: {_received(hparams)}"
        )
    (block,) = hparams["query_shape"]
    heads = hparams["local_num_heads"] + hparams["sparsity_cluster_num_heads"]
    hidden = hparams["hidden_size"]
    feed_forward = hparams["ffn_layer"]
    if feed_forward not in ("geglu", "none"):
        feed_forward = "relu"
    fields = {
        "vocabulary_size": vocabulary_size,
        "max_sequence_length": hparams["max_length"],
        "num_layers": hparams["num_decoder_layers"],
        "hidden_dim": hidden,
        "embedding_dim": hparams["embedding_dims"],
        "intermediate_dim": hparams["filter_size"],
        "feed_forward": feed_forward,
        "norm_position": _norm_position(hparams),
        "key_dim": (hparams["attention_key_channels"] or hidden) // heads,
        "value_dim": (hparams["attention_value_channels"] or hidden) // heads,
        "timing_signal": hparams["add_timing_signal"],
        "shared_head_projection": True,
        "project_shared_keys": True,
    }
    compatibility = Compatibility()
    if faithful:
        fields["truncate_length"] = hparams["max_target_length"]
        compatibility = Compatibility.release(hparams["cache_padding_bias"])
    return Hyperparameters(
        **fields,
        **_head_fields(hparams, block),
        **_dropout_fields(hparams),
        **(_training_fields(hparams) if trains else {}),
        compatibility=compatibility,
    )


def _head_fields(hparams, block):
    (flange,) = hparams["memory_flange"]
    routed = hparams["sparsity_cluster_num_heads"]
    return {
        "num_local_heads": hparams["local_num_heads"],
        "local_block_length": block,
        "local_flange_blocks": flange // block,
        "local_relative_positions": hparams["local_relative"],
        "num_routed_heads": routed,
        "num_local_only_layers": hparams["sparsity_skip_first"] if routed else 0,
        "num_clusters": hparams["sparsity_cluster_size"] if routed else 1,
        "attention_window": (
            hparams["sparsity_cluster_attention_window"] if routed else 1
        ),
        "routed_relative_positions": hparams["sparsity_cluster_relative"],
        "share_query_key": hparams["share_qk"],
        "ema": hparams["ema"],
        "centroid_decay": hparams["decay"],
        "commitment_weight": hparams["beta"],
        "max_relative_position": hparams["max_relative_position"],
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
                f"`{name}` must be {neutral!r} in a decoder-only model of this "
                f"package. Received: {name}={hparams[name]!r}"
            )
    for name in ("query_shape", "memory_flange"):
        if len(hparams[name]) != 1:
            raise ValueError(
                f"`{name}` must have one dimension in a text model. "
                f"Received: {name}={hparams[name]!r}"
            )
    if hparams["memory_flange"][0] % hparams["query_shape"][0]:
        raise ValueError(
            "`memory_flange` must be a multiple of `query_shape`. Received: "
            f"memory_flange={hparams['memory_flange']!r}, "
            f"query_shape={hparams['query_shape']!r}"
        )
    heads = hparams["local_num_heads"] + hparams["sparsity_cluster_num_heads"]
    if not heads:
        raise ValueError(
            "`local_num_heads` and `sparsity_cluster_num_heads` must not both be zero. "
            "Received: 0 and 0"
        )
    for name in ("hidden_size", "attention_key_channels", "attention_value_channels"):
        if hparams[name] % heads:
            raise ValueError(
                f"`{name}` must be a multiple of the number of heads. Received: "
                f"{name}={hparams[name]!r}, {heads} heads"
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


def _known(name):
    if name not in OWN_SETS and name not in RELEASE_SETS:
        raise ValueError(
            f"Unknown preset. Received: {name!r}. Valid names are: "
            f"{', '.join(preset_names())}"
        )
    return name

"""Presets as data: the release's hyperparameter sets by their own names, and ours."""

from routing_tf import untrusted
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
    "sparsity_cluster_strided_relative": True,
    "sparsity_strided_num_heads": 0,
    "sparsity_strided_relative": False,
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
    "input_dropout": 0.0,
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
_WIKITEXT103_CLUSTER_1K = {
    **_WIKITEXT103_CLUSTER_4K,
    "max_length": 1024,
    "batch_size": 1024,
    "sparsity_cluster_size": 2,
    "num_decoder_layers": 20,
    "target_dropout": 0.2,
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

_MEENA = {
    **_BASE,
    "max_length": 2048,
    "batch_size": 2048,
    "max_target_length": 512,
    "hidden_size": 1024,
    "embedding_dims": 256,
    "num_encoder_layers": 6,
    "num_decoder_layers": 15,
    "filter_size": 3072,
    "query_shape": (256,),
    "memory_query_shape": (256,),
    "memory_flange": (256,),
    "max_relative_position": 513,
    "attention_dropout": 0.1,
    "relu_dropout": 0.1,
}
_ARXIV = {
    **_MEENA,
    "max_length": 24000,
    "batch_size": 24000,
    "hidden_size": 256,
    "num_encoder_layers": 4,
    "num_decoder_layers": 8,
}
_PUBMED = {
    **_ARXIV,
    "max_length": 10240,
    "batch_size": 10240,
    "num_decoder_layers": 10,
    "query_shape": (128,),
    "memory_query_shape": (128,),
    "memory_flange": (128,),
    "max_relative_position": 257,
    "input_dropout": 0.1,
}
_TRANSLATE = {
    **_PG19_CLUSTER_8K,
    "max_length": 512,
    "max_target_length": 512,
    "batch_size": 8192,
    "hidden_size": 1024,
    "embedding_dims": 1024,
    "local_num_heads": 14,
    "num_encoder_layers": 6,
    "num_decoder_layers": 6,
    "sparsity_skip_first": 4,
    "sparsity_cluster_size": 1,
    "memory_query_shape": (256,),
    "layer_prepostprocess_dropout": 0.3,
    "optimizer": "adam",
    "optimizer_adam_beta1": 0.9,
    "optimizer_adam_beta2": 0.98,
    "optimizer_adam_epsilon": 1e-9,
    "learning_rate_schedule": "legacy",
    "learning_rate_decay_scheme": "noam",
    "learning_rate_warmup_steps": 4000,
}
# The number of channels is one of the problem there.
_IMAGE_BASE = {
    **_BASE,
    "batch_size": 1,
    "frame_height": 32,
    "frame_width": 32,
    "num_channels": 3,
    "add_positional_emb": True,
    "unconditional": True,
    "num_decoder_layers": 12,
    "hidden_size": 256,
    "filter_size": 256,
    "ffn_layer": "conv_hidden_relu",
    "query_shape": (128,),
    "memory_query_shape": (128,),
    "memory_flange": (128,),
    "max_relative_position": 0,
    "local_relative": False,
    "sparsity_cluster_relative": False,
    "sparsity_cluster_strided_relative": False,
    "layer_prepostprocess_dropout": 0.0,
    "cache_padding_bias": True,
}
_MNIST = {
    **_IMAGE_BASE,
    "frame_height": 28,
    "frame_width": 28,
    "num_channels": 1,
    "local_num_heads": 4,
    "hidden_size": 512,
    "filter_size": 2048,
    "layer_prepostprocess_dropout": 0.3,
    "query_shape": (56,),
    "memory_flange": (56,),
}
_MNIST_CLUSTER = {
    **_MNIST,
    "local_num_heads": 2,
    "sparsity_cluster_num_heads": 2,
    "sparsity_cluster_size": 7,
    "sparsity_cluster_attention_window": 112,
}
_CIFAR10 = {
    **_IMAGE_BASE,
    "hidden_size": 1024,
    "filter_size": 2048,
    "layer_prepostprocess_dropout": 0.3,
    "query_shape": (256,),
    "memory_flange": (256,),
}
_CIFAR10_CLUSTER = {
    **_CIFAR10,
    "local_num_heads": 4,
    "sparsity_cluster_num_heads": 4,
    "sparsity_cluster_size": 6,
    "sparsity_cluster_attention_window": 512,
}
_IMAGENET = {
    **_CIFAR10,
    "frame_height": 64,
    "frame_width": 64,
    "num_decoder_layers": 24,
    "local_num_heads": 16,
}
_IMAGENET_CLUSTER = {
    **_IMAGENET,
    "local_num_heads": 12,
    "sparsity_cluster_num_heads": 4,
    "sparsity_cluster_size": 8,
    "sparsity_cluster_attention_window": 2048,
}


def _translate(length):
    """The set of one length: a cluster for each 512 tokens."""
    return {
        **_TRANSLATE,
        "max_length": length,
        "max_target_length": length,
        "sparsity_cluster_size": length // 512,
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
        _WIKITEXT103_CLUSTER_1K,
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
    "wikitext103_local_hash4k": (
        "Local and hashed heads on words, 14 layers, length 4096.",
        {**_WIKITEXT103_CLUSTER_4K, "hash_items": True},
    ),
    "wikitext103_local_hash1k": (
        "Local and hashed heads on words, 20 layers, length 1024.",
        {**_WIKITEXT103_CLUSTER_1K, "hash_items": True},
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
    "meena_local2k": (
        "Dialogue: local heads, 6 + 15 layers, inputs of 2048, targets of 512.",
        _MEENA,
    ),
    "meena_local_cluster2k": (
        "Dialogue: local and routed heads, 6 + 15 layers, inputs of 2048, targets of "
        "512.",
        {
            **_MEENA,
            "embedding_dims": 512,
            "local_num_heads": 6,
            "sparsity_skip_first": 5,
            "sparsity_cluster_num_heads": 2,
            "sparsity_cluster_size": 8,
            "sparsity_cluster_attention_window": 512,
        },
    ),
    "arxiv_local24k": (
        "Summaries of papers: local heads, 4 + 8 layers, inputs of 24000.",
        _ARXIV,
    ),
    "arxiv_local_cluster24k": (
        "Summaries of papers: local and routed heads, 4 + 8 layers, inputs of 24064.",
        {
            **_ARXIV,
            "max_length": 24064,
            "batch_size": 24064,
            "hidden_size": 1024,
            "embedding_dims": 1024,
            "local_num_heads": 6,
            "sparsity_cluster_num_heads": 2,
            "sparsity_cluster_size": 47,
            "sparsity_cluster_attention_window": 512,
            "filter_size": 4096,
            "max_relative_position": 257,
        },
    ),
    "pubmed_local10k": (
        "Summaries of papers: local heads, 4 + 10 layers, inputs of 10240.",
        _PUBMED,
    ),
    "pubmed_local_cluster10k": (
        "Summaries of papers: local and routed heads, 4 + 10 layers, inputs of 10240.",
        {
            **_PUBMED,
            "local_num_heads": 4,
            "sparsity_cluster_num_heads": 4,
            "sparsity_cluster_size": 40,
            "sparsity_skip_first": 2,
            "sparsity_cluster_attention_window": 256,
        },
    ),
    **{
        f"translate_local_cluster{name}": (
            f"Translation: local and routed heads, 6 + 6 layers, length {length}.",
            _translate(length),
        )
        for name, length in (
            ("512", 512),
            ("1k", 1024),
            ("2k", 2048),
            ("4k", 4096),
            ("8k", 8192),
        )
    },
    "translate_local8k": (
        "Translation: local heads, 6 + 6 layers, length 8192.",
        {
            **_translate(8192),
            "share_qk": False,
            "local_num_heads": 16,
            "sparsity_cluster_num_heads": 0,
        },
    ),
    "sparse_imagetransformer_base": (
        "The release's base set of images: local heads, 12 layers, 32 x 32 x 3.",
        _IMAGE_BASE,
    ),
    "sparse_imagetransformer_local2d": (
        "Local heads in blocks of 16 x 16 pixels, 12 layers, 32 x 32 x 3.",
        {
            **_IMAGE_BASE,
            "query_shape": (16, 48),
            "memory_query_shape": (16, 48),
            "memory_flange": (16, 48),
        },
    ),
    "mnist_local1d": ("Local heads, 12 layers, 28 x 28.", _MNIST),
    "mnist_full": (
        "Full attention, 12 layers, 28 x 28; it fails to build in the release.",
        {**_MNIST, "query_shape": (784,), "memory_flange": (0,)},
    ),
    "mnist_cluster_local": (
        "Local and routed heads, 12 layers, 28 x 28.",
        _MNIST_CLUSTER,
    ),
    "mnist_local_cluster_strided": (
        "Local, routed and cluster-strided heads, 12 layers, 28 x 28.",
        {
            **_MNIST_CLUSTER,
            "local_num_heads": 4,
            "sparsity_cluster_strided_num_heads": 2,
        },
    ),
    "cifar10_local1d": ("Local heads, 12 layers, 32 x 32 x 3.", _CIFAR10),
    "cifar10_full": (
        "Full attention, 12 layers, 32 x 32 x 3.",
        {**_CIFAR10, "query_shape": (3072,), "memory_flange": (0,)},
    ),
    "cifar10_local_cluster": (
        "Local and routed heads, 12 layers, 32 x 32 x 3.",
        _CIFAR10_CLUSTER,
    ),
    "cifar10_local_cluster_strided": (
        "Local, routed and cluster-strided heads, 12 layers, 32 x 32 x 3.",
        {
            **_CIFAR10_CLUSTER,
            "sparsity_cluster_num_heads": 2,
            "sparsity_cluster_strided_num_heads": 2,
        },
    ),
    "imagenet_local1d": ("Local heads, 24 layers, 64 x 64 x 3.", _IMAGENET),
    "imagenet_full": (
        "Full attention, 24 layers, 64 x 64 x 3; it fails to build in the release.",
        {**_IMAGENET, "query_shape": (12288,), "memory_flange": (0,)},
    ),
    "imagenet_local_cluster": (
        "Local and routed heads, 24 layers, 64 x 64 x 3.",
        _IMAGENET_CLUSTER,
    ),
    "imagenet_local_cluster_strided": (
        "Local, routed and cluster-strided heads, 24 layers, 64 x 64 x 3.",
        {
            **_IMAGENET_CLUSTER,
            "local_num_heads": 6,
            "sparsity_cluster_num_heads": 5,
            "sparsity_cluster_strided_num_heads": 5,
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
            num_routed_heads=4,
            key_dim=32,
            num_local_only_layers=2,
            num_clusters=16,
            attention_window=64,
            routing="token_choice",
            routed_key_shift=1,
            balance_rate=0.003,
            max_relative_position=32,
            relative_key_stddev=2.0,
            scale_embeddings=True,
            learning_rate=4e-3,
            warmup_steps=80,
            gradient_clip_norm=1.0,
            batch_tokens=2048,
            train_steps=900,
        ),
    ),
    "digits_small": (
        "Handwritten digits of 8 x 8 pixels, by their class, on two cores in a minute.",
        Hyperparameters(
            vocabulary_size=17,
            max_sequence_length=64,
            image_height=8,
            image_width=8,
            num_classes=10,
            num_layers=3,
            hidden_dim=96,
            intermediate_dim=192,
            num_local_heads=2,
            local_block_length=16,
            num_routed_heads=2,
            num_clusters=4,
            attention_window=16,
            routing="token_choice",
            max_relative_position=32,
            learning_rate=2e-3,
            warmup_steps=50,
            gradient_clip_norm=1.0,
            batch_tokens=2048,
            train_steps=500,
        ),
    ),
    "pairs_small": (
        "Pairs of short texts as bytes, with an encoder, on two cores in minutes.",
        Hyperparameters(
            vocabulary_size=258,
            max_sequence_length=256,
            max_input_length=256,
            num_encoder_layers=2,
            num_layers=2,
            hidden_dim=128,
            intermediate_dim=256,
            num_local_heads=2,
            local_block_length=32,
            num_routed_heads=2,
            num_clusters=4,
            attention_window=64,
            routing="token_choice",
            max_relative_position=32,
            scale_embeddings=True,
            learning_rate=2e-3,
            warmup_steps=80,
            gradient_clip_norm=1.0,
            batch_tokens=4096,
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
            routing="token_choice",
            routed_key_shift=1,
            max_relative_position=16,
            learning_rate=3e-3,
            warmup_steps=10,
            batch_tokens=512,
            train_steps=100,
        ),
    ),
}

_HEADS = (
    "local_num_heads",
    "sparsity_cluster_num_heads",
    "sparsity_cluster_strided_num_heads",
    "sparsity_strided_num_heads",
)
# The release's step letters of a sublayer's input and output -> `norm_position`.
_NORM_POSITIONS = {("none", "dan"): "post", ("n", "da"): "pre"}
# Settings of the release that no layer here reproduces yet, with their neutral value.
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


def preset_names(kind=None):
    """Returns the names of presets.

    Args:
        kind: `"text"`, `"seq2seq"` or `"image"`, see `Hyperparameters.kind`; None (the
            default) for all.
    """
    names = [*OWN_SETS, *RELEASE_SETS]
    if kind is None:
        return names
    return [name for name in names if preset_hyperparameters(name).kind == kind]


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


def read_hparams(hparams):
    """Returns hyperparameters as a dict; reads those that are the path of a file.

    Raises:
        ValueError: if there is no such file, or no JSON object in it.
    """
    if isinstance(hparams, dict):
        return hparams
    try:
        found = untrusted.read_json(hparams)
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


def hyperparameters_from_release(hparams, faithful=False, **fields):
    """Translates hyperparameters of the release.

    Args:
        hparams: dict of hyperparameters by the release's names; those of an image
            model have a `frame_height`. Missing ones have the values of
            `sparse_transformer_local` or `sparse_imagetransformer_base`; those that do
            not concern the model are ignored.
        faithful: whether to turn on the flaws of the release, see `Compatibility`.
            The model is then for computing what the release computed, so settings of
            its training that are not supported are ignored.
        **fields: settings that the release takes from elsewhere, by our names:
            `vocabulary_size` (hard-wired to 98302 for texts), `num_channels`,
            `num_classes`.

    Returns:
        `Hyperparameters`.

    Raises:
        ValueError: for a setting that is not supported.
    """
    is_image = "frame_height" in hparams
    hparams = {**(_IMAGE_BASE if is_image else _BASE), **hparams}
    _refuse_unsupported(hparams)
    trains = _training_is_supported(hparams)
    if not trains and not faithful:
        raise ValueError(
            "The optimizer, its settings and the initializer must be those of the "
            f"release's sets: {_NEUTRAL_IN_TRAINING}, optimizer adafactor or adam. "
            f"Received: {_received(hparams)}"
        )
    compatibility = Compatibility()
    if faithful:
        compatibility = Compatibility.release(hparams["cache_padding_bias"])
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
    """Adds what depends on the channels of an image: the release counts images."""
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
        # 0 in the image sets, where nothing is relative.
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


def _known(name):
    if name not in OWN_SETS and name not in RELEASE_SETS:
        raise ValueError(
            f"Unknown preset. Received: {name!r}. Valid names are: "
            f"{', '.join(preset_names())}"
        )
    return name

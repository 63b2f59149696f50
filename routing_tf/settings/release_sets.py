"""The hyperparameter sets of the release, by its own names."""

# Hyperparameters of the release, by its names, except those that concern neither the
# model nor its training.
BASE = {
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


def _heads(local, routed, clusters, window):
    """Local and routed heads, with these numbers of clusters and tokens in each."""
    return {
        "local_num_heads": local,
        "sparsity_cluster_num_heads": routed,
        "sparsity_cluster_size": clusters,
        "sparsity_cluster_attention_window": window,
    }


def _length(tokens):
    return {"max_length": tokens, "batch_size": tokens}


def _blocks(*lengths):
    return {"query_shape": lengths, "memory_flange": lengths}


_ENWIK8_8K = {
    **BASE,
    **_length(8192),
    **_blocks(256),
    "hidden_size": 1024,
    "embedding_dims": 1024,
    "num_decoder_layers": 22,
    "filter_size": 3072,
    "max_relative_position": 513,
    "attention_dropout": 0.4,
    "relu_dropout": 0.4,
}
_ENWIK8_12K = {
    **_ENWIK8_8K,
    **_length(12288),
    **_blocks(128),
    "max_relative_position": 257,
}
_ENWIK8_CLUSTER = {
    "num_decoder_layers": 12,
    "attention_dropout": 0.0,
    "relu_dropout": 0.0,
}
_WIKITEXT103_4K = {
    **BASE,
    "hidden_size": 1024,
    "embedding_dims": 256,
    "filter_size": 3072,
    "local_num_heads": 16,
    "num_decoder_layers": 14,
    **_blocks(256),
    "max_relative_position": 513,
    "attention_dropout": 0.4,
    "relu_dropout": 0.4,
    "dropout": 0.4,
    "target_dropout": 0.25,
    "weight_decay": 2e-5,
}
_WIKITEXT103_CLUSTER_4K = {
    **_WIKITEXT103_4K,
    **_heads(local=8, routed=8, clusters=8, window=512),
}
_WIKITEXT103_CLUSTER_1K = {
    **_WIKITEXT103_CLUSTER_4K,
    **_length(1024),
    "sparsity_cluster_size": 2,
    "num_decoder_layers": 20,
    "target_dropout": 0.2,
}
_PG19_CLUSTER_8K = {
    **_WIKITEXT103_4K,
    **_length(8192),
    "max_target_length": 8192,
    "hidden_size": 1032,
    "embedding_dims": 1032,
    "filter_size": 4096,
    **_heads(local=6, routed=2, clusters=16, window=512),
    "sparsity_skip_first": 21,
    "num_decoder_layers": 22,
    "attention_dropout": 0.0,
    "relu_dropout": 0.0,
    "dropout": 0.0,
    "target_dropout": 0.0,
    "weight_decay": 0.0,
}
_MEENA = {
    **BASE,
    **_length(2048),
    "max_target_length": 512,
    "hidden_size": 1024,
    "embedding_dims": 256,
    "num_encoder_layers": 6,
    "num_decoder_layers": 15,
    "filter_size": 3072,
    **_blocks(256),
    "memory_query_shape": (256,),
    "max_relative_position": 513,
    "attention_dropout": 0.1,
    "relu_dropout": 0.1,
}
_ARXIV = {
    **_MEENA,
    **_length(24000),
    "hidden_size": 256,
    "num_encoder_layers": 4,
    "num_decoder_layers": 8,
}
_PUBMED = {
    **_ARXIV,
    **_length(10240),
    "num_decoder_layers": 10,
    **_blocks(128),
    "memory_query_shape": (128,),
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


# There, the problem gives the number of channels.
IMAGE_BASE = {
    **BASE,
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
    **_blocks(128),
    "memory_query_shape": (128,),
    "max_relative_position": 0,
    "local_relative": False,
    "sparsity_cluster_relative": False,
    "sparsity_cluster_strided_relative": False,
    "layer_prepostprocess_dropout": 0.0,
    "cache_padding_bias": True,
}
_MNIST = {
    **IMAGE_BASE,
    "frame_height": 28,
    "frame_width": 28,
    "num_channels": 1,
    "local_num_heads": 4,
    "hidden_size": 512,
    "filter_size": 2048,
    "layer_prepostprocess_dropout": 0.3,
    **_blocks(56),
}
_MNIST_CLUSTER = {**_MNIST, **_heads(local=2, routed=2, clusters=7, window=112)}
_CIFAR10 = {
    **IMAGE_BASE,
    "hidden_size": 1024,
    "filter_size": 2048,
    "layer_prepostprocess_dropout": 0.3,
    **_blocks(256),
}
_CIFAR10_CLUSTER = {**_CIFAR10, **_heads(local=4, routed=4, clusters=6, window=512)}
_IMAGENET = {
    **_CIFAR10,
    "frame_height": 64,
    "frame_width": 64,
    "num_decoder_layers": 24,
    "local_num_heads": 16,
}
_IMAGENET_CLUSTER = {**_IMAGENET, **_heads(local=12, routed=4, clusters=8, window=2048)}


_TRANSLATE_LENGTHS = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192}


def _translate(length):
    """The set of one length: a cluster for each 512 tokens."""
    lengths = dict.fromkeys(("max_length", "max_target_length"), length)
    return {**_TRANSLATE, **lengths, "sparsity_cluster_size": length // 512}


# name -> (description, hyperparameters by the release's names)
RELEASE_SETS = {
    "sparse_transformer_local": (
        "The release's base set: local heads only, 24 layers, length 4096.",
        BASE,
    ),
    "enwik8_local8k": ("Local heads on bytes, 22 layers, length 8192.", _ENWIK8_8K),
    "enwik8_local_cluster8k": (
        "Local and routed heads on bytes, 12 layers, length 8192.",
        {
            **_ENWIK8_8K,
            **_ENWIK8_CLUSTER,
            **_heads(local=4, routed=4, clusters=16, window=512),
        },
    ),
    "enwik8_local12k": ("Local heads on bytes, 22 layers, length 12288.", _ENWIK8_12K),
    "enwik8_local_cluster12k": (
        "Local and routed heads on bytes, 12 layers, length 12288.",
        {
            **_ENWIK8_12K,
            **_ENWIK8_CLUSTER,
            **_heads(local=4, routed=4, clusters=48, window=256),
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
            **_heads(local=6, routed=2, clusters=8, window=512),
            "sparsity_skip_first": 5,
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
            **_length(24064),
            "hidden_size": 1024,
            "embedding_dims": 1024,
            **_heads(local=6, routed=2, clusters=47, window=512),
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
            **_heads(local=4, routed=4, clusters=40, window=256),
            "sparsity_skip_first": 2,
        },
    ),
    **{
        f"translate_local_cluster{name}": (
            f"Translation: local and routed heads, 6 + 6 layers, length {length}.",
            _translate(length),
        )
        for name, length in _TRANSLATE_LENGTHS.items()
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
        IMAGE_BASE,
    ),
    "sparse_imagetransformer_local2d": (
        "Local heads in blocks of 16 x 16 pixels, 12 layers, 32 x 32 x 3.",
        {**IMAGE_BASE, **_blocks(16, 48), "memory_query_shape": (16, 48)},
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

"""Presets as data: our own, those of other papers, and the sets of the release.

`release_sets.json` has the sets of the release by its own names, except hyperparameters
that concern neither the model nor its training. Each has those of the set that it is
`"like"`, except where it has its own.
"""

import json
import pathlib

# name -> (description, hyperparameters)
OWN_SETS = {
    "python_small": (
        "The main job: bytes of Python source on two cores in minutes.",
        dict(
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
            routed_relative_positions=False,
            balance_rate=0.003,
            max_relative_position=32,
            relative_key_stddev=2.0,
            scale_embeddings=True,
            optimizer="muon",
            learning_rate=5.5e-3,
            warmup_steps=80,
            gradient_clip_norm=1.0,
            batch_tokens=2048,
            train_steps=900,
        ),
    ),
    "digits_small": (
        "Handwritten digits of 8 x 8 pixels, by their class, on two cores in a minute.",
        dict(
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
    "images_small": (
        "Small images of your own, by their class, on two cores in minutes.",
        dict(
            vocabulary_size=256,
            max_sequence_length=32 * 32 * 3,
            image_height=32,
            image_width=32,
            num_channels=3,
            num_classes=10,
            coordinate_embeddings=True,
            num_layers=4,
            hidden_dim=128,
            intermediate_dim=256,
            num_local_heads=2,
            local_block_length=128,
            num_routed_heads=2,
            num_clusters=8,
            attention_window=96,
            routing="token_choice",
            routed_key_shift=1,
            local_key_shift=1,
            max_relative_position=32,
            optimizer="muon",
            learning_rate=5e-3,
            warmup_steps=50,
            gradient_clip_norm=1.0,
            batch_tokens=3072,
            train_steps=600,
        ),
    ),
    "pairs_small": (
        "Pairs of short texts as bytes, with an encoder, on two cores in minutes.",
        dict(
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
        dict(
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

# Of Child et al. (2019), with the training of the paper. It leaves open the learning
# rates of text and ImageNet, all batch sizes, and the arrangement of heads for images.
# Here, learning rates are those of CIFAR-10, and batches have one or two sequences for
# each of its GPUs. Heads of images alternate, which is the paper's first choice and
# that of OpenAI's later code (`distribution_augmentation`); that code also has the
# stride of CIFAR-10, one row of an image.
_SPARSE_TRANSFORMER = {
    "num_local_heads": 0,
    "num_routed_heads": 0,
    "coordinate_embeddings": True,
    "feed_forward": "sigmoid_gelu",
    "attention_bias": True,
    "initializer": "fan_in_normal",
    "initializer_gain": 0.125,
    "scale_residual_initializer": True,
    "drops_inputs": False,
    "remat": True,
    "optimizer": "adamw",
    "adam_beta_2": 0.999,
    "adam_epsilon": 1e-8,
    "learning_rate": 0.00035,
    "learning_rate_schedule": "constant*linear_warmup*cosine_decay",
    "warmup_steps": 5000,
    "weight_decay": 0.01,
    "gradient_clip_norm": 1.0,
}

SPARSE_TRANSFORMER_SETS = {
    "sparse_transformer_cifar10": (
        "Sparse Transformer of Child et al.: strided, CIFAR-10, 59 million weights.",
        dict(
            **_SPARSE_TRANSFORMER,
            vocabulary_size=256,
            max_sequence_length=32 * 32 * 3,
            image_height=32,
            image_width=32,
            num_channels=3,
            num_layers=128,
            hidden_dim=256,
            # Half of the usual size.
            intermediate_dim=512,
            key_dim=64,
            value_dim=128,
            num_factorized_heads=2,
            local_block_length=96,
            residual_dropout=0.25,
            batch_tokens=16 * 32 * 32 * 3,
            # 120 epochs of 48,000 images.
            train_steps=360_000,
        ),
    ),
    "sparse_transformer_enwik8": (
        "Sparse Transformer of Child et al.: fixed, enwik8, 95 million weights.",
        dict(
            **_SPARSE_TRANSFORMER,
            vocabulary_size=258,
            max_sequence_length=12288,
            num_layers=30,
            hidden_dim=512,
            intermediate_dim=2048,
            num_factorized_heads=8,
            factorized_pattern="fixed",
            factorized_arrangement="merged",
            local_block_length=128,
            num_summary_columns=32,
            # Preferable with several heads (section 4.3).
            distinct_summaries=True,
            residual_dropout=0.4,
            batch_tokens=8 * 12288,
            # 80 epochs of 90 million bytes.
            train_steps=73_242,
        ),
    ),
    "sparse_transformer_imagenet64": (
        "Sparse Transformer of Child et al.: strided, ImageNet 64 x 64, 152 million "
        "weights.",
        dict(
            **_SPARSE_TRANSFORMER,
            vocabulary_size=256,
            max_sequence_length=64 * 64 * 3,
            image_height=64,
            image_width=64,
            num_channels=3,
            num_layers=48,
            hidden_dim=512,
            intermediate_dim=2048,
            num_factorized_heads=16,
            local_block_length=128,
            residual_dropout=0.01,
            batch_tokens=64 * 64 * 64 * 3,
            # 70 epochs of 1,281,149 images.
            train_steps=1_401_257,
        ),
    ),
}


def _release_sets():
    """Reads a description and the hyperparameters, by the release's names, by name."""
    path = pathlib.Path(__file__).with_name("release_sets.json")
    sets = {}
    for name, own in json.loads(path.read_text("utf-8")).items():
        changes = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in own["hyperparameters"].items()
        }
        _, values = sets.get(own.get("like"), (None, {}))
        sets[name] = own["description"], {**values, **changes}
    return sets


RELEASE_SETS = _release_sets()
_, BASE = RELEASE_SETS["sparse_transformer_local"]
# In the release, the problem gives the number of channels.
_, IMAGE_BASE = RELEASE_SETS["sparse_imagetransformer_base"]

# The presets of hyperparameters; those of the release have its own names for them.
SETS = {**OWN_SETS, **SPARSE_TRANSFORMER_SETS}
#: Descriptions of all presets, by name.
DESCRIPTIONS = {name: own[0] for name, own in {**SETS, **RELEASE_SETS}.items()}

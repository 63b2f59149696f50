"""Presets as data: our own, those of other papers, and the sets of the release."""

from routing_tf.files.misspelt import did_you_mean
from routing_tf.models import bridge
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.sparse_transformer_sets import SPARSE_TRANSFORMER_SETS

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
    "images_small": (
        "Small images of your own, by their class, on two cores in minutes.",
        Hyperparameters(
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

# The presets that are `Hyperparameters`; those of the release have its own names.
SETS = {**OWN_SETS, **SPARSE_TRANSFORMER_SETS}


def preset_names(kind=None):
    """Returns the names of presets.

    Args:
        kind: `"text"`, `"seq2seq"` or `"image"`, see `Hyperparameters.kind`; None (the
            default) for all.
    """
    names = [*SETS, *bridge.release().sets]
    if kind is None:
        return names
    return [name for name in names if preset_hyperparameters(name).kind == kind]


def preset_description(name):
    """Returns one sentence about a preset."""
    return {**SETS, **bridge.release().sets}[_known(name)][0]


def preset_hyperparameters(name):
    """Returns the `Hyperparameters` of a preset.

    The sets of the release have its shapes and its training, but none of its flaws;
    `routing_tf.models.release` builds them with flaws.

    Args:
        name: name of a preset.

    Raises:
        ValueError: for an unknown name, with the list of valid ones.
    """
    if _known(name) in SETS:
        return SETS[name][1]
    release = bridge.release()
    return release.hyperparameters_of(release.sets[name][1])


def _known(name):
    if name not in SETS and name not in bridge.release().sets:
        raise ValueError(
            f"Unknown preset. Received: {name!r}."
            f"{did_you_mean(name, preset_names())} Valid names are: "
            f"{', '.join(preset_names())}"
        )
    return name

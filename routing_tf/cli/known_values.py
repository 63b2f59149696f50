"""What values of hyperparameters can be, as text: commands refuse others at once.

Which values go together is told later, by the hyperparameters themselves.
"""

import math
import sys

from routing_tf.files.misspelt import did_you_mean

_SWITCH = ("true", "false", "1", "0")


def _number(convert, least=None, below=math.inf, words=()):
    """Returns a function that tells whether a text is a number in a range or a word."""

    def is_valid(text):
        if text.lower() in words:
            return True
        try:
            number = convert(text)
        except ValueError:
            return False
        return least is None or least <= number < below

    return is_valid


# The rule, a function that tells whether a text keeps it, and for which names.
RULES = (
    (
        "a positive integer",
        _number(int, 1),
        (
            "num_layers",
            "hidden_dim",
            "intermediate_dim",
            "max_sequence_length",
            "max_input_length",
            "num_channels",
            "local_block_length",
            "local_dilation",
            "num_summary_columns",
            "num_clusters",
            "attention_window",
            "clusters_per_query",
            "max_relative_position",
            "train_steps",
            "batch_tokens",
            "warmup_steps",
        ),
    ),
    (
        "a positive integer or none",
        _number(int, 1, words=("none",)),
        (
            "embedding_dim",
            "key_dim",
            "value_dim",
            "truncate_length",
            "memory_block_length",
            "image_height",
            "image_width",
            "num_classes",
            "channel_vocabulary_size",
            "local_block_width",
            "num_key_value_heads",
            "prefix_block_size",
            "revive_centroids_after",
        ),
    ),
    (
        "an integer of at least 0",
        _number(int, 0),
        (
            "num_encoder_layers",
            "num_local_heads",
            "num_routed_heads",
            "num_cluster_strided_heads",
            "num_strided_heads",
            "num_factorized_heads",
            "num_local_only_layers",
            "local_flange_blocks",
            "exploring_queries",
        ),
    ),
    (
        "an integer of at least 0 or none",
        _number(int, 0, words=("none",)),
        ("memory_flange_blocks",),
    ),
    ("0 or 1", _number(int, 0, 2), ("routed_key_shift", "local_key_shift")),
    (
        "a finite number of at least 0",
        _number(float, 0),
        (
            "balance_rate",
            "anchor_weight",
            "commitment_weight",
            "relative_key_stddev",
            "initializer_gain",
            "learning_rate",
            "weight_decay",
            "gradient_clip_norm",
        ),
    ),
    (
        "a number of at least 0 and less than 1",
        _number(float, 0, 1),
        (
            "input_dropout",
            "token_dropout",
            "embedding_dropout",
            "residual_dropout",
            "attention_dropout",
            "feed_forward_dropout",
        ),
    ),
    (
        "a number of at least 0 or none",
        _number(float, 0, words=("none",)),
        ("routed_relative_key_stddev",),
    ),
    (
        "a positive number or none",
        _number(float, math.ulp(0.0), words=("none",)),
        ("logit_soft_cap",),
    ),
    (
        "a number from 1.001 to 2, learned or none",
        _number(float, 1.001, math.nextafter(2, 3), words=("learned", "none")),
        ("entmax_alpha",),
    ),
    (
        "a number",
        _number(float),
        ("centroid_decay", "adam_beta_1", "adam_beta_2", "adam_epsilon"),
    ),
    (
        "true or false",
        lambda text: text.lower() in _SWITCH,
        (
            "scale_embeddings",
            "routed_relative_positions",
            "local_relative_positions",
            "cluster_strided_relative_positions",
            "strided_relative_positions",
            "position_embeddings",
            "coordinate_embeddings",
            "timing_signal",
            "restart_positions",
            "rotary_positions",
            "share_query_key",
            "use_gate",
            "qk_norm",
            "attention_bias",
            "sparse_projections",
            "shared_head_projection",
            "project_shared_keys",
            "distinct_summaries",
            "ema",
            "scale_residual_initializer",
            "drops_inputs",
            "remat",
            "remat_feed_forward",
        ),
    ),
    (
        "true, false or weights",
        lambda text: text == "weights" or text.lower() in _SWITCH,
        ("remat_attention",),
    ),
)
OF_PATTERNS = ("routing", "routed_heads", "encoder_routing")
# What users can register names for.
REGISTERED = (*OF_PATTERNS, "feed_forward")
CHOICES = {
    "feed_forward": (
        *("geglu", "relu", "sigmoid_gelu", "none"),
        *("mixture_of_experts", "product_key_memory", "sparse_feed_forward"),
    ),
    "norm_position": ("pre", "post"),
    "encoder_inputs": ("tokens", "embeddings"),
    "factorized_pattern": ("strided", "fixed"),
    "factorized_arrangement": ("interleaved", "merged", "separate"),
    "query_cluster": ("query", "key"),
    "routing_scope": ("full", "prefix"),
    "centroid_initialization": ("normal", "tokens"),
    "initializer": ("unit_scaling", "fan_in_normal"),
    "attention_implementation": ("plain", "auto", "cudnn", "splash", "xla"),
    "optimizer": ("adafactor", "adam", "adamw", "muon"),
}
# Heads of `OF_PATTERNS`.
PATTERNS = (
    "expert_choice",
    "token_choice",
    "expert_threshold",
    "hashed",
    "random",
    "full",
    "axial",
    "bigbird",
    "block_pair",
    "block_top_k",
    "clustered_queries",
    "compressed",
    "etc",
    "fixed",
    "global_tokens",
    "indexed",
    "induced",
    "linear",
    "linformer",
    "long_short",
    "longformer",
    "luna",
    "native_sparse",
    "nystrom",
    "performer",
    "random_blocks",
    "random_features",
    "random_synthesizer",
    "reformer",
    "sinkhorn",
    "sliding",
    "strided",
    "synthesizer",
)


def check(flag, name, value):
    """Raises a `ValueError` if a hyperparameter can never have a value.

    Args:
        flag: name of the flag, for the message.
        name: name of a hyperparameter.
        value: what the flag says of it, a string.
    """
    for rule, is_valid, names in RULES:
        if name in names and not is_valid(value):
            raise ValueError(
                f"`{name}` in `--{flag}` must be {rule}. Received: "
                f"{_shown(name, value)}"
            )
    choices = CHOICES.get(name)
    if name in OF_PATTERNS and value.lower() != "none":
        choices = PATTERNS
    if "routing_tf.models" in sys.modules and name in REGISTERED:
        choices = None  # a user may have registered others
    if choices is not None and value not in choices:
        listed = f" Choices are: {', '.join(choices)}"
        hint = did_you_mean(value, choices) or listed
        raise ValueError(
            f"`{name}` in `--{flag}` must be a choice that there is. Received: "
            f"{_shown(name, value)}.{hint}"
        )


def _shown(name, value):
    """Returns a setting as Python writes it: numbers have no quotes."""
    is_number = value.lstrip("-").replace(".", "", 1).isdecimal()
    return f"{name}={value if is_number else repr(value)}"

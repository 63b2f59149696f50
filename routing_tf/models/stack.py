"""Makes the blocks of all models from hyperparameters."""

import keras

from routing_tf import layers
from routing_tf.models import feed_forwards
from routing_tf.models import group_configs
from routing_tf.models import initializers
from routing_tf.models import patterns
from routing_tf.settings.hyperparameters import arguments_of


def decoder_block(hyperparameters, index, policy):
    """Makes a block of a decoder: causal, with cross-attention after an encoder."""
    h = hyperparameters
    output_initializer = _output_initializer(h, h.num_layers)
    cross_attention = None
    if h.num_encoder_layers:
        cross_attention = _attention(
            h,
            group_configs.cross_attention(h, index),
            "cross_attention",
            policy,
            output_initializer,
        )
    return layers.TransformerBlock(
        _attention(
            h,
            group_configs.self_attention(h, index),
            "attention",
            policy,
            output_initializer,
        ),
        _feed_forward(h, index, policy, output_initializer),
        cross_attention,
        **arguments_of("TransformerBlock", h),
        name=f"block_{index}",
        dtype=policy,
    )


def encoder_block(hyperparameters, index, policy):
    """Makes a block of an encoder: every token sees tokens on both sides.

    Queries and keys are projected separately, as in the release, except in patterns
    whose queries are their keys.
    """
    h = hyperparameters
    configs = group_configs.self_attention(h, index, is_causal=False)
    output_initializer = _output_initializer(h, h.num_encoder_layers)
    return layers.TransformerBlock(
        _attention(h, configs, "attention", policy, output_initializer),
        _feed_forward(h, index, policy, output_initializer, is_decoder=False),
        **arguments_of("TransformerBlock", h),
        use_causal_mask=False,
        name=f"encoder_block_{index}",
        dtype=policy,
    )


def _output_initializer(hyperparameters, num_layers):
    """The initializer of the last kernel of each part; None for the usual one."""
    if not hyperparameters.scale_residual_initializer:
        return None
    return initializers.of_kernels(hyperparameters, num_summed=2 * num_layers)


def dropout(rate, name, policy):
    """Makes a dropout layer."""
    return keras.layers.Dropout(rate, name=name, dtype=policy)


def _attention(hyperparameters, configs, name, policy, output_initializer):
    h = hyperparameters
    make = layers.MixedAttention
    if h.sparse_projections and name == "attention":
        make = patterns.of_the_zoo("SparseProjectionAttention")
    return make(
        [group for config in configs for group in config.groups(h, policy)],
        key_dim=h.size_of_key,
        block_shape=None if h.local_block_width is None else h.local_block_shape,
        kernel_initializer=initializers.of_kernels(h),
        output_initializer=output_initializer,
        **arguments_of("MixedAttention", h),
        name=name,
        dtype=policy,
    )


def _feed_forward(hyperparameters, index, policy, output_initializer, is_decoder=True):
    h = hyperparameters
    return feed_forwards.make_layer(
        h.feed_forward,
        feed_forwards.Place(
            h.intermediate_dim,
            h.max_sequence_length if is_decoder else h.max_input_length,
            index,
            h.num_layers if is_decoder else h.num_encoder_layers,
        ),
        dropout=h.feed_forward_dropout,
        kernel_initializer=initializers.of_kernels(h),
        output_initializer=output_initializer,
        name="feed_forward",
        dtype=policy,
    )

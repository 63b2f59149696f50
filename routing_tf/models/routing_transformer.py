"""The decoder: embeddings and a stack of blocks with local and routed heads."""

import keras

from routing_tf import layers
from routing_tf.files import safe_loading
from routing_tf.layers.blocks.transformer_block import LAYER_NORM_EPSILON
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.layers.support.masks import offsets_behind
from routing_tf.layers.support.validation import checked_index
from routing_tf.models import initializers
from routing_tf.models import stack
from routing_tf.models import token_inputs
from routing_tf.models.preset_backbone import PresetBackbone
from routing_tf.models.preset_backbone import hyperparameters_of_kind
from routing_tf.models.presets import preset_description
from routing_tf.models.presets import preset_names
from routing_tf.models.token_inputs import without_segment_ids

_LAYERS_OF_PLACES = layers.TimingSignal, layers.GridEmbedding


class TextBackbone(token_inputs.ChecksSegmentIds, PresetBackbone):
    """The common part of text models with and without an encoder: the decoder.

    Attributes:
        segment_names: names of the optional inputs with the ids of packed documents.
    """

    segment_names = token_inputs.OF_TEXT

    @property
    def token_embedding(self):
        """The `TokenEmbedding` of the decoder."""
        return next(
            layer
            for layer in self.embedding_layers
            if isinstance(layer, layers.TokenEmbedding)
        )

    @property
    def transformer_layers(self):
        """The blocks of the decoder, as keras_hub names them."""
        return self.blocks

    def make_decoder(self, hyperparameters, policy):
        """Makes the layers of the decoder."""
        h = hyperparameters
        self.hyperparameters = h
        self.embedding_layers = _embedding_layers(h, policy)
        self.blocks = [
            stack.decoder_block(h, index, policy) for index in range(h.num_layers)
        ]
        self.final_norm = final_norm(h, "final_norm", policy)

    def make_cache(self, batch_size, max_length, memory=None, memory_mask=None):
        """Returns an empty cache for `decode_with_cache`, with the batch on axis 0.

        `max_length` tokens fit into each of `batch_size` sequences; for `memory`, see
        `decode`.
        """
        safe_loading.check_memory(self.hyperparameters, max_length)
        return [
            block.make_cache(batch_size, max_length, memory, memory_mask)
            for block in self.blocks
        ]

    def decode_with_cache(
        self, token_ids, cache, cache_index, padding_mask=None, segment_ids=None
    ):
        """Applies the decoder to tokens that follow those in a cache.

        Args:
            token_ids: `<int>[batch, length]`.
            cache: as returned by `make_cache` or this method.
            cache_index: position of the first token, see `MixedAttention`. Unlike in a
                call, tokens beyond `truncate_length` are computed.
            padding_mask: `<bool>[batch, length]`, True for real tokens; None (the
                default) for no padding.
            segment_ids: `<int32>[batch, length]`, ids of packed documents, see
                `MixedAttention`; None (the default) for one document in each row.

        Returns:
            `<float>[batch, length, hidden_dim]`, and the cache with these tokens.
        """
        cache_index = checked_index(cache_index)
        offset, segments = cache_index, {}
        if segment_ids is not None:
            segments["segment_ids"] = segment_ids
            if self.hyperparameters.restart_positions:
                starts_anew = isinstance(cache_index, int) and cache_index == 0
                segment = cache[0]["attention"]["segment"]
                behind = offsets_behind(segment, segment_ids, cache_index)
                offset = 0 if starts_anew else behind
        x = token_ids
        for layer in self.embedding_layers:
            has_places = isinstance(layer, _LAYERS_OF_PLACES)
            x = layer(x, offset=offset, **segments) if has_places else layer(x)
        caches = []
        for block, block_cache in zip(self.blocks, cache, strict=True):
            x, block_cache = block(
                x,
                padding_mask=padding_mask,
                cache=block_cache,
                cache_index=cache_index,
                **segments,
            )
            caches.append(block_cache)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, caches

    def decode(
        self,
        token_ids,
        padding_mask,
        memory=None,
        memory_mask=None,
        layer_intercept_fn=None,
        routing_scope=None,
        segment_ids=None,
        memory_segment_ids=None,
    ):
        """Applies the decoder.

        Args:
            token_ids: `<int>[batch, length]`.
            padding_mask: `<bool>[batch, length]`, True for real tokens.
            memory: `<float>[batch, memory length, hidden_dim]`, the output of an
                encoder; None (the default) without one.
            memory_mask: `<bool>[batch, memory length]`, True for its real tokens; None
                (the default) without padding.
            layer_intercept_fn: function of a tensor and an index that returns the
                tensor to use instead: token embeddings for the index -1, otherwise the
                output of a block. None (the default) to change nothing.
            routing_scope: the tokens that compete in expert choice, see
                `MixedAttention`; None (the default) for that of the call around it.
            segment_ids: `<int32>[batch, length]`, ids of packed documents, see
                `MixedAttention`; None (the default) for those of the call around it.
            memory_segment_ids: `<int32>[batch, memory length]`, the same for `memory`.

        Returns:
            `<float>[batch, length, hidden_dim]`, cut to `truncate_length`.
        """
        intercept = layer_intercept_fn or (lambda x, index: x)
        options = {} if routing_scope is None else {"routing_scope": routing_scope}
        limit = self.hyperparameters.truncate_length
        x, mask, segments = token_ids, padding_mask, {}
        if segment_ids is not None:
            segments["segment_ids"] = segment_ids[:, :limit]
            options |= {**segments, "memory_segment_ids": memory_segment_ids}
        if limit is not None:
            x, mask = x[:, :limit], mask[:, :limit]
        for layer in self.embedding_layers:
            x = (
                layer(x, **segments)
                if isinstance(layer, _LAYERS_OF_PLACES)
                else layer(x)
            )
            if layer is self.token_embedding:
                x = intercept(x, -1)
        for index, block in enumerate(self.blocks):
            x = block(
                x, memory=memory, padding_mask=mask, memory_mask=memory_mask, **options
            )
            x = intercept(x, index)
        return x if self.final_norm is None else self.final_norm(x)


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformer(TextBackbone):
    """A causal transformer whose heads attend locally and inside clusters.

    Maps token ids to hidden states. Called with a dict of `token_ids`
    `<int>[batch, length]` and `padding_mask` `<bool>[batch, length]`, True for real
    tokens, it returns `<float>[batch, length, hidden_dim]`. The dict may also contain
    `segment_ids` `<int32>[batch, length]`, for rows that pack several documents: no
    token sees another segment, see `layers.MixedAttention`.

    Args:
        hyperparameters: `Hyperparameters`, or a dict of its fields.
        dtype: dtype policy of computations; None (the default) for the global policy
            of Keras. Weights of the clustering stay float32.
        **kwargs: arguments of `keras_hub.models.Backbone`, such as `name`.

    Raises:
        ValueError: if a hyperparameter is unknown or invalid, see `Hyperparameters` and
            the layers, or belongs to another kind of model; when the model runs, if it
            has random heads and the length is unknown while TensorFlow traces it.

    Example:

    ```python
    import numpy as np
    from routing_tf import models

    backbone = models.RoutingTransformer.from_preset("byte_tiny")
    inputs = {
        "token_ids": np.zeros((1, 64), "int32"),
        "padding_mask": np.ones((1, 64), "bool"),
    }
    assert backbone(inputs).shape == (1, 64, 32)
    ```

    Reference: paper, section 4; `SparseTransformer.body` of the release.
    """

    presets = {
        name: {"metadata": {"description": preset_description(name)}}
        for name in preset_names("text")
    }

    def __init__(self, hyperparameters, dtype=None, **kwargs):
        hyperparameters = hyperparameters_of_kind("text", hyperparameters)
        # === Layers ===
        self.make_decoder(hyperparameters, keras.dtype_policies.get(dtype))
        # === Functional model ===
        inputs = {
            "token_ids": keras.Input((None,), dtype="int32", name="token_ids"),
            "padding_mask": keras.Input((None,), dtype="bool", name="padding_mask"),
        }
        outputs = self.decode(**inputs)
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        declare_call_argument(self, "routing_scope", "segment_ids")

    def call(self, inputs, training=None, mask=None, segment_ids=None, **kwargs):
        inputs, own_ids = without_segment_ids(inputs)
        segment_ids = segment_ids if own_ids is None else own_ids
        if segment_ids is not None:
            segment_ids = segment_ids[:, : self.hyperparameters.truncate_length]
            mask, _ = without_segment_ids(mask)
        return super().call(
            inputs, training=training, mask=mask, segment_ids=segment_ids, **kwargs
        )


def final_norm(hyperparameters, name, policy):
    """Makes the layer normalization after a stack of blocks; None if it has none."""
    if hyperparameters.norm_position == "post":
        return None
    return keras.layers.LayerNormalization(
        epsilon=LAYER_NORM_EPSILON, name=name, dtype=policy
    )


def _embedding_layers(hyperparameters, policy):
    """The layers between the token ids of a decoder and its blocks."""
    h = hyperparameters
    made = []
    if h.token_dropout:
        made.append(layers.TokenDropout(h.token_dropout, name="token_dropout"))
    made.append(
        layers.TokenEmbedding(
            h.vocabulary_size,
            h.embedding_dim or h.hidden_dim,
            embeddings_initializer=initializers.of_embeddings(
                h, h.embedding_dim or h.hidden_dim
            ),
            scale=h.scale_embeddings,
            name="token_embedding",
            dtype=policy,
        )
    )
    if h.embedding_dropout:
        made.append(stack.dropout(h.embedding_dropout, "embedding_dropout", policy))
    if h.embedding_dim is not None:
        made.append(
            keras.layers.Dense(
                h.hidden_dim,
                kernel_initializer=initializers.of_kernels(h),
                name="embedding_projection",
                dtype=policy,
            )
        )
    if h.timing_signal:
        made.append(
            layers.TimingSignal(
                restart=h.restart_positions, name="timing_signal", dtype=policy
            )
        )
    if h.coordinate_embeddings:
        length = h.local_block_length
        grid_shape = (-(-h.max_sequence_length // length), length)
        made.append(
            layers.GridEmbedding(
                grid_shape,
                initializers.of_embeddings(h, h.hidden_dim, len(grid_shape)),
                restart=h.restart_positions,
                name="grid_embedding",
                dtype=policy,
            )
        )
    if h.residual_dropout and h.drops_inputs:
        made.append(stack.dropout(h.residual_dropout, "input_dropout", policy))
    return made

"""The decoder: embeddings and a stack of blocks with local and routed heads."""

import contextlib
import os

import keras
import keras_hub

from routing_tf import layers
from routing_tf.files import safe_loading
from routing_tf.files.misspelt import did_you_mean
from routing_tf.layers.blocks.transformer_block import LAYER_NORM_EPSILON
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.segments import offsets_behind
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import is_integer
from routing_tf.models import stack
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.hyperparameters import field_names
from routing_tf.models.packed_documents import without_segment_ids
from routing_tf.models.presets import preset_description
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.presets import preset_names

_MODEL_ARGUMENTS = ("dtype", "name", "trainable")


class PresetBackbone(keras_hub.models.Backbone):
    """The common part of backbones: presets that are data.

    Subclasses set `presets` and `hyperparameters`.
    """

    def get_config(self):
        return {
            **super().get_config(),
            "hyperparameters": self.hyperparameters.to_dict(),
        }

    def default_lora_layer_names(self):
        """Returns the names of attention layers, whose queries and values adapt."""
        return sorted(
            {
                layer.name
                for layer in layers_inside(self)
                if isinstance(layer, layers.MixedAttention)
            }
        )

    def enable_lora(self, rank, target_layer_names=None):
        """Freezes the backbone and adds trainable matrices of low rank to some layers.

        Layers that a task adds to the backbone, such as logits, are not frozen, and not
        in the file of `save_lora_weights`. A saved model contains the sums of weights
        and adapters, and no adapters.

        Args:
            rank: rank of the matrices.
            target_layer_names: names of the layers to adapt: attention layers, see
                `MixedAttention.enable_lora`, or `Dense` layers such as `"input"`,
                `"gate"` and `"output"` of the feed-forward parts. None (the default)
                for all attention layers.

        Raises:
            ValueError: if `rank` is not a positive integer, there is no such layer, or
                there are adapters already.

        Example:

        ```python
        from routing_tf import models

        lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
        lm.backbone.enable_lora(rank=4)
        lm.logits_dense.trainable = False
        assert all("lora" in weight.name for weight in lm.trainable_weights)
        lm.backbone.save_lora_weights("tuned.lora.h5")
        ```
        """
        check_positive_integer("rank", rank)
        if target_layer_names is None:
            target_layer_names = self.default_lora_layer_names()
        found = [
            layer for layer in layers_inside(self) if hasattr(layer, "enable_lora")
        ]
        if any(layer.lora_enabled for layer in found):
            raise ValueError(
                "LoRA can be enabled once. Received: a backbone with adapters, "
                f"{self.name!r}. Build or load it again"
            )
        unknown = sorted(set(target_layer_names) - {layer.name for layer in found})
        if unknown or not target_layer_names:
            raise ValueError(
                "`target_layer_names` must name layers that can be adapted: "
                f"{sorted({layer.name for layer in found})}. Received: "
                f"target_layer_names={target_layer_names!r}"
            )
        super().enable_lora(rank, target_layer_names)

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """Builds the model of a preset.

        Args:
            preset: one of the names in `presets` of the class, which are data and
                download nothing: their weights are freshly initialized. keras_hub
                handles all other names and directories. Its own classes, such as
                `keras_hub.models.CausalLM`, know only presets with weights, and none of
                these names.
            load_weights: whether keras_hub loads the weights of its preset. Defaults
                to True.
            **kwargs: changes of hyperparameters, such as `vocabulary_size`, and
                `dtype`, `name` and `trainable` of the model.

        Raises:
            ValueError: if a hyperparameter is unknown (the message lists the valid
                names) or invalid, or a change concerns a saved model, or
                `routing_tf.files.safe_loading.check_preset` refuses a directory.
        """
        if preset not in cls.presets:
            refuse_changes(preset, kwargs)
            safe_loading.check_preset(preset)
            with naming_presets(cls, preset):
                return super().from_preset(preset, load_weights=load_weights, **kwargs)
        # Keras would swallow a misspelled hyperparameter without a word.
        own = {key: kwargs.pop(key) for key in _MODEL_ARGUMENTS if key in kwargs}
        return cls(preset_hyperparameters(preset).replace(**kwargs), **own)


class TextBackbone(PresetBackbone):
    """The common part of text models with and without an encoder: the decoder."""

    @property
    def token_embedding(self):
        """The `TokenEmbedding` of the decoder."""
        return next(
            layer
            for layer in self.embedding_layers
            if isinstance(layer, layers.TokenEmbedding)
        )

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
        """Makes an empty cache, for `decode_with_cache`.

        Args:
            batch_size: number of sequences.
            max_length: number of tokens a sequence may have.
            memory: as in `decode`.
            memory_mask: as in `decode`.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.

        Raises:
            ValueError: as in `MixedAttention.make_cache`, or if heads would remember
                far more than `max_length` tokens, see `safe_loading.check_memory`.
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
        cache_index = 0 if cache_index is None else cache_index
        offset, segments = cache_index, {}
        if segment_ids is not None:
            segments["segment_ids"] = segment_ids
            if self.hyperparameters.restart_positions:
                starts_anew = is_integer(cache_index) and cache_index == 0
                segment = cache[0]["attention"]["segment"]
                behind = offsets_behind(segment, segment_ids, cache_index)
                offset = 0 if starts_anew else behind
        x = token_ids
        for layer in self.embedding_layers:
            moves = isinstance(layer, (layers.TimingSignal, layers.GridEmbedding))
            x = layer(x, offset=offset, **segments) if moves else layer(x)
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

        Returns:
            `<float>[batch, length, hidden_dim]`, cut to `truncate_length`.
        """
        intercept = layer_intercept_fn or (lambda x, index: x)
        scope = {} if routing_scope is None else {"routing_scope": routing_scope}
        limit = self.hyperparameters.truncate_length
        x, mask = token_ids, padding_mask
        if limit is not None:
            x, mask = x[:, :limit], mask[:, :limit]
        for layer in self.embedding_layers:
            x = layer(x)
            if layer is self.token_embedding:
                x = intercept(x, -1)
        for index, block in enumerate(self.blocks):
            x = block(
                x, memory=memory, padding_mask=mask, memory_mask=memory_mask, **scope
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


def hyperparameters_of_kind(kind, hyperparameters):
    """Returns `Hyperparameters`, also from a dict; refuses those of another kind."""
    if isinstance(hyperparameters, dict):
        hyperparameters = Hyperparameters.from_dict(hyperparameters)
    if hyperparameters.kind != kind:
        raise ValueError(
            f"`hyperparameters` must be those of a model of the kind {kind!r}. "
            f"Received: kind={hyperparameters.kind!r} with "
            f"num_encoder_layers={hyperparameters.num_encoder_layers}, "
            f"image_height={hyperparameters.image_height}"
        )
    return hyperparameters


@contextlib.contextmanager
def naming_presets(cls, preset):
    """Says which preset of a class was perhaps meant where keras_hub knows none."""
    try:
        yield
    except ValueError as error:
        hint = did_you_mean(preset, cls.presets)
        if not hint or os.path.exists(preset):
            raise
        raise ValueError(
            f"`preset` must be a preset of {cls.__name__}, a folder or a name that "
            f"keras_hub knows. Received: preset={preset!r}.{hint}"
        ) from error


def refuse_changes(preset, arguments):
    """Refuses changes of the hyperparameters of a saved model."""
    changes = sorted(set(arguments) & set(field_names()))
    if changes:
        raise ValueError(
            "The hyperparameters of a saved model are in its folder and cannot be "
            f"changed. Received: preset={preset!r}, {', '.join(changes)}. Leave them "
            "out, or build a new model from one of the presets that are data"
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
            embeddings_initializer=stack.embeddings_initializer(
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
                kernel_initializer=stack.initializer(h),
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
                stack.embeddings_initializer(h, h.hidden_dim, len(grid_shape)),
                restart=h.restart_positions,
                name="grid_embedding",
                dtype=policy,
            )
        )
    if h.residual_dropout and h.drops_inputs:
        made.append(stack.dropout(h.residual_dropout, "input_dropout", policy))
    return made

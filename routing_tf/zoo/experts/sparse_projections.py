"""Attention whose queries, keys and values need few weights."""

import itertools

import keras
from keras import ops

from routing_tf.layers import MixedAttention
from routing_tf.layers.attention import arguments
from routing_tf.layers.attention import stepping
from routing_tf.layers.caches.next_token import NotCast
from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.support import tensors
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.masks import Segments
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import offsets_behind
from routing_tf.layers.support.positions import Positions
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import static_length

__all__ = ["SparseProjectionAttention"]


# That of the authors' code.
GATE_STDDEV = 0.5


@keras.saving.register_keras_serializable("routing_tf")
class SparseProjectionAttention(MixedAttention):
    """Heads whose queries, keys and values come from modules and a convolution.

    A multiplicative layer makes S modules of M numbers of a token x,

        y[s, m] = sum_i x[i] D[s, i] E[i, m],

    which needs `dim * (S + M)` weights instead of `dim * S * M`. Queries, keys and
    values are convolutions of these modules with M filters each, over the modules of a
    token and over the tokens up to it. With one module for each head, the default, a
    filter makes one number of a head, and reads `module_kernel_size` heads of
    `length_kernel_size` tokens. Any head groups attend with the results, such as routed
    and local ones side by side.

    The convolution reads no later token, with a causal mask or without, no padding and
    no other segment. A cache also contains the modules of the last
    `length_kernel_size - 1` tokens, so that calls with it give the outputs of one pass.
    A call with one token multiplies by D and E one after the other, and reads no more
    weights than these.

    The authors' code has a kernel of one module for values, and no projection after
    the heads, as with `use_output_projection=False`.

    Args:
        head_groups: as in `MixedAttention`.
        key_dim: size of a query, key or value of one head.
        *args: further arguments of `MixedAttention`. `value_dim` must be None or
            `key_dim`, and `num_key_value_heads` None or the number of heads.
        num_modules: number of modules S, which must divide the number of heads times
            `key_dim`; None (the default) for the number of heads.
        module_kernel_size: number of neighbouring modules that a filter reads, an odd
            number. Defaults to 3.
        length_kernel_size: number of tokens that a filter reads: a token and those
            before it. More than 1 needs positions on one axis. Defaults to 3.
        use_output_projection: whether a dense projection follows the heads, as in
            `MixedAttention`. Without one, the number of heads times `key_dim` must be
            the size of the output. Defaults to True.
        **kwargs: the same as `*args`, by name, and arguments of `keras.layers.Layer`.
            Biases (`use_bias`) are those of modules, filters and the last projection;
            a gate (`use_gate`) is a dense projection of the token's modules. The
            gates D of the modules have an initializer of their own.

    Call arguments and Returns: as in `MixedAttention`, for self-attention only. Head
    groups that read the tokens themselves, such as `IndexedHeads`, read the modules.

    Raises:
        ValueError: when built, if heads are not of the size of an output that has no
            projection; when called, as in `MixedAttention`, with another sequence as
            `value`, or with positions on two axes and a kernel over several tokens.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    attention = zoo.SparseProjectionAttention(
        [layers.RoutedHeads(2, 3, 8), layers.LocalHeads(2, (8,))], key_dim=4
    )
    x = np.random.default_rng(0).normal(size=(2, 24, 16)).astype("float32")
    assert attention(x, use_causal_mask=True).shape == (2, 24, 16)
    ```

    Reference: Jaszczur et al., "Sparse is Enough in Scaling Transformers"
    (https://arxiv.org/abs/2111.12763), section 3.2; `FactoredDense` and
    `MultiplicativeConvCausalAttention` of the package trax. Tested only against NumPy
    code of this repository.
    """

    num_modules = Argument(check_optional_integer)
    module_kernel_size = Argument(check_positive_integer)
    length_kernel_size = Argument(check_positive_integer)
    use_output_projection = Argument(check_flag)

    def __init__(
        self,
        head_groups,
        key_dim,
        *args,
        num_modules=None,
        module_kernel_size=3,
        length_kernel_size=3,
        use_output_projection=True,
        **kwargs,
    ):
        super().__init__(head_groups, key_dim, *args, **kwargs)
        self.num_modules = num_modules
        self.module_kernel_size = module_kernel_size
        self.length_kernel_size = length_kernel_size
        self.use_output_projection = use_output_projection
        self.width = self.num_heads * self.key_dim
        number = self.num_modules or self.num_heads
        #: Number of modules of a token, and of numbers of a module.
        self.module_shape = number, self.width // number
        self._check_sizes()

    def _check_sizes(self):
        if self.module_kernel_size % 2 == 0:
            raise ValueError(
                "`module_kernel_size` must be odd, for as many modules on both sides. "
                f"Received: module_kernel_size={self.module_kernel_size}"
            )
        if self.width % self.module_shape[0]:
            raise ValueError(
                "`num_modules` must divide the number of heads times `key_dim`. "
                f"Received: num_modules={self.num_modules}, {self.num_heads} heads, "
                f"key_dim={self.key_dim}"
            )
        sizes = {"value_dim": self.key_dim, "num_key_value_heads": self.num_heads}
        for name, size in sizes.items():
            received = getattr(self, name)
            if received not in (None, size):
                raise ValueError(
                    f"`{name}` must be None or {size}, because equal filters make "
                    f"queries, keys and values. Received: {name}={received}. Leave it "
                    "out"
                )

    def build_heads(self, dim, memory_dim):
        number, size = self.module_shape
        self.module_gates = self.add_weight(
            name="module_gates",
            shape=(number, dim),
            initializer=keras.initializers.RandomNormal(stddev=GATE_STDDEV),
        )
        self.module_kernel = self._weight("module", "kernel", (dim, size))
        shape = (self.width,) if self.use_bias else None
        self.module_bias = self._weight("module", "bias", shape)
        if not self.use_output_projection and self.size_of_output != self.width:
            raise ValueError(
                "Without a projection the output has a part for each head, so the "
                "number of heads times `key_dim` must be its size. Received: "
                f"{self.num_heads} heads, key_dim={self.key_dim}, an output of "
                f"{self.size_of_output}. Set `use_output_projection=True`"
            )
        # The heads read the modules of some tokens.
        width_of_tokens = self.length_kernel_size * self.width
        super().build_heads(width_of_tokens, width_of_tokens)

    def kernel_shapes(self, dim, memory_dim):
        shapes = super().kernel_shapes(dim, memory_dim)
        size = self.module_shape[1]
        filters = (self.module_kernel_size * self.length_kernel_size * size, size)
        for name in ("query", "key", "value"):
            shapes[name] = shapes[name] and filters
        if self.use_gate:
            shapes["gate"] = (self.width, shapes["gate"][1])
        if not self.use_output_projection:
            shapes["output"] = None
        return shapes

    def make_cache(
        self, batch_size, max_length, value=None, value_mask=None, token_bias=None
    ):
        self._refuse_another_sequence(value)
        cache = super().make_cache(batch_size, max_length)
        if self.length_kernel_size > 1:
            cache["earlier"] = self._no_tokens(batch_size)
        return cache

    def call(
        self,
        query,
        value=None,
        key=None,
        *,
        query_mask=None,
        value_mask=None,
        token_bias=None,
        training=None,
        cache=None,
        cache_index=None,
        attention_mask=None,
        mask=None,
        self_attention=None,
        routing_scope=None,
        segment_ids=None,
        **options,
    ):
        value = arguments.other_sequence(query, value, self_attention)
        self._refuse_another_sequence(value)
        cache, earlier = NotCast.of(cache, cache_index), None
        self._check_cache(query, cache)
        query_mask = mask if query_mask is None else query_mask
        x = self._in_modules(query)
        if self.length_kernel_size > 1:
            masks = [query_mask, value_mask, attention_mask]
            x, earlier = self._with_earlier(query, x, masks, segment_ids, cache)
        if earlier is not None:
            others = {k: v for k, v in cache.cache.items() if k != "earlier"}
            cache = NotCast(others, cache.cache_index)
        output = super().call(
            x,
            query_mask=query_mask,
            value_mask=value_mask,
            token_bias=token_bias,
            training=training,
            cache=cache,
            attention_mask=attention_mask,
            routing_scope=routing_scope,
            segment_ids=segment_ids,
            **options,
        )
        if earlier is None:
            return output
        output, cache = output
        return output, {**cache, "earlier": earlier}

    def _check_cache(self, query, cache):
        if cache is None:
            return
        if ("earlier" in cache.cache) != (self.length_kernel_size > 1):
            raise ValueError(
                "`cache` must be made by the `make_cache` of this layer. Received: the "
                f"cache of another layer, with {', '.join(cache.cache)}"
            )
        stepping.check_room(self, query, cache.cache, cache.cache_index)

    def _refuse_another_sequence(self, value):
        if value is not None:
            raise ValueError(
                "`value` must be the sequence of `query`, whose tokens the "
                "convolution reads. Received: another sequence, value.shape="
                f"{tuple(value.shape)}. Use `MixedAttention` for it"
            )

    def _in_modules(self, x):
        """Returns the modules of tokens, side by side, `<float>[..., S * M]`."""
        number, size = self.module_shape
        gates, kernel = (
            ops.cast(ops.convert_to_tensor(weight), x.dtype)
            for weight in (self.module_gates, self.adapted("module"))
        )
        shape = (*ops.shape(x)[:-1], self.width)
        if x.shape[1] == 1:
            modules = ops.matmul(x[..., None, :] * gates, kernel)
            modules = ops.reshape(modules, shape)
        else:
            # Of many tokens, `x * gates` would need S times the memory of the tokens.
            both = ops.transpose(gates)[..., None] * kernel[:, None]
            modules = ops.matmul(x, ops.reshape(both, (-1, number * size)))
        if self.module_bias is not None:
            modules = modules + ops.cast(self.module_bias, modules.dtype)
        return modules

    def _with_earlier(self, query, x, masks, segment_ids, cache):
        """Puts the modules of earlier tokens before those of each token.

        Args:
            query: as in a call.
            x: `<float>[B, L, S * M]`, modules.
            masks: query mask, value mask and attention mask of a call.
            segment_ids: as in a call.
            cache: `NotCast` of a cache and the position of the first token, or None.

        Returns:
            `<float>[B, L, F * S * M]`, those of the F tokens of a kernel, the oldest
            first, and what a cache contains of them; None without one.
        """
        real, ids = self._real_tokens(query, masks, segment_ids, cache)
        if real is not None:
            x = ops.where(real[..., None], x, ops.zeros_like(x))
        number, length = self.length_kernel_size - 1, length_of(x, 1)
        places = None if ids is None else Segments.of_ids(ids).query_places[:, 0]
        index, before = 0, self._no_tokens(ops.shape(x)[0])
        past = before["tokens"]
        if cache is not None and not cache.starts_anew:
            index, before = ops.cast(cache.cache_index, "int32"), cache.cache["earlier"]
            past = tokens_before(before, index)
            segment = cache.cache["segment"]
            if ids is None:
                places = index - segment["start"][:, None] + numbers(length)
            else:
                places = places + offsets_behind(segment, ids, index)
        joined = ops.concatenate([past, x], axis=1)
        tokens = []
        for distance in range(number, -1, -1):
            token = joined[:, number - distance : number - distance + length]
            if places is not None:
                is_own = (places >= distance)[..., None]
                token = ops.where(is_own, token, ops.zeros_like(token))
            tokens.append(token)
        tokens = ops.concatenate(tokens, axis=-1)
        if cache is None:
            return tokens, None
        static_length("query", query)
        return tokens, with_tokens(before, index, x, real)

    def _real_tokens(self, query, masks, segment_ids, cache):
        """Returns which tokens are no padding, `<bool>[B, L]`, and the ids; or None."""
        if len(query.shape) != 3:
            raise ValueError(
                "`query` must have positions on one axis for a kernel over several "
                f"tokens. Received: query.shape={tuple(query.shape)}, "
                f"length_kernel_size={self.length_kernel_size}. Set "
                "`length_kernel_size=1`"
            )
        positions, batch = Positions((length_of(query, 1),)), query.shape[0]
        query_mask, value_mask, attention_mask = masks
        if attention_mask is not None:
            value_mask = arguments.with_mask_of_keys(
                attention_mask, query, cache, value_mask
            )
        ids, _ = arguments.check_segment_ids(segment_ids, False, 1)
        if ids is not None:
            ids = positions.sequence("segment_ids", ids, batch)
            query_mask, value_mask = arguments.masks_of_ids(
                (ids, None), query_mask, value_mask
            )
        given = {"query_mask": query_mask, "value_mask": value_mask}
        masks = [positions.sequence(name, x, batch) for name, x in given.items()]
        masks = [None if mask is None else ops.cast(mask, "bool") for mask in masks]
        return combine_masks(*masks), ids

    def _no_tokens(self, batch_size):
        number = self.length_kernel_size - 1
        return no_tokens(batch_size, number, self.width, self.compute_dtype)

    def product(self, x, names):
        if names == ["output"] and not self.use_output_projection:
            return x
        if names == ["gate"]:
            x = x[..., -self.width :]  # the modules of the token itself
        if names[0] in ("output", "gate"):
            return super().product(x, names)
        batch, length = ops.shape(x)[:2]
        number, size = self.module_shape
        num_tokens = self.length_kernel_size
        x = ops.reshape(x, (batch, length, num_tokens, number, size))
        x = ops.swapaxes(x, 2, 3)
        x = ops.reshape(x, (batch, length, number, num_tokens * size))
        around = self.module_kernel_size // 2
        if around:
            x = ops.pad(x, ((0, 0), (0, 0), (around, around), (0, 0)))
            starts = range(self.module_kernel_size)
            x = ops.concatenate([x[:, :, i : i + number] for i in starts], axis=-1)
        # All modules have the same filters.
        x = super().product(x, names)
        x = ops.reshape(x, (batch, length, number, len(names), size))
        shape = (batch, length, len(names) * self.num_heads, self.key_dim)
        x = ops.reshape(ops.swapaxes(x, 2, 3), shape)
        kept = self._heads_of(names)
        if len(kept) < len(names) * self.num_heads:
            x = ops.take(x, ops.convert_to_tensor(kept, "int32"), axis=2)
        return ops.reshape(x, (batch, length, len(kept) * self.key_dim))

    def _heads_of(self, names):
        """Returns which of the heads of all names there are, as a list of numbers."""
        has_key = [
            group.needs_keys or self.project_shared_keys
            for group in self.head_groups
            for _ in range(group.num_heads)
        ]
        pairs = enumerate(itertools.product(names, has_key))
        return [head for head, (name, has) in pairs if has or name != "key"]


def no_tokens(batch_size, num_tokens, size, dtype):
    """Returns an empty cache of the last few tokens, for the convolution.

    A dict of `"tokens"` `<float>[B, N, E]` and their `"positions"` `<int32>[B, N]`, -1
    where there is none; as in a ring, the token at position p is in the slot p % N.
    """
    return {
        "tokens": ops.zeros((batch_size, num_tokens, size), dtype),
        "positions": ops.full((batch_size, num_tokens), -1, dtype="int32"),
    }


def tokens_before(cache, index):
    """Returns the tokens before position `index`, `[B, N, E]`; zeros for no token."""
    number = cache["positions"].shape[1]
    positions = index - number + numbers(number)
    slots = positions % number
    is_there = ops.take(cache["positions"], slots, axis=1) == positions
    tokens = ops.take(cache["tokens"], slots, axis=1)
    return ops.where(is_there[..., None], tokens, ops.zeros_like(tokens))


def with_tokens(cache, index, tokens, real=None):
    """Returns the cache with tokens up to the last real one of each row.

    Args:
        cache: that of the tokens before.
        index: position of the first token, an integer or a tensor.
        tokens: `[B, L, E]`, with zeros at padding; L must be known.
        real: `<bool>[B, L]`, or `[1, L]`, False for padding; None (the default) for
            none.
    """
    batch, number = ops.shape(cache["positions"])
    length, slots = tokens.shape[1], numbers(number)
    last = index + (length - 1 if real is None else last_token(real)[:, None])
    positions = last - (last - slots) % number
    positions = ops.broadcast_to(positions, (batch, number))
    is_new = positions >= index
    places = ops.clip(positions - index, 0, length - 1)
    new = tensors.gather(tokens[:, None], places[:, None])[:, 0]
    return {
        "tokens": ops.where(is_new[..., None], new, cache["tokens"]),
        "positions": ops.where(is_new, positions, cache["positions"]),
    }

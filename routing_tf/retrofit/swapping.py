"""How the classes of attention layers and blocks are changed, and changed back."""

import contextlib
import functools

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support.keras_internals import mask_of
from routing_tf.layers.support.keras_internals import set_mask_of
from routing_tf.layers.support.masks import combine_masks
from routing_tf.retrofit import keras_hub_internals as internals
from routing_tf.retrofit.slots import HEADS
from routing_tf.retrofit.slots import Slot


class Swapped:
    """A part of a model whose class was changed; `restored_class` has the old one."""

    #: The class before.
    restored_class = None


class SwappedAttention(Swapped):
    """Attention whose `slot` says how it attends."""

    #: The `Slot`, set with the class.
    slot = None

    def _attend(self, x, mask, cache, training, original):
        slot = self.slot
        if slot.watch is not None:
            return slot.watch(slot, x, mask, original)
        if cache is not None:
            raise ValueError(
                "A changed attention layer has caches of its own, which only "
                "`generate` of its `CausalLM` makes. Received: a cache of keras_hub "
                f"for {slot.name!r}. Pass the `CausalLM` to `retrofit.sparsify`, not "
                "its backbone or blocks"
            )
        if slot.centroids == "sequence" and training:
            raise ValueError(
                '`centroids="sequence"` is for inference only: a token would see which '
                "keys come later. Received: training=True. Use "
                '`centroids="calibrated"`'
            )
        return slot.attend(x, mask, training)


class SwappedLlamaAttention(SwappedAttention):
    """The call of Llama's attention, and of those like it."""

    def call(
        self,
        hidden_states,
        attention_mask=None,
        cache=None,
        cache_update_index=None,
        training=None,
    ):
        original = functools.partial(
            super().call, hidden_states, attention_mask, training=training
        )
        mask = padding_of(attention_mask)
        return self._attend(hidden_states, mask, cache, training, original)


class SwappedGemmaAttention(SwappedAttention):
    """The call of Gemma's attention."""

    def call(
        self,
        x,
        attention_mask=None,
        cache=None,
        cache_update_index=0,
        cache_update_mask=None,
        training=False,
    ):
        original = functools.partial(super().call, x, attention_mask, training=training)
        return self._attend(x, padding_of(attention_mask), cache, training, original)


class SwappedMultiHeadAttention(SwappedAttention):
    """The call of Keras' attention layers, and of `CachedMultiHeadAttention`."""

    def __call__(self, query, value=None, key=None, *args, **kwargs):
        # Keras converts each argument on its own: the same tensor becomes two.
        value = query if value is None else value
        if value is not query or key is not None and key is not query:
            self.slot.attends_to_another = True
        return super().__call__(query, value, key, *args, **kwargs)

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        cache=None,
        cache_update_index=None,
    ):
        slot = self.slot
        # `CachedMultiHeadAttention` has none of these.
        options = {"use_causal_mask": True} if use_causal_mask else {}
        masks = {"value_mask": value_mask, "key_mask": key_mask}
        options |= {name: x for name, x in masks.items() if x is not None}
        original = functools.partial(
            super().call,
            query,
            value,
            key,
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            training=training,
            **options,
        )
        if slot.watch is None and (slot.attends_to_another or return_attention_scores):
            raise ValueError(
                "A changed attention layer attends to its own sequence, and returns no "
                f"attention scores. Received: {slot.name!r} with another sequence as "
                f"value: {slot.attends_to_another}, return_attention_scores="
                f"{return_attention_scores}. Call `retrofit.restore`, or convert the "
                "layer by hand with `MixedAttention.from_keras`"
            )
        if slot.block is None:
            slot.is_causal = bool(use_causal_mask)
        elif slot.watch is not None and not slot.is_known:
            slot.is_causal = is_of_pairs(attention_mask)
        if is_of_pairs(attention_mask) and not may_be_left_out(slot, attention_mask):
            refuse_mask(slot, attention_mask)
        own = mask_of(query)
        mask = padding_of(attention_mask)
        for each in (own, value_mask, key_mask):
            mask = combine_masks(mask, None if each is None else ops.cast(each, "bool"))
        output = self._attend(query, mask, cache, training, original)
        if own is not None and not isinstance(output, tuple):
            set_mask_of(output, own)
        return output


class SwappedBlock(Swapped):
    """A block of keras_hub that makes no dense mask."""

    #: The `Slot` of its attention, set with the class.
    slot = None

    def _compute_self_attention_mask(
        self,
        decoder_sequence,
        decoder_padding_mask,
        decoder_attention_mask,
        use_causal_mask=True,
        **kwargs,
    ):
        slot = self.slot
        if decoder_attention_mask is not None:
            refuse_mask(slot, decoder_attention_mask)
        slot.is_causal = use_causal_mask
        if decoder_padding_mask is None:
            decoder_padding_mask = mask_of(decoder_sequence)
        return None if decoder_padding_mask is None else decoder_padding_mask[:, None]

    def _compute_attention_mask(
        self, x, padding_mask, *args, vision_mask=None, **kwargs
    ):
        if padding_mask is None:
            padding_mask = mask_of(x)
        return None if padding_mask is None else padding_mask[:, None]

    def get_config(self):
        raise ValueError(
            f"{self.slot.block.name!r} was changed by `retrofit.sparsify`, which no "
            "config says. Received: a call of `get_config`. Save a model of keras_hub "
            "by `save_to_preset`, and the weights of any by `save_weights`; or call "
            "`retrofit.restore` first"
        )


def padding_of(attention_mask):
    """Returns the mask of padding in a causal mask, or in one of only padding."""
    if attention_mask is None:
        return None
    mask = attention_mask
    if len(mask.shape) > 2:
        mask = mask[(slice(None), *[0] * (len(mask.shape) - 3), -1)]
    return ops.cast(mask, "bool")


def is_of_pairs(attention_mask):
    """Whether a mask for Keras' attention has an entry for each pair."""
    shape = tuple(getattr(attention_mask, "shape", ()))
    return len(shape) > 2 and any(length != 1 for length in shape[1:-1])


def may_be_left_out(slot, attention_mask):
    """Whether a mask of pairs is one that a block makes: causal, and of padding.

    Blocks that were changed make none.
    """
    if slot.watch is None or slot.block is None or len(attention_mask.shape) != 3:
        return False
    if slot.is_known:
        return True
    mask = np.asarray(ops.convert_to_numpy(attention_mask)).astype(bool)
    return np.array_equal(mask, np.tril(np.ones_like(mask)) & mask[:, -1:])


def refuse_mask(slot, mask):
    """Refuses a mask that is neither causal nor padding."""
    raise ValueError(
        "Masks must be causal or of padding, because other pairs are never compared. "
        f"Received: a mask of shape {tuple(mask.shape)} for {slot.name!r}. Pass "
        "`use_causal_mask=True` and a mask of padding"
    )


_CALLS = {
    internals.GemmaAdapter: SwappedGemmaAttention,
    internals.LlamaAdapter: SwappedLlamaAttention,
    internals.MultiHeadAdapter: SwappedMultiHeadAttention,
    internals.NeoXAdapter: SwappedLlamaAttention,
}


@functools.cache
def swapped_class(mixin, cls):
    """Returns the class `cls` with another one before it."""
    return type(f"Sparse{cls.__name__}", (mixin, cls), {"restored_class": cls})


def swap_attention(slot):
    """Makes an attention layer do what its slot says."""
    layer = slot.layer
    if not isinstance(layer, Swapped):
        layer.__class__ = swapped_class(_CALLS[type(slot.adapter)], type(layer))
    object.__setattr__(layer, "slot", slot)


def swap_back(layer):
    """Gives a layer or model its class back."""
    if isinstance(layer, Swapped):
        layer.__class__ = layer.restored_class
        layer.__dict__.pop("slot", None)


@contextlib.contextmanager
def watched(slots, watch):
    """Calls a function in each call of the attention layers, which attend as before."""
    before = [isinstance(slot.layer, Swapped) for slot in slots]
    try:
        for slot in slots:
            slot.watch = watch
            swap_attention(slot)
            if slot.block is not None:
                swap_back(slot.block)
        yield
    finally:
        for slot, was_changed in zip(slots, before, strict=True):
            slot.watch = None
            if was_changed:
                swap_block(slot)
            else:
                swap_back(slot.layer)


def put_in(slot):
    """Puts the heads of a slot into its attention layer."""
    internals.attach(slot.layer, HEADS, slot.group)
    slot.is_known = slot.block is not None
    swap_attention(slot)
    swap_block(slot)


def swap_block(slot):
    """Makes the block of a slot, if it has one, build no dense mask."""
    if slot.block is not None:
        slot.block.__class__ = swapped_class(SwappedBlock, type(slot.block))
        object.__setattr__(slot.block, "slot", slot)


def take_out(slot):
    """Undoes `put_in`."""
    if slot.block is not None:
        swap_back(slot.block)
    swap_back(slot.layer)
    if hasattr(slot.layer, HEADS):
        internals.detach(slot.layer, HEADS)


def slots_of(model):
    """Returns the slots of all attention layers of a model that may be changed.

    Raises:
        ValueError: if there are none, or the model was changed before.
    """
    if not isinstance(model, keras.Layer):
        raise ValueError(
            "`model` must be a Keras model or layer. Received: "
            f"{model!r} of type {type(model).__name__}"
        )
    layers = list(internals.walk(model))
    changed = [x for x in layers if isinstance(x, SwappedAttention)]
    if changed:
        raise ValueError(
            "`model` must not have been changed before. Received: a model whose "
            f"{changed[0].name!r} has other heads already. Call `retrofit.restore` "
            "first"
        )
    reason = internals.refusal(model)
    if reason is not None:
        raise ValueError(f"`model` is of a family that is refused. Received: {reason}")
    found, seen = [], set()
    for layer in layers:
        adapter = internals.attention_of(layer)
        if adapter is not None and id(adapter.layer) not in seen:
            other = internals.other_attention_of(layer)
            seen |= {id(adapter.layer), id(other)}
            found.append((adapter, layer))
    kinds = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    for layer in layers:
        if isinstance(layer, kinds) and layer.built and id(layer) not in seen:
            found.append((internals.MultiHeadAdapter(layer), None))
    if not found:
        raise ValueError(
            "`model` must have attention that is known: blocks of the families "
            f"{', '.join(internals.FAMILIES)} of keras_hub, `TransformerDecoder`, "
            "`TransformerEncoder`, or Keras' `MultiHeadAttention` and "
            f"`GroupQueryAttention`, built. Received: {model.name!r}. Convert other "
            "layers by hand, with the head groups of `routing_tf.layers`"
        )
    # A block of Keras' layers is causal if its calls say so.
    return [
        Slot(index, adapter, block, is_causal=adapter.is_causal)
        for index, (adapter, block) in enumerate(found)
    ]

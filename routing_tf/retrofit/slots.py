"""Attention layers of a model, and the heads that replace them."""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers import HeadGroup
from routing_tf.layers.attention.stepping import in_pieces
from routing_tf.layers.heads.sliding import SlidingHeads
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.configs import serialize
from routing_tf.layers.support.head_inputs import HeadInputs
from routing_tf.retrofit import keras_hub_internals as internals
from routing_tf.retrofit import sequence_centroids

#: The name under which a changed attention layer has its heads.
HEADS = "sparse_heads"


@dataclasses.dataclass(eq=False)
class Slot:
    """One attention layer of a model.

    Args:
        index: its place among the attention layers of the model.
        adapter: its `Adapter`.
        block: the transformer block of keras_hub around it; None if there is none.
        group: the heads that replace its own; None before they are made.
        centroids: `"calibrated"` or `"sequence"`.
        watch: called with the slot, the layer's input, its mask of padding, and a
            function that attends as before, instead of all else; None (the default)
            for nothing.
        step: the `Step` of decoding; None (the default) outside of decoding.
        is_causal: whether the attention is causal.
        attends_to_another: whether it was seen to attend to another sequence.
        is_known: whether `is_causal` is known, and calls need not show it.
    """

    index: int
    adapter: Any
    block: Any = None
    group: HeadGroup | None = None
    centroids: str = "calibrated"
    watch: Any = None
    step: Any = None
    is_causal: bool = True
    attends_to_another: bool = False
    is_known: bool = False

    @property
    def layer(self):
        """The attention layer."""
        return self.adapter.layer

    @property
    def name(self):
        """The path of the attention layer, for people."""
        return self.layer.path or self.layer.name

    @property
    def limit(self):
        """Number of tokens that a sequence may have; None for any number.

        A window of the model holds for all heads that see further.
        """
        window = self.adapter.window
        slides = isinstance(self.group, SlidingHeads)
        if window is None or slides and self.group.radius < window:
            return None
        return window

    def check_length(self, length):
        """Refuses lengths at which heads would see beyond the window of the model."""
        if self.limit is not None and length is not None and length > self.limit:
            raise ValueError(
                f"Sequences must not be longer than the window of the model, "
                f"{self.limit} tokens: {self.group.name!r} of {self.name!r} would see "
                f"more. Received: {length} tokens. Use "
                f"`heads=layers.SlidingHeads(num_heads, radius={self.limit - 1})`"
            )

    def inputs(self, x, mask=None, first_position=0):
        """Returns the `HeadInputs` of tokens `<float>[batch, length, dim]`."""
        return self.prepared(self.adapter.projected(x), x, mask, first_position)

    def prepared(self, projected, x, mask=None, first_position=0, group=None):
        """Returns the `HeadInputs` of projected tokens.

        Args:
            projected: queries, keys and values.
            x: the tokens they are made from.
            mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
            first_position: position of the first token. Defaults to 0.
            group: the heads; None (the default) for those of the slot.
        """
        inputs = HeadInputs.of(
            *projected,
            query_mask=mask,
            value_mask=mask,
            source=x,
            use_causal_mask=self.is_causal,
            first_position=first_position,
        )
        return (self.group if group is None else group).prepared(inputs)

    def attend(self, x, mask=None, training=None):
        """Returns what the attention layer returns, with other heads."""
        if self.step is not None:
            outputs = self.step.attend(self, x)
        else:
            self.check_length(x.shape[1])
            inputs = self.inputs(x, mask)
            if self.centroids == "sequence":
                outputs = sequence_centroids.attend(self.group, inputs)
            else:
                outputs = self.group(inputs=inputs, training=training)
        outputs = ops.cast(outputs, self.layer.compute_dtype)
        return self.adapter.returned(self.adapter.combined(outputs, x, training))


@dataclasses.dataclass(eq=False)
class Step:
    """Tokens that follow those in a cache.

    Args:
        cache: of the group of one slot; `attend` leaves the next one here.
        index: position of the first token, the integer 0 for an empty cache.
        mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
    """

    cache: Any
    index: Any
    mask: Any = None

    def attend(self, slot, x):
        """Returns the outputs of the heads of a slot, and keeps the cache."""
        inputs = slot.inputs(x, self.mask, self.index)
        inputs = dataclasses.replace(inputs, adds_losses=False)
        by_row = slot.centroids == "sequence"
        if isinstance(self.index, int) and self.index == 0:
            start = sequence_centroids.start if by_row else _start
            outputs, self.cache = start(slot.group, self.cache, inputs)
        else:
            go_on = sequence_centroids.step if by_row else _step
            outputs, self.cache = go_on(slot.group, self.cache, inputs, self.index)
        return outputs


def _start(group, cache, inputs):
    return group.start(cache, inputs)


def _step(group, cache, inputs, index):
    return in_pieces(group, "tokens", cache, inputs, ops.cast(index, "int32"))


def made_group(slot, heads, value_dim=None, **config):
    """Returns heads for a slot, of the kind and settings of others, and builds them.

    Args:
        slot: the `Slot`.
        heads: a `HeadGroup`, or its config.
        value_dim: size of a value; None (the default) for that of the layer.
        **config: arguments that are set, whatever `heads` have.
    """
    adapter, layer = slot.adapter, slot.layer
    value_dim = value_dim or adapter.value_dim
    if isinstance(heads, HeadGroup):
        heads = serialize(heads)
    heads = {**heads, "config": {**heads["config"], **config}}
    group = deserialize(heads)
    if group.num_heads != adapter.num_heads:
        raise ValueError(
            f"`heads` must have as many heads as the layer, {adapter.num_heads}. "
            f"Received: {group.num_heads} heads for {slot.name!r}"
        )
    if not group.needs_keys:
        raise ValueError(
            "`heads` must have keys of their own, as a trained model has. Received: "
            f"{group.name!r}, which share queries and keys. Pass "
            "`share_query_key=False`"
        )
    group.follow_dtype(layer.dtype_policy)
    group.set_sizes(adapter.key_dim, value_dim)
    group.num_key_value_heads = adapter.num_key_heads
    group.input_dim = adapter.dim
    start = (None, adapter.num_heads, None)
    key_shape, value_shape = (*start, adapter.key_dim), (*start, value_dim)
    with internals.scope_of(layer):
        group.build(key_shape, key_shape, value_shape)
    if adapter.has_sinks and getattr(group, "sink_logits", False):
        internals.share(group, "logits_of_sinks", layer.sinks)
    return group


def settings_of(slot):
    """Returns arguments of heads that the model decides."""
    rotary = slot.adapter.rotary()
    settings = {
        "name": HEADS,
        "rotary": None if rotary is None else serialize(rotary),
        "logit_soft_cap": slot.adapter.soft_cap,
        "dropout": slot.adapter.dropout,
    }
    if slot.adapter.has_sinks:
        settings["sink_logits"] = True
    return settings

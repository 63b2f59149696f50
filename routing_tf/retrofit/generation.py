"""Generation with caches of changed layers, inside keras_hub's own `generate`."""

from keras import ops

from routing_tf.retrofit import keras_hub_internals as internals
from routing_tf.retrofit import sequence_centroids
from routing_tf.retrofit.slots import Slot
from routing_tf.retrofit.slots import Step
from routing_tf.retrofit.swapping import Swapped

#: Samplers that need hidden states of the whole prompt, or another model.
_REFUSED_SAMPLERS = ("ContrastiveSampler", "SpeculativeSampler")


class View:
    """An object with some attributes of its own, and else those of another one."""

    def __init__(self, other, **own):
        self.__dict__.update(own, _other=other)

    def __getattr__(self, name):
        return getattr(self._other, name)


class Placeholder:
    """A placeholder for the caches of layers, which keras_hub cuts and stacks."""

    def __getitem__(self, index):
        return ops.zeros((1, 1))


class Decoder:
    """Steps of a `CausalLM` whose layers are changed, all of them or some.

    Args:
        model: the `CausalLM`.
    """

    def __init__(self, model):
        self.model = model
        self.blocks = list(model.backbone.transformer_layers)

    def make_caches(self, batch_size, max_length):
        """Returns empty caches of all layers: small ones of those that are changed."""
        return [self._make_cache(x, batch_size, max_length) for x in self.blocks]

    def _make_cache(self, block, batch_size, max_length):
        if not isinstance(block, Swapped):
            adapter = internals.attention_of(block)
            return adapter.empty_cache(batch_size, max_length)
        slot = block.slot
        slot.check_length(max_length)
        if slot.centroids == "sequence":
            return sequence_centroids.make_cache(slot.group, batch_size, max_length)
        return slot.group.make_cache(batch_size, max_length)

    def call_with_cache(self, token_ids, cache, cache_update_index, mask=None):
        """Feeds tokens, each once, and returns logits, hidden states and caches.

        Args:
            token_ids: `<int>[batch, length]`.
            cache: caches of all layers.
            cache_update_index: position of the first token.
            mask: `<bool>[batch, length]`, False for padding at the end of all rows,
                which is not remembered; None (the default) for none.
        """
        caches = list(cache)
        blocks = [
            self._called(place, block, caches, cache_update_index, mask)
            for place, block in enumerate(self.blocks)
        ]
        backbone = View(self.model.backbone, transformer_layers=blocks)
        logits, hidden_states, _ = self.model.restored_class.call_with_cache(
            View(self.model, backbone=backbone),
            token_ids,
            Placeholder(),
            cache_update_index,
        )
        return logits, hidden_states, caches

    def _called(self, place, block, caches, index, mask):
        """Returns a substitute for a block in keras_hub's loop over all blocks."""
        has_slot = isinstance(block, Swapped)

        def with_own_cache(x, **options):
            step = Step(caches[place], index, mask)
            slot: Slot = block.slot
            slot.step = step
            try:
                output = block(x)
            finally:
                slot.step = None
            caches[place] = step.cache
            output = output[0] if isinstance(output, tuple) else output
            return output, Placeholder()[0]

        def with_cache_of_keras_hub(x, **options):
            options.pop("cache_update_mask", None)
            name = next(name for name in options if name.endswith("cache"))
            output, caches[place], *_ = block(x, **{**options, name: caches[place]})
            return output, Placeholder()[0]

        return with_own_cache if has_slot else with_cache_of_keras_hub

    def prefilled(self, token_ids, number, chunk):
        """Returns the caches after the first tokens of all rows.

        Args:
            token_ids: `<int>[batch, length]`.
            number: how many of them are fed, a scalar tensor.
            chunk: how many are fed at once.
        """
        batch, length = token_ids.shape
        caches = self.make_caches(batch, length)

        def feed(first, size, caches):
            ids = ops.slice(token_ids, (0, first), (batch, size))
            places = ops.arange(size, dtype="int32")
            mask = ops.broadcast_to(first + places < number, (batch, size))
            return self.call_with_cache(ids, caches, first, mask)[2]

        if any(_is_by_sequence(block) for block in self.blocks):
            chunk = length
        size = min(chunk, length)
        caches = feed(0, size, caches)
        _, caches = ops.while_loop(
            lambda first, _: ops.logical_and(first < number, first + size <= length),
            lambda first, caches: (first + size, feed(first, size, caches)),
            (ops.full((), size, "int32"), caches),
        )
        rest = length % size
        if rest == 0:
            return caches
        first = length - rest
        return ops.cond(
            first < number,
            lambda: feed(ops.full((), first, "int32"), rest, caches),
            lambda: caches,
        )


def _is_by_sequence(block):
    return isinstance(block, Swapped) and block.slot.centroids == "sequence"


def generate_step(model, inputs, *args, **kwargs):
    """Generates as the class of `model` did before, with caches of changed layers."""
    sampler = type(model.sampler).__name__
    if sampler in _REFUSED_SAMPLERS:
        raise ValueError(
            "`sampler` must need no more than a cache, such as greedy, top-k, top-p or "
            f"beam. Received: {sampler} for a changed model"
        )
    decoder = Decoder(model)
    lengths = ops.sum(ops.cast(inputs["padding_mask"], "int32"), axis=-1)
    # The sampler feeds the last token of the shortest prompt first.
    number = ops.maximum(ops.min(lengths) - 1, 0)

    def build_cache(token_ids, *others):
        return None, decoder.prefilled(token_ids, number, model.prefill_length)

    def call_with_cache(token_ids, cache, cache_update_index, **others):
        return decoder.call_with_cache(token_ids, cache, cache_update_index)

    view = View(model, _build_cache=build_cache, call_with_cache=call_with_cache)
    # keras_hub squeezes hidden states, and hands them to samplers that need them.
    return model.restored_class.generate_step(view, inputs, *args, **kwargs)

"""How a `MixedAttention` attends with a cache: all at once, or token by token."""

import math

import keras
import numpy as np
from keras import ops

from routing_tf.layers.heads.head_inputs import HeadInputs
from routing_tf.layers.heads.head_inputs import features_for
from routing_tf.layers.positions import Positions
from routing_tf.layers.validation import check_positive_integer
from routing_tf.layers.validation import static_length


def make_cache(attention, batch_size, max_length, value, value_mask, token_bias):
    """Makes an empty cache; see `MixedAttention.make_cache`."""
    lengths = max_length if isinstance(max_length, (tuple, list)) else (max_length,)
    lengths = [check_positive_integer("max_length", length) for length in lengths]
    positions = attention.positions(
        "max_length", f"max_length={max_length!r}", tuple(lengths)
    )
    length, groups = positions.num_positions, attention.head_groups
    if value is None:
        caches = [group.cache_for(batch_size, positions) for group in groups]
        return {"tokens": caches}
    if not attention.built:
        raise ValueError(
            "The layer must be built before `value` is put into a cache. Received: "
            f"value.shape={tuple(value.shape)} for {attention.name!r}. Call it once, "
            "or `build` it"
        )
    _, inputs = attention.head_inputs(
        None,
        ops.convert_to_tensor(value, attention.compute_dtype),
        value_mask=value_mask,
        token_bias=token_bias,
        positions=positions,
    )
    caches = [
        group.make_memory(own, length)
        for group, own in zip(groups, inputs, strict=True)
    ]
    return {"memory": caches}


def call_with_cache(attention, query, masks, cache):
    """Attends with tokens that follow those in a cache.

    `masks` are `query_mask`, `value_mask` and `token_bias` by their names. `cache` is a
    `NotCast` of what `make_cache` returned and the position of the first token, an
    integer or a tensor, None for 0. A cache is a dict with a list of the caches of the
    head groups, `"tokens"` in self-attention, else `"memory"`. Returns the output, and
    the cache with the tokens of `query`.
    """
    cache, index = cache.cache, cache.cache_index
    index = 0 if index is None else index
    if isinstance(index, np.integer):
        index = int(index)
    _check_room(attention, query, cache, index)
    starts = isinstance(index, int) and index == 0
    if "memory" in cache:
        if starts:
            cache = _restarted(attention, cache)
    elif starts and attention.fits_blocks(len(query.shape) - 2):
        return _start(attention, query, masks, cache)
    if len(query.shape) != 3:
        raise ValueError(
            "`query` must be (batch, length, dim) where tokens go one by one, on "
            "two axes of positions in their blocked order. Received: query.shape="
            f"{tuple(query.shape)} with cache_index={index}"
        )
    index = ops.cast(index, "int32")
    if query.shape[1] == 1:
        return _step(attention, query, masks, cache, index)
    return _steps(attention, query, masks, cache, index)


def _check_room(attention, query, cache, index):
    """Refuses tokens that do not fit a cache, as far as sizes are known."""
    (caches,) = cache.values()
    sequences = keras.tree.flatten(caches)[0].shape[0]
    if None not in (sequences, query.shape[0]) and sequences != query.shape[0]:
        raise ValueError(
            "`cache` must be one for as many sequences as `query` has. Received: "
            f"query.shape={tuple(query.shape)} and a cache for {sequences}. Pass this "
            "number to `make_cache` as `batch_size`"
        )
    known = isinstance(index, int) and None not in query.shape[1:-1]
    if "memory" in cache or not known:
        return
    end = index + math.prod(query.shape[1:-1])
    for group, group_cache in zip(attention.head_groups, caches, strict=True):
        room = group.max_positions(group_cache)
        if index < 0 or room is not None and end > room:
            raise ValueError(
                "`cache_index` must be at least 0, and the cache have room for "
                f"`query`. Received: cache_index={index} with "
                f"query.shape={tuple(query.shape)} and room for {room} tokens. "
                "Make a cache with a larger `max_length`: only heads that remember "
                "as many tokens as they can see go on behind it"
            )


def _restarted(attention, cache):
    """Returns a cache with a memory as it was before the first query."""
    caches = zip(attention.head_groups, cache["memory"], strict=True)
    return {"memory": [group.restart_memory(own) for group, own in caches]}


def _start(attention, query, masks, cache):
    """Attends with a whole sequence at once."""
    static_length("query", query)
    positions, inputs = attention.head_inputs(
        query,
        **masks,
        use_causal_mask=True,
        adds_losses=False,
        routing_scope="prefix",
    )
    groups = attention.head_groups
    outputs = [
        group(inputs=own, training=False)
        for group, own in zip(groups, inputs, strict=True)
    ]
    caches = [
        group.fill_cache(group_cache, own)
        for group, group_cache, own in zip(groups, cache["tokens"], inputs, strict=True)
    ]
    output = attention.combined(attention.joined(positions, outputs), query)
    return positions.unflatten(output), {"tokens": caches}


def _steps(attention, query, masks, cache, index):
    """Attends with one token after the other."""
    length = static_length("query", query)
    tokens = {
        name: ops.convert_to_tensor(x)
        for name, x in {"query": query, **masks}.items()
        if x is not None
    }

    def step(place, cache, outputs):
        token = {name: ops.take(x, place[None], axis=1) for name, x in tokens.items()}
        query = token.pop("query")
        output, cache = _step(attention, query, token, cache, index + place)
        return place + 1, cache, ops.slice_update(outputs, (0, place, 0), output)

    batch, size = ops.shape(query)[0], attention.output_kernel.shape[-1]
    outputs = ops.zeros((batch, length, size), attention.compute_dtype)
    start = ops.zeros((), "int32")
    _, cache, outputs = ops.while_loop(
        lambda place, cache, outputs: place < length, step, (start, cache, outputs)
    )
    return outputs, cache


def _step(attention, query, masks, cache, index):
    """Attends with one token; `index` is a tensor."""
    ((kind, caches),) = cache.items()
    positions = Positions((1,), None)
    if kind == "tokens":
        _, inputs = attention.head_inputs(
            query,
            **masks,
            positions=positions,
            first_position=index,
            use_causal_mask=True,
            adds_losses=False,
        )
    else:
        inputs = _queries_alone(attention, positions, query, masks)
    steps = [
        (group.step if kind == "tokens" else group.read_memory)(own_cache, index, own)
        for group, own_cache, own in zip(
            attention.head_groups, caches, inputs, strict=True
        )
    ]
    outputs, caches = zip(*steps, strict=True)
    output = attention.combined(attention.joined(positions, outputs), query)
    return output, {kind: list(caches)}


def _queries_alone(attention, positions, query, masks):
    """Returns the `HeadInputs` of each group for one token and a memory in a cache."""
    mask = positions.sequence("query_mask", masks.get("query_mask"), query.shape[0])
    return [
        HeadInputs.of(
            ops.cast(own, group.compute_dtype),
            query_mask=mask,
            features=features_for(group, positions, query),
            is_cross_attention=True,
            adds_losses=False,
        )
        for group, own in zip(
            attention.head_groups, attention.queries(query), strict=True
        )
    ]

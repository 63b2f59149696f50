"""Attention of a `MixedAttention` with a cache, step by step."""

import math

import keras
from keras import ops

from routing_tf.layers.attention import arguments
from routing_tf.layers.caches import next_token
from routing_tf.layers.caches.rows import last_token
from routing_tf.layers.support.backends import longest_integer
from routing_tf.layers.support.head_inputs import HeadInputs
from routing_tf.layers.support.masks import Segments
from routing_tf.layers.support.positions import Positions
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import static_length

# The id before the first token.
NO_ID = -(2**31)


def make_cache(attention, batch_size, max_length, value, value_mask, token_bias):
    """Makes an empty cache; see `MixedAttention.make_cache`."""
    lengths = max_length if isinstance(max_length, (tuple, list)) else (max_length,)
    lengths = [check_positive_integer("max_length", length) for length in lengths]
    positions = attention.positions(
        "max_length", f"max_length={max_length!r}", tuple(lengths)
    )
    length, groups = positions.length, attention.head_groups
    if value is None:
        caches = [group.make_cache(batch_size, length, positions) for group in groups]
        return _empty({"tokens": caches}, batch_size)
    if not attention.built:
        raise ValueError(
            "The layer must be built before `value` is put into a cache. Received: "
            f"value.shape={tuple(value.shape)} for {attention.name!r}. Call it once, "
            "or `build` it"
        )
    arguments.check_axes("value", value)
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
    return _empty({"memory": caches}, ops.shape(value)[0])


def call_with_cache(attention, query, masks, cache):
    """Attends with tokens that follow those in a cache.

    `masks` are `query_mask`, `value_mask`, `token_bias` and `segment_ids` by their
    names. `cache` is a `NotCast` of what `make_cache` returned and the position of the
    first token. A cache is a dict with a list of the caches of the head groups,
    `"tokens"` in self-attention, else `"memory"`. In self-attention it also has the
    `"segment"` of the newest token: its id, and the position at which it starts, and
    the one after its end. `"next"` says where the next token may stand, see
    `next_token`. Returns the output, and the cache with the tokens of `query`.
    """
    cache, index = cache.cache, cache.cache_index
    check_room(attention, query, cache, index)
    starts = isinstance(index, int) and index == 0
    if masks["segment_ids"] is not None and "tokens" in cache:
        masks = _with_masks_of_ids(query, masks)
    if "memory" in cache:
        _refuse_segments_of_memory(masks["segment_ids"])
    elif starts and attention.fits_blocks(len(query.shape) - 2):
        return _start(attention, query, masks, cache)
    if starts:
        cache = _restarted(attention, cache)
    if len(query.shape) != 3:
        raise ValueError(
            "`query` must be (batch, length, dim) after the tokens of a cache, on "
            "two axes of positions in their blocked order. Received: query.shape="
            f"{tuple(query.shape)} with cache_index={index}"
        )
    if query.shape[1] is None:
        static_length("query", query)
    if isinstance(index, int) and not starts:
        # On two axes, the places that pad blocks may be left out.
        next_token.check(cache["next"], index, not attention.fits_blocks(1))
    index = ops.cast(index, "int32")
    if query.shape[1] > 1 and masks["segment_ids"] is not None:
        return _one_by_one(attention, query, masks, cache, index)
    return _step(attention, query, masks, cache, index)


def check_room(attention, query, cache, index):
    """Refuses tokens that do not fit into a cache, as far as sizes are known."""
    caches = cache["memory" if "memory" in cache else "tokens"]
    sequences = keras.tree.flatten(caches)[0].shape[0]
    if None not in (sequences, query.shape[0]) and sequences != query.shape[0]:
        raise ValueError(
            "`cache` must be made for as many sequences as `query` has. Received: "
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
                "`cache_index` must be at least 0, and the cache must have room for "
                f"`query`. Received: cache_index={index} with "
                f"query.shape={tuple(query.shape)} and room for {room} tokens. Make a "
                "cache with a larger `max_length`: only heads whose cache does not "
                "grow can go beyond it"
            )


def _restarted(attention, cache):
    """Returns a cache as it was before the first token or query."""
    groups = attention.head_groups
    if "memory" in cache:
        caches = zip(groups, cache["memory"], strict=True)
        caches = [group.restart_memory(own) for group, own in caches]
        return _empty({"memory": caches}, ops.shape(cache["next"]["least"])[0])
    caches = zip(groups, cache["tokens"], strict=True)
    caches = [group.restart_cache(own) for group, own in caches]
    return _empty({"tokens": caches}, ops.shape(cache["next"]["least"])[0])


def _start(attention, query, masks, cache):
    """Attends with a whole sequence at once."""
    static_length("query", query)
    segment = _no_segment(ops.shape(query)[0])
    if masks["segment_ids"] is not None:
        ids, ends = _in_last_segment(masks)
        masks = {**masks, "segment_ids": ids}
    positions, inputs = attention.head_inputs(
        query,
        **masks,
        use_causal_mask=True,
        adds_losses=False,
        routing_scope="prefix",
    )
    started = [
        group.start(group_cache, own)
        for group, group_cache, own in zip(
            attention.head_groups, cache["tokens"], inputs, strict=True
        )
    ]
    outputs, caches = zip(*started, strict=True)
    if masks["segment_ids"] is not None:
        segment = _segment_behind(inputs[0].segments, masks["segment_ids"], ends)
    output = attention.combined(attention.joined(positions, outputs), query)
    mask = masks["query_mask"] if masks["value_mask"] is None else masks["value_mask"]
    mask = positions.sequence("value_mask", mask, query.shape[0], fill=True)
    length = positions.length if len(positions.lengths) > 1 else query.shape[1]
    mask = mask if mask is None else mask[:, :length]
    known = next_token.after(cache["next"], 0, length, mask)
    cache = {"tokens": list(caches), "segment": segment, "next": known}
    return positions.unflatten(output), cache


def _one_by_one(attention, query, masks, cache, index):
    """Attends with one token after the other: any may start a segment."""
    length = query.shape[1]
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

    batch, size = ops.shape(query)[0], attention.size_of_output
    outputs = ops.zeros((batch, length, size), attention.compute_dtype)
    start = ops.zeros((), "int32")
    _, cache, outputs = ops.while_loop(
        lambda place, cache, outputs: place < length, step, (start, cache, outputs)
    )
    return outputs, cache


def _step(attention, query, masks, cache, index):
    """Attends with tokens; `index` is a tensor. Only one may have a segment."""
    kind = "memory" if "memory" in cache else "tokens"
    caches, options = cache[kind], {}
    positions = Positions((query.shape[1],))
    if masks.get("segment_ids") is not None:
        cache, options["segments"] = _in_segment(attention, masks, cache, index)
        caches = cache[kind]
    if kind == "tokens":
        _, inputs = attention.head_inputs(
            query,
            **{name: x for name, x in masks.items() if name != "segment_ids"},
            **options,
            positions=positions,
            first_position=index,
            use_causal_mask=True,
            adds_losses=False,
        )
    else:
        inputs = _queries_alone(attention, query, masks)
    steps = [
        in_pieces(group, kind, *each, index)
        for group, *each in zip(attention.head_groups, caches, inputs, strict=True)
    ]
    outputs, caches = zip(*steps, strict=True)
    output = attention.combined(attention.joined(positions, outputs), query)
    mask = masks.get("query_mask")
    if kind == "tokens" and masks.get("value_mask") is not None:
        mask = masks["value_mask"]
    known = next_token.after(cache["next"], index, query.shape[1], mask)
    return output, {**cache, kind: list(caches), "next": known}


def in_pieces(group, kind, cache, inputs, index):
    """Attends with a head group, with as many tokens at once as it takes."""
    length, step = inputs.query.shape[2], group.step
    if kind == "memory":
        step = group.read_memory
    if length == 1:
        return step(cache, index, inputs)
    size = group.tokens_per_step if kind == "tokens" else group.queries_per_step
    if size is None or length <= size:
        return step(cache, index, inputs)

    def next_piece(first, cache, outputs, size=size):
        output, cache = step(cache, index + first, inputs.tokens(first, size))
        output = ops.cast(output, outputs.dtype)
        outputs = ops.slice_update(outputs, (0, 0, first, 0), output)
        return first + size, cache, outputs

    shape = (ops.shape(inputs.query)[0], group.num_heads, length, group.value_dim)
    state = (ops.zeros((), "int32"), cache, ops.zeros(shape, group.compute_dtype))
    state = ops.while_loop(lambda first, *_: first + size <= length, next_piece, state)
    rest = length % size
    _, cache, outputs = next_piece(*state, size=rest) if rest else state
    return outputs, cache


def _empty(caches, batch_size):
    """Returns a cache of no tokens or queries, given those of the head groups."""
    cache = {**caches, "next": next_token.first(batch_size)}
    if "tokens" in caches:
        cache["segment"] = _no_segment(batch_size)
    return cache


def _no_segment(batch_size):
    """Returns the segment of an empty cache."""
    return {
        "id": ops.full((batch_size,), NO_ID, dtype=longest_integer()),
        "start": ops.zeros((batch_size,), "int32"),
        "end": ops.zeros((batch_size,), "int32"),
    }


def _with_masks_of_ids(query, masks):
    """Checks the ids of segments; their masks hide the id 0 where none is given."""
    ids, _ = arguments.check_segment_ids(
        masks["segment_ids"], False, len(query.shape) - 2
    )
    positions = Positions((query.shape[1],))
    ids = positions.sequence("segment_ids", ids, query.shape[0])
    given = masks["query_mask"], masks["value_mask"]
    query_mask, value_mask = arguments.masks_of_ids((ids, None), *given)
    return {
        **masks,
        # A later call may have another type.
        "segment_ids": ops.cast(ids, longest_integer()),
        "query_mask": query_mask,
        "value_mask": value_mask,
    }


def _is_no_segment(masks):
    """Returns which tokens are padding with the id 0, `<bool>[batch, length]`."""
    names = ("query_mask", "value_mask")
    mask = [masks[name] for name in names if masks.get(name) is not None][-1]
    return ops.logical_and(
        masks["segment_ids"] == 0, ops.logical_not(ops.cast(mask, "bool"))
    )


def _in_last_segment(masks):
    """Counts padding with the id 0 at the end of rows to the segment before it.

    Returns the ids, and the positions after the last token of that segment.
    """
    is_padding = _is_no_segment(masks)
    last = last_token(ops.logical_not(is_padding))[:, None]
    ids = ops.broadcast_to(masks["segment_ids"], ops.shape(is_padding))
    own = ops.take_along_axis(ids, ops.maximum(last, 0), axis=1)
    ids = ops.where(numbers(ids.shape[1]) > last, own, ids)
    return ids, last[:, 0] + 1


def _segment_behind(segments, segment_ids, ends):
    """Returns the segment of the last token of a sequence, in the form of a cache."""
    length = segment_ids.shape[1]
    starts = segments.query_starts[:, 0, length - 1]
    ids = segment_ids[:, -1]
    ids, ends = (ops.broadcast_to(x, ops.shape(starts)) for x in (ids, ends))
    return {"id": ids, "start": starts, "end": ends}


def _in_segment(attention, masks, cache, index):
    """Resets the cache where the token at `index` starts a segment.

    Returns the cache and the token's `Segments`.
    """
    segment = cache["segment"]
    ids, is_padding = masks["segment_ids"], _is_no_segment(masks)
    ids, is_padding = (
        ops.broadcast_to(x[:, 0], ops.shape(segment["id"])) for x in (ids, is_padding)
    )
    # Padding with the id 0 is in no segment, unless it has the id of one.
    is_other = ops.logical_and(segment["id"] != 0, segment["id"] != NO_ID)
    is_padding = ops.logical_and(is_padding, is_other)
    differs = ids != segment["id"]
    # Padding has ended a segment, unless the token stands in its place.
    has_ended = ops.logical_and(is_other, index > segment["end"])
    restarts = ops.logical_or(differs, has_ended)
    restarts = ops.logical_and(restarts, ops.logical_not(is_padding))
    ids = ops.where(is_padding, segment["id"], ids)
    start = ops.where(restarts, index, segment["start"])
    end = ops.where(is_padding, segment["end"], index + 1)

    def chosen(new, old):
        rows = ops.reshape(restarts, (-1, *[1] * (len(old.shape) - 1)))
        return ops.where(rows, new, old)

    groups = zip(attention.head_groups, cache["tokens"], strict=True)
    caches = [
        keras.tree.map_structure(chosen, group.restart_cache(own), own)
        for group, own in groups
    ]
    segment = {"id": ids, "start": start, "end": end}
    cache = {**cache, "tokens": caches, "segment": segment}
    numbers = ops.zeros_like(ids)[:, None, None]
    starts = (start - index)[:, None, None]
    return cache, Segments(numbers, numbers, starts, starts)


def _refuse_segments_of_memory(segment_ids):
    if segment_ids is not None:
        raise ValueError(
            "`segment_ids` cannot be used with a cache for attention to another "
            "sequence. Received: segment_ids and a cache with a memory. Make a cache "
            "of each document's own memory, or call the layer without a cache"
        )


def _queries_alone(attention, query, masks):
    """Returns the `HeadInputs` of each group for tokens and a memory in a cache."""
    mask = Positions((query.shape[1],)).sequence(
        "query_mask", masks.get("query_mask"), query.shape[0]
    )
    options = {"query_mask": mask, "is_cross_attention": True, "adds_losses": False}
    queries = zip(attention.head_groups, attention.queries(query), strict=True)
    return [group.prepared(HeadInputs.of(own, **options)) for group, own in queries]

"""Checks of the arguments of `MixedAttention`."""

import warnings

import keras
from keras import ops

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support.backends import IS_TORCH
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.masks import check_integers
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.tensors import is_known

#: Arguments of Keras's attention that have another name or no meaning here.
OF_KERAS = {
    "output_shape": "Pass the size of the output as `output_dim`",
    "attention_axes": "All axes between the batch and the last one are positions: put "
    "other axes into the batch, or use `AxialHeads` for one axis of two",
    "sliding_window": "Use `SlidingHeads(radius=sliding_window - 1)` among the "
    "`head_groups` of `MixedAttention`",
    "flash_attention": 'Pass `attention_implementation="auto"` to `RoutingAttention` '
    "or to the head groups",
    "dropout": "Pass it to the head groups",
    "seed": "Pass it to the head groups, as `dropout_seed`",
}

#: Classes of sparse tensors, by name: the backend need not be imported.
SPARSE = ("SparseTensor", "BCOO")


def check_axes(name, x):
    """Refuses everything except a sequence of at least one position."""
    if getattr(x, "is_nested", False):  # of torch, which tells no shape
        raise ValueError(
            f"`{name}` must be a dense tensor with a mask of its padding. Received: a "
            "nested tensor. Pass `nested.to_padded_tensor(0.0)`, and a mask of its "
            f"real tokens as `{name}_mask`"
        )
    shape = getattr(x, "shape", None)
    if getattr(x, "ragged_rank", None) is not None or getattr(x, "ragged", False):
        raise ValueError(
            f"`{name}` must be a dense tensor with a mask of its padding. Received: "
            f"{name}.shape={tuple(shape)} of a ragged tensor. Pass "
            "`ragged.to_tensor()`, and `tf.sequence_mask(ragged.row_lengths())` as "
            f"`{name}_mask`"
        )
    is_sparse = getattr(x, "sparse", False) or type(x).__name__ in SPARSE
    is_sparse = is_sparse or IS_TORCH and "sparse" in str(getattr(x, "layout", ""))
    if is_sparse:
        raise ValueError(
            f"`{name}` must be a dense tensor. Received: {name}.shape={tuple(shape)} "
            "of a sparse one. Pass `tf.sparse.to_dense(x)`, or `x.to_dense()` on torch "
            "and `x.todense()` on JAX"
        )
    if shape is None or len(shape) not in (3, 4) or 0 in shape[1:]:
        received = f"{name}.shape={tuple(shape or ())}"
        if shape is None:
            kind = "None" if x is None else f"a {type(x).__name__}"
            received = f"{name}={kind}. Pass a tensor or an array"
        raise ValueError(
            f"`{name}` must be (batch, length, dim) or (batch, height, width, dim), "
            f"with at least one position. Received: {received}"
        )


def refuse_symbolic_sizes(error, layer, *sequences):
    """Explains an error of unknown sizes, as `export` has them on JAX.

    Does nothing if they are known, or the error is a `ValueError`.
    """
    shapes = [tuple(x.shape) for x in sequences if x is not None]
    are_known = all(is_known(*(n or 1 for n in shape)) for shape in shapes)
    if are_known or isinstance(error, ValueError):
        return
    groups = {type(group).__name__ for group in layer.head_groups}
    raise ValueError(
        "On JAX, `export` needs known sizes for these heads, which compare them. "
        f"Received: {', '.join(sorted(groups))} in {layer.name!r} with the shapes "
        f"{', '.join(map(str, shapes))}. Make the model with a known length, such as "
        "`keras.Input((128, dim))`, pass `input_signature=` of known sizes to "
        "`export`, or export it on the TensorFlow backend"
    ) from error


def check_by_position(key, others):
    """Refuses masks that are passed by position."""
    dtype = getattr(key, "dtype", None)
    is_mask = dtype is not None and keras.backend.standardize_dtype(dtype) == "bool"
    if others or is_mask:
        raise ValueError(
            "`query_mask`, `value_mask` and all arguments after `key` must be passed "
            "by name. Received: a mask or more than three arguments by position. Pass "
            "`attention(query, value, query_mask=..., value_mask=...)`"
        )


def check_key(query, value, key):
    """Refuses a separate `key`, which calls of Keras's attention may have."""
    if key is None or key is (query if value is None else value):
        return
    raise ValueError(
        "`key` must be None or the same tensor as `value`, because keys are made from "
        f"`value`. Received: another tensor, of shape {getattr(key, 'shape', None)}. "
        "Leave it out"
    )


def other_sequence(query, value, self_attention):
    """Returns the sequence that is attended to; None for the query's own."""
    if self_attention is None:
        self_attention = value is None or value is query
    if not self_attention:
        return query if value is None else value
    pairs = () if value is None else zip(query.shape, value.shape)
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise ValueError(
            "`value` must have the shape of `query` with `self_attention=True`. "
            f"Received: query.shape={tuple(query.shape)}, "
            f"value.shape={tuple(value.shape)}. Leave `value` or `self_attention` out"
        )
    return None


def looks_like_copy(query, value):
    """Returns whether `value` is another tensor of the query's shape and dtype."""
    if value is None or value is query:
        return False
    shape = tuple(query.shape)
    known = None not in shape[1:]
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in (query, value)}
    return known and tuple(value.shape) == shape and len(dtypes) == 1


def warn_of_copy(layer, shape):
    """Warns that a layer may take an equal tensor for another sequence."""
    warnings.warn(
        f"{layer.name!r} attends to another sequence: `value` is a different tensor "
        f"from `query`, with the same shape {tuple(shape)}. A copy counts as another "
        "sequence; a compiled function of both gets copies. Leave `value` out or pass "
        "`self_attention=True` if it is the same sequence, and pass "
        "`self_attention=False` if it is not",
        stacklevel=3,
    )


def check_value(value, batch, depth):
    """Refuses a `value` `<float>[batch, *lengths, dim]` that does not fit.

    `batch` is the query's batch size, None if unknown; `depth` is the size of a token
    that the layer was built with.
    """
    if None not in (batch, value.shape[0]) and batch != value.shape[0]:
        raise ValueError(
            "`query` and `value` must have the same batch size. Received: "
            f"{batch} and {value.shape[0]}"
        )
    if value.shape[-1] != depth:
        raise ValueError(
            f"`value` must have the depth that the layer was built with, {depth}. "
            f"Received: value.shape={tuple(value.shape)}. Use another layer for a "
            "memory of another depth."
        )


def check_head_groups(head_groups):
    """Returns the head groups of a layer, and makes those that come as configs."""
    if not isinstance(head_groups, (list, tuple)):
        raise ValueError(
            "`head_groups` must be a list of head groups. Received: "
            f"head_groups={head_groups!r}"
        )
    groups = []
    for group in head_groups:
        group = deserialize(group)
        if not isinstance(group, HeadGroup):
            raise ValueError(
                "`head_groups` must hold head groups such as `RoutedHeads` or "
                f"`LocalHeads`. Received: {group!r}"
            )
        groups.append(group)
    if len({id(group) for group in groups}) < len(groups):
        raise ValueError(
            "`head_groups` must not contain one group twice. Received: "
            f"{[group.name for group in groups]}. Make another group"
        )
    if not groups:
        raise ValueError(
            "`head_groups` must name at least one head group. Received: head_groups=[]"
        )
    return groups


def refuse_keras_arguments(kwargs):
    """Returns `kwargs` without neutral arguments of Keras's attention."""
    kwargs = dict(kwargs)
    for name, way in OF_KERAS.items():
        value = kwargs.pop(name, None)
        if value is not None:
            raise ValueError(
                f"`{name}` of Keras's attention must be left out. Received: "
                f"{name}={value!r}. {way}"
            )
    return kwargs


def queries_per_key(num_key_value_heads, head_groups):
    """Returns how many heads of queries read one head of keys and values."""
    num_heads = sum(group.num_heads for group in head_groups)
    if num_key_value_heads in (None, num_heads):
        return 1
    received = (
        f"Received: num_key_value_heads={num_key_value_heads} with groups of "
        f"{[group.num_heads for group in head_groups]} heads"
    )
    if num_heads % num_key_value_heads:
        raise ValueError(
            "`num_key_value_heads` must divide the number of heads in all groups, "
            f"{num_heads}, so that each key head serves as many query heads. {received}"
        )
    number = num_heads // num_key_value_heads
    if any(group.num_heads % number for group in head_groups):
        raise ValueError(
            "`num_key_value_heads` counts the key heads of all groups, and each group "
            f"must have whole ones: here one key head serves {number} query heads, so "
            f"this number must divide the heads of every group. {received}"
        )
    shared = [group.name for group in head_groups if not group.needs_keys]
    if shared:
        raise ValueError(
            "`num_key_value_heads` must be None (or the number of heads) with shared "
            f"queries and keys, as {shared} have. {received}. Pass "
            "`share_query_key=False` to these heads"
        )
    return number


def check_not_built(group):
    """Refuses a head group that belongs to another layer."""
    if group.built:
        raise ValueError(
            "`head_groups` must belong to this layer only, because a group has weights "
            f"and centroids. Received: {group.name!r}, built by another layer"
        )


def blocks_on_two_axes(head_groups, block_shape):
    """Returns the shape of all blocks on two axes; None if there are none."""
    shapes = {tuple(getattr(group, "block_shape", ())) for group in head_groups}
    shapes = {shape for shape in shapes if len(shape) > 1}
    if block_shape is not None and (shapes or len(block_shape) > 1):
        shapes.add(block_shape)
    if len(shapes) > 1:
        raise ValueError(
            "A `block_shape` on two axes sets the order of the positions, so all head "
            f"groups and the layer must have the same one. Received: {sorted(shapes)}"
        )
    return shapes.pop() if shapes else None


def refuse_axes(name, received, blocks):
    """Refuses positions whose number of axes is not that of the blocks."""
    raise ValueError(
        f"`{name}` must have one axis of positions for each entry of the block shape. "
        f"Received: {received} with blocks of {blocks}. Pass (batch, length, dim) for "
        "blocks with one entry, (batch, height, width, dim) for two."
    )


def refuse_key_mask(key_mask):
    """Refuses `key_mask`, which calls of Keras's attention may have."""
    if key_mask is not None:
        raise ValueError(
            "`key_mask` must be left out: keys are made from `value`. Received: "
            f"key_mask.shape={tuple(key_mask.shape)}. Pass it as `value_mask`, or as "
            "`query_mask` in self-attention"
        )


def mask_of_keys(attention_mask, query):
    """Returns the `[batch, S]` that a mask for Keras's attention is; None for others.

    Keras takes two axes for a matrix of pairs. Only a batch of as many as there are
    positions may be meant so.
    """
    shape = tuple(getattr(attention_mask, "shape", ()))
    if len(query.shape) != 3 or not 2 <= len(shape) <= 4:
        return None
    if len(shape) == 2:
        is_batch = shape[0] in (None, query.shape[0]) and shape[0] != query.shape[1]
        return attention_mask if is_batch else None
    if any(length != 1 for length in shape[1:-1]):
        return None
    return attention_mask[(slice(None), *[0] * (len(shape) - 2))]


def with_mask_of_keys(attention_mask, query, cache, value_mask):
    """Returns `value_mask`, which also hides what a mask for Keras's attention hides.

    Refuses a dense mask, and any mask with a cache.
    """
    of_keys = mask_of_keys(attention_mask, query) if cache is None else None
    if of_keys is not None:
        return combine_masks(value_mask, ops.cast(of_keys, "bool"))
    raise ValueError(
        "A dense `attention_mask` of shape (batch, length, memory length) is not "
        "supported: sparse heads never build the matrix it would mask. Received: "
        f"attention_mask.shape={tuple(attention_mask.shape)}. Use `query_mask` and "
        "`value_mask`, or a mask of shape (batch, 1, memory length), for padding, "
        "`segment_ids` for packed documents, and `use_causal_mask=True` for "
        "causality."
    )


def check_segment_ids(segment_ids, is_cross_attention, num_axes):
    """Returns `segment_ids` as a pair, of query and of value; a pair of None without.

    Args:
        segment_ids: as in a call of `MixedAttention`.
        is_cross_attention: whether there is another sequence.
        num_axes: number of axes of the positions.
    """
    if segment_ids is None:
        return None, None
    is_pair = isinstance(segment_ids, (tuple, list))
    pair = tuple(segment_ids) if is_pair else (segment_ids, None)
    if is_pair != is_cross_attention or len(pair) != 2:
        kind = f"{len(pair)} tensors" if is_pair else "one tensor"
        raise ValueError(
            "`segment_ids` must be one tensor in self-attention, and a pair (of query "
            f"and of value) in attention to another sequence. Received: {kind} with "
            f"is_cross_attention={is_cross_attention}. Pass "
            "`segment_ids=(query_segment_ids, value_segment_ids)` with a `value`"
        )
    if num_axes != 1:
        raise ValueError(
            "`segment_ids` need positions on one axis, along which documents follow "
            f"each other. Received: positions on {num_axes} axes. Leave `segment_ids` "
            "out"
        )
    for ids in pair if is_pair else pair[:1]:
        check_integers(ids)
    return pair


def masks_of_ids(ids, query_mask, value_mask):
    """Returns masks that hide the segment id 0 where no mask is given.

    Args:
        ids: pair of the ids of query and value; None for the latter in self-attention.
        query_mask: `<bool>[batch, length]`, or None.
        value_mask: `<bool>[batch, memory length]`, or None.
    """
    query_ids, value_ids = ids
    if value_ids is not None and value_mask is None:
        value_mask = ops.not_equal(value_ids, 0)
    has_mask = value_ids is None and value_mask is not None
    if query_mask is None and not has_mask:
        query_mask = ops.not_equal(query_ids, 0)
    return query_mask, value_mask


def check_cache(cache, value, training, return_attention_scores):
    """Refuses calls that cannot use a cache."""
    if training or return_attention_scores:
        raise ValueError(
            "`cache` must be None in training and with attention scores. Received: "
            f"training={training}, return_attention_scores={return_attention_scores}"
        )
    if value is not None and "memory" not in cache:
        raise ValueError(
            "`cache` must contain the memory in attention to another sequence. "
            f"Received: value.shape={tuple(value.shape)} and a cache for "
            "self-attention. Make it with `make_cache(batch_size, max_length, "
            "value=value)`"
        )


def warn_of_other_dtypes(layer):
    """Warns of head groups whose compute dtype is not that of their layer."""
    others = [
        f"{group.name!r} in {group.compute_dtype}"
        for group in layer.head_groups
        if group.compute_dtype != layer.compute_dtype
    ]
    if others:
        warnings.warn(
            f"These head groups do not compute in {layer.compute_dtype}, the dtype of "
            f"the layer {layer.name!r}: {', '.join(others)}. Pass them the same "
            "`dtype`",
            stacklevel=4,
        )

"""Rows of a cache: the key, value and bias of a token, and whether there is one."""

import keras
from keras import ops

from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers


def row_size(group):
    """Returns how many numbers a row has."""
    return group.key_dim + group.value_dim + 2


def empty_rows(group, *shape):
    """Returns rows `[*shape, E]` in which there is no token."""
    return ops.zeros((*shape, row_size(group)), group.compute_dtype)


def make_rows(key, value, mask, bias):
    """Joins keys and values `<float>[B, H, L, D]`, mask and bias to `[B, H, L, E]`.

    Mask (False for padding) and bias are broadcastable to `[B, H, L]`, or None.
    """
    dtype = value.dtype
    ones = ops.ones_like(value[..., :1])
    real = ones if mask is None else ones * ops.cast(mask, dtype)[..., None]
    if bias is None:
        bias = ops.zeros_like(ones)
    else:
        least = large_negative(keras.backend.standardize_dtype(dtype))
        bias = ops.maximum(ops.cast(bias, dtype), least)[..., None] * ones
    return ops.concatenate([ops.cast(key, dtype), value, bias, real], axis=-1)


def of_inputs(group, inputs):
    """Returns the rows of `HeadInputs`, with the mask and bias that the group reads."""
    mask, bias = group.cached_mask_and_bias(inputs)
    return make_rows(inputs.key, inputs.value, mask, bias)


def of_tokens(tokens):
    """Returns the rows of `RoutedTokens`, each with its own key and value."""
    inputs = tokens.inputs
    return make_rows(tokens.key, inputs.value, inputs.value_mask, inputs.token_bias)


def split_rows(group, rows):
    """Undoes `make_rows`: keys, values, biases and `<bool>[...]`, True for tokens."""
    key_dim = group.key_dim
    return (
        rows[..., :key_dim],
        rows[..., key_dim:-2],
        rows[..., -2],
        rows[..., -1] > 0,
    )


def attend_to_rows(group, query, rows, visible, distances, bias=None, **options):
    """Attends with queries `<float>[B, H, ..., Q, D]` to rows `[B, H, ..., R, E]`.

    Rows may be those of key heads, which serve the queries of several heads.
    `visible` (None for all there are) and `distances`, the relative positions, are
    broadcastable to `[..., Q, R]`; `bias`, likewise or None, is added to that of the
    rows. Other options are those of the dot product.
    """
    if rows.shape[1] != query.shape[1]:
        rows = head_inputs.for_queries(rows, query.shape[1])
    key, value, own_bias, real = split_rows(group, rows)
    own_bias = own_bias[..., None, :]
    bias = own_bias if bias is None else bias + ops.cast(own_bias, bias.dtype)
    real = group.padding_mask(real)[..., None, :]
    if visible is not None:
        real = ops.logical_and(real, visible)
    return group.dot_product(
        query,
        key,
        value,
        attention_mask=real,
        bias=bias,
        distances=distances,
        training=False,
        **options,
    )


def last_token(mask):
    """Returns the last True position on the last axis of a mask, or -1."""
    positions = numbers(length_of(mask, -1))
    return tensors.largest(ops.where(mask, positions, -1), axis=-1)

"""Exploring queries: while training, some queries see all that a mask lets them see.

A query that sees only the members of its cluster learns nothing about a match in
another cluster: no gradient says that the two should be similar, so no clustering ever
brings them together. Some queries at random positions, drawn again in each step, attend
densely, and their outputs replace those of the pattern. Their number is constant, so
work is linear in the length. Positions differ between heads, and are the same for all
sequences of a batch. In packed documents, a query sees only its own segment. Evaluation
and decoding do not change.

Letters: B batch, H heads, L length, E exploring queries, D dim.
"""

import keras
from keras import ops

from routing_tf.layers.support import tensors
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.masks import segment_mask
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import numbers
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.tensors import smaller

# Marks the generators of positions. A training loop that splits a batch into parts or
# replicas gives all of them the same state.
SEED_NAME = "exploring_seed"


def make_seed(seed=None):
    """Returns the generator of positions; `seed` as in `keras.random.SeedGenerator`."""
    return keras.random.SeedGenerator(seed, name=SEED_NAME)


def is_exploring_seed(variable):
    """Returns whether a variable is the state of a generator of positions."""
    return SEED_NAME in variable.path.split("/")


def draw_positions(num_queries, num_heads, length, seed):
    """Draws distinct positions for each head, `<int32>[H, Q]`; at most all of them."""
    noise = keras.random.uniform((num_heads, length), dtype="float32", seed=seed)
    _, positions = ops.top_k(noise, smaller(num_queries, length), sorted=False)
    return ops.cast(positions, "int32")


def explore(group, tokens, inputs, output, training=None, hides_own=False):
    """Lets some queries attend densely, and inserts their outputs.

    Padding does not explore. Exploring queries have no relative positions, because
    these are ranks in a cluster. `output` `<float>[B, H, L, D]` has the outputs of all
    queries in their clusters. With `hides_own`, a query sees itself only if it sees
    nothing else.
    """
    length = tokens.length
    positions = draw_positions(
        group.exploring_queries, group.num_heads, length, group.exploring_seed
    )
    batch, heads = ops.shape(output)[:2]
    places = ops.broadcast_to(positions, (batch, heads, length_of(positions, 1)))
    found = _attend(group, tokens, inputs, positions, places, hides_own, training)
    found = ops.cast(found, output.dtype)
    real = inputs.real_tokens()
    if real is not None:
        real = tensors.gather_entries(real, places, length)
    return tensors.replaced(output, places, found, real)


def _attend(group, tokens, inputs, positions, places, hides_own, training):
    """Attends with the queries at `places` `<int32>[B, H, E]`: `[B, H, E, D]`."""
    query, key = (ops.cast(x, group.compute_dtype) for x in (tokens.query, tokens.key))
    query = tensors.gather(query, places)
    mask = _mask(group, inputs, positions, tokens.length)
    bias = None if inputs.token_bias is None else inputs.token_bias[:, :, None]
    if hides_own:
        dtype = group.compute_dtype
        is_own = numbers(tokens.length) == positions[..., None]
        own = ops.where(is_own, ops.cast(large_negative(dtype), dtype), 0)
        bias = own if bias is None else own + bias
    logits = product(query, key, transpose_y=True)
    weights = group.dot_product.attention_weights(logits, mask, bias, training)
    output = product(weights, inputs.value)
    return output if mask is None else group.dot_product.of_seeing(output, mask)


def _mask(group, inputs, positions, length):
    """Returns which keys queries see, broadcastable to `[B, H, E, L]`; None for all."""
    mask = None
    if inputs.use_causal_mask:
        # Values stand at their keys, so the query's own shifted key counts as later.
        mask = numbers(length) <= positions[..., None] - group.key_shift
    own = segment_mask(
        inputs.segments, lambda x: ops.take(x[:, 0], positions, axis=1), lambda x: x
    )
    real = inputs.value_mask
    return combine_masks(mask, own, None if real is None else real[:, :, None])

"""Blocks of attention and feed-forward, as the backbones of the zoo stack them."""

from keras import ops

from routing_tf import layers
from routing_tf.layers.support.validation import check_positive_integer


def transformer_block(
    head_groups, dim, intermediate_dim, activation, reads_memory=False, **options
):
    """Makes a block that is not causal, whose projections have biases.

    Args:
        head_groups: list of `HeadGroup` layers, which share `dim` equally.
        dim: size of all queries of a token.
        intermediate_dim: as in `FeedForward`.
        activation: as in `FeedForward`.
        reads_memory: whether the heads attend to another sequence, the `memory` of the
            block, and not to their own. Defaults to False.
        **options: further arguments of `TransformerBlock`.
    """
    own = {"dtype": options["dtype"]}
    attention = layers.MixedAttention(
        head_groups,
        size_of_head(dim, sum(group.num_heads for group in head_groups)),
        use_bias=True,
        name="attention",
        **own,
    )
    feed_forward = layers.FeedForward(
        intermediate_dim, activation, name="feed_forward", **own
    )
    parts = {"attention": attention, "cross_attention": None}
    if reads_memory:
        parts = {"attention": None, "cross_attention": attention}
    options = {"use_causal_mask": False, **options}
    return layers.TransformerBlock(feed_forward=feed_forward, **parts, **options)


def read_behind(block, x, memory, mask, cache, index):
    """Lets tokens read another sequence up to their places, and that in a cache.

    `block` reads a memory with one group of heads. Tokens `x` are at the last places of
    `memory`, `<float>[batch, length, dim]`. `index` is the place of its first token, as
    many as there are of `x`; None for the beginning, where there may be more. Returns
    outputs, and the cache with `memory`.
    """
    attention = block.cross_attention
    (group,) = attention.head_groups
    y = block.cross_attention_input(x)
    positions, (inputs,) = attention.head_inputs(y, memory, value_mask=mask)
    if index is None:
        output, cache = group(inputs=inputs), group.fill_cache(cache, inputs)
    else:
        output, cache = group.step(cache, ops.cast(index, "int32"), inputs)
    output = attention.combined(attention.joined(positions, [output]), y)
    x = block.cross_attention_output(output, residual=x)
    y = block.feed_forward(block.feed_forward_input(x))
    return block.feed_forward_output(y, residual=x), cache


def size_of_head(dim, num_heads):
    """Returns the equal part of each head; raises a `ValueError` if there is none."""
    check_positive_integer("num_heads", num_heads)
    if dim % num_heads:
        raise ValueError(
            "The number of heads must divide the size of the hidden states. Received: "
            f"{num_heads} heads for a size of {dim}"
        )
    return dim // num_heads

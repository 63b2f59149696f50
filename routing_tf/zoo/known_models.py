"""Head groups of known sparse models, and names for heads of `routing_tf.layers`.

"sliding", "strided" and "fixed" are the patterns of the Sparse Transformer, whose
queries see the same places whatever the tokens say; "multipole" is this package's own.

Reference: Child et al., "Generating Long Sequences with Sparse Transformers"
(https://arxiv.org/abs/1904.10509), section 4.3, in the form that merges near and far.
"""

from routing_tf.layers import LocalHeads
from routing_tf.layers.heads.fixed import FixedHeads
from routing_tf.layers.heads.multipole import MultipoleHeads
from routing_tf.layers.heads.sliding import SlidingHeads
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.zoo.distant_blocks import RandomBlockHeads
from routing_tf.zoo.global_tokens import GlobalHeads
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share

__all__ = ["bigbird_heads", "etc_heads", "longformer_heads"]


def longformer_heads(
    num_heads,
    attention_window=512,
    global_positions=(0,),
    dilation=1,
    num_dilated_heads=0,
    **kwargs,
):
    """Returns head groups like those of Longformer.

    A sliding window and global tokens, in one softmax, as in the paper. Differences:
    global tokens share the projections of all tokens, while Longformer has three more
    matrices for them; dilated heads see blocks instead of sliding windows, and no
    global tokens; and under a causal mask, for which the paper has no global tokens, no
    token sees later ones.

    Args:
        num_heads: total number of heads.
        attention_window: length of the window, in tokens, see `GlobalHeads`. Defaults
            to 512.
        global_positions: positions of the global tokens. Defaults to `(0,)`.
        dilation: dilation of some heads, see `LocalHeads`. Defaults to 1.
        num_dilated_heads: number of heads with this dilation; in the paper, two heads
            of the upper layers have one. Their blocks are half as long as the window.
            Defaults to 0.
        **kwargs: arguments of `HeadGroup`, the same for all groups; a `name` is the
            name of the first group, and the start of the other names.

    Returns:
        List of a `GlobalHeads`, and a `LocalHeads` if there are dilated heads.

    Example:

    ```python
    from routing_tf import layers, zoo

    heads = zoo.longformer_heads(4, 4, dilation=2, num_dilated_heads=1)
    attention = layers.MixedAttention(heads, key_dim=8)
    ```

    Reference: Beltagy et al., "Longformer: The Long-Document Transformer"
    (https://arxiv.org/abs/2004.05150), section 3.
    """
    num_plain = _num_others("num_dilated_heads", num_dilated_heads, num_heads)
    attention_window = check_positive_integer("attention_window", attention_window)
    if (check_positive_integer("dilation", dilation) > 1) != (num_dilated_heads > 0):
        raise ValueError(
            "`dilation` and `num_dilated_heads` must be given together. Received: "
            f"dilation={dilation} with num_dilated_heads={num_dilated_heads}"
        )
    groups = [GlobalHeads(num_plain, global_positions, attention_window, **kwargs)]
    if num_dilated_heads:
        block_shape = (max(attention_window // 2, 1),)
        kwargs = _of_second_group(kwargs, "dilated")
        groups.append(
            LocalHeads(num_dilated_heads, block_shape, dilation=dilation, **kwargs)
        )
    return groups


def etc_heads(
    num_heads, num_global_tokens, local_radius=84, max_relative_position=12, **kwargs
):
    """Returns head groups like those of ETC, the Extended Transformer Construction.

    The first tokens are the global input, which sees all tokens; all others are the
    long input, which sees the global input and the tokens at most `local_radius` away,
    in one softmax. Differences: one table of relative positions, with the distances in
    the sequence, serves all four parts of attention, while ETC labels relations between
    the two inputs and hides some pairs; and one projection serves them, which is the
    default of ETC's code, but not its only choice.

    Args:
        num_heads: number of heads.
        num_global_tokens: length of the global input, in tokens.
        local_radius: number of tokens that a token sees on each side; under a causal
            mask, it sees the last `2 * local_radius` tokens. Defaults to 84.
        max_relative_position: largest relative position with an embedding of its own,
            in tokens; None for no relative positions. Defaults to 12.
        **kwargs: arguments of `HeadGroup`.

    Returns:
        List of a `GlobalHeads`.

    Example:

    ```python
    from routing_tf import layers, zoo

    attention = layers.MixedAttention(zoo.etc_heads(2, 3, 2), key_dim=8)
    ```

    Reference: Ainslie et al., "ETC: Encoding Long and Structured Inputs in
    Transformers" (https://arxiv.org/abs/2004.08483), section 3.
    """
    number = check_positive_integer("num_global_tokens", num_global_tokens)
    radius = check_positive_integer("local_radius", local_radius)
    return [
        GlobalHeads(
            num_heads,
            range(number),
            2 * radius,
            max_relative_position=max_relative_position,
            **kwargs,
        )
    ]


def bigbird_heads(
    num_heads,
    num_random_heads=None,
    block_length=64,
    num_random_blocks=3,
    seed=0,
    **kwargs,
):
    """Returns head groups like those of BigBird.

    Some heads see a window of three blocks and the first block, whose tokens are
    global; the others see random blocks. Differences: in BigBird, every head sees all
    of this in one softmax over the union, while here they are different heads side by
    side; the window slides, while BigBird's is the query's block and the two next to
    it; and the last block is not global, because its place depends on the length.

    Args:
        num_heads: total number of heads, at least 2.
        num_random_heads: number of heads that see random blocks; None (the default) for
            a quarter, at least one.
        block_length: length of a block, in tokens. Defaults to 64.
        num_random_blocks: number of random blocks that a query sees. Defaults to 3.
        seed: non-negative integer that decides the random blocks. Give each layer
            another seed. Defaults to 0.
        **kwargs: arguments of `HeadGroup`, the same for both groups; a `name` is the
            name of the first group, and the start of the second name.

    Returns:
        List of a `GlobalHeads` and a `RandomBlockHeads`.

    Example:

    ```python
    from routing_tf import layers, zoo

    attention = layers.MixedAttention(zoo.bigbird_heads(4, block_length=2), 8)
    ```

    Reference: Zaheer et al., "Big Bird: Transformers for Longer Sequences"
    (https://arxiv.org/abs/2007.14062), section 2 and appendix D.
    """
    num_heads = check_positive_integer("num_heads", num_heads)
    block_length = check_positive_integer("block_length", block_length)
    number = check_optional_integer("num_random_heads", num_random_heads)
    number = max(num_heads // 4, 1) if number is None else number
    num_near = _num_others("num_random_heads", number, num_heads)
    near = GlobalHeads(num_near, range(block_length), 3 * block_length, **kwargs)
    kwargs = _of_second_group(kwargs, "random")
    far = RandomBlockHeads(number, block_length, num_random_blocks, seed, **kwargs)
    return [near, far]


def _of_second_group(kwargs, part):
    """Gives a second group another name, so that its variables have other paths."""
    name = kwargs.get("name")
    return kwargs if name is None else {**kwargs, "name": f"{name}_{part}"}


def _num_others(name, number, num_heads):
    """Returns the number of other heads, at least one."""
    num_heads = check_positive_integer("num_heads", num_heads)
    number = check_non_negative_integer(name, number)
    if number >= num_heads:
        raise ValueError(
            f"`{name}` must be less than `num_heads`. Received: {name}={number} with "
            f"num_heads={num_heads}"
        )
    return num_heads - number


def _bigbird(sizes):
    # The near heads also see four blocks, a window of three and the first.
    return {
        "block_length": share(sizes, 4),
        "num_random_blocks": 4,
        "seed": sizes.index,
    }


def _etc(sizes):
    chosen = share(sizes, 4)
    radius = max(1, (sizes.attention_window - chosen) // 2)
    return {"num_global_tokens": chosen, "local_radius": radius}


def _longformer(sizes):
    return {"attention_window": sizes.attention_window}


def _sliding(sizes):
    return {"radius": sizes.attention_window - 1}


def _strided(sizes):
    return {"radius": share(sizes, 2), "is_strided": True}


def _fixed(sizes):
    block = share(sizes, 2)
    num_blocks = -(-sizes.max_length // block)
    # Own block and the summaries of all others have half of the window each.
    columns = min(max(1, block // num_blocks), block)
    return {"block_shape": (block,), "num_summary_columns": columns}


def _multipole(sizes):
    # Clusters are chosen as by routed heads: trained from scratch, that was best.
    block = min(16, share(sizes, 4))
    return {
        "num_clusters": sizes.num_clusters,
        "attention_window": max(1, sizes.attention_window - block),
        "clusters_per_query": sizes.clusters_per_query,
        "num_recent": 0,
        "num_sinks": 0,
        "block_length": block,
        "normalization": "layer",
        "choice": "centroid",
    }


PATTERNS = {
    "bigbird": Pattern(bigbird_heads, _bigbird, refuses=("entmax_alpha",), min_heads=2),
    "etc": Pattern(etc_heads, _etc, refuses=("entmax_alpha",)),
    "longformer": Pattern(longformer_heads, _longformer, refuses=("entmax_alpha",)),
    "sliding": Pattern(
        SlidingHeads, _sliding, is_bounded=True, refuses=("entmax_alpha",)
    ),
    "strided": Pattern(
        SlidingHeads, _strided, has_relative_positions=False, refuses=("entmax_alpha",)
    ),
    "fixed": Pattern(FixedHeads, _fixed, has_relative_positions=False),
    "multipole": Pattern(
        MultipoleHeads,
        _multipole,
        has_relative_positions=False,
        is_bounded=True,
        has_centroids=True,
        reads_clusters=True,
        refuses=("entmax_alpha",),
    ),
}

"""The rules of the attention patterns in plain NumPy: who sees whom, who is a member.

Positions are those of one sequence; on two axes of positions of the blocked order.
"""

import numpy as np

from routing_tf import layers
from routing_tf import zoo


def local(length, memory_length, block, memory_block, flange, causal):
    """Blocks at most `flange` away; causal: nothing later.

    Returns, as all functions here unless they say otherwise, who sees whom
    `<bool>[length, memory length]`, and relative positions: here those of the places in
    the window of blocks round the query's own.
    """
    i, j = np.ogrid[:length, :memory_length]
    apart = j // memory_block - i // block
    sees = (np.abs(apart) <= flange) & ((j <= i) | (not causal))
    return sees, apart * memory_block + j % memory_block - i % block


def dilated(length, block, flange, dilation, causal):
    """Local attention among every `dilation`-th token."""
    i, j = np.indices((length, length))
    part = -(-length // dilation)
    block = min(block, part)
    near, distances = local(part, part, block, block, flange, causal)
    pairs = i // dilation, j // dilation
    return near[pairs] & (i % dilation == j % dilation), distances[pairs]


def rectangles(grid, block, flange, causal):
    """Blocks at most a flange away along each of two axes, in blocked order.

    Causal: none that comes later, row by row of blocks, and of the own block nothing
    later. `grid`, `block` and `flange` are pairs: numbers of blocks along each axis, of
    positions in a block, of blocks. Relative positions are places in the window.
    """
    size = block[0] * block[1]
    order = np.arange(grid[0] * grid[1] * size)
    block_row, block_column = np.divmod(order // size, grid[1])
    rows = block_row[None] - block_row[:, None]
    columns = block_column[None] - block_column[:, None]
    sees = (np.abs(rows) <= flange[0]) & (np.abs(columns) <= flange[1])
    if causal:
        sees &= order[None] <= order[:, None]
    blocks_apart = rows * (2 * flange[1] + 1) + columns
    places = order % size
    return sees, blocks_apart * size + places[None] - places[:, None]


def full(group, length, memory_length, causal):
    """All tokens; causal: all up to the query.

    The rules of groups whose pairs depend on nothing but the lengths are functions of
    the group and of these, and so in `OF_GROUPS`.
    """
    i, j = np.ogrid[:length, :memory_length]
    return (j <= i) | (not causal), j - i


def sliding(group, length, memory_length, causal):
    """The tokens at most a radius away, and on request every multiple of it."""
    earlier, distances = full(group, length, memory_length, causal)
    apart, radius = np.abs(distances), group.radius
    strided = group.is_strided & (apart % max(radius, 1) == 0)
    return earlier & ((apart <= radius) | strided), distances


def strided(group, length, memory_length, causal):
    """The same place in every block; causal: in every earlier one.

    Relative positions are differences of block.
    """
    earlier, _ = full(group, length, memory_length, causal)
    i, j = np.ogrid[:length, :memory_length]
    block = int(np.prod(group.block_shape))
    return earlier & (i % block == j % block), j // block - i // block


def fixed(group, length, memory_length, causal):
    """The own block and the last columns of every block, `[heads, length, length]`.

    With distinct summaries head h has the columns before those of head h - 1.
    """
    earlier, distances = full(group, length, memory_length, causal)
    i, j = np.ogrid[:length, :memory_length]
    block, columns = int(np.prod(group.block_shape)), group.num_summary_columns
    own, heads = i // block == j // block, []
    for head in range(group.num_heads):
        place = head % (block // columns) if group.distinct_summaries else 0
        end = block - columns * place
        summary = (j % block < end) & (j % block >= end - columns)
        summary = np.broadcast_to(summary, own.shape)
        seen = {"merged": own | summary, "summaries": summary}
        seen["separate"] = own if head < group.num_heads // 2 else summary
        heads.append(earlier & seen[group.arrangement])
    return np.stack(heads), distances


def global_tokens(group, length, memory_length, causal):
    """Some positions see all and are seen by all, the others see a sliding window.

    Under a causal mask the window is before the query.
    """
    earlier, distances = full(group, length, memory_length, causal)
    i, j = np.ogrid[:length, :memory_length]
    sees = np.isin(i, group.global_positions) | np.isin(j, group.global_positions)
    if group.attention_window is not None:
        reach = group.attention_window - 1 if causal else group.attention_window // 2
        sees = sees | (np.abs(distances) <= reach)
    return earlier & sees, distances


def random_blocks(group, length, memory_length, causal):
    """Some other blocks, or none; who sees whom has an axis of heads in front."""
    i, j = np.ogrid[:length, :memory_length]
    drawn = group.random_blocks(-(-length // group.block_length), causal)
    seen = drawn[:, np.arange(length) // group.block_length]
    sees = seen[:, :, None] == (j // group.block_length)[..., None]
    return np.any(sees, axis=-1), j - i


def block_pairs(group, length, memory_length, causal):
    """One block of as even ones as there can be, for each head.

    The mask of the paper: blocks are the floors of place * number / length.
    """
    i, j = np.ogrid[:length, :memory_length]
    block = np.arange(length) * group.num_blocks // length
    pairs = group.permutation_of_each_head()
    return pairs[:, block][..., None] == block, j - i


OF_GROUPS = {
    layers.FullHeads: full,
    layers.SlidingHeads: sliding,
    layers.StridedHeads: strided,
    layers.FixedHeads: fixed,
    zoo.GlobalHeads: global_tokens,
    zoo.RandomBlockHeads: random_blocks,
    zoo.BlockPairHeads: block_pairs,
}


def axial(rows, columns, axis, causal):
    """The same row (axis 1), the same column (0), or either (None).

    Rows and columns are those of positions in the order of the sequence. Relative
    positions are those along the axis.
    """
    i, j = np.ogrid[: len(rows), : len(rows)]
    in_row, in_column = rows[i] == rows[j], columns[i] == columns[j]
    sees = [in_column, in_row, in_row | in_column][2 if axis is None else axis]
    along = rows if axis == 0 else columns
    return sees & ((j <= i) | (not causal)), along[j] - along[i]


def blocks_of_query(products, real, block, number, causal, has_own):
    """The own block, and those whose real keys are most like the query on average.

    A query of a row of `products` sees `number` blocks, its own included where
    `has_own`. Returns who sees whom, and by how much the last block that was chosen
    scores higher than the first one that was not, `[length]`.
    """
    length, memory_length = products.shape
    sees, margins = np.zeros(products.shape, "bool"), np.full(length, np.inf)
    block_of_key = np.arange(memory_length) // block
    means = {
        b: products[:, real & (block_of_key == b)].mean(axis=1)
        for b in np.unique(block_of_key[real])
    }
    for i in range(length):
        own = i // block
        others = [b for b in means if not (has_own and b == own)]
        others = [b for b in others if b < own or not causal]
        others = sorted(others, key=lambda b: (-means[b][i], b))
        count = number - has_own
        if 0 < count < len(others):
            first, second = (means[b][i] for b in others[count - 1 : count + 1])
            margins[i] = first - second
        chosen = others[:count] + [own] * has_own
        sees[i] = np.isin(block_of_key, chosen)
    i, j = np.ogrid[:length, :memory_length]
    return sees & ((j <= i) | (not causal)), margins


def ranked(scores, real):
    """Positions of the real tokens in order of score, best first, then of position."""
    return np.argsort(np.where(real, -scores, np.inf), kind="stable")[: real.sum()]


def best(scores, real, window):
    """Positions of the best `window` real tokens of a cluster, in order."""
    return np.sort(ranked(scores, real)[:window])


def every_nth(scores, real, window):
    """Every nth real token in the order of the scores, put in order of position."""
    return np.sort(evenly_spread(ranked(scores, real), window))


def evenly_spread(tokens, window):
    """Every nth of a list of tokens, so that there are about `window` of them."""
    return tokens[:: max(1, len(tokens) // window)][:window]


def bucket_numbers(products):
    """The signs of products `[..., bits]`, read as binary digits."""
    bits = products > 0
    return sum(bits[..., n] * 2**n for n in range(bits.shape[-1]))


def above_thresholds(margins, limit):
    """The clusters whose thresholds a token reaches, at most `limit` of them.

    `margins` are scores minus thresholds, `[..., clusters]`. Returns who sits in which
    cluster, and by how much the least certain of these decisions is certain, `[...]`.
    """
    ordered = -np.sort(-margins, axis=-1)
    certain = np.abs(margins).min(axis=-1)
    last = 0.0
    if limit < margins.shape[-1]:
        last = np.maximum(ordered[..., limit - 1 : limit], 0.0)
        gap = ordered[..., limit - 1] - ordered[..., limit]
        certain = np.where(ordered[..., limit] >= 0, np.minimum(certain, gap), certain)
    return margins >= last, certain

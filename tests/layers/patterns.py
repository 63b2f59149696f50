"""The rules of the attention patterns in plain NumPy: who sees whom, who is a member.

Positions are those of one sequence; on two axes of positions of the blocked order.
"""

import numpy as np


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


def sliding(length, radius, is_strided, causal):
    """The tokens at most a radius away, and on request every multiple of it."""
    i, j = np.ogrid[:length, :length]
    apart = np.abs(i - j)
    sees = (apart <= radius) | (is_strided & (apart % max(radius, 1) == 0))
    return sees & ((j <= i) | (not causal)), j - i


def strided(length, memory_length, block, causal):
    """The same place in every block; causal: in every earlier one.

    Relative positions are differences of block.
    """
    i, j = np.ogrid[:length, :memory_length]
    sees = (i % block == j % block) & ((j <= i) | (not causal))
    return sees, j // block - i // block


def fixed(length, block, columns, arrangement, causal, num_heads, distinct=False):
    """The own block and the last columns of every block, `[heads, length, length]`.

    With `distinct` summaries head h has the columns before those of head h - 1.
    """
    i, j = np.ogrid[:length, :length]
    own = i // block == j // block
    heads = []
    for head in range(num_heads):
        end = block - columns * (head % (block // columns) if distinct else 0)
        summary = (j % block < end) & (j % block >= end - columns)
        summary = np.broadcast_to(summary, own.shape)
        seen = {"merged": own | summary, "summaries": summary}
        seen["separate"] = own if head < num_heads // 2 else summary
        heads.append(seen[arrangement])
    return np.stack([seen & ((j <= i) | (not causal)) for seen in heads])


def global_tokens(length, positions, window, causal):
    """Some positions see all and are seen by all, the others see a sliding window.

    Under a causal mask the window is before the query.
    """
    i, j = np.ogrid[:length, :length]
    sees = np.isin(i, positions) | np.isin(j, positions)
    if window is not None:
        sees = sees | ((i - j < window) if causal else (np.abs(i - j) <= window // 2))
    return sees & ((j <= i) | (not causal)), j - i


def random_blocks(length, block, drawn):
    """Some other blocks: `drawn` `<int>[heads, blocks, number]`, or -1 for none.

    Who sees whom has an axis of heads in front.
    """
    i, j = np.ogrid[:length, :length]
    seen = drawn[:, np.arange(length) // block]
    return np.any(seen[:, :, None] == (j // block)[..., None], axis=-1), j - i


def block_pairs(length, pairs):
    """One block of as even ones as there can be: `pairs` `<int>[heads, blocks]`.

    Who sees whom has an axis of heads in front. The mask of the paper: blocks are the
    floors of place * number / length.
    """
    i, j = np.ogrid[:length, :length]
    block = np.arange(length) * pairs.shape[1] // length
    return pairs[:, block][..., None] == block, j - i


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

"""How many operations a pattern needs at least, for the floor of its time.

Counted are the pairs of a query and a key that the pattern really lets see each other:
under the causal mask half of a block, not all of it. A pair costs a product of sizes
`key_dim` and one of `value_dim`, two operations each, and three times that with the
gradients. Scores of tokens and centroids, softmax and sorting are not counted.
"""


def triangle(size):
    """Pairs in which the key is not later than the query."""
    return size * (size + 1) // 2


def full_pairs(length):
    """Pairs of full causal attention."""
    return triangle(length)


def local_pairs(length, window):
    """Pairs of causal blocks of a window whose queries also see the block before."""
    window = min(window, length)
    num_blocks = length // window
    return num_blocks * triangle(window) + (num_blocks - 1) * window**2


def clustered_pairs(num_clusters, window):
    """Pairs of causal clusters with a window of members each.

    Token choice is counted as if its clusters were as even as those of expert choice;
    a larger one needs more pairs, up to a window for each token.
    """
    return num_clusters * triangle(window)


def window_pairs(length, window):
    """Pairs of queries that see up to a window of earlier keys."""
    window = min(window, length)
    return triangle(window) + (length - window) * window


def multipole_pairs(length, window, num_clusters):
    """Pairs of multipole heads, half of whose window is near.

    Once it is full, a query also sees the other half, and the mean of each cluster.
    """
    near = min(window - window // 2, length)
    far = window // 2 + num_clusters
    return window_pairs(length, near) + (length - near) * far


def attention_operations(pairs, num_heads, key_dim, value_dim, passes):
    """Returns the operations of attention.

    Args:
        pairs: number of pairs of one head.
        num_heads: number of heads.
        key_dim: size of a query or a key.
        value_dim: size of a value.
        passes: `"forward"` or `"forward+backward"`.
    """
    factor = 3 if passes == "forward+backward" else 1
    return factor * num_heads * pairs * 2 * (key_dim + value_dim)


def step_operations(sizes, length, pattern):
    """Returns the operations of a training step of a language model.

    Each weight of a matrix multiplies each token once, and twice more for gradients.

    Args:
        sizes: see `benchmarks.contenders.SIZES`.
        length: number of tokens.
        pattern: `"dense"` for full heads; else half of the heads are local, the others
            routed with shared queries and keys.
    """
    dim, window, heads = sizes["hidden_dim"], sizes["window"], sizes["num_heads"]
    projections = 4 if pattern == "dense" else 3.5
    weights = projections * dim**2 + 2 * dim * sizes["intermediate_dim"]
    pairs = full_pairs(length)
    if pattern != "dense":
        routed = clustered_pairs(max(1, length // window), min(window, length))
        pairs = (local_pairs(length, window) + routed) / 2
    size = dim // heads
    attention = attention_operations(pairs, heads, size, size, "forward+backward")
    matrices = 6 * length * weights
    logits = 6 * length * dim * sizes["vocabulary_size"]
    return sizes["num_layers"] * (matrices + attention) + logits

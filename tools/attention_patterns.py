"""Draws which keys the queries of each kind of heads see.

Usage: python tools/attention_patterns.py --output=docs/attention_patterns.png
Each picture is the attention matrix that the layers compute for one sequence: rows are
queries, columns are keys. Under a causal mask no pattern looks at later tokens, not
even to choose the members of its clusters. Needs matplotlib (the extra `bench`).
"""

import keras
import numpy as np
from absl import app
from absl import flags
from keras import ops

from routing_tf import layers
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.online_kmeans import normalize

LENGTH, DIM, KEY_DIM = 64, 16, 16
IMAGE = (8, 8)
COLUMNS = 5
LOCAL = {"block_shape": (8,)}
CLUSTERS = {"num_clusters": 4, "attention_window": 16}
_OUTPUT = flags.DEFINE_string(
    "output", "docs/attention_patterns.png", "The picture to write."
)
_CAUSAL = flags.DEFINE_bool("causal", True, "Whether queries see earlier keys only.")


def kinds(causal):
    """Returns the head groups by the titles of their pictures.

    Args:
        causal: whether queries see earlier keys only.
    """
    expert_choice = layers.RoutedHeads(
        1, routing="expert_choice", routing_scope="prefix", **CLUSTERS
    )
    routed = {"routed, expert choice": expert_choice}
    if causal:  # which token choice needs
        token_choice = layers.RoutedHeads(1, routing="token_choice", **CLUSTERS)
        routed = {"routed, token choice": token_choice, **routed}
    return {
        "full": layers.FullHeads(1),
        "local": layers.LocalHeads(1, **LOCAL),
        "strided": layers.StridedHeads(1, **LOCAL),
        "fixed": layers.FixedHeads(1, num_summary_columns=2, **LOCAL),
        "local, blocks of 4 x 4 in 8 x 8": layers.LocalHeads(1, block_shape=(4, 4)),
        **routed,
        "cluster-strided": layers.ClusterStridedHeads(1, **CLUSTERS),
        "hashed": layers.HashedHeads(1, num_buckets=4, attention_window=32),
        "random": layers.RandomHeads(1, **CLUSTERS),
    }


def contents(seed=0):
    """Returns a sequence whose tokens are of four sorts, `(1, length, dim)`."""
    generator = np.random.default_rng(seed)
    sorts = generator.normal(size=(4, DIM))
    tokens = sorts[generator.integers(0, 4, LENGTH)]
    return (tokens + 0.5 * generator.normal(size=(LENGTH, DIM)))[None].astype("float32")


def visible(group, x, causal):
    """Returns which keys each query sees, from the weights of the attention itself.

    Args:
        group: the head group, of one head.
        x: the sequence, `(1, length, dim)`.
        causal: whether queries see earlier keys only.

    Returns:
        NumPy array `<int>[length, length]`: 0 where a key is not seen, else 1; in
        clustered patterns 1 and more, the number of the cluster that both sit in.
    """
    attention = layers.MixedAttention([group], key_dim=KEY_DIM)
    if len(getattr(group, "block_shape", (1,))) > 1:
        x = x.reshape(1, *IMAGE, DIM)
    _, weights = attention(x, use_causal_mask=causal, return_attention_scores=True)
    seen = ops.convert_to_numpy(weights)[0, 0] > 0
    if not isinstance(group, ClusteredHeads):
        return seen.astype(int)
    query = normalize(ops.matmul(x, attention.query_kernel))[:, None]
    (scores,) = group.scores([query], [None])
    colours = np.zeros(seen.shape, int)
    for number, together in enumerate(in_one_cluster(group, scores, causal)):
        colours[together] = number + 1
    return colours * seen


def in_one_cluster(group, scores, causal):
    """Tells which tokens sit in a cluster together.

    Args:
        group: the head group, of one head with clusters.
        scores: `<float32>[1, 1, length, clusters]`.
        causal: whether members are judged among the tokens up to the query.

    Returns:
        NumPy array `<bool>[clusters, length, length]`, for each query (first) and key.
    """
    length, clusters = scores.shape[2:]
    if causal and group.causal_rule().tokens_choose:
        best = ops.convert_to_numpy(ops.argmax(scores, axis=-1))[0, 0]
        is_member = best == np.arange(clusters)[:, None]
        return is_member[:, :, None] & is_member[:, None]
    mask = None
    if causal:  # a row of the batch for each query, with the tokens up to it
        scores = ops.repeat(scores, length, axis=0)
        mask = np.tri(length, dtype="bool")[:, None]
    members, belongs = group.choose(scores, mask)
    is_member = ops.convert_to_numpy(members)[:, 0, :, :, None] == np.arange(length)
    if belongs is not None:
        is_member &= ops.convert_to_numpy(belongs)[:, 0, :, :, None]
    is_member = np.swapaxes(is_member.any(axis=2), 0, 1)
    own = is_member if causal else np.repeat(is_member, length, axis=1)
    return np.diagonal(own, axis1=1, axis2=2)[..., None] & is_member


def draw(patterns, path):
    """Writes the pictures into one file.

    Args:
        patterns: dict of arrays as `visible` returns them, by title.
        path: the file.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import colors
    from matplotlib import pyplot

    colour_map = colors.ListedColormap(
        ["white", "#31688e", "#d1495b", "#66a182", "#edae49"]
    )
    rows = -(-len(patterns) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(2.6 * COLUMNS, 2.9 * rows))
    for axis in axes.flat:
        axis.axis("off")
    for axis, (title, pattern) in zip(axes.flat, patterns.items(), strict=False):
        axis.axis("on")
        axis.imshow(pattern, cmap=colour_map, vmin=0, vmax=4, interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def main(argv):
    del argv
    keras.utils.set_random_seed(0)
    x = contents()
    patterns = {
        title: visible(group, x, _CAUSAL.value)
        for title, group in kinds(_CAUSAL.value).items()
    }
    draw(patterns, _OUTPUT.value)
    print(f"{len(patterns)} patterns of {LENGTH} tokens: {_OUTPUT.value}")


if __name__ == "__main__":
    app.run(main)

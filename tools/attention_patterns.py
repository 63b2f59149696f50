"""Draws which keys the queries of each kind of heads see.

    python tools/attention_patterns.py

writes into `docs`, or the folder of `--output_dir`:

- `attention_patterns.png`: the patterns of a Routing Transformer, with a colour for
  each cluster;
- `multipole.png`: which pairs multipole heads see exactly, and which through means;
- `head_groups_places.png`, `head_groups_content.png`, `head_groups_mixtures.png`: every
  head group of `routing_tf.layers` and `routing_tf.zoo` that has a map of its weights,
  by family;
- `head_groups_images.png`: what one position of an image sees.

Each panel is the attention matrix that the layers compute for one short sequence with
random weights: rows are queries, columns are keys. Under a causal mask no pattern looks
at later tokens, not even to choose the members of its clusters. Needs matplotlib (the
extra `bench`).
"""

import dataclasses
import math
import pathlib

import keras
import numpy as np
from absl import app
from absl import flags
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.routing.online_kmeans import normalize

LENGTH, DIM, KEY_DIM = 64, 16, 16
IMAGE = (8, 8)
COLUMNS = 5
LOCAL = {"block_shape": (8,)}
CLUSTERS = {"num_clusters": 4, "attention_window": 16}
MULTIPOLE = {
    "num_clusters": 4,
    "attention_window": 8,
    "clusters_per_query": 2,
    "num_recent": 8,
    "num_sinks": 2,
    "block_length": 4,
}
SHORT_MULTIPOLE = {**MULTIPOLE, "attention_window": 6, "num_recent": 4}
# Of each cluster, and of what is in none.
CLUSTER_COLOURS = ("#31688e", "#d1495b", "#66a182", "#edae49", "#777777")

# The pictures of head groups: fewer tokens, so that each cell can be told.
SHORT_LENGTH, BLOCK, WIDTH = 32, 4, 8
SHORT_CLUSTERS = {"num_clusters": 4, "attention_window": 6}
LARGE_IMAGE, IMAGE_BLOCK, POSITION = (12, 12), (3, 3), (7, 7)
#: Head groups that refuse to show their weights.
NO_MAP = (zoo.NativeSparseHeads,)
BLUE, LEAST_SHADE = "#1f5f8b", 0.18
# In dots of the picture.
DPI, PANELS_IN_A_ROW, PANEL_DOTS, GAP, TITLE, MARGIN = 150, 4, 352, 36, 84, 44


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of the pictures of head groups.

    Args:
        title: what a query sees, in plain words.
        name: the head group.
        groups: list of head groups, whose heads are drawn over each other.
        has_causal_form: whether there is a rule for it under a causal mask.
        needs_causal_mask: whether there is one only under a causal mask.
    """

    title: str
    name: str
    groups: list
    has_causal_form: bool = True
    needs_causal_mask: bool = False

    def map(self, x, causal):
        """Returns the weights, `<float>[length, length]`; None if it has no such map.

        Args:
            x: the sequence, `(1, length, dim)`, or an image.
            causal: whether queries see earlier keys only, where it can be.
        """
        if self.needs_causal_mask and not causal:
            return None
        attention = layers.MixedAttention(self.groups, key_dim=KEY_DIM)
        weights = weights_of(attention, x, causal and self.has_causal_form)
        # Estimated weights may be negative.
        return np.abs(weights).max(axis=0)


def places():
    """Returns the panels of patterns of places, whatever the content."""
    block = {"block_shape": (BLOCK,)}
    bigbird = zoo.bigbird_heads(2, block_length=BLOCK, num_random_blocks=1)
    return [
        Panel("all tokens", "FullHeads", [layers.FullHeads(1)]),
        Panel("own block, neighbours", "LocalHeads", [layers.LocalHeads(1, **block)]),
        Panel("sliding window", "SlidingHeads", [layers.SlidingHeads(1, BLOCK)]),
        Panel(
            "window, every 4th token",
            "SlidingHeads, strided",
            [layers.SlidingHeads(1, BLOCK, is_strided=True)],
        ),
        Panel(
            "own place in all blocks", "StridedHeads", [layers.StridedHeads(1, **block)]
        ),
        Panel(
            "own block, ends of all",
            "FixedHeads",
            [layers.FixedHeads(1, num_summary_columns=1, **block)],
        ),
        Panel(
            "first tokens, a window",
            "GlobalHeads",
            [zoo.GlobalHeads(1, range(2), attention_window=BLOCK)],
        ),
        Panel(
            "random far blocks",
            "RandomBlockHeads",
            [zoo.RandomBlockHeads(1, BLOCK, num_random_blocks=2)],
        ),
        Panel("first, near and random", "bigbird_heads", bigbird),
        Panel(
            "random tokens", "RandomHeads", [layers.RandomHeads(1, **SHORT_CLUSTERS)]
        ),
        Panel(
            "row, column of an image",
            "AxialHeads",
            [zoo.AxialHeads(1, width=WIDTH)],
        ),
        Panel(
            "one block for each block",
            "BlockPairHeads",
            [zoo.BlockPairHeads(1, num_blocks=SHORT_LENGTH // BLOCK)],
            has_causal_form=False,
        ),
    ]


def content():
    """Returns the panels of patterns in which the content of tokens chooses."""
    token_choice = {"routing": "token_choice", **SHORT_CLUSTERS}
    best = {"routing": "expert_choice", "routing_scope": "prefix", **SHORT_CLUSTERS}
    reformer = {
        "hash": "rotation",
        "num_rounds": 2,
        "normalization": "unit_keys",
        "attends_to_self": False,
    }
    window = SHORT_CLUSTERS["attention_window"]
    return [
        Panel(
            "tokens like it",
            "RoutedHeads, token choice",
            [layers.RoutedHeads(1, **token_choice)],
            needs_causal_mask=True,
        ),
        Panel(
            "what followed those",
            "the same, key_shift=1",
            [layers.RoutedHeads(1, key_shift=1, **token_choice)],
            needs_causal_mask=True,
        ),
        Panel(
            "near, and tokens like it",
            "LocalHeads, RoutedHeads",
            [
                layers.LocalHeads(1, block_shape=(BLOCK,)),
                layers.RoutedHeads(1, **token_choice),
            ],
            needs_causal_mask=True,
        ),
        Panel(
            "first, near, best clusters",
            "MultipoleHeads, no means",
            [layers.MultipoleHeads(1, summaries=False, **SHORT_MULTIPOLE)],
        ),
        Panel(
            "best of a centroid",
            "RoutedHeads, expert choice",
            [layers.RoutedHeads(1, **best)],
        ),
        Panel(
            "sampled by distance",
            "ClusterStridedHeads",
            [layers.ClusterStridedHeads(1, **SHORT_CLUSTERS)],
        ),
        Panel(
            "same bucket of a hash",
            "HashedHeads",
            [layers.HashedHeads(1, num_buckets=4, attention_window=window)],
        ),
        Panel(
            "same bucket, two hashes",
            "ReformerHeads",
            [zoo.ReformerHeads(1, 4, window, **reformer)],
        ),
        Panel(
            "own block, blocks like it",
            "BlockTopKHeads",
            [zoo.BlockTopKHeads(1, BLOCK, num_blocks=3)],
        ),
        Panel(
            "best by an indexer",
            "IndexedHeads",
            [zoo.IndexedHeads(1, num_selected=window)],
        ),
    ]


def mixtures():
    """Returns the panels of patterns whose queries see mixtures, or all by features."""

    def feature_map(name):
        return [zoo.FeatureMapHeads(1, name, num_features=64)]

    return [
        Panel(
            "window, compressed rest",
            "CompressedHeads",
            [zoo.CompressedHeads(1, ratio=BLOCK, attention_window=BLOCK)],
        ),
        Panel(
            "window, mixed segments",
            "LongShortHeads",
            [zoo.LongShortHeads(1, BLOCK, segment_length=BLOCK)],
        ),
        Panel(
            "own block, mixed block",
            "SinkhornHeads",
            [zoo.SinkhornHeads(1, BLOCK, num_iterations=1)],
        ),
        Panel("a few packed tokens", "LunaHeads", [zoo.LunaHeads(1, 4)]),
        Panel("all, by features", "FeatureMapHeads, elu", feature_map("elu")),
        Panel(
            "all, near softmax", "FeatureMapHeads, positive", feature_map("positive")
        ),
        Panel(
            "all, near a Gaussian", "FeatureMapHeads, fourier", feature_map("fourier")
        ),
        Panel(
            "all, by place",
            "SynthesizerHeads",
            [zoo.SynthesizerHeads(1, max_length=SHORT_LENGTH)],
        ),
        Panel(
            "what queries like it see",
            "ClusteredQueryHeads",
            [zoo.ClusteredQueryHeads(1, num_clusters=4, num_keys=6)],
            has_causal_form=False,
        ),
        Panel(
            "learned points",
            "InducedHeads",
            [zoo.InducedHeads(1, num_points=4)],
            has_causal_form=False,
        ),
        Panel(
            "learned mixtures of all",
            "LinformerHeads",
            [zoo.LinformerHeads(1, SHORT_LENGTH, num_projected=8)],
            has_causal_form=False,
        ),
        Panel(
            "all, by landmarks",
            "NystromHeads",
            [zoo.NystromHeads(1, num_landmarks=8, convolution_size=5)],
            has_causal_form=False,
        ),
    ]


def images():
    """Returns the panels of patterns of images."""
    block = {"block_shape": IMAGE_BLOCK}
    return [
        Panel("own block, neighbours", "LocalHeads", [layers.LocalHeads(1, **block)]),
        Panel(
            "own place in all blocks", "StridedHeads", [layers.StridedHeads(1, **block)]
        ),
        Panel(
            "own block, ends of all",
            "FixedHeads",
            [layers.FixedHeads(1, num_summary_columns=3, **block)],
        ),
        Panel(
            "window, row by row",
            "SlidingHeads",
            [layers.SlidingHeads(1, LARGE_IMAGE[1])],
        ),
        Panel("its row", "AxialHeads, axis=1", [zoo.AxialHeads(1, 1)]),
        Panel("its column", "AxialHeads, axis=0", [zoo.AxialHeads(1, 0)]),
        Panel("its row and column", "AxialHeads", [zoo.AxialHeads(1)]),
        Panel(
            "positions like it",
            "RoutedHeads, token choice",
            [layers.RoutedHeads(1, 4, 24, routing="token_choice")],
            needs_causal_mask=True,
        ),
    ]


FAMILIES = {"places": places, "content": content, "mixtures": mixtures}


def maps(panels, x, causal):
    """Returns pairs of a panel and its map, of those that have one.

    Args:
        panels: list of `Panel`.
        x: the sequence or the image.
        causal: whether queries see earlier keys only, where it can be.
    """
    found = []
    for panel in panels:
        keras.utils.set_random_seed(0)  # whatever stands before it
        found.append((panel, panel.map(x, causal)))
    return [(panel, weights) for panel, weights in found if weights is not None]


def seen(weights, is_shaded):
    """Returns how dark the cells of a map are: 0 where a key is not seen, at most 1.

    Args:
        weights: `<float>[length, length]`.
        is_shaded: whether cells are the darker, the larger their share of the largest
            weight of the query.
    """
    is_seen = weights > 0
    if not is_shaded:
        return is_seen.astype(float)
    largest = np.maximum(weights.max(axis=-1, keepdims=True), np.finfo("float32").tiny)
    return is_seen * (LEAST_SHADE + (1 - LEAST_SHADE) * weights / largest)


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


def contents(length=LENGTH, seed=0):
    """Returns a sequence whose tokens are of four sorts, `(1, length, dim)`."""
    generator = np.random.default_rng(seed)
    sorts = generator.normal(size=(4, DIM))
    tokens = sorts[generator.integers(0, 4, length)]
    return (tokens + 0.5 * generator.normal(size=(length, DIM)))[None].astype("float32")


def weights_of(attention, x, causal):
    """Returns the weights of a layer, NumPy array `<float>[heads, length, length]`.

    Args:
        attention: `MixedAttention`.
        x: the sequence, `(1, length, dim)`, or an image.
        causal: whether queries see earlier keys only.
    """
    _, weights = attention(x, use_causal_mask=causal, return_attention_scores=True)
    return ops.convert_to_numpy(weights)[0]


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
    is_seen = weights_of(attention, x, causal)[0] > 0
    if not isinstance(group, ClusteredHeads):
        return is_seen.astype(int)
    query = normalize(ops.matmul(x, attention.query_kernel))[:, None]
    (assigned,) = group.assign([query], [None])
    colours = np.zeros(is_seen.shape, int)
    for number, together in enumerate(in_one_cluster(group, assigned, causal)):
        colours[together] = number + 1
    return colours * is_seen


def in_one_cluster(group, assigned, causal):
    """Tells which tokens sit in a cluster together.

    Args:
        group: the head group, of one head with clusters.
        assigned: `Assignment` of its tokens.
        causal: whether members are judged among the tokens up to the query.

    Returns:
        NumPy array `<bool>[clusters, length, length]`, for each query (first) and key.
    """
    length, clusters = assigned.entries.shape[2], assigned.num_clusters
    if causal and group.causal_rule().tokens_choose:
        best = ops.convert_to_numpy(assigned.numbers)[0, 0]
        is_member = best == np.arange(clusters)[:, None]
        return is_member[:, :, None] & is_member[:, None]
    mask = None
    if causal:  # a row of the batch for each query, with the tokens up to it
        assigned = assigned.with_entries(ops.repeat(assigned.entries, length, axis=0))
        mask = np.tri(length, dtype="bool")[:, None]
    members, belongs = group.choose(assigned, mask)
    is_member = ops.convert_to_numpy(members)[:, 0, :, :, None] == np.arange(length)
    if belongs is not None:
        is_member &= ops.convert_to_numpy(belongs)[:, 0, :, :, None]
    is_member = np.swapaxes(is_member.any(axis=2), 0, 1)
    own = is_member if causal else np.repeat(is_member, length, axis=1)
    return np.diagonal(own, axis1=1, axis2=2)[..., None] & is_member


def draw_clusters(patterns, path):
    """Writes the pictures into one file.

    Args:
        patterns: dict of arrays as `visible` returns them, by title.
        path: the file.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import colors
    from matplotlib import pyplot

    colour_map = colors.ListedColormap(["white", *CLUSTER_COLOURS])
    columns = min(COLUMNS, len(patterns))
    rows = -(-len(patterns) // columns)
    # A row alone has no room for its titles otherwise.
    size = 2.6 * columns, 2.9 * rows + 0.3 * (rows == 1)
    figure, axes = pyplot.subplots(rows, columns, figsize=size)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (title, pattern) in zip(axes.flat, patterns.items(), strict=False):
        axis.axis("on")
        axis.imshow(pattern, cmap=colour_map, vmin=0, vmax=5, interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def draw_panels(panels, path, side, marked=None):
    """Writes panels of one size into one file, four in a row.

    Args:
        panels: list of `(title, name, cells)`, cells as `seen` returns them.
        path: the file.
        side: number of cells along a side of a panel.
        marked: row and column of a cell with a frame, in panels that show one position
            of an image; None (the default) for panels of queries and keys.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import colors
    from matplotlib import pyplot

    dots = PANEL_DOTS // side * side
    rows = -(-len(panels) // PANELS_IN_A_ROW)
    width = MARGIN + PANELS_IN_A_ROW * (dots + GAP)
    height = rows * (TITLE + dots) + MARGIN
    figure = pyplot.figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    colour_map = colors.LinearSegmentedColormap.from_list("seen", ["white", BLUE])
    for number, (title, name, cells) in enumerate(panels):
        row, column = divmod(number, PANELS_IN_A_ROW)
        left, top = MARGIN + column * (dots + GAP), row * (TITLE + dots) + TITLE
        place = left / width, 1 - (top + dots) / height, dots / width, dots / height
        axis = figure.add_axes(place)
        axis.imshow(cells, cmap=colour_map, vmin=0, vmax=1, interpolation="nearest")
        axis.set_xticks(np.arange(0.5, side - 1), [])
        axis.set_yticks(np.arange(0.5, side - 1), [])
        axis.tick_params(length=0)
        axis.grid(color="#dddddd", linewidth=0.4)
        axis.set_axisbelow(False)
        for spine in axis.spines.values():
            spine.set_color("#888888")
        above = {"transform": axis.transAxes, "ha": "left", "va": "bottom"}
        axis.text(0, 1 + 32 / dots, title, fontsize=12, weight="bold", **above)
        axis.text(0, 1 + 6 / dots, name, fontsize=10.5, color="#444444", **above)
        if marked is not None:
            corner = marked[1] - 0.5, marked[0] - 0.5
            frame = {"fill": False, "lw": 2.5, "ec": "#d1495b", "zorder": 3}
            axis.add_patch(pyplot.Rectangle(corner, 1, 1, **frame))
            continue
        if column == 0:
            axis.set_ylabel("query", fontsize=12)
        if number + PANELS_IN_A_ROW >= len(panels):
            axis.set_xlabel("key", fontsize=12)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)


def write_clusters(path, causal):
    """Draws the patterns of a Routing Transformer, with a colour for each cluster."""
    keras.utils.set_random_seed(0)
    x = contents()
    patterns = {
        title: visible(group, x, causal) for title, group in kinds(causal).items()
    }
    draw_clusters(patterns, path)


def multipole(causal):
    """Returns what `draw_clusters` draws of multipole heads, by title."""
    x, found = contents(), {}
    for name, summaries in (("exactly", False), ("at all", True)):
        keras.utils.set_random_seed(0)
        group = layers.MultipoleHeads(1, summaries=summaries, **MULTIPOLE)
        attention = layers.MixedAttention([group], key_dim=KEY_DIM)
        found[name] = weights_of(attention, x, causal)[0] > 0
    own, other = np.mgrid[:LENGTH, :LENGTH]
    borders = ops.convert_to_numpy(group.borders(np.arange(LENGTH)))
    is_near = other >= borders[:, None]
    if not causal:
        is_near = abs(own - other) <= group.num_recent // 2
    is_near |= other < group.num_sinks
    key = normalize(ops.matmul(x, attention.key_kernel))[:, None]
    (assigned,) = group.assign([key], [None])
    clusters = ops.convert_to_numpy(assigned.numbers)[0, 0] + 1
    colours = np.where(is_near, len(CLUSTER_COLOURS), clusters)
    exactly, means = found["exactly"], found["at all"] & ~found["exactly"]
    return {
        "near pairs": colours * (exactly & is_near),
        "read of the best clusters": colours * (exactly & ~is_near),
        "through means": colours * means,
        "all, in one softmax": colours * found["at all"],
    }


def write_family(path, causal, family):
    """Draws one of `FAMILIES`."""
    found = []
    for panel, weights in maps(FAMILIES[family](), contents(SHORT_LENGTH), causal):
        name = panel.name
        if causal and not panel.has_causal_form:
            name += ", not causal"
        found.append((panel.title, name, seen(weights, family == "mixtures")))
    draw_panels(found, path, SHORT_LENGTH)


def write_images(path, causal):
    """Draws what one position of an image sees."""
    x = contents(math.prod(LARGE_IMAGE)).reshape(1, *LARGE_IMAGE, DIM)
    query = np.ravel_multi_index(POSITION, LARGE_IMAGE)
    found = [
        (panel.title, panel.name, seen(weights[query].reshape(LARGE_IMAGE), False))
        for panel, weights in maps(images(), x, causal)
    ]
    draw_panels(found, path, LARGE_IMAGE[0], POSITION)


def main(argv):
    del argv
    folder, causal = pathlib.Path(flags.FLAGS.output_dir), flags.FLAGS.causal
    write_clusters(folder / "attention_patterns.png", causal)
    draw_clusters(multipole(causal), folder / "multipole.png")
    for family in FAMILIES:
        write_family(folder / f"head_groups_{family}.png", causal, family)
    write_images(folder / "head_groups_images.png", causal)


if __name__ == "__main__":
    flags.DEFINE_string("output_dir", "docs", "The folder of the pictures.")
    flags.DEFINE_bool("causal", True, "Whether queries see earlier keys only.")
    app.run(main)

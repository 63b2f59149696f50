"""What recall.py works on: examples, settings, what routing makes of them, and plot.

Letters: B batch, H heads, L length, P pairs.
"""

import dataclasses
import math
import statistics

import numpy as np

from benchmarks.tasks import mqar

EVALUATION_SEED = 2**31  # no flag can be as large


def make_examples(number, length, pairs, vocabulary, seed, step=0, synonyms=1):
    """Makes sequences of `benchmarks.tasks.mqar`, with fillers of any tokens.

    Args:
        number: number of sequences.
        length: tokens of a sequence.
        pairs: pairs of a sequence.
        vocabulary: number of tokens there are.
        seed: of the random numbers.
        step: number of the batch. Defaults to 0.
        synonyms: number of tokens that are one key. Defaults to 1.

    Returns:
        `Examples`; equal ones for equal arguments.
    """
    generator = np.random.default_rng([seed, step])
    settings = {"pairs": pairs, "vocabulary": vocabulary, "synonyms": synonyms}
    return mqar.mqar(generator, number, length, **settings)


def first_places(examples):
    """Returns where the key at each labelled position stood first, `<int>[B, P]`."""
    values = examples.tokens[:, None, 1 : 2 * examples.labels.shape[1] : 2]
    return 2 * np.argmax(examples.labels[..., None] == values, axis=2)


def routing_figures(
    examples, query_clusters, key_clusters, window, key_shift, num_clusters
):
    """Returns whether routing lets labelled positions see what they look for.

    Their match is the first place of the key, whose value a head with `key_shift=1`
    reads there; without, it is the place of the value after it.

    Args:
        examples: `Examples`.
        query_clusters: `<int>[B, H, L, R]`, the R clusters that each query reads.
        key_clusters: `<int>[B, H, L]`, that of which each position is a member.
        window: number of members that a query sees, the same of each cluster.
        key_shift: 0 or 1, see `HeadGroup`.
        num_clusters: number of clusters of a head.

    Returns:
        Dict of lists with an entry for each head, and of a number:
        `same_cluster`: share of the labelled positions that read the cluster of their
        match;
        `pushed_out`: share of these whose window ends before the match, as too many
        members came in between;
        `evenness`: entropy of the sizes of the clusters, divided by its largest
        possible value;
        `found_by_any`: share of the labelled positions that see their match in some
        head.
    """
    key_clusters = np.asarray(key_clusters)  # shares in float32 have no logarithm of 0
    matches = first_places(examples) + (1 - key_shift)
    places = np.arange(examples.tokens.shape[1])
    last = (examples.positions - key_shift)[..., None]
    between = (places > matches[..., None]) & (places <= last)
    wanted = np.take_along_axis(key_clusters, matches[:, None], axis=2)
    positions = examples.positions[:, None, :, None]
    read = np.take_along_axis(query_clusters, positions, axis=2)
    is_same = (wanted[..., None] == read).any(axis=-1)
    members = key_clusters[:, :, None] == wanted[..., None]
    share = window // query_clusters.shape[-1]
    is_pushed_out = (members & between[:, None]).sum(axis=-1) >= share
    found = is_same & ~is_pushed_out
    same = is_same.mean(axis=(0, 2))
    pushed_out = (is_same & is_pushed_out).mean(axis=(0, 2)) / np.maximum(same, 1e-9)
    return {
        "same_cluster": same.tolist(),
        "pushed_out": pushed_out.tolist(),
        "evenness": _evenness(key_clusters, num_clusters),
        "found_by_any": float(found.any(axis=1).mean()),
    }


def _evenness(clusters, num_clusters):
    """Entropy of the sizes of each head's clusters, in parts of the largest one."""
    shares = (clusters[..., None] == np.arange(num_clusters)).mean(axis=(0, 2))
    terms = -shares * np.log(np.maximum(shares, 1e-300))
    return (terms.sum(axis=-1) / math.log(max(num_clusters, 2))).tolist()


def words(figures):
    """Returns `routing_figures` as text: the mean over the heads, and each of them."""
    texts = [f"found by any head {figures['found_by_any']:.3f}"]
    for name in ("same_cluster", "pushed_out", "evenness"):
        heads = " ".join(f"{value:.3f}" for value in figures[name])
        mean = statistics.mean(figures[name])
        texts.append(f"{name.replace('_', ' ')} {mean:.3f} (heads {heads})")
    return ", ".join(texts)


def columns_of(runs):
    """Returns columns of a table for a list of `routing_figures`, means over heads.

    Dict from the title of a column to a list with a number for each run.
    """
    names = ("same_cluster", "pushed_out", "evenness")
    columns = {
        name.replace("_", " "): [statistics.mean(run[name]) for run in runs]
        for name in names
    }
    return columns | {"found by any head": [run["found_by_any"] for run in runs]}


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides how a run ends: the key of its record.

    Args:
        pattern: one of `recall.PATTERNS`.
        key_shift: 0 or 1, of the heads of the pattern.
        length: tokens of a sequence.
        pairs: pairs of a key and its value in a sequence.
        window: tokens that a query sees; None for full attention.
        num_clusters: clusters or buckets; None where there are none.
        steps: number of training steps.
        learning_rate: the largest one.
        seed: of the weights and the training data.
        vocabulary: number of tokens there are.
        batch_size: sequences of a training step.
        width: size of a hidden state.
        num_heads: heads of the pattern.
        key_dim: size of a head, in both layers.
        options: dict of arguments of `RoutedHeads`.
        synonyms: tokens that are one key. Defaults to 1.
        exploring_queries: those of heads with clusters, see `ClusteredHeads`. Defaults
            to 0.
    """

    pattern: str
    key_shift: int
    length: int
    pairs: int
    window: int | None
    num_clusters: int | None
    steps: int
    learning_rate: float
    seed: int
    vocabulary: int
    batch_size: int
    width: int
    num_heads: int
    key_dim: int
    options: dict
    synonyms: int = 1
    exploring_queries: int = 0

    @property
    def key(self):
        """The settings as a dict, without those that earlier records do not have."""
        fields = dataclasses.asdict(self)
        for name, neutral in (("synonyms", 1), ("exploring_queries", 0)):
            if fields[name] == neutral:
                del fields[name]
        return fields

    @property
    def name(self):
        """The run in words."""
        return (
            f"{self.pattern}, key_shift {self.key_shift}, {self.length}x{self.pairs}, "
            f"{f'{self.synonyms} synonyms, ' * (self.synonyms > 1)}"
            f"{f'{self.exploring_queries} exploring, ' * bool(self.exploring_queries)}"
            f"window {self.window}, learning rate {self.learning_rate:g}, seed "
            f"{self.seed}"
        )

    def examples(self, number, seed, step=0):
        """Returns `Examples` of this size."""
        sizes = (self.length, self.pairs, self.vocabulary)
        return make_examples(number, *sizes, seed, step, self.synonyms)


def draw(panels):
    """Draws accuracy against steps, the mean over the seeds.

    Args:
        panels: dict from the title of a panel to a dict from pairs of a pattern and a
            key shift to the list of its runs, as a `Record` has them.

    Returns:
        A matplotlib figure.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels) + 2, 4.5), layout="constrained")
    patterns = list(dict.fromkeys(key[0] for lines in panels.values() for key in lines))
    handles = {}
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items()
    ):
        for (pattern, key_shift), runs in lines.items():
            curves = [dict(run["curve"]) for run in runs]
            steps = sorted(set.intersection(*map(set, curves)))
            name = f"{pattern}, key_shift {key_shift}"
            (handles[name],) = axes.plot(
                steps,
                [statistics.mean(curve[step] for curve in curves) for step in steps],
                "-" if key_shift else "--",
                color=colormaps["tab10"](patterns.index(pattern)),
            )
        axes.set(xlabel="step", ylabel="accuracy", ylim=(-0.02, 1.02))
        axes.set_title(title, fontsize="small")
        axes.grid(alpha=0.3)
    figure.legend(
        handles.values(), handles, loc="outside right upper", fontsize="small"
    )
    return figure

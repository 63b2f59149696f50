"""How heads differ, and how tokens are spread over clusters."""

import dataclasses
import itertools
import math

import numpy as np

from routing_tf.analysis.probe import Probe
from routing_tf.analysis.probe import clustered_groups
from routing_tf.analysis.windows import rows_of
from routing_tf.files.progress import progress
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.training.log import shares_of
from routing_tf.training.log import spread

EPSILON = 1e-5


def jensen_shannon_divergence(a, b):
    """Returns the mean Jensen-Shannon divergence of rows of `a` and `b`, in nats.

    Rows of both, `[batch, length]`, are divided by their sums. The smoothing of the
    release raises the result over many places: equal, uniform rows of 8,192 have 0.08.

    Reference: paper, section 5.4; `jensen_shannon_divergence` of the release.
    """
    a, b = (np.asarray(x) / np.sum(x, axis=-1, keepdims=True) for x in (a, b))
    middle = (a + b) / 2
    divergence = kl_divergence(a, middle) + kl_divergence(b, middle)
    return float(np.mean(divergence) / 2)


def kl_divergence(a, b):
    """Returns the divergence of rows of `b` from those of `a`, as in the release."""
    return -np.sum(a * np.log(b / (a + EPSILON) + EPSILON), axis=-1)


@dataclasses.dataclass(frozen=True)
class HeadDivergence:
    """The divergence of the attention of two head groups of a block.

    Args:
        block: name of the block.
        kinds: names of two head groups, which may be the same.
        mean: mean over the runs, in nats; None if no query had two distributions.
        deviation: standard deviation over the runs; None for fewer than two.
        left_out: share of the queries for which one of the two heads sees nothing.
    """

    block: str
    kinds: tuple
    mean: float | None
    deviation: float | None
    left_out: float


@dataclasses.dataclass(frozen=True)
class Spread:
    """How evenly tokens are spread over the clusters of each head.

    Args:
        smallest: smallest share of a head's tokens that are nearest to one centroid.
        largest: largest share.
        entropy: entropy of the shares divided by its largest possible value, the mean
            over heads.
    """

    smallest: float
    largest: float
    entropy: float


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How the clusters of a head group are occupied.

    Args:
        part: `"BLOCK GROUP"`.
        seen: `Spread` of the analysed tokens.
        trained: `Spread` by the moving averages of training; None without any.
        in_none: share of the tokens that are members of no cluster.
    """

    part: str
    seen: Spread
    trained: Spread | None
    in_none: float


def compare_heads(lm, windows, num_runs=10, routing_scope="full", seed=0, verbose=True):
    """Compares the attention of pairs of heads, and counts the tokens of clusters.

    Each run takes the next window and, from each block, a random pair of different
    heads for each pair of head groups. Queries for which one of them sees nothing are
    left out.

    Args:
        lm: a `RoutingTransformerCausalLM` or `RoutingImageTransformer`.
        windows: dict of NumPy arrays, inputs of the model without padding. Memory grows
            with the square of their length.
        num_runs: number of runs. Defaults to 10, as in the paper.
        routing_scope: `"full"` (the default) or `"prefix"`, see `RoutedHeads`.
        seed: seed of the choice of heads. Defaults to 0.
        verbose: whether to show progress on standard error. Defaults to True.

    Returns:
        List of `HeadDivergence`, for each block and pair of head groups with two
        different heads; and list of `Occupancy`, for each head group with clusters.

    Example:

    ```python
    import numpy as np
    from routing_tf import models
    from routing_tf.analysis import compare_heads

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    ids = np.random.default_rng(0).integers(2, 258, (2, 64)).astype("int32")
    windows = {"token_ids": ids, "padding_mask": np.ones((2, 64), "bool")}
    divergences, occupancies = compare_heads(lm, windows, num_runs=2)
    ```

    Reference: paper, section 5.4 and Table 6.
    """
    check_positive_integer("num_runs", num_runs)
    probe = Probe(lm, routing_scope)
    generator = np.random.default_rng(seed)
    pairs = {}  # (block, kinds): divergence and share left out of each run
    clusters = {}  # part: `Clusters` of each window
    num_windows = len(windows["padding_mask"])
    for run in progress(range(num_runs), "run", verbose=verbose):
        row = run % num_windows
        for found in probe.attention(rows_of(windows, [row])):
            for kinds, *maps in _random_pairs(found.maps, generator):
                pairs.setdefault((found.block, kinds), []).append(_divergence(*maps))
            for name, each in found.clusters.items() if run < num_windows else ():
                clusters.setdefault(f"{found.block} {name}", []).append(each)
    return (
        [_summary(*key, np.array(values)) for key, values in pairs.items()],
        _occupancies(probe, clusters),
    )


def _random_pairs(maps, generator):
    """Yields pairs of kinds with maps `[L, L]` of two different heads."""
    # Local heads come last in a block, and first in the paper's table.
    for kinds in itertools.combinations_with_replacement(reversed(maps), 2):
        first, second = (maps[kind][0] for kind in kinds)
        if kinds[0] != kinds[1]:
            i, j = generator.integers(len(first)), generator.integers(len(second))
        elif len(first) > 1:
            i, j = generator.choice(len(first), 2, replace=False)
        else:
            continue
        yield kinds, first[i], second[j]


def _divergence(first, second):
    """Returns the divergence of two maps, nan without any; the share left out."""
    is_seen = (first.sum(axis=-1) > 0) & (second.sum(axis=-1) > 0)
    if not is_seen.any():
        return math.nan, 1.0
    first, second = (x[is_seen].astype("float64") for x in (first, second))
    return jensen_shannon_divergence(first, second), 1.0 - is_seen.mean()


def _summary(block, kinds, values):
    divergences, left_out = values[:, 0], values[:, 1]
    divergences = divergences[~np.isnan(divergences)]
    return HeadDivergence(
        block,
        kinds,
        mean=float(divergences.mean()) if len(divergences) else None,
        deviation=float(divergences.std(ddof=1)) if len(divergences) > 1 else None,
        left_out=float(left_out.mean()),
    )


def _occupancies(probe, clusters):
    found = []
    for block in probe.blocks:
        for group in clustered_groups(block):
            part = f"{block.name} {group.name}"
            members = np.concatenate([each.members for each in clusters[part]])
            nearest = np.concatenate([each.nearest for each in clusters[part]])
            trained = shares_of(getattr(group, "kmeans", None))
            found.append(
                Occupancy(
                    part,
                    seen=_spread(nearest, members.shape[-1]),
                    trained=None if trained is None else Spread(*spread(trained)),
                    in_none=float(1 - members.any(axis=-1).mean()),
                )
            )
    return found


def _spread(nearest, num_clusters):
    """Returns the `Spread` of tokens with the nearest centroids `[B, H, L]`."""
    is_nearest = nearest[..., None] == np.arange(num_clusters)
    return Spread(*spread(is_nearest.mean(axis=(0, 2))))

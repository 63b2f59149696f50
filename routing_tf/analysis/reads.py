"""The earlier positions that tokens of a text read, and the members of a cluster.

A token reads the positions whose values have a weight in its row of an attention map.
"""

import dataclasses

import numpy as np

NOWHERE = -1
# Share of the largest weight below which a position is hardly read.
LEAST_SHARE = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class HeadReads:
    """The positions that the tokens of a text read with one head.

    Args:
        layer: number of the block.
        head: number of the head, counted over all heads of the block's
            self-attention.
        name: name for people: block, head group and number in the group.
        weights: NumPy array `<float>[length, length]`, the weights of the values read
            (columns) for each token (rows).
    """

    layer: int
    head: int
    name: str
    weights: np.ndarray

    @property
    def places(self):
        """NumPy array `<int>[length]`: the position read most, or `NOWHERE`."""
        return np.where(self.strengths > 0, self.weights.argmax(axis=-1), NOWHERE)

    @property
    def strengths(self):
        """NumPy array `<float>[length]`: the largest weight."""
        return self.weights.max(axis=-1)

    def beyond(self, reach):
        """Returns the weights of positions at least `reach` away, and 0 for others."""
        return np.tril(self.weights, -reach)

    def strongest(self, token, count=5):
        """Returns pairs of a position and its weight that a token reads, by weight.

        There are at most `count`, all above a hundredth of the largest weight.
        """
        weights = self.weights[token]
        least = LEAST_SHARE * weights.max()
        order = np.argsort(-weights, kind="stable")[:count]
        return [(int(p), float(weights[p])) for p in order if weights[p] > least]


@dataclasses.dataclass(frozen=True)
class ReadScores:
    """How a head reads, over all tokens of a text.

    Args:
        distance: mean distance of the position read most; None if no token reads.
        far: mean of the largest weight beyond the reach of local heads.
        recall: share of the tokens that read a position with the next token most.
        nothing: share of the tokens that read nothing.
    """

    distance: float | None
    far: float
    recall: float
    nothing: float


def list_reads(attention):
    """Returns the reads of each head of a model, in the first text of a batch.

    Args:
        attention: list of `BlockAttention`, see `Probe.attention`.

    Returns:
        List of `HeadReads`, in the order of the blocks and of their heads.
    """
    found = []
    for layer, each in enumerate(attention):
        heads = [
            (f"{each.block} {group} {number}", weights)
            for group, maps in each.maps.items()
            for number, weights in enumerate(maps[0])
        ]
        found += [HeadReads(layer, head, *pair) for head, pair in enumerate(heads)]
    return found


def score_reads(reads, token_ids, reach):
    """Summarises how a head reads.

    Args:
        reads: `HeadReads`.
        token_ids: NumPy array `<int>[length]` with at least two ids.
        reach: distance from which local heads see nothing.

    Returns:
        `ReadScores`.
    """
    places = reads.places
    does_read = places != NOWHERE
    distances = (np.arange(len(places)) - places)[does_read]
    is_next = does_read[:-1] & (token_ids[places[:-1]] == token_ids[1:])
    return ReadScores(
        distance=float(distances.mean()) if len(distances) else None,
        far=float(reads.beyond(reach).max(axis=-1).mean()),
        recall=float(is_next.mean()),
        nothing=float(1 - does_read.mean()),
    )


def chance_of_recall(token_ids):
    """Returns the largest possible recall, and that of reading random positions."""
    is_next = np.tril(token_ids[1:, None] == token_ids[None, :-1])
    numbers = is_next.sum(axis=-1)
    shares = numbers / np.arange(1, len(numbers) + 1)
    return float((numbers > 0).mean()), float(shares.mean())


def choose_head(heads, reach, layer=None, head=None):
    """Returns the `HeadReads` to show.

    Without `layer`, it belongs to the last block with a head that reads at the distance
    `reach` or more, where local heads see nothing, or to the last block if there is
    none. Without `head`, which counts over all heads of the block, it is the one with
    the largest mean of the largest weight at that distance.
    """
    far = [each.beyond(reach).max(axis=-1).mean() for each in heads]
    layers = sorted({each.layer for each in heads})
    if layer is None:
        reaching = [h.layer for h, mean in zip(heads, far, strict=True) if mean > 0]
        layer = max(reaching, default=layers[-1])
    check_one_of("layer", layer, layers, "model's layers")
    here = [number for number, each in enumerate(heads) if each.layer == layer]
    if head is None:
        return heads[max(here, key=far.__getitem__)]
    check_one_of("head", head, range(len(here)), "layer's heads")
    return heads[here[head]]


def choose_token(reads, reach, token=None):
    """Returns the number of the token whose reads are shown.

    Without `token`, it is the one with the largest product of weight and distance, at
    the distance `reach` or more if anything is read there.
    """
    length = len(reads.weights)
    if token is None:
        weights = reads.beyond(reach)
        weights = weights if weights.any() else reads.weights
        distances = np.arange(length)[:, None] - np.arange(length)
        return int((weights * distances).max(axis=-1).argmax())
    if not 0 <= token < length:
        raise ValueError(
            "`token` must be the number of a token of the text, from 0 to "
            f"{length - 1}. Received: token={token}"
        )
    return token


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """A cluster of a head in a text; `is_member`, `<bool>[length]`, are its tokens.

    `head` is the number of the head in its group, and `number` that of the cluster.
    """

    block: str
    group: str
    head: int
    number: int
    is_member: np.ndarray

    @property
    def name(self):
        """Name for people."""
        return f"{self.block} {self.group} {self.head}, cluster {self.number}"


def find_cluster(attention, layer=None, head=0, cluster=None):
    """Returns a cluster by its numbers, in the first text of a batch.

    Args:
        attention: the result of `Probe.attention`.
        layer: number of the block; None (the default) for the last one with clusters.
        head: number of the head, over all head groups of the block with clusters.
        cluster: number of the cluster; None (the default) for that with the most
            tokens.

    Returns:
        The cluster; None if no block has clusters and `layer` is None.
    """
    layers = [number for number, each in enumerate(attention) if each.clusters]
    if layer is None and not layers:
        return None
    layer = layers[-1] if layer is None else layer
    check_one_of("layer", layer, layers, "layers with clusters")
    heads = [
        (group, number, members)
        for group, clusters in attention[layer].clusters.items()
        for number, members in enumerate(clusters.members[0])
    ]
    check_one_of("head", head, range(len(heads)), "layer's heads with clusters")
    group, number, members = heads[head]
    if cluster is None:
        cluster = int(members.sum(axis=0).argmax())
    check_one_of("cluster", cluster, range(members.shape[1]), "head's clusters")
    block = attention[layer].block
    return Cluster(block, group, number, cluster, members[:, cluster])


def check_one_of(name, number, numbers, what):
    """Raises a `ValueError` unless a number is valid."""
    if number not in numbers:
        raise ValueError(
            f"`{name}` must be one of the {what}, {list(numbers)}. "
            f"Received: {name}={number}"
        )

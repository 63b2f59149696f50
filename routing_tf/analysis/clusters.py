"""One cluster of a head, and its members."""

import dataclasses

import numpy as np


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

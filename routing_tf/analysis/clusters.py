"""One cluster of a head, and who sits in it."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """A cluster in a text.

    Args:
        block: name of the block.
        group: name of the head group.
        head: number of the head in the group.
        number: number of the cluster.
        is_member: NumPy array `<bool>[length]`, who sits in it.
    """

    block: str
    group: str
    head: int
    number: int
    is_member: np.ndarray

    @property
    def name(self):
        """Name for a reader."""
        return f"{self.block} {self.group} {self.head}, cluster {self.number}"


def find_cluster(attention, layer=None, head=0, cluster=None):
    """Finds a cluster by its numbers, in the first text of a batch.

    Args:
        attention: list of `BlockAttention`, see `Probe.attention`.
        layer: number of the block; None (the default) for the last one with clusters.
        head: number of the head, counted over the block's head groups with clusters.
            Defaults to 0.
        cluster: number of the cluster; None (the default) for that with the most
            tokens.

    Returns:
        `Cluster`; None if no block has clusters and no layer is given.

    Raises:
        ValueError: if there is no such cluster.

    Example:

    ```python
    import numpy as np
    from routing_tf import models
    from routing_tf.analysis import Probe
    from routing_tf.analysis.clusters import find_cluster

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    inputs = {
        "token_ids": np.arange(64, dtype="int32")[None],
        "padding_mask": np.ones((1, 64), "bool"),
    }
    cluster = find_cluster(Probe(lm).attention(inputs))
    assert cluster.is_member.shape == (64,)
    ```
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
    """Raises a `ValueError` if a number is not one of those there are.

    Args:
        name: name of the argument.
        number: its value.
        numbers: sequence of the numbers there are.
        what: what they number.
    """
    if number not in numbers:
        raise ValueError(
            f"`{name}` must be one of the {what}, {list(numbers)}. "
            f"Received: {name}={number}"
        )

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
    """Finds a cluster by its numbers, in the first text of a batch.

    `head` counts over the block's head groups with clusters. Without `layer`, it is in
    the last block with clusters, or None if no block has any; without `cluster`, it is
    the one with the most tokens. `attention` is the result of `Probe.attention`.

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
    """Raises a `ValueError` unless a number is valid."""
    if number not in numbers:
        raise ValueError(
            f"`{name}` must be one of the {what}, {list(numbers)}. "
            f"Received: {name}={number}"
        )

"""What may stand in the place of full attention, at about as many keys for a query."""

import dataclasses
from collections.abc import Callable

import numpy as np

from routing_tf import layers
from routing_tf import retrofit
from routing_tf import zoo
from routing_tf.retrofit import calibration

NUM_SINKS = 4


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to attend.

    Args:
        heads: function from a number of heads and one of keys to a head group; None
            for full attention.
        centroids: `"calibrated"` (the default), `"sequence"` (also for
            heads without any), or `"random"`.
        keep_full: as in `retrofit.sparsify`. Defaults to ().
    """

    heads: Callable | None
    centroids: str = "calibrated"
    keep_full: tuple | str = ()

    def put_into(self, lm, keys, texts):
        """Changes a model; returns the report, or None.

        Args:
            lm: a `CausalLM`.
            keys: how many keys a query reads.
            texts: ids for the calibration, `<int>[number, length]`.
        """
        if self.heads is None:
            return None
        number = lm.backbone.num_query_heads
        # No report of the others, and no centroids to find.
        needs = {"calibrated": texts, "random": texts[:1, :128]}
        report = retrofit.sparsify(
            lm,
            needs.get(self.centroids),
            heads=self.heads(number, keys),
            keep_full=self.keep_full,
            centroids="calibrated" if self.centroids == "random" else self.centroids,
        )
        if self.centroids == "random":
            _draw_centroids(lm)
        return report


def _draw_centroids(lm, seed=0):
    """Gives all clusters random directions."""
    random = np.random.default_rng(seed)
    for block in lm.backbone.transformer_layers:
        group = block._self_attention_layer.slot.group
        shape = tuple(group.kmeans.centroids.shape)
        drawn = calibration._normalized(random.normal(size=shape).astype("float32"))
        calibration.set_centroids(group, drawn, np.ones(shape[:2], "float32"))


def multipole(number, keys, **kwargs):
    """Half of the keys is near, on average, and half is in the best clusters."""
    near = (keys - NUM_SINKS) // 2
    block = 64 if near >= 96 else 1
    settings = {
        "num_clusters": 64,
        "attention_window": keys - NUM_SINKS - near,
        "members_per_cluster": (keys - NUM_SINKS - near) // 2,
        "num_recent": near - block // 2,
        "block_length": block,
        "num_sinks": NUM_SINKS,
    }
    return layers.MultipoleHeads(number, **{**settings, **kwargs})


def equal_shares(number, keys):
    """The same, but each of the best clusters is read as far back as the others."""
    return multipole(number, keys, members_per_cluster=None)


def window(number, keys):
    """The first tokens, and a window of all other keys."""
    near = keys - NUM_SINKS
    return layers.MultipoleHeads(
        number,
        num_clusters=1,
        attention_window=1,
        clusters_per_query=1,
        num_recent=near,
        block_length=1,
        num_sinks=NUM_SINKS,
        summaries=False,
    )


def blocks(number, keys):
    """The own block, and others by their mean key."""
    return zoo.BlockTopKHeads(number, block_length=16, num_blocks=round(keys / 16))


CONTENDERS = {
    "full attention": Contender(None),
    "multipole": Contender(multipole),
    "multipole, equal shares": Contender(equal_shares),
    "multipole, keep_full=auto": Contender(multipole, keep_full="auto"),
    "multipole, random centroids": Contender(multipole, "random"),
    "multipole, centroids of the sequence": Contender(multipole, "sequence"),
    "sinks and window": Contender(window, "sequence"),
    "blocks of 16 by mean key": Contender(blocks, "sequence"),
}

"""What may stand in the place of full attention, at about as many keys for a query."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from benchmarks.retrofit import best_blocks
from routing_tf import layers
from routing_tf import retrofit
from routing_tf.retrofit import calibration
from routing_tf.retrofit import swapping

NUM_SINKS, NUM_CLUSTERS = 4, 64


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
        has_report = self.keep_full == "auto"
        # Else few are enough: centroids are set below.
        given = texts if has_report else texts[:1, :128]
        report = retrofit.sparsify(
            lm,
            None if self.centroids == "sequence" else given,
            heads=self.heads(number, keys),
            keep_full=self.keep_full,
            centroids="calibrated" if self.centroids == "random" else self.centroids,
        )
        if self.centroids == "random":
            _set_centroids(lm, _random_centroids)
        elif self.centroids == "calibrated" and not has_report:
            found = functools.partial(_centroids_of, texts.tobytes(), texts.shape)
            _set_centroids(lm, lambda index, shape: found(shape[1])[index])
        return report


def _set_centroids(lm, centroids_of):
    """Sets the centroids of all layers, from a function of their index and shape."""
    for index, block in enumerate(lm.backbone.transformer_layers):
        group = block._self_attention_layer.slot.group
        shape = tuple(group.kmeans.centroids.shape)
        found = centroids_of(index, shape)
        calibration.set_centroids(group, found, np.ones(shape[:2], "float32"))


def _random_centroids(index, shape):
    drawn = np.random.default_rng(index).normal(size=shape)
    return calibration._normalized(drawn.astype("float32"))


@functools.cache
def _centroids_of(texts, shape, number):
    """Finds centroids once for all contenders of a process, `number` for a head."""
    return [calibration.centroids_of(keys, number)[0] for keys in _keys(texts, shape)]


@functools.cache
def _keys(texts, shape):
    """Returns the keys that the model makes of texts, of all layers."""
    from benchmarks.retrofit import smollm2

    lm = smollm2.load()
    slots = swapping.slots_of(lm)
    keys = calibration.Keys(calibration.KEYS_PER_CLUSTER * NUM_CLUSTERS)
    batches = calibration.batches_of(lm, np.frombuffer(texts, "int32").reshape(shape))
    calibration.run(lm.backbone, slots, keys.watch, batches)
    return [keys.kept[slot.index] for slot in slots]


def multipole(number, keys, near_share=0.5, most_of_one=0.5, **kwargs):
    """Some of the keys are near, on average, the others in the best clusters.

    Args:
        number: of heads.
        keys: how many a query reads.
        near_share: which share of them is near. Defaults to half.
        most_of_one: which share of the others may be in one cluster. Defaults to half.
        **kwargs: other settings of `MultipoleHeads`.
    """
    near = int((keys - NUM_SINKS) * near_share)
    block = 64 if near >= 96 else 1
    window = keys - NUM_SINKS - near
    settings = {
        "num_clusters": NUM_CLUSTERS,
        "clusters_per_query": 8,
        "attention_window": window,
        "members_per_cluster": int(window * most_of_one),
        "num_recent": near - block // 2,
        "block_length": block,
        "num_sinks": NUM_SINKS,
    }
    return layers.MultipoleHeads(number, **{**settings, **kwargs})


def more_clusters(number, keys, **kwargs):
    """Clusters are half as large, and so is what may be read of one."""
    return multipole(number, keys, most_of_one=0.25, num_clusters=128, **kwargs)


def far_distance(number, keys, distance=4096, **kwargs):
    """All keys that are not near are compared as if at one distance."""
    import keras_hub

    # That of the model replaces it.
    rotary = keras_hub.layers.RotaryEmbedding()
    settings = {"far_distance": distance, "rotary": rotary}
    return more_clusters(number, keys, **settings, **kwargs)


def equal_shares(number, keys):
    """Four clusters, of which each is read as far back as the others."""
    return multipole(number, keys, clusters_per_query=4, members_per_cluster=None)


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


def blocks(number, keys, block_length=16):
    """The first tokens, the nearest ones, and the best blocks of all others."""
    near = (keys - NUM_SINKS) // 2
    best = keys - NUM_SINKS - near
    return best_blocks.BestBlocksHeads(number, NUM_SINKS, near, best, block_length)


CONTENDERS = {
    "full attention": Contender(None),
    "multipole": Contender(multipole),
    "multipole with four clusters": Contender(
        functools.partial(multipole, clusters_per_query=4)
    ),
    "multipole with four clusters and equal shares": Contender(equal_shares),
    "multipole with keep_full=auto": Contender(multipole, keep_full="auto"),
    "multipole with 128 clusters": Contender(more_clusters),
    "multipole with 128 clusters and keep_full=auto": Contender(
        more_clusters, keep_full="auto"
    ),
    "multipole with 128 clusters and a quarter near": Contender(
        functools.partial(
            more_clusters, near_share=0.25, num_recent=48, block_length=32
        )
    ),
    "multipole with far_distance=4096": Contender(far_distance),
    "multipole with far_distance=1024": Contender(
        functools.partial(far_distance, distance=1024)
    ),
    "multipole with far_distance=1024 without means": Contender(
        functools.partial(far_distance, distance=1024, summaries=False)
    ),
    "multipole with whole clusters": Contender(
        functools.partial(more_clusters, keeps_all=True)
    ),
    "multipole with 16 whole clusters": Contender(
        functools.partial(more_clusters, keeps_all=True, clusters_per_query=16)
    ),
    "multipole with random centroids": Contender(multipole, "random"),
    "multipole with centroids of the sequence": Contender(multipole, "sequence"),
    "sinks and window": Contender(window, "sequence"),
    "blocks of 16 by mean key": Contender(blocks, "sequence"),
    "best keys (oracle)": Contender(
        functools.partial(blocks, block_length=1), "sequence"
    ),
}

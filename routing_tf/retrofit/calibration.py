"""Centroids of the keys that a trained model makes of texts."""

import numpy as np
from keras import ops
from tqdm import tqdm

from routing_tf.layers.routing.online_kmeans import LAYER_NORM_EPSILON
from routing_tf.layers.support.validation import is_integer
from routing_tf.retrofit import keras_hub_internals as internals
from routing_tf.retrofit import swapping

#: Tokens of a text that the model sees at once.
ROW_LENGTH = 2048
#: Keys of a head that k-means sees, for each cluster.
KEYS_PER_CLUSTER = 256
NUM_ITERATIONS = 15


def batches_of(model, calibration):
    """Yields the inputs of a model, batch after batch.

    Args:
        model: a model of keras_hub, or any other Keras model.
        calibration: a text or texts; for models with token ids, these, as
            `<int>[n, length]` or lists of them; a dict or tuple of arrays; or an
            iterable of inputs.
    """
    if isinstance(calibration, dict):
        yield calibration
        return
    if isinstance(calibration, (str, bytes)):
        calibration = [calibration]
    if not hasattr(calibration, "__iter__"):
        raise ValueError(
            "`calibration` must be texts, arrays, or an iterable of inputs. Received: "
            f"{type(calibration).__name__}"
        )
    is_array = hasattr(calibration, "shape")
    if is_array:
        calibration = np.asarray(ops.convert_to_numpy(calibration))
    for batch in calibration:
        if isinstance(batch, bytes):
            batch = batch.decode()
        if isinstance(batch, str):
            yield from _batches_of_text(model, batch)
            continue
        if is_array:
            batch = batch[None]
        if isinstance(batch, (list, tuple)) and not is_integer(batch[0]):
            batch = batch[0]
        yield _inputs(model, batch)


def _batches_of_text(model, text):
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            "`calibration` can only be texts for a model with a `preprocessor`. "
            f"Received: a text for {model.name!r}. Pass token ids `<int>[n, length]`"
        )
    ids = np.asarray(ops.convert_to_numpy(tokenizer(text)), "int32")
    length = min(ROW_LENGTH, internals.longest_input(model) or ROW_LENGTH)
    for first in range(0, len(ids), length):
        yield _inputs(model, ids[None, first : first + length])


def _inputs(model, batch):
    """Returns what a model is called with, for a batch of token ids or of anything."""
    names = getattr(model, "input", None)
    takes_ids = isinstance(names, dict) and {"token_ids", "padding_mask"} <= set(names)
    if not takes_ids or isinstance(batch, dict):
        return batch
    ids = np.atleast_2d(np.asarray(ops.convert_to_numpy(batch)))
    _check_ids(model, ids)
    ids = ids.astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def _check_ids(model, ids):
    size = getattr(getattr(model, "backbone", model), "vocabulary_size", None)
    longest = internals.longest_input(model)
    are_ids = ids.ndim == 2 and ids.size and ids.dtype.kind in "iu"
    if are_ids:
        are_ids = ids.min() >= 0 and (size is None or ids.max() < size)
        are_ids = are_ids and (longest is None or ids.shape[1] <= longest)
    if not are_ids:
        least = "" if size is None else f", below {size}"
        most = "" if longest is None else f", of at most {longest} in a row"
        raise ValueError(
            f"`calibration` must be texts, or token ids `<int>[n, length]`{least}"
            f"{most}. Received: {ids.dtype} of the shape {ids.shape}"
        )


def run(model, slots, watch, batches):
    """Runs a model on batches, with attention layers that are watched."""
    with swapping.watched(slots, watch):
        for batch in batches:
            model(batch, training=False)


class Keys:
    """Keys of all layers: at most so many of each head, evenly spread over the texts.

    Args:
        limit: how many keys of a head to keep.
    """

    def __init__(self, limit):
        self.limit = limit
        self.kept, self._seen, self._every = {}, {}, {}

    def watch(self, slot, x, mask, original):
        """Keeps keys of a call, and attends as before."""
        if slot.attends_to_another:
            return original()
        _, key, _ = slot.adapter.projected(x)
        key = np.asarray(ops.convert_to_numpy(ops.cast(key, "float32")))
        key = np.moveaxis(key, 1, 0).reshape(key.shape[1], -1, key.shape[3])
        if mask is not None:
            real = np.asarray(ops.convert_to_numpy(mask))
            real = np.broadcast_to(real, x.shape[:2]).reshape(-1)
            key = key[:, real]
        self._keep(slot.index, _normalized(key))
        return original()

    def _keep(self, index, key):
        every, seen = self._every.get(index, 1), self._seen.get(index, 0)
        kept = [self.kept[index]] if index in self.kept else []
        kept = np.concatenate([*kept, key[:, -seen % every :: every]], axis=1)
        while kept.shape[1] > self.limit:
            kept, every = kept[:, ::2], 2 * every
        self.kept[index] = kept
        self._every[index], self._seen[index] = every, seen + key.shape[1]


def _normalized(x):
    """Layer-normalises the last axis, as clusters see keys."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + LAYER_NORM_EPSILON)


def centroids_of(keys, num_clusters, seed=0):
    """Finds centroids by spherical k-means.

    Args:
        keys: `<float32>[heads, number, dim]`, layer-normalised.
        num_clusters: number of centroids of a head.
        seed: of the keys that the centroids start as. Defaults to 0.

    Returns:
        Centroids `<float32>[heads, num_clusters, dim]`, layer-normalised, and the
        number of keys of each, `<float32>[heads, num_clusters]`.
    """
    heads, number, dim = keys.shape
    if number < num_clusters:
        raise ValueError(
            "`calibration` must have at least as many tokens as there are clusters. "
            f"Received: {number} tokens for num_clusters={num_clusters}. Pass more "
            "text; some thousand tokens are a good number"
        )
    random = np.random.default_rng(seed)
    centroids = np.empty((heads, num_clusters, dim), "float32")
    counts = np.zeros((heads, num_clusters), "float32")
    for head, own in enumerate(keys):
        means = own[random.choice(number, num_clusters, replace=False)]
        for _ in range(NUM_ITERATIONS):
            scores = own @ means.T
            nearest = scores.argmax(axis=1)
            sums = np.zeros_like(means)
            np.add.at(sums, nearest, own)
            count = np.bincount(nearest, minlength=num_clusters)
            # An empty cluster starts anew as a key that is far from all others.
            empty = np.flatnonzero(count == 0)
            worst = np.argsort(scores.max(axis=1))[: len(empty)]
            sums[empty] = own[worst]
            means = _normalized(sums)
        centroids[head], counts[head] = means, count
    return centroids, counts


def set_centroids(group, centroids, counts):
    """Sets the state of a group's clusters.

    Args:
        group: heads with `kmeans`, built.
        centroids: `<float32>[heads, clusters, dim]`.
        counts: number of tokens of each, `<float32>[heads, clusters]`.
    """
    kmeans = group.kmeans
    kmeans.centroids.assign(centroids)
    if hasattr(kmeans, "sums"):
        # Where they move, they go on from here.
        counts = np.maximum(counts, 1)
        kmeans.counts.assign(counts)
        kmeans.sums.assign(centroids * counts[..., None])
    if hasattr(kmeans, "empty_steps"):
        kmeans.empty_steps.assign(np.zeros_like(counts))


def has_centroids(group):
    """Whether heads choose clusters by learned centroids."""
    return getattr(group, "kmeans", None) is not None


def calibrate(model, slots, batches):
    """Sets the centroids of the groups of all slots that have some."""
    slots = [slot for slot in slots if has_centroids(slot.group)]
    if not slots:
        return
    most = max(slot.group.num_clusters for slot in slots)
    keys = Keys(KEYS_PER_CLUSTER * most)
    batches = tqdm(batches, "calibration", unit="batch", disable=None)
    run(model, slots, keys.watch, batches)
    for slot in tqdm(slots, "k-means", unit="layer", disable=None):
        if slot.attends_to_another:
            continue
        found = centroids_of(keys.kept.pop(slot.index), slot.group.num_clusters)
        set_centroids(slot.group, *found)

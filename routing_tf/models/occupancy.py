"""How evenly tokens are spread over clusters."""

import math

import numpy as np

from routing_tf import layers
from routing_tf.layers.support.keras_internals import layers_inside

# A cluster counts as dead if its share of tokens is below this part of an even share.
DEAD = 0.01


def centroid_occupancy(lm):
    """Returns how evenly the tokens are spread over the clusters of each routed layer.

    Returns a dict with four entries for each layer that counts its tokens: smallest and
    largest share of a head's tokens in one cluster (`occupancy/LAYER/min` and `max`),
    the entropy of the shares divided by its largest possible value
    (`occupancy/LAYER/entropy`), the mean over heads, and the share of clusters that get
    less than a hundredth of an even share (`dead`).
    """
    found = {}
    for layer in layers_inside(lm):
        shares = shares_of(layer)
        if shares is None:
            continue
        tag = "occupancy/" + layer.counts.path.removesuffix("/kmeans/counts")
        for name, value in zip(("min", "max", "entropy"), spread(shares)):
            found[f"{tag}/{name}"] = value
        found[f"{tag}/dead"] = float(np.mean(shares * shares.shape[-1] < DEAD))
    return found


def shares_of(kmeans):
    """Returns the shares of tokens in clusters, moving averages, `[heads, clusters]`.

    None for a layer that counts no tokens or has not seen any.
    """
    counts = getattr(kmeans, "counts", None)
    if not isinstance(kmeans, layers.OnlineKMeans) or counts is None:
        return None
    tokens = np.asarray(counts, "float64")
    totals = tokens.sum(axis=-1, keepdims=True)
    return tokens / totals if totals.all() else None


def spread(shares):
    """Returns the smallest and the largest of `shares`, and their entropy.

    The entropy is divided by its largest possible value, the mean over heads.
    """
    terms = -shares * np.log(np.maximum(shares, 1e-300))
    most = math.log(shares.shape[-1]) or 1.0
    entropy = terms.sum(axis=-1).mean() / most
    return float(shares.min()), float(shares.max()), float(entropy)

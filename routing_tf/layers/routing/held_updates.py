"""Updates of centroids and thresholds that wait until all parts of a batch are done."""

from routing_tf.layers.support.open_lists import OpenLists
from routing_tf.layers.support.replicas import sum_over_replicas

_held = OpenLists()


def hold_updates():
    """Collects the updates of centroids instead of making them, inside the context.

    For training loops that split a batch into parts: add up the statistics of
    `OnlineKMeans` over the parts and replicas; `move` then updates the centroids as the
    whole batch would. Open it inside the function that a strategy runs on each replica,
    or that `tf.function` or `jax.jit` compiles.

    Returns:
        A context manager that gives a list of pairs: a layer and its statistics, a flat
        list of float32 tensors of fixed shapes.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    kmeans = layers.OnlineKMeans(num_clusters=4)
    totals = None
    for part in np.random.normal(size=(2, 1, 3, 10, 6)).astype("float32"):
        with layers.hold_updates() as updates:
            kmeans(part, training=True)
        ((layer, statistics),) = updates
        totals = statistics if totals is None else map(sum, zip(totals, statistics))
    kmeans.move(list(totals))
    ```
    """
    return _held.opened()


def update_or_hold(layer, statistics):
    """Moves a layer by the statistics of one call, or passes them to `hold_updates`.

    The layer has a method `move`, as `OnlineKMeans` has.
    """
    updates = _held.innermost
    if updates is None:
        layer.move(sum_over_replicas(statistics))
    else:
        updates.append((layer, statistics))

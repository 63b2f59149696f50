"""Full attention of trained models, turned into other heads, and back."""

import itertools

import keras

from routing_tf import layers
from routing_tf.layers import FullHeads
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.retrofit import calibration as calibrating
from routing_tf.retrofit import models
from routing_tf.retrofit import plain_models
from routing_tf.retrofit import report as reporting
from routing_tf.retrofit import swapping
from routing_tf.retrofit.slots import made_group
from routing_tf.retrofit.slots import settings_of

CENTROIDS = ("calibrated", "sequence")
#: Clusters that a query reads, unless told otherwise.
CLUSTERS_PER_QUERY = 8
#: Arguments of clusters that stay where they are, and pull at nothing.
FROZEN = {"decay": 1.0, "update_rule": "paper", "commitment_weight": 0.0}


def sparsify(
    model,
    calibration=None,
    *,
    num_recent=256,
    num_sinks=4,
    attention_window=256,
    num_clusters=128,
    clusters_per_query=None,
    keep_full="auto",
    heads=None,
    frozen=True,
    centroids="calibrated",
    **kwargs,
):
    """Turns the full attention of a trained model into sparse attention.

    The projections stay, and so do their names and paths. By default, each layer gets
    `MultipoleHeads`, with clusters of the keys that the model makes of `calibration`;
    see [Models that you have](docs/existing_models.md).

    Args:
        model: a `CausalLM` or a backbone of keras_hub of a known family; or a model
            with keras_hub's `TransformerDecoder` or `TransformerEncoder`, or with
            Keras' `MultiHeadAttention` or `GroupQueryAttention`.
        calibration: text or list of texts; token ids `<int>[n, length]`, or the input
            of a model without them; or an iterable of inputs, such as a
            `tf.data.Dataset`. None (the default) for heads without centroids, with
            `keep_full` given.
        num_recent: number of nearest tokens that a query sees at least. Defaults to
            256.
        num_sinks: number of first tokens that all queries see. Defaults to 4.
        attention_window: number of members of clusters that a query sees. Defaults to
            256.
        num_clusters: number of clusters of each key head. Defaults to 128.
        clusters_per_query: number of clusters that a query reads. None (the default)
            for 8, or as many as `num_clusters` and `attention_window` allow.
        keep_full: indices of the layers that stay as they are; `"auto"` (the default)
            for those whose outputs would suffer most, at most a tenth of the layers.
        heads: a head group of this package, of which each layer gets one like it; or a
            function from a layer's index to one, or to None for a layer that stays.
            None (the default) for `MultipoleHeads` by the arguments above.
        frozen: whether centroids stay in training where calibration has put them.
            Defaults to True.
        centroids: `"calibrated"` (the default), or `"sequence"`: each sequence gets
            centroids of its own, or in `generate` each prompt. Only for inference.
        **kwargs: other arguments of `MultipoleHeads`. Their `members_per_cluster` is by
            default twice an equal share, half of `attention_window` at most, or all of
            it where one cluster is read.

    Returns:
        A `Report`. Its `model` is `model` itself, changed in place, or a new model with
        the same weights for functional and Sequential models with Keras' layers.

    Example:

    ```python
    import keras_hub
    import numpy as np
    from routing_tf import layers, retrofit

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
    )
    ids = np.arange(40)[None]
    heads = layers.SlidingHeads(4, radius=7)
    report = retrofit.sparsify(backbone, ids, heads=heads)
    ```
    """
    check_flag("frozen", frozen)
    check_choice("centroids", centroids, CENTROIDS)
    _check_heads(heads, kwargs)
    slots = swapping.slots_of(model)
    stays = _staying(slots, keep_full)
    heads = heads or _multipole_heads(
        slots,
        num_recent=num_recent,
        num_sinks=num_sinks,
        attention_window=attention_window,
        num_clusters=num_clusters,
        clusters_per_query=clusters_per_query,
        **kwargs,
    )
    for slot in slots:
        if slot.index not in stays and not _gets_heads(slot, heads, frozen, centroids):
            stays[slot.index] = "`heads` is None"
    if len(stays) == len(slots):
        raise ValueError(
            "`keep_full` and `heads` must leave a layer to change. Received: "
            f"{len(slots)} layers, which all stay: {stays}"
        )
    found = _calibrated(model, slots, stays, calibration, keep_full)
    if keep_full == "auto":
        stays |= _worst(found, slots)
    # In the report before they are gone.
    rows = tuple(_layer_report(slot, stays, found) for slot in slots)
    for slot in slots:
        if slot.index in stays:
            slot.group = None
            if not slot.adapter.has_right_cache:
                _gets_heads(slot, FullHeads(slot.adapter.num_heads), frozen, centroids)
    return reporting.Report(_installed(model, slots), rows)


def restore(model):
    """Returns a model as it was before `sparsify`, bit for bit.

    Args:
        model: the `model` of a `Report`, or one that was read from a preset. Weights
            that were trained since stay as they are.

    Raises:
        ValueError: if it was not changed, or is a new model that was read from a file.
    """
    original = getattr(model, "restored_model", None)
    if original is not None:
        return original
    if not isinstance(model, keras.Layer) or not models.slots_in(model):
        raise ValueError(
            "`model` must have been changed by `retrofit.sparsify`. Received: "
            f"{getattr(model, 'name', model)!r}, which was not, or was read from a "
            "`.keras` file"
        )
    models.uninstall(model)
    return model


def _check_heads(heads, arguments):
    if heads is None:
        return
    if not isinstance(heads, layers.HeadGroup) and not callable(heads):
        raise ValueError(
            "`heads` must be a head group, a function from the index of a layer to "
            f"one, or None. Received: heads={heads!r}"
        )
    if arguments:
        raise ValueError(
            "`heads` must be None with arguments of `MultipoleHeads`. Received: "
            f"heads={heads!r} with {', '.join(arguments)}"
        )


def _staying(slots, keep_full):
    """Returns why layers stay, by index, as far as it is known from the start."""
    if isinstance(keep_full, str):
        check_choice("keep_full", keep_full, ("auto",))
        keep_full = ()
    if not hasattr(keep_full, "__iter__"):
        raise ValueError(
            "`keep_full` must be 'auto' or a sequence of indices. Received: "
            f"keep_full={keep_full!r}"
        )
    indices = {slot.index for slot in slots}
    if not set(keep_full) <= indices:
        raise ValueError(
            f"`keep_full` must be 'auto' or indices of the {len(slots)} attention "
            f"layers, from 0 on. Received: keep_full={tuple(keep_full)}"
        )
    stays = dict.fromkeys(keep_full, "`keep_full`")
    windows = [slot.adapter.window for slot in slots]
    if None in windows:
        local = (slot for slot in slots if slot.adapter.window is not None)
        stays |= {slot.index: "has a window" for slot in local}
    return stays


def _multipole_heads(slots, **arguments):
    """Returns a function from the index of a layer to `MultipoleHeads`."""
    adapters = {slot.index: slot.adapter for slot in slots}
    window = arguments["attention_window"]
    if arguments["clusters_per_query"] is None:
        number = min(CLUSTERS_PER_QUERY, arguments["num_clusters"], window)
        arguments["clusters_per_query"] = number
    if arguments.get("members_per_cluster") is None:
        # Where few clusters hold what matters, an equal share hides most of it.
        number = arguments["clusters_per_query"]
        parts = 1 if number == 1 else max(number // 2, 2)
        arguments["members_per_cluster"] = -(-window // parts)

    def heads(index):
        # `far_distance` needs them.
        own = {"rotary": adapters[index].rotary(), **arguments}
        return layers.MultipoleHeads(adapters[index].num_heads, **own)

    return heads


def _gets_heads(slot, heads, frozen, centroids):
    """Makes the group of a slot; returns False if it is to stay as it is."""
    own = heads if isinstance(heads, layers.HeadGroup) else heads(slot.index)
    if own is None:
        return False
    if not isinstance(own, layers.HeadGroup):
        raise ValueError(
            "`heads` must be a head group, or a function from the index of a layer to "
            f"one, or None. Received: {own!r} for layer {slot.index}"
        )
    settings = settings_of(slot)
    if calibrating.has_centroids(own) and frozen:
        settings |= FROZEN
    if slot.adapter.has_sinks and not hasattr(own, "sink_logits"):
        raise ValueError(
            "`heads` must have `sink_logits`, as GPT-OSS has. Received: "
            f"{type(own).__name__}. Use `MultipoleHeads`, which have them"
        )
    slot.centroids = centroids if calibrating.has_centroids(own) else "calibrated"
    slot.group = made_group(slot, own, **settings)
    return True


def _calibrated(model, slots, stays, calibration, keep_full):
    """Sets the centroids of all groups, and returns what a comparison finds."""
    changed = [slot for slot in slots if slot.index not in stays]
    learned = [slot for slot in changed if calibrating.has_centroids(slot.group)]
    if calibration is None:
        if keep_full == "auto" or any(x.centroids == "calibrated" for x in learned):
            raise ValueError(
                "`calibration` must be given for heads with centroids, and for "
                "`keep_full='auto'`. Received: calibration=None. Pass some thousand "
                "tokens of text"
            )
        return {}
    runner = getattr(model, "backbone", model)
    batches = calibrating.batches_of(model, calibration)
    first = next(batches, None)
    if first is None:
        raise ValueError("`calibration` must not be empty. Received: no batch")
    batches = itertools.chain([first], batches)
    # Only runs tell which layers attend to another sequence.
    calibrating.calibrate(runner, changed, batches)
    found = reporting.compare(runner, changed, [first])
    stays |= {x.index: "another sequence" for x in changed if x.attends_to_another}
    return found


def _worst(found, slots):
    """Returns the layers with the largest errors, at most a tenth of all."""
    errors = {index: own["error"] for index, own in found.items()}
    worst = sorted(errors, key=errors.get, reverse=True)[: len(slots) // 10]
    return dict.fromkeys(worst, "`keep_full='auto'`")


def _layer_report(slot, stays, found):
    reason = stays.get(slot.index, "")
    heads = "full" if reason else type(slot.group).__name__
    figures = found.get(slot.index, {})
    return reporting.LayerReport(slot.index, slot.name, heads, reason, **figures)


def _installed(model, slots):
    """Returns the changed model."""
    slots = [slot for slot in slots if slot.group is not None]
    of_keras = [slot for slot in slots if slot.block is None]
    in_place = [slot for slot in slots if slot.block is not None]
    if of_keras and plain_models.can_be_cloned(model):
        if in_place:
            raise ValueError(
                "`model` must have attention of one kind. Received: blocks of "
                f"keras_hub ({in_place[0].name!r}) and layers of Keras "
                f"({of_keras[0].name!r}). Pass `heads` that are None for one of them"
            )
        new = plain_models.cloned(model, of_keras)
        object.__setattr__(new, "restored_model", model)
        return new
    models.install(model, slots)
    return model

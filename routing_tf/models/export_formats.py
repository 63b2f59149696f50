"""Formats of `keras.Model.export` that cannot have some heads."""

from routing_tf import layers
from routing_tf.layers.support.keras_internals import layers_inside

# Their runtimes cannot loop, see the table of formats in the documentation.
WITHOUT_LOOPS = ("litert", "openvino")


def check_format(model, format):
    """Raises a `ValueError` if a format cannot have the heads of a model."""
    looping = {type(layer).__name__ for layer in layers_inside(model) if _loops(layer)}
    if looping and format in WITHOUT_LOOPS:
        raise ValueError(
            "`format` must be one that has loops over blocks of queries, which heads "
            f"of this model need. Received: format={format!r} with "
            f"{', '.join(sorted(looping))}. Export to 'tf_saved_model' or 'onnx', or "
            "take token choice"
        )


def _loops(layer):
    if isinstance(layer, layers.RoutedHeads):
        return (layer.routing, layer.routing_scope) == ("expert_choice", "prefix")
    return isinstance(layer, layers.ClusterStridedHeads)

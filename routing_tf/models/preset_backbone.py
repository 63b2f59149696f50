"""The common part of backbones: presets, adapters, layouts."""

import contextlib
import os

import keras
import keras_hub

from routing_tf import layers
from routing_tf.files import safe_loading
from routing_tf.files.names import did_you_mean
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.models.hyperparameters import Hyperparameters
from routing_tf.models.hyperparameters import field_names
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.presets import preset_names

# Their runtimes cannot loop, see the table of formats in the documentation.
WITHOUT_LOOPS = ("litert", "openvino")

_TASKS = {
    "text": "RoutingTransformerCausalLM",
    "seq2seq": "RoutingTransformerSeq2SeqLM",
    "image": "RoutingImageTransformer",
}
_MODEL_ARGUMENTS = ("dtype", "name", "trainable")

# How weights are split over the axes "data" and "model" of a mesh, by their paths. A
# head stays on one device if the devices divide the heads; other weights are copied.
_LAYOUTS = {
    r".*attention/(query|key|value|gate)_kernel": ("data", "model"),
    r".*attention/(query|key|value|gate)_bias": ("model",),
    r".*attention/output_kernel": ("model", "data"),
    r".*feed_forward/(input|gate)/kernel": ("data", "model"),
    r".*feed_forward/input/bias": ("model",),
    r".*feed_forward/output/kernel": ("model", "data"),
    # Sizes of vocabularies are rarely multiples of the number of devices.
    r".*token_embedding/embeddings": (None, "model"),
    "logits/kernel": ("model", None),
}


class PresetBackbone(keras_hub.models.Backbone):
    """The common part of backbones: presets that are data.

    Subclasses set `presets` and `hyperparameters`.
    """

    def get_config(self):
        return {
            **super().get_config(),
            "hyperparameters": self.hyperparameters.to_dict(),
        }

    def export(self, filepath, format="tf_saved_model", *args, **kwargs):
        """Exports as `keras.Model.export`, in the formats that can have the heads."""
        check_format(self, format)
        super().export(filepath, format, *args, **kwargs)

    @staticmethod
    def get_layout_map(
        device_mesh,
        model_parallel_dim_name="model",
        data_parallel_dim_name="batch",
    ):
        """Returns how the weights of a model are split over several devices, on JAX.

        Projections of attention are split by heads, feed-forward parts by their inner
        size, embeddings and logits by the size of a token's vector. Everything else is
        copied.

        Args:
            device_mesh: a `keras.distribution.DeviceMesh`.
            model_parallel_dim_name: name of the axis of the mesh that splits weights.
                Its size must divide the heads, and the sizes above. Defaults to
                `"model"`.
            data_parallel_dim_name: name of the axis that splits the batch, and the
                other axis of kernels. Defaults to `"batch"`.

        Returns:
            A `keras.distribution.LayoutMap` of the backbone and its task.

        Example:

        ```python
        import keras
        from routing_tf import models

        mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), ["cpu:0"])
        layout_map = models.RoutingTransformer.get_layout_map(mesh)
        ```
        """
        names = {"model": model_parallel_dim_name, "data": data_parallel_dim_name}
        axes = getattr(device_mesh, "axis_names", ())
        if not set(names.values()) <= set(axes):
            raise ValueError(
                "`device_mesh` must be a `keras.distribution.DeviceMesh` with the axes "
                f"{sorted(names.values())}. Received: device_mesh={device_mesh!r}, "
                f"axis_names={list(axes)}. Name the axes in the mesh or here"
            )
        layout_map = keras.distribution.LayoutMap(device_mesh)
        for path, layout in _LAYOUTS.items():
            layout_map[path] = tuple(names.get(axis) for axis in layout)
        return layout_map

    def default_lora_layer_names(self):
        """Returns the names of attention layers, whose queries and values adapt.

        If they are quantized, the names of their projections of queries and values.
        """
        found = [
            layer
            for layer in layers_inside(self)
            if isinstance(layer, layers.MixedAttention)
        ]
        if any(layer.quantized_projections for layer in found):
            return ["query_projection", "value_projection"]
        return sorted({layer.name for layer in found})

    def enable_lora(self, rank, target_layer_names=None):
        """Freezes the backbone and adds trainable matrices of low rank to some layers.

        Layers that a task adds to the backbone, such as logits, are not frozen, and not
        in the file of `save_lora_weights`. A saved model contains the sums of weights
        and adapters.

        Args:
            rank: rank of the matrices.
            target_layer_names: names of attention layers, see
                `MixedAttention.enable_lora`, or of `Dense` layers such as `"input"`,
                `"gate"` and `"output"` of the feed-forward parts. None (the default)
                for all attention layers; of those that are quantized, for
                `"query_projection"` and `"value_projection"`.

        Example:

        ```python
        from routing_tf import models

        lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
        lm.backbone.enable_lora(rank=4)
        lm.backbone.save_lora_weights("tuned.lora.h5")
        ```
        """
        check_positive_integer("rank", rank)
        if target_layer_names is None:
            target_layer_names = self.default_lora_layer_names()
        found = [
            layer
            for layer in layers_inside(self)
            if hasattr(layer, "enable_lora") and getattr(layer, "can_be_adapted", True)
        ]
        if any(layer.lora_enabled for layer in found):
            raise ValueError(
                "LoRA can be enabled once. Received: a backbone with adapters, "
                f"{self.name!r}. Build or load it again"
            )
        unknown = sorted(set(target_layer_names) - {layer.name for layer in found})
        if unknown or not target_layer_names:
            raise ValueError(
                "`target_layer_names` must name layers that can be adapted: "
                f"{sorted({layer.name for layer in found})}. Received: "
                f"target_layer_names={target_layer_names!r}"
            )
        super().enable_lora(rank, target_layer_names)

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """Builds the model of a preset.

        Args:
            preset: one of the names in `presets` of the class, whose weights are
                freshly initialized. keras_hub handles all other names and directories;
                its own classes, such as `keras_hub.models.CausalLM`, know none of these
                names.
            load_weights: whether keras_hub loads the weights of its preset. Defaults to
                True.
            **kwargs: changes of hyperparameters, such as `vocabulary_size`, and
                `dtype`, `name` and `trainable` of the model.
        """
        if preset not in cls.presets:
            with preset_from_elsewhere(cls, preset, kwargs):
                return super().from_preset(preset, load_weights=load_weights, **kwargs)
        # Keras would swallow a misspelled hyperparameter without a word.
        own = {key: kwargs.pop(key) for key in _MODEL_ARGUMENTS if key in kwargs}
        return cls(preset_hyperparameters(preset).replace(**kwargs), **own)


def hyperparameters_of_kind(kind, hyperparameters):
    """Returns `Hyperparameters`, also from a dict; refuses those of another kind."""
    if isinstance(hyperparameters, dict):
        hyperparameters = Hyperparameters.from_dict(hyperparameters)
    if hyperparameters.kind != kind:
        raise ValueError(
            f"`hyperparameters` must be those of a model of the kind {kind!r}. "
            f"Received: kind={hyperparameters.kind!r} with "
            f"num_encoder_layers={hyperparameters.num_encoder_layers}, "
            f"image_height={hyperparameters.image_height}"
        )
    return hyperparameters


@contextlib.contextmanager
def preset_from_elsewhere(cls, preset, arguments):
    """Checks a preset that is not data of a class, while keras_hub loads it.

    Says which preset of the class was perhaps meant where keras_hub knows none.
    """
    if preset in preset_names() and not os.path.exists(preset):
        kind = preset_hyperparameters(preset).kind
        raise ValueError(
            f"`preset` must be one of {cls.__name__}. Received: preset={preset!r}, a "
            f"preset of the kind {kind!r}. Call `from_preset` of {_TASKS[kind]}"
        )
    _refuse_changes(preset, arguments)
    safe_loading.check_preset(preset)
    try:
        yield
    except ValueError as error:
        hint = did_you_mean(preset, cls.presets)
        if not hint or os.path.exists(preset):
            raise
        raise ValueError(
            f"`preset` must be a preset of {cls.__name__}, a folder or a name that "
            f"keras_hub knows. Received: preset={preset!r}.{hint}"
        ) from error


def _refuse_changes(preset, arguments):
    """Refuses changes of the hyperparameters of a saved model."""
    changes = sorted(set(arguments) & set(field_names()))
    if changes:
        raise ValueError(
            "The hyperparameters of a saved model are in its folder and cannot be "
            f"changed. Received: preset={preset!r}, {', '.join(changes)}. Leave them "
            "out, or build a new model from one of the presets that are data"
        )


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

"""Models of keras_hub with changed layers: their generation and configs."""

import functools

import keras

from routing_tf.layers.support.configs import serialize
from routing_tf.retrofit import generation
from routing_tf.retrofit import keras_hub_internals as internals
from routing_tf.retrofit import swapping
from routing_tf.retrofit.calibration import has_centroids
from routing_tf.retrofit.slots import made_group

#: Tokens of a prompt that are fed at once.
PREFILL_LENGTH = 2048


class SwappedModel(swapping.Swapped):
    """A backbone whose config says how its layers were changed."""

    def get_config(self):
        return {**super().get_config(), "retrofit": settings_of(self)}

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        settings = config.pop("retrofit")
        model = cls.restored_class.from_config(config)
        install(model, slots_by(model, settings))
        return model

    def enable_lora(self, *args, **kwargs):
        super().enable_lora(*args, **kwargs)
        # It stops all other layers. Centroids that stay have settings that say so.
        for slot in slots_in(self):
            if has_centroids(slot.group):
                slot.group.kmeans.trainable = True


class SwappedCausalLM(swapping.Swapped):
    """A `CausalLM` whose layers have caches of their own."""

    #: Tokens of a prompt that are fed at once.
    prefill_length = PREFILL_LENGTH

    @classmethod
    def from_config(cls, config):
        model = cls.restored_class.from_config(config)
        model.__class__ = cls
        return model

    def generate_step(self, inputs, *args, **kwargs):
        return generation.generate_step(self, inputs, *args, **kwargs)


@functools.cache
def swapped_backbone(cls):
    """Returns the class of a changed backbone of the class `cls`."""
    return _registered(swapping.swapped_class(SwappedModel, cls))


@functools.cache
def swapped_causal_lm(cls):
    """Returns the class of a changed `CausalLM` of the class `cls`."""
    swapped = swapping.swapped_class(SwappedCausalLM, cls)
    # So keras_hub finds it for presets of the backbone.
    swapped.backbone_cls = swapped_backbone(cls.backbone_cls)
    return _registered(swapped)


def _registered(cls):
    return keras.saving.register_keras_serializable("routing_tf")(cls)


# Presets are read by the names of these classes.
for _backbone, _causal_lm in internals.classes_of_families():
    swapped_causal_lm(_causal_lm)


def slots_in(model):
    """Returns the slots of a changed model."""
    layers = internals.walk(model)
    return [x.slot for x in layers if isinstance(x, swapping.SwappedAttention)]


def settings_of(model):
    """Returns how the layers of a model were changed, for JSON."""
    slots = slots_in(model)
    return {
        "heads": {str(slot.index): serialize(slot.group) for slot in slots},
        "centroids": slots[0].centroids,
    }


def slots_by(model, settings):
    """Returns slots of a model that is to be changed as `settings_of` another one."""
    heads = {int(index): config for index, config in settings["heads"].items()}
    slots = [slot for slot in swapping.slots_of(model) if slot.index in heads]
    for slot in slots:
        slot.centroids = settings["centroids"]
        slot.group = made_group(slot, heads[slot.index])
    return slots


def install(model, slots):
    """Puts the heads of slots into a model, or leaves it as it was."""
    try:
        for slot in slots:
            swapping.put_in(slot)
        backbone = getattr(model, "backbone", None)
        if backbone is not None:
            model.__class__ = swapped_causal_lm(type(model))
        elif _is_backbone(model):
            backbone = model
        if backbone is not None:
            backbone.__class__ = swapped_backbone(type(backbone))
        internals.forget_functions(model)
    except Exception:
        uninstall(model)
        raise


def _is_backbone(model):
    return internals.is_of_keras_hub(model) and hasattr(model, "transformer_layers")


def uninstall(model):
    """Undoes `install`."""
    layers = list(internals.walk(model))
    for slot in slots_in(model):
        swapping.take_out(slot)
    for layer in layers:
        swapping.swap_back(layer)
    internals.forget_functions(model)

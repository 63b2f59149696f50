"""Fits the output of each changed layer to that of the full model."""

import itertools

import keras
from keras import ops
from tqdm import tqdm

from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.retrofit import calibration
from routing_tf.retrofit import models
from routing_tf.retrofit import swapping


def distill(model, data, steps, optimizer=None):
    """Trains queries and keys of changed layers to give the outputs of full attention.

    Each layer gets the input that it has in the full model, and its loss is the mean
    squared error of its output, relative to the mean square of the full one. Only
    projections to queries and keys are trained, or their adapters where `enable_lora`
    was called; in GPT-NeoX, one projection makes values too. Centroids stay.

    Args:
        model: the `model` of a `Report`, changed in place; the full model is that of
            the weights at the time of the call.
        data: as `calibration` of `sparsify`; it is repeated as often as needed.
        steps: number of batches.
        optimizer: a Keras optimizer; None (the default) for Adam with a learning rate
            of 1e-4.

    Returns:
        List of the mean loss of all layers, for each step.

    Raises:
        ValueError: if `model` was not changed, or nothing of it can be trained, or
            `steps` is not a positive integer.

    Reference: attention transfer of LoLCATs (https://arxiv.org/abs/2410.10254).
    """
    steps = check_positive_integer("steps", steps)
    slots = models.slots_in(model)
    trained = {
        id(weight): weight
        for slot in slots
        for layer in slot.adapter.trained()
        for weight in layer.trainable_variables
    }
    if not trained:
        raise ValueError(
            "`model` must have been changed in place by `retrofit.sparsify`, and have "
            "projections to queries or keys that are trainable. Received: "
            f"{model.name!r} with {len(slots)} changed layers"
        )
    runner = getattr(model, "backbone", model)
    flags = [(weight, weight.trainable) for weight in runner.variables]
    batches = list(calibration.batches_of(model, data))
    if not batches:
        raise ValueError("`data` must not be empty. Received: no batch")
    losses = []
    try:
        for weight, _ in flags:
            weight.trainable = id(weight) in trained
        distiller = _Distiller(runner, slots, trained)
        distiller.compile(optimizer=optimizer or keras.optimizers.Adam(1e-4))
        steps = itertools.islice(itertools.cycle(batches), steps)
        for batch in tqdm(steps, "distill", unit="step", disable=None):
            losses.append(float(distiller.train_on_batch(batch)))
    finally:
        for weight, flag in flags:
            weight.trainable = flag
    return losses


class _Distiller(keras.Model):
    """A model whose loss is the error of the changed layers of another one.

    Args:
        model: the model that is trained.
        slots: those of its changed layers.
        trained: the weights that change, by id.
    """

    def __init__(self, model, slots, trained):
        super().__init__(name="distiller")
        self.model = model
        self._slots = slots
        # As NumPy, lest a compiled function holds the weights themselves.
        self._full = {
            place: ops.convert_to_numpy(weight) for place, weight in trained.items()
        }

    def build(self, *args, **kwargs):
        self.built = True

    def call(self, inputs, training=None):
        calls = self._full_calls(inputs)
        losses = [_missed(*call) for call in calls]
        loss = sum(losses) / len(losses)
        self.add_loss(loss)
        return loss

    def _full_calls(self, inputs):
        """Runs the full model; returns slot, input, mask and output of all layers."""
        calls = []

        def watch(slot, x, mask, original):
            output = original()
            dense = output[0] if isinstance(output, tuple) else output
            calls.append((slot, ops.stop_gradient(x), mask, ops.stop_gradient(dense)))
            return output

        # In a scope, variables without a value would be those of no scope.
        values = [
            (weight, ops.convert_to_tensor(self._full.get(id(weight), weight)))
            for weight in self.model.variables
        ]
        scope = keras.StatelessScope(state_mapping=values)
        with swapping.watched(self._slots, watch), scope:
            self.model(inputs, training=False)
        return calls


def _missed(slot, x, mask, dense):
    """Returns the mean squared error of a layer, relative to the mean square."""
    sparse = slot.attend(x, mask, training=False)
    sparse = sparse[0] if isinstance(sparse, tuple) else sparse
    sparse, dense = (ops.cast(each, "float32") for each in (sparse, dense))
    missed, whole = ops.square(sparse - dense), ops.square(dense)
    if mask is not None:
        real = ops.cast(mask, "float32")[..., None]
        missed, whole = missed * real, whole * real
    return ops.sum(missed) / ops.maximum(ops.sum(whole), 1e-30)

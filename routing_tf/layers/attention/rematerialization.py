"""Recomputing activations for the gradients."""

import dataclasses
import itertools

import keras
from keras import ops

from routing_tf.layers.softmax.scaled_dot_product import ScaledDotProduct
from routing_tf.layers.support.keras_internals import disown
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.keras_internals import without_autocast
from routing_tf.layers.support.parts_of_batches import add_batch_loss
from routing_tf.layers.support.parts_of_batches import hold_losses
from routing_tf.layers.support.parts_of_batches import hold_updates
from routing_tf.layers.support.parts_of_batches import update_or_hold


def call_and_forget(layer, function, tensors, parts=None):
    """Runs a part of a layer's call whose activations the gradients recompute.

    Side effects happen once: afterwards, variables such as dropout's seeds are
    assigned, centroids move (or are left to an outer `hold_updates`), and losses are
    added to `layer`. Both runs see the values from before, so dropout draws the same
    masks.

    The layer must be built. `function` reads only variables of the `parts`, a list of
    layers (None for the layer itself), and returns one tensor. Gradients flow to the
    float `tensors` that it is called with; it may close over other tensors that need no
    gradients.
    """
    # A frozen layer may have trainable sublayers, as with LoRA.
    variables = [v for part in parts or [layer] for v in part.variables]
    trainable = [variable for variable in variables if variable.trainable]
    fixed = [variable for variable in variables if not variable.trainable]
    with without_autocast():
        # Copies, because on TensorFlow the result of `convert_to_tensor` changes with
        # them.
        values = [ops.copy(variable) for variable in trainable]
        fixed_values = [ops.copy(variable) for variable in fixed]
    effects = _Effects()

    def pure(*arguments):
        values, inputs = arguments[: len(trainable)], arguments[len(trainable) :]
        mapping = zip([*trainable, *fixed], [*values, *fixed_values], strict=True)
        scope = keras.StatelessScope(list(mapping), collect_losses=True)
        before = [scope.get_current_value(variable) for variable in fixed]
        with scope, hold_updates() as updates, hold_losses() as held:
            output = function(*inputs)
        after = [scope.get_current_value(variable) for variable in fixed]
        losses = list(scope.losses)
        disown(layer, losses)
        state = fixed, before, after
        return output, *effects.flatten(*state, losses, held, updates)

    output, *flat = keras.remat(pure)(*values, *tensors)
    effects.apply(layer, flat)
    return output


def train_and_forget(group, inputs):
    """Calls a head group for training; the gradients recompute its activations."""
    names = inputs.differentiated

    def attend(*tensors):
        differentiated = dict(zip(names, tensors, strict=True))
        own = dataclasses.replace(inputs, **differentiated)
        return group(inputs=own, training=True)

    return call_and_forget(group, attend, [getattr(inputs, name) for name in names])


def computes_again(layer, remat):
    """Sets `remat`, as in `ScaledDotProduct`, of all attention inside a layer."""
    for each in layers_inside(layer):
        if isinstance(each, ScaledDotProduct):
            each.remat = remat


class _Effects:
    """The side effects of a run, without their tensors, which are traced."""

    def flatten(self, variables, before, after, losses, held, updates):
        """Records the side effects and returns their tensors, as `apply` takes them."""
        changed = [
            (variable, new)
            for variable, old, new in zip(variables, before, after, strict=True)
            if new is not old
        ]
        self.assigned = [variable for variable, _ in changed]
        self.num_losses = len(losses)
        self.held = [
            (loss.name, loss.of, len(loss.own), len(loss.counts)) for loss in held
        ]
        sums = [tensor for loss in held for tensor in (*loss.own, *loss.counts)]
        self.moved = [(kmeans, len(statistics)) for kmeans, statistics in updates]
        statistics = [tensor for _, tensors in updates for tensor in tensors]
        return [*losses, *sums, *statistics, *(value for _, value in changed)]

    def apply(self, layer, flat):
        """Applies the recorded side effects outside."""
        flat = iter(flat)

        def taken(number):
            return list(itertools.islice(flat, number))

        for loss in taken(self.num_losses):
            layer.add_loss(loss)
        for name, of, num_own, num_counts in self.held:
            add_batch_loss(layer, name, taken(num_own), taken(num_counts), of)
        for kmeans, count in self.moved:
            update_or_hold(kmeans, taken(count))
        for variable, value in zip(self.assigned, flat, strict=True):
            variable.assign(value)

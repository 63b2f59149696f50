"""One training step, the same for every engine."""

import dataclasses
import functools
import math
import typing

import keras
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf.layers.routing.exploring import is_exploring_seed
from routing_tf.layers.support.keras_internals import decays
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.parts_of_batches import hold_losses
from routing_tf.layers.support.replicas import sum_over_replicas
from routing_tf.models.token_inputs import inputs_of

# More random draws than one layer makes in one part of a step.
DRAWS_PER_PART = 256
# Replicas of TensorFlow draw separately; JAX has one draw for the global batch.
SEEDS_BETWEEN_REPLICAS = 7919
# What a report has of each step, before losses by name and squares of gradients.
NUM_SCALARS = 6


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of one step.

    Args:
        loss: the loss that was differentiated.
        cross_entropy: its part in nats per token.
        clustering_loss: its part from the centroids, and from losses without a name.
        num_tokens: sum of the weights of all tokens.
        gradient_norm: global norm of the gradients before they are clipped.
        loss_scale: factor that kept gradients from vanishing in float16; otherwise 1.
        gradient_squares: NumPy array `<float32>[variables]`, the sums of squares of the
            gradient of each trainable variable.
        named_losses: dict of its parts that layers add by name, such as the load
            balancing of experts. Defaults to no such parts.
    """

    loss: float
    cross_entropy: float
    clustering_loss: float
    num_tokens: float
    gradient_norm: float
    loss_scale: float
    gradient_squares: np.ndarray
    named_losses: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, vector, loss_names=()):
        """Reads the vector that `TrainingStep.finish` makes, with its `loss_names`."""
        numbers, rest = np.split(np.asarray(vector), [NUM_SCALARS])
        named, squares = np.split(rest, [len(loss_names)])
        named = dict(zip(loss_names, map(float, named), strict=True))
        return cls(*map(float, numbers), squares, named)

    @property
    def is_finite(self):
        """Whether loss and gradients are finite, so that the step changed weights."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class TrainingStep:
    """The arithmetic of one step: a loss, its sums over tokens, and an update.

    A step may have several parts (gradient accumulation) and several replicas. Each
    contributes sums over its own tokens; their total is the result of one device for
    the whole batch: the loss is divided by the weights of all tokens, each `BatchLoss`
    by what it counts in all tokens, and all tokens move the centroids once. A loss that
    a layer adds by Keras' `add_loss` counts on each replica and in each part by the
    weights of its tokens.

    Other state that a pass writes, such as the moving averages of a
    `BatchNormalization`, goes from part to part, as in Keras, and is averaged over
    replicas.

    An engine computes gradients and runs the methods; see `training.engines`. With
    several parts it adds up the `counts` of all of them first.

    Args:
        lm: the language model or image model.
        optimizer: a built optimizer of its trainable variables; a
            `keras.optimizers.LossScaleOptimizer` scales the loss. Only its
            `update_step` and `weight_decay`, one rate for all weights, are used, so
            other options, such as `use_ema`, must be off.
        clip_norm: largest global norm of the gradients; 0 for no limit.
        num_parts: number of parts of a step.
        num_replicas: number of replicas that add their sums.
    """

    def __init__(self, lm, optimizer, clip_norm=0.0, num_parts=1, num_replicas=1):
        self.lm = lm
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.num_parts = num_parts
        self.num_replicas = num_replicas
        self.loss_scaling = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self.loss_scaling = optimizer
            self.optimizer = optimizer.inner_optimizer
        self._seeds = [
            (variable, int(ops.convert_to_numpy(variable)[0]))
            for variable in lm.non_trainable_variables
            if variable.name == "seed_generator_state"
        ]
        parts = (lm, *layers_inside(lm))
        names = (getattr(part, "loss_names", ()) for part in parts)
        self.loss_names = sorted({name for own in names for name in own})
        self._kmeans, self._written = [], []
        self._num_targets = None

    def objective(self, values, batch, step, part=0, replica=0, totals=None):
        """Sums the losses of one part on one replica.

        Args:
            values: tensors, one for each of `variables`.
            batch: inputs, targets `<int>[batch, ...]`, weights `<float>[batch, ...]`.
            step: integer tensor, number of the step.
            part: which part of the step.
            replica: which replica.
            totals: `counts`, added up over all parts and replicas; None for one part.

        Returns:
            A scalar to differentiate; a dict of tensors to add up over parts and
            replicas, like the gradients; and a list of the state that the pass wrote,
            for `with_written` and `keep`.
        """
        _, targets, weights = batch
        logits, passed = self._run(values, batch, step, part, replica)
        counts = passed.counts(weights)
        totals = sum_over_replicas(counts) if totals is None else totals
        # A fixed number keeps the size of gradients near that of a mean.
        self._num_targets = (
            math.prod(targets.shape) * self.num_parts * self.num_replicas
        )
        sums = self._sums(logits, targets, weights, passed, totals)
        value = _total(sums) / self._num_targets
        if self.loss_scaling is not None:
            scale = values[self._index(self.loss_scaling.dynamic_scale)]
            value *= ops.cast(scale, "float32")
        self._kmeans = [layer for layer, _ in passed.updates]
        sums["statistics"] = [statistics for _, statistics in passed.updates]
        self._written = [variable for variable, _ in passed.written]
        return value, sums, [ops.stop_gradient(new) for _, new in passed.written]

    def counts(self, values, batch, step, part=0, replica=0):
        """Returns the counts by which losses are divided, in one part of a batch.

        Compilers drop what these do not need: for most layers, nearly all of the pass.
        """
        _, passed = self._run(values, batch, step, part, replica)
        return passed.counts(batch[-1])

    def _run(self, values, batch, step, part, replica):
        """Returns the logits, and a `_Pass`."""
        lm = self.lm
        values = dict(zip(map(id, self.variables), values, strict=True))
        for variable, seed in self._seeds:
            values[id(variable)] = self._seed_state(variable, seed, step, part, replica)
        variables = [*lm.trainable_variables, *lm.non_trainable_variables]
        scope = keras.StatelessScope(
            [(variable, values[id(variable)]) for variable in variables],
            collect_losses=True,
        )
        before = {id(v): scope.get_current_value(v) for v in variables}
        seeds = {id(variable) for variable, _ in self._seeds}
        # Replicas are threads, which would mix their losses without their own scopes.
        with scope, layers.hold_updates() as updates, hold_losses() as held:
            logits = lm(inputs_of(lm, batch[0]), training=True)
            losses = list(lm.losses)
        after = [(v, scope.get_current_value(v)) for v in variables]
        written = [
            (v, new)
            for v, new in after
            if new is not before[id(v)] and id(v) not in seeds
        ]
        return logits, _Pass(held, losses, updates, written)

    def with_written(self, values, written):
        """Returns `values` with the state that an earlier part of the step wrote."""
        values = list(values)
        for variable, new in zip(self._written, written, strict=True):
            values[self._index(variable)] = new
        return values

    def _index(self, variable):
        return next(i for i, own in enumerate(self.variables) if own is variable)

    def _sums(self, logits, targets, weights, passed, totals):
        nats = keras.losses.sparse_categorical_crossentropy(
            targets, ops.cast(logits, "float32"), from_logits=True
        )
        weights = ops.cast(weights, "float32")
        own_weight = ops.sum(weights)
        weight, *totals = totals
        totals = iter(totals)
        parts = {name: ops.zeros(()) for name in (None, *self.loss_names)}
        for loss in passed.losses_of_batch:
            total = loss.of(loss.own, [next(totals) for _ in loss.counts])
            name = loss.name if loss.name in parts else None
            # `finish` divides by the weights of all tokens.
            parts[name] += weight * total
        # Keras lists the losses of regularizers after those of layers.
        losses = [own_weight * ops.cast(loss, "float32") for loss in passed.losses]
        num_decays = len([v for v in self._trainable if v.regularizer is not None])
        split = len(losses) - num_decays
        return {
            "nats": ops.sum(nats * weights),
            "weight": own_weight,
            "clustering": sum(losses[:split], parts.pop(None)),
            "named": parts,
            "decay": sum(losses[split:], ops.zeros(())),
        }

    def _seed_state(self, variable, seed, step, part, replica):
        """The state of a generator in a part of a step."""
        draw = ops.cast(step, "int32")
        if is_exploring_seed(variable):
            # The same positions as in a whole batch on one device.
            replica = 0
        else:
            draw = draw * self.num_parts + part
        draw *= DRAWS_PER_PART
        seed = ops.convert_to_tensor(seed, variable.dtype)
        offset = ops.cast(replica, "int32") * SEEDS_BETWEEN_REPLICAS
        return ops.stack(
            [seed + ops.cast(offset, variable.dtype), ops.cast(draw, variable.dtype)]
        )

    def finish(self, gradients, sums):
        """Turns the sums over all parts and replicas into gradients and a report.

        Args:
            gradients: sums of the gradients of `objective`.
            sums: sums of its second result.

        Returns:
            The clipped gradients of the mean loss; a boolean tensor that tells whether
            loss and gradients are finite; and the report, a vector that `report`
            reads.
        """
        weight = sums["weight"]
        divisor = ops.where(weight > 0, weight, 1.0)
        scale = ops.convert_to_tensor(1.0)
        if self.loss_scaling is not None:
            scale = ops.cast(self.loss_scaling.dynamic_scale, "float32")
        factor = self._num_targets / (divisor * scale)
        gradients = [ops.cast(gradient, "float32") * factor for gradient in gradients]
        squares = ops.stack([ops.sum(ops.square(gradient)) for gradient in gradients])
        norm = ops.sqrt(ops.sum(squares))
        loss = _total(sums) / divisor
        report = [
            loss,
            sums["nats"] / divisor,
            sums["clustering"] / divisor,
            weight,
            norm,
            scale,
            *(sums["named"][name] / divisor for name in self.loss_names),
        ]
        report = ops.concatenate([ops.stack(report), squares])
        if self.clip_norm:
            shrink = self.clip_norm / ops.maximum(norm, self.clip_norm)
            gradients = [gradient * shrink for gradient in gradients]
        return gradients, ops.isfinite(loss + norm), report

    def report(self, vector):
        """Returns the `Report` of a vector that `finish` made."""
        return Report.of(vector, self.loss_names)

    def update(self, gradients, statistics):
        """Moves weights, optimizer state and centroids.

        Args:
            gradients: those that `finish` returned.
            statistics: sums of the `"statistics"` of `objective`.
        """
        learning_rate = self.optimizer.learning_rate
        decay = self.optimizer.weight_decay
        rate = learning_rate * decay if decay else None
        for gradient, variable in zip(gradients, self._trainable, strict=True):
            if decay and decays(self.optimizer, variable):
                lost = ops.convert_to_tensor(variable) * rate
                self.optimizer.assign_sub(variable, lost)
            self.optimizer.update_step(gradient, variable, learning_rate)
        for layer, values in zip(self._kmeans, statistics, strict=True):
            layer.move(values)

    def keep(self, written, is_finite):
        """Keeps the state that a pass wrote, if the step was finite.

        Replicas keep the mean of theirs.
        """
        if self.num_replicas > 1:
            written = _means_over_replicas(written, self.num_replicas)
        for variable, new in zip(self._written, written, strict=True):
            old = ops.convert_to_tensor(variable)
            variable.assign(ops.where(is_finite, ops.cast(new, old.dtype), old))

    def count(self, is_finite):
        """Counts the step, even if its update was skipped, and moves the loss scale.

        Args:
            is_finite: the second result of `finish`.
        """
        self.optimizer.iterations.assign_add(1)
        if self.loss_scaling is None:
            return
        # The rule of `keras.optimizers.LossScaleOptimizer`.
        scaling = self.loss_scaling
        steps = ops.where(is_finite, scaling.step_counter + 1, 0)
        grows = steps == scaling.dynamic_growth_steps
        up = ops.where(grows, 2.0, 1.0)
        scale = ops.convert_to_tensor(scaling.dynamic_scale)
        scaling.dynamic_scale.assign(scale * ops.where(is_finite, up, 0.5))
        scaling.step_counter.assign(ops.where(grows, 0, steps))

    @property
    def _trainable(self):
        return self.lm.trainable_variables

    @property
    def report_size(self):
        """Number of entries of a report."""
        return NUM_SCALARS + len(self.loss_names) + len(self._trainable)

    @property
    def variables(self):
        """All variables that a step may change, including its seeds."""
        optimizer = self.loss_scaling or self.optimizer
        lm = self.lm
        return [
            *lm.trainable_variables,
            *lm.non_trainable_variables,
            *optimizer.variables,
        ]


class _Pass(typing.NamedTuple):
    """What a pass leaves besides its outputs.

    Attributes:
        losses_of_batch: list of `BatchLoss`.
        losses: list of other losses.
        updates: list as that of `hold_updates`.
        written: list of pairs of a variable and its new value.
    """

    losses_of_batch: list
    losses: list
    updates: list
    written: list

    def counts(self, weights):
        """Returns the weight of all tokens, and what losses count."""
        counts = [count for loss in self.losses_of_batch for count in loss.counts]
        return [ops.sum(ops.cast(weights, "float32")), *counts]


def _total(sums):
    """Returns the sum of all losses."""
    loss = sums["nats"] + sums["clustering"] + sums["decay"]
    return sum(sums["named"].values(), loss)


def _means_over_replicas(tensors, number):
    """Returns the means of tensors over replicas; those of integers, rounded down."""
    names = [keras.backend.standardize_dtype(x.dtype) for x in tensors]
    is_float = ["float" in name for name in names]
    sums = sum_over_replicas(
        [
            ops.cast(x, "float32" if own else "int64")
            for x, own in zip(tensors, is_float, strict=True)
        ]
    )
    return [
        total / number if own else total // number
        for total, own in zip(sums, is_float, strict=True)
    ]


def split_batch(batch, num_parts):
    """Cuts NumPy arrays with the batch on axis 0 into parts of equal size."""

    def part(array, index):
        size = len(array) // num_parts
        return array[index * size : (index + 1) * size]

    return [
        keras.tree.map_structure(functools.partial(part, index=index), batch)
        for index in range(num_parts)
    ]


class Engine:
    """Where a run computes.

    Attributes:
        num_devices: number of devices that share a batch.
        num_replicas: number of replicas that each see a part of the batch and add up
            their sums; 1 on JAX, where all devices see the whole batch.
        num_workers: number of machines (processes).
        worker: number of this machine, counted from 0; 0 writes checkpoints and logs.
    """

    num_devices = num_replicas = num_workers = 1
    worker = 0

    @property
    def is_chief(self):
        """Whether this process writes checkpoints and logs."""
        return self.worker == 0

    def agree(self, wish):
        """Returns whether the flag of any worker is set; all must call it together."""
        return bool(self.gather(float(wish)).any())

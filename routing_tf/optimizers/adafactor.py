"""Adafactor as tensor2tensor computes it."""

import numbers

import keras
from keras import ops

from routing_tf.layers.support.keras_internals import index_of
from routing_tf.layers.support.validation import check_choice

__all__ = ["Adafactor"]

DECAY_TYPES = ("pow", "adam")


@keras.saving.register_keras_serializable("routing_tf")
class Adafactor(keras.optimizers.Optimizer):
    """Adafactor with tensor2tensor's step size and truly factored memory.

    Each gradient is divided by the root of its second moment, which is kept as one
    row and one column average for variables of two or more axes; the result is cut
    to a root mean square of `clipping_threshold` and scaled by the learning rate
    and, if wanted, by the variable's own root mean square. All arithmetic and all
    slots are float32, whatever the dtype of the variables, and sparse embedding
    gradients are merged before they are squared.

    `keras.optimizers.Adafactor` differs: it caps the learning rate at
    `1 / sqrt(step)` and keeps a second moment of full size for every variable.

    Args:
        learning_rate: float, `keras.optimizers.schedules.LearningRateSchedule` or
            callable. The relative step size with `scale_by_parameter`, else the
            absolute one. Defaults to `0.01`.
        beta_1: float in `[0, 1)`, decay of the average over past updates. `0` applies
            each update directly, without a slot. Defaults to `0.0`.
        beta_2: float in `(0, 1)`, the limit of the decay with `decay_type="adam"`.
            Defaults to `0.999`.
        decay_type: `"pow"` or `"adam"`, how the second moment forgets at step `t`,
            counted from 1: with decay `1 - t ** -decay_exponent`, or with Adam's
            decay and bias correction in one,
            `beta_2 * (1 - beta_2 ** (t - 1)) / (1 - beta_2 ** t)`. Both are 0 at the
            first step. Defaults to `"pow"`.
        decay_exponent: positive float, used by `decay_type="pow"`. Defaults to `0.8`.
        clipping_threshold: positive float, largest root mean square of a variable's
            update before it is scaled; `None` for no limit. Defaults to `1.0`.
        scale_by_parameter: bool, whether to multiply a variable's update by the
            root mean square of the variable. Defaults to `True`.
        epsilon_1: positive float, added to each squared gradient.
            Defaults to `1e-30`.
        epsilon_2: positive float, smallest root mean square of a variable that
            `scale_by_parameter` uses. Defaults to `1e-3`.
        name: string, name of the optimizer. Defaults to `"adafactor"`.
        **kwargs: arguments of `keras.optimizers.Optimizer`, such as
            `global_clipnorm` or `gradient_accumulation_steps`.

    Raises:
        ValueError: if an argument is outside of the range given above.

    Example:
    ```python
    import keras
    from routing_tf.optimizers import Adafactor, FactorSchedule

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    schedule = FactorSchedule("constant*rsqrt_normalized_decay", constant=0.01)
    model.compile(optimizer=Adafactor(schedule), loss="mse")
    model.fit(keras.ops.ones((4, 8)), keras.ops.ones((4, 1)), verbose=0)
    ```

    Reference:
        [Shazeer and Stern, 2018](https://arxiv.org/abs/1804.04235);
        tensor2tensor's `adafactor.AdafactorOptimizer`.
    """

    def __init__(
        self,
        learning_rate=0.01,
        beta_1=0.0,
        beta_2=0.999,
        decay_type="pow",
        decay_exponent=0.8,
        clipping_threshold=1.0,
        scale_by_parameter=True,
        epsilon_1=1e-30,
        epsilon_2=1e-3,
        name="adafactor",
        **kwargs,
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        check_choice("decay_type", decay_type, DECAY_TYPES)
        _check("beta_1", beta_1, lambda x: 0 <= x < 1, "in [0, 1)")
        _check("beta_2", beta_2, lambda x: 0 < x < 1, "in (0, 1)")
        _check_positive("decay_exponent", decay_exponent)
        if clipping_threshold is not None:
            _check_positive("clipping_threshold", clipping_threshold, " or None")
        _check_positive("epsilon_1", epsilon_1)
        _check_positive("epsilon_2", epsilon_2)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.decay_type = decay_type
        self.decay_exponent = decay_exponent
        self.clipping_threshold = clipping_threshold
        self.scale_by_parameter = scale_by_parameter
        self.epsilon_1 = epsilon_1
        self.epsilon_2 = epsilon_2

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._slots = [self._add_slots(variable) for variable in variables]

    def apply(self, grads, trainable_variables=None):
        """Applies one gradient per variable; see `keras.optimizers.Optimizer`."""
        super().apply([_densify(gradient) for gradient in grads], trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        """Moves `variable` and its slots by one step."""
        slots = self._slots[index_of(self, variable)]
        value = ops.cast(variable, "float32")
        update = self._normalize(ops.cast(gradient, "float32"), slots)
        if self.clipping_threshold is not None:
            excess = _root_mean_square(update) / self.clipping_threshold
            update = update / ops.maximum(excess, 1.0)
        step_size = ops.cast(learning_rate, "float32")
        if self.scale_by_parameter:
            scale = ops.maximum(_root_mean_square(value), self.epsilon_2)
            step_size = step_size * scale
        update = step_size * update
        if self.beta_1:
            update = self._average(slots["momentum"], update, self.beta_1)
        self.assign(variable, value - update)

    def get_config(self):
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "decay_type": self.decay_type,
            "decay_exponent": self.decay_exponent,
            "clipping_threshold": self.clipping_threshold,
            "scale_by_parameter": self.scale_by_parameter,
            "epsilon_1": self.epsilon_1,
            "epsilon_2": self.epsilon_2,
        }

    def _add_slots(self, variable):
        if getattr(variable, "overwrite_with_gradient", False):
            return {}
        shape = tuple(variable.shape)
        if len(shape) >= 2:
            shapes = {
                "row_moment": shape[:-1],
                "column_moment": shape[:-2] + shape[-1:],
            }
        else:
            shapes = {"moment": shape}
        if self.beta_1:
            shapes["momentum"] = shape
        prefix = getattr(variable, "path", variable.name)
        prefix = prefix.replace("/", "_").replace(":", "_")
        return {
            name: self.add_variable(shape, dtype="float32", name=f"{prefix}_{name}")
            for name, shape in shapes.items()
        }

    def _normalize(self, gradient, slots):
        """Updates the second moment and divides the gradient by its root."""
        decay = self._second_moment_decay()
        square = ops.square(gradient) + self.epsilon_1
        if "moment" in slots:
            moment = self._average(slots["moment"], square, decay)
            return gradient * ops.rsqrt(moment)
        rows = self._average(slots["row_moment"], ops.mean(square, -1), decay)
        columns = self._average(slots["column_moment"], ops.mean(square, -2), decay)
        # One factor at a time, because the product of two moments near epsilon_1 would
        # round to 0 in float32, and a zero gradient divided by its root would be NaN.
        rows = rows / ops.mean(rows, axis=-1, keepdims=True)
        gradient = gradient * ops.expand_dims(ops.rsqrt(rows), -1)
        return gradient * ops.expand_dims(ops.rsqrt(columns), -2)

    def _second_moment_decay(self):
        step = ops.cast(self.iterations, "float32") + 1.0
        if self.decay_type == "pow":
            return 1.0 - ops.power(step, -self.decay_exponent)
        return (
            self.beta_2
            * (1.0 - ops.power(self.beta_2, step - 1.0))
            / (1.0 - ops.power(self.beta_2, step))
        )

    def _average(self, slot, value, decay):
        """Moves `slot` towards `value` and returns its new value."""
        value = decay * slot + (1.0 - decay) * value
        self.assign(slot, value)
        return value


def _check(name, value, is_valid, requirement):
    if not isinstance(value, numbers.Real) or not is_valid(value):
        raise ValueError(f"`{name}` must be {requirement}. Received: {name}={value!r}")


def _check_positive(name, value, otherwise=""):
    _check(name, value, lambda x: x > 0, f"positive{otherwise}")


def _root_mean_square(x):
    return ops.sqrt(ops.mean(ops.square(x)))


def _densify(gradient):
    """Adds up the rows of a sparse TensorFlow gradient that share an index."""
    if keras.backend.backend() != "tensorflow":
        return gradient
    # Imported here, for JAX runs without TensorFlow.
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    total = tf.convert_to_tensor(tf.cast(gradient, tf.float32))
    return tf.cast(total, gradient.dtype)


def _make(hyperparameters, schedule, clip):
    return Adafactor(schedule, global_clipnorm=clip)


OPTIMIZERS = {"adafactor": _make}

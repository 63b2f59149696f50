"""The learning rate schedules of tensor2tensor."""

import math

import keras
from keras import ops

from routing_tf.layers.support.validation import check_positive_integer

__all__ = ["FactorSchedule", "NoamSchedule"]


def _linear_warmup(schedule, step):
    return ops.minimum(step / schedule.warmup_steps, 1.0)


def _rsqrt_decay(schedule, step):
    return ops.rsqrt(ops.maximum(step, schedule.warmup_steps))


def _rsqrt_normalized_decay(schedule, step):
    return math.sqrt(schedule.warmup_steps) * _rsqrt_decay(schedule, step)


def _cosine_decay(schedule, step):
    duration = schedule.decay_steps - schedule.warmup_steps
    progress = ops.clip((step - schedule.warmup_steps) / duration, 0.0, 1.0)
    return 0.5 + 0.5 * ops.cos(math.pi * progress)


FACTORS = {
    "constant": lambda schedule, step: schedule.constant,
    "linear_warmup": _linear_warmup,
    "rsqrt_decay": _rsqrt_decay,
    "rsqrt_normalized_decay": _rsqrt_normalized_decay,
    "rsqrt_hidden_size": lambda schedule, step: schedule.hidden_dim**-0.5,
    "cosine_decay": _cosine_decay,
}


@keras.saving.register_keras_serializable("routing_tf")
class FactorSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rate as a product of named factors.

    At step `t`, counted from 0, the factors are:

    | name | value |
    | --- | --- |
    | `constant` | `constant` |
    | `linear_warmup` | `min(1, t / warmup_steps)`: 0 at the first step |
    | `rsqrt_decay` | `1 / sqrt(max(t, warmup_steps))` |
    | `rsqrt_normalized_decay` | the same times `sqrt(warmup_steps)`: 1 at first |
    | `rsqrt_hidden_size` | `1 / sqrt(hidden_dim)` |
    | `cosine_decay` | 1 until `warmup_steps`, 0 from `decay_steps` on |

    The release trains with the default factors, and so at the full rate from the first
    step. `cosine_decay` is an addition to tensor2tensor's rule of the same idea.

    Args:
        factors: names from the table joined by `*`. Defaults to
            `"constant*rsqrt_normalized_decay"`.
        constant: value of the factor `constant`. Defaults to `0.01`.
        warmup_steps: length of the warm-up in steps. Defaults to `10000`.
        hidden_dim: width of the model, for `rsqrt_hidden_size`. Defaults to `None`.
        decay_steps: the step, after `warmup_steps`, at which `cosine_decay` reaches 0.
            Defaults to `None`.

    Example:
    ```python
    from routing_tf.optimizers import FactorSchedule

    schedule = FactorSchedule("constant*linear_warmup*rsqrt_normalized_decay")
    print(float(schedule(5000)), float(schedule(40000)))  # 0.005 0.005
    ```

    Reference: tensor2tensor's `learning_rate.learning_rate_factor`.
    """

    def __init__(
        self,
        factors="constant*rsqrt_normalized_decay",
        constant=0.01,
        warmup_steps=10000,
        hidden_dim=None,
        decay_steps=None,
    ):
        self._names = _split(factors)
        check_positive_integer("warmup_steps", warmup_steps)
        if "rsqrt_hidden_size" in self._names or hidden_dim is not None:
            check_positive_integer("hidden_dim", hidden_dim)
        if "cosine_decay" in self._names or decay_steps is not None:
            check_positive_integer("decay_steps", decay_steps)
            if decay_steps <= warmup_steps:
                raise ValueError(
                    "`decay_steps` must be greater than `warmup_steps`. Received: "
                    f"decay_steps={decay_steps}, warmup_steps={warmup_steps}"
                )
        self.factors = factors
        self.constant = constant
        self.warmup_steps = warmup_steps
        self.hidden_dim = hidden_dim
        self.decay_steps = decay_steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rate = ops.ones((), dtype="float32")
        for name in self._names:
            rate = rate * FACTORS[name](self, step)
        return rate

    def get_config(self):
        return {
            "factors": self.factors,
            "constant": self.constant,
            "warmup_steps": self.warmup_steps,
            "hidden_dim": self.hidden_dim,
            "decay_steps": self.decay_steps,
        }


@keras.saving.register_keras_serializable("routing_tf")
class NoamSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then inverse square root decay, scaled by the model's width.

    The rate of step `t`, counted from 1, is `5000 * learning_rate *
    optimizer_factor * hidden_dim ** -0.5 * min(t * warmup_steps ** -1.5, t ** -0.5)`.
    The release trains its translation models with it.

    Args:
        learning_rate: multiplier of the whole schedule; not the highest rate.
        warmup_steps: the step at which the rate is highest.
        hidden_dim: width of the model.
        optimizer_factor: tensor2tensor's factor for the optimizer: `0.002` for Adam,
            `1.0` for Adafactor. Defaults to `1.0`.

    Example:
    ```python
    from routing_tf.optimizers import NoamSchedule

    schedule = NoamSchedule(0.1, 4000, hidden_dim=1024, optimizer_factor=0.002)
    ```

    Reference: tensor2tensor's `learning_rate.legacy_learning_rate_schedule`.
    """

    def __init__(self, learning_rate, warmup_steps, hidden_dim, optimizer_factor=1.0):
        check_positive_integer("warmup_steps", warmup_steps)
        check_positive_integer("hidden_dim", hidden_dim)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.hidden_dim = hidden_dim
        self.optimizer_factor = optimizer_factor

    def __call__(self, step):
        step = ops.cast(step, "float32") + 1.0
        scale = self.learning_rate * self.optimizer_factor * self.hidden_dim**-0.5
        warmup = step * self.warmup_steps**-1.5
        return 5000.0 * scale * ops.minimum(warmup, ops.rsqrt(step))

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "hidden_dim": self.hidden_dim,
            "optimizer_factor": self.optimizer_factor,
        }


def _split(factors):
    names = [name.strip() for name in str(factors).split("*")]
    if not set(names) <= set(FACTORS):
        choices = ", ".join(map(repr, FACTORS))
        raise ValueError(
            f"`factors` must be names out of {choices}, joined by '*'. "
            f"Received: factors={factors!r}"
        )
    return names

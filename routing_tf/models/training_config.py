"""How a model is trained, documented in this one place."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Settings that decide how a model is trained.

    `Hyperparameters` has them together with those of the model.

    Args:
        optimizer: `"adafactor"` (the tensor2tensor rule), `"adam"`, `"adamw"`, or
            `"muon"`: Muon for the matrices between layers, and Adam for everything
            else.
        learning_rate: the factor `constant` of the schedule.
        learning_rate_schedule: factors joined by `*`, see `FactorSchedule`, or
            `"noam"`.
        warmup_steps: steps of the schedule's warm-up.
        adam_beta_1: decay of Adam's first moment.
        adam_beta_2: decay of Adam's second moment.
        adam_epsilon: Adam's smallest divisor.
        weight_decay: factor of the sum of squared weights / 2 in the training loss;
            with `"adamw"` and `"muon"`, the share of all matrices that a step
            subtracts, times the learning rate.
        gradient_clip_norm: largest global norm of the gradients; 0 for no limit.
        batch_tokens: tokens in one training batch.
        train_steps: number of training steps, unless a run names another number.
    """

    optimizer: str = "adam"
    learning_rate: float = 1e-3
    learning_rate_schedule: str = "constant*linear_warmup*cosine_decay"
    warmup_steps: int = 100
    adam_beta_1: float = 0.9
    adam_beta_2: float = 0.98
    adam_epsilon: float = 1e-9
    weight_decay: float = 0.0
    gradient_clip_norm: float = 0.0
    batch_tokens: int = 8192
    train_steps: int = 10000

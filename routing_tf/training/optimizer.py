"""Optimizers and losses from hyperparameters."""

import keras
import keras_hub

from routing_tf import optimizers


def make_schedule(hyperparameters, train_steps=None):
    """Makes the learning rate schedule that the hyperparameters describe.

    Args:
        hyperparameters: `Hyperparameters`.
        train_steps: number of steps of the run, after which a cosine decay ends; None
            for `hyperparameters.train_steps`. A run that ends within the warm-up never
            decays.

    Returns:
        `FactorSchedule` or `NoamSchedule`.
    """
    h = hyperparameters
    if h.learning_rate_schedule == "noam":
        factor = 1.0 if h.optimizer == "adafactor" else 0.002
        return optimizers.NoamSchedule(
            h.learning_rate, h.warmup_steps, h.hidden_dim, optimizer_factor=factor
        )
    decay_steps = max(train_steps or h.train_steps, h.warmup_steps + 1)
    return optimizers.FactorSchedule(
        h.learning_rate_schedule,
        constant=h.learning_rate,
        warmup_steps=h.warmup_steps,
        hidden_dim=h.hidden_dim,
        decay_steps=decay_steps,
    )


def make_optimizer(hyperparameters, train_steps=None):
    """Returns the Keras optimizer that the hyperparameters describe.

    AdamW and Muon have a weight decay; for others, see `add_weight_decay`.
    """
    h = hyperparameters
    schedule = make_schedule(h, train_steps)
    clip = h.gradient_clip_norm if h.gradient_clip_norm > 0 else None
    made = optimizers.OPTIMIZERS[h.optimizer](h, schedule, clip)
    if not isinstance(made, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be the name of a function that returns a Keras "
            f"optimizer. Received: optimizer={h.optimizer!r}, which returns {made!r}"
        )
    return made


def add_weight_decay(lm, rate):
    """Adds `rate / 2` times the sum of squared weights to the training loss.

    As in tensor2tensor, biases do not decay, here of any shape; 0 removes the decay.
    """
    for variable in lm.trainable_variables:
        # Keras calls the bias of layer normalization beta.
        decays = rate and not variable.name.endswith(("bias", "beta"))
        variable.regularizer = keras.regularizers.L2(rate / 2) if decays else None


def compile_for_training(lm, hyperparameters=None, jit_compile="auto", seed=None):
    """Gives a language model the loss and the optimizer of the hyperparameters.

    Args:
        lm: the language model.
        hyperparameters: `Hyperparameters`; None for those of the model.
        jit_compile: whether XLA compiles the model on TensorFlow; `"auto"` (the
            default): only with a GPU.
        seed: seed of the sampler of `lm.generate`.
    """
    if hyperparameters is None:
        hyperparameters = lm.hyperparameters
    # Images have another sampler.
    sampler = {"sampler": keras_hub.samplers.TopPSampler(p=0.9, seed=seed)}
    optimizer = make_optimizer(hyperparameters)
    in_loss = not optimizer.weight_decay
    add_weight_decay(lm, hyperparameters.weight_decay if in_loss else 0.0)
    if lm.logits_dense.dtype_policy.name == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    lm.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(
                from_logits=True, name="cross_entropy"
            )
        ],
        jit_compile=jit_compile,
        **({} if hyperparameters.kind == "image" else sampler),
    )
    lm.optimizer.build(lm.trainable_variables)

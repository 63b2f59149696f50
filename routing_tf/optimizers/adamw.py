"""Adam whose weight decay leaves out biases and normalization."""

import keras

__all__ = ["AdamW"]

# Parts of the names of weights that do not decay.
NOT_DECAYED = ("bias", "gamma", "beta", "_scale", "sigma", "alpha_scores")


@keras.saving.register_keras_serializable("routing_tf")
class AdamW(keras.optimizers.AdamW):
    """Adam with decoupled weight decay, except of biases and normalization.

    Weights whose names contain `bias`, `gamma`, `beta`, `_scale` (of `qk_norm`),
    `sigma` (of random Fourier features) or `alpha_scores` (of learned entmax) do not
    decay.

    Args:
        *args: arguments of `keras.optimizers.AdamW`.
        **kwargs: the same, by name.

    Example:

    ```python
    from routing_tf.optimizers import AdamW

    optimizer = AdamW(1e-3, weight_decay=0.01)
    ```

    Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization"
    (https://arxiv.org/abs/1711.05101).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Set here, because the config of an optimizer does not include it.
        self.exclude_from_weight_decay(var_names=list(NOT_DECAYED))


def _settings(hyperparameters, clip):
    h = hyperparameters
    return {
        "beta_1": h.adam_beta_1,
        "beta_2": h.adam_beta_2,
        "epsilon": h.adam_epsilon,
        "global_clipnorm": clip,
    }


def _make_adam(hyperparameters, schedule, clip):
    return keras.optimizers.Adam(schedule, **_settings(hyperparameters, clip))


def _make_adamw(hyperparameters, schedule, clip):
    decay = hyperparameters.weight_decay
    return AdamW(schedule, weight_decay=decay, **_settings(hyperparameters, clip))


OPTIMIZERS = {"adam": _make_adam, "adamw": _make_adamw}

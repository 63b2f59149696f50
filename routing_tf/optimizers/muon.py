"""Muon for the matrices between layers, Adam for everything else."""

import keras

from routing_tf.optimizers.adamw import NOT_DECAYED

__all__ = ["Muon"]

# Everything except kernels, and the kernel of the logits.
_NOT_MATRICES = (r"^(?!.*kernel$)", r"logits")


@keras.saving.register_keras_serializable("routing_tf")
class Muon(keras.optimizers.Muon):
    """Orthogonalised momentum for matrices between layers, Adam for everything else.

    Muon moves a matrix at the same pace along all of its directions. It takes the
    kernels of two axes, except that of the logits; Adam takes embeddings, tables,
    biases, normalization, convolutions, and kernels of three axes, such as those of
    experts. A step of Muon is as long as a usual step of Adam (`rms_rate`), so both
    have one learning rate.

    Args:
        learning_rate: number, or a schedule. Defaults to 0.001.
        weight_decay: share of a weight that a step subtracts, times the learning rate,
            except of biases and normalization. None (the default) for none.
        exclude_layers: list of regular expressions of paths of further weights for
            Adam. None (the default) for none.
        **kwargs: further arguments of `keras.optimizers.Muon`.

    Example:

    ```python
    from routing_tf.optimizers import Muon

    optimizer = Muon(2e-3, weight_decay=0.01)
    ```

    Reference: Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
    (https://kellerjordan.github.io/posts/muon/); the length of a step is that of Liu et
    al., equation 4 (https://arxiv.org/abs/2502.16982).
    """

    def __init__(
        self, learning_rate=0.001, *, weight_decay=None, exclude_layers=None, **kwargs
    ):
        if kwargs.setdefault("adam_weight_decay", weight_decay) != weight_decay:
            raise ValueError(
                "`adam_weight_decay` must be `weight_decay`, one rate for all weights. "
                f"Received: adam_weight_decay={kwargs['adam_weight_decay']}, "
                f"weight_decay={weight_decay}. Leave the first one out"
            )
        excluded = [*(exclude_layers or []), *_NOT_MATRICES]
        super().__init__(
            learning_rate,
            weight_decay=weight_decay,
            exclude_layers=list(dict.fromkeys(excluded)),
            **kwargs,
        )
        # Set here, because the config of an optimizer does not include it.
        self.exclude_from_weight_decay(var_names=list(NOT_DECAYED))


def _make(hyperparameters, schedule, clip):
    h = hyperparameters
    return Muon(
        schedule,
        weight_decay=h.weight_decay or None,
        adam_beta_1=h.adam_beta_1,
        adam_beta_2=h.adam_beta_2,
        epsilon=h.adam_epsilon,
        global_clipnorm=clip,
    )


OPTIMIZERS = {"muon": _make}

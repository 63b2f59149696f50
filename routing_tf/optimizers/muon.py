"""Muon for the matrices between layers, Adam for everything else."""

import keras
from keras import ops

from routing_tf.layers.support.keras_internals import index_of

# Everything except kernels, and the kernel of the logits.
_NOT_MATRICES = (r"^(?!.*kernel$)", r"logits")


@keras.saving.register_keras_serializable("routing_tf")
class Muon(keras.optimizers.Muon):
    """Orthogonalised momentum for matrices between layers, Adam for everything else.

    Muon moves a matrix at the same pace along all of its directions, whatever their
    gradients. It is meant for matrices through which activations pass, so it moves the
    weights that are named kernels, except that of the logits; Adam moves embeddings,
    tables, biases, normalization and convolutions. A step of Muon is as long as a usual
    step of Adam (`rms_rate`), so both have one learning rate.

    Args:
        learning_rate: number, or a schedule. Defaults to 0.001.
        weight_decay: share of a weight that a step subtracts, times the learning rate,
            except of biases and normalization. None (the default) for none.
        exclude_layers: list of regular expressions of paths of further weights for
            Adam. None (the default) for none.
        **kwargs: further arguments of `keras.optimizers.Muon`.

    Raises:
        ValueError: if `adam_weight_decay` is given and is not `weight_decay`.

    Example:

    ```python
    from routing_tf.optimizers import Muon

    optimizer = Muon(2e-3, weight_decay=0.01)
    ```

    Reference: Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
    (https://kellerjordan.github.io/posts/muon/); the length of a step is that of Liu et
    al., "Muon is Scalable for LLM Training", equation 4
    (https://arxiv.org/abs/2502.16982).
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
        self.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])

    def update_steps(self, gradients, variables, learning_rate):
        """Does what `update_step` does, in fewer operations.

        Matrices of one shape are orthogonalised at once, tall ones in their transposed
        form, and the rate of Adam is computed once.

        Args:
            gradients: tensors, one for each variable.
            variables: variables for which the optimizer was built.
            learning_rate: number or scalar tensor.
        """
        groups, others = {}, []
        for gradient, variable in zip(gradients, variables, strict=True):
            index = index_of(self, variable)
            if self.adam_velocities[index] is None:
                momentum = self._add_to_momentum(gradient, self.momentums[index])
                group = groups.setdefault(tuple(sorted(variable.shape)), [])
                group.append((variable, momentum))
            else:
                others.append((index, gradient, variable))
        self._move_by_adam(others, learning_rate)
        for group in groups.values():
            self._move_matrices(*zip(*group), learning_rate)

    def _move_by_adam(self, updates, learning_rate):
        """Moves variables, with their indices and gradients, as `update_step` does."""
        step = ops.cast(self.iterations + 1, "float32")
        corrections = [
            1 - ops.power(ops.cast(beta, "float32"), step)
            for beta in (self.adam_beta_1, self.adam_beta_2)
        ]
        rate = learning_rate * self.adam_lr_ratio
        rate = rate * ops.sqrt(corrections[1]) / corrections[0]
        for index, gradient, variable in updates:
            m, v = self.momentums[index], self.adam_velocities[index]
            self.assign_add(m, (gradient - m) * (1 - self.adam_beta_1))
            self.assign_add(v, (ops.square(gradient) - v) * (1 - self.adam_beta_2))
            self.assign_sub(variable, m * rate / (ops.sqrt(v) + self.epsilon))

    def _add_to_momentum(self, gradient, momentum):
        """Returns the sum that is orthogonalised."""
        self.assign_add(momentum, gradient + momentum * (self.momentum - 1))
        return gradient + self.momentum * momentum if self.nesterov else momentum

    def _move_matrices(self, variables, momentums, learning_rate):
        turns = [variable.shape[0] > variable.shape[1] for variable in variables]
        rows = [ops.transpose(x) if turn else x for x, turn in zip(momentums, turns)]
        updates = self.zeropower_via_newtonschulz5(ops.stack(rows), self.ns_steps)
        for variable, update, turn in zip(variables, ops.unstack(updates), turns):
            update = ops.transpose(update) if turn else update
            self.assign_sub(variable, self.lr_adjust(learning_rate * update))

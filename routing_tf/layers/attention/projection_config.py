"""Settings of the projections of an attention layer that are rarely changed."""

import dataclasses

from routing_tf.layers.support.configs import Settings
from routing_tf.layers.support.configs import setting
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import constraint
from routing_tf.layers.support.validation import initializer
from routing_tf.layers.support.validation import regularizer


@dataclasses.dataclass(frozen=True, eq=False)  # objects of Keras do not compare
class ProjectionConfig(Settings):
    """Settings of the projections to queries, keys and values, and back.

    `MixedAttention` and `RoutingAttention` take them by name and have an attribute for
    each. Their configs hold them together, as `projection_config`.

    Args:
        use_bias: whether projections have biases. Defaults to False.
        use_gate: whether a gate, the sigmoid of one more projection of the query,
            multiplies the outputs of the heads before the last projection. Defaults to
            False.
        bias_initializer: initializer of the biases. Defaults to `"zeros"`.
        output_initializer: initializer of the kernel of the last projection; None (the
            default) for the layer's `kernel_initializer`.
        kernel_regularizer: regularizer of each kernel. Defaults to None.
        bias_regularizer: regularizer of each bias. Defaults to None.
        kernel_constraint: constraint on each kernel. Defaults to None.
        bias_constraint: constraint on each bias. Defaults to None.
        shared_head_projection: whether one more `(value_dim, value_dim)` matrix, the
            same for all heads, multiplies the output of each head (the release).
            Defaults to False.
        project_shared_keys: whether the key projection also has columns for heads that
            share the query projection and do not read them (the release). Defaults to
            False.
    """

    use_bias: bool = setting(False, check_flag)
    use_gate: bool = setting(False, check_flag)
    bias_initializer: object = setting("zeros", initializer)
    output_initializer: object = setting(None, initializer)
    kernel_regularizer: object = setting(None, regularizer)
    bias_regularizer: object = setting(None, regularizer)
    kernel_constraint: object = setting(None, constraint)
    bias_constraint: object = setting(None, constraint)
    shared_head_projection: bool = setting(False, check_flag)
    project_shared_keys: bool = setting(False, check_flag)

"""Settings of the projections of an attention layer that are rarely changed."""

import dataclasses

from routing_tf.layers.support.settings import Settings
from routing_tf.layers.support.settings import setting
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import constraint
from routing_tf.layers.support.validation import initializer
from routing_tf.layers.support.validation import regularizer


@dataclasses.dataclass(frozen=True, eq=False)  # objects of Keras do not compare
class ProjectionConfig(Settings):
    """How an attention layer projects to queries, keys and values, and back.

    `MixedAttention` and `RoutingAttention` take these settings by name, as in
    `MixedAttention(head_groups, key_dim=64, use_bias=True)`, and have an attribute for
    each. Their configs hold them together, as `projection_config`.

    Args:
        use_bias: whether projections have biases. Defaults to False.
        use_gate: whether a gate in (0, 1), the sigmoid of one more projection of the
            query, multiplies the outputs of the heads before the last projection, as in
            `keras.layers.MultiHeadAttention`. Defaults to False.
        bias_initializer: initializer of the biases. Defaults to `"zeros"`.
        output_initializer: initializer of the kernel of the last projection; None (the
            default) for the `kernel_initializer` of the layer.
        kernel_regularizer: regularizer of each kernel; None (the default) for none.
        bias_regularizer: the same for each bias.
        kernel_constraint: constraint on each kernel; None (the default) for none.
        bias_constraint: the same on each bias.
        shared_head_projection: whether one more `(value_dim, value_dim)` matrix, the
            same for all heads, multiplies the output of each head (the release).
            Defaults to False.
        project_shared_keys: whether the key projection also has columns for heads that
            share the query projection and do not read them (the release). Defaults to
            False.

    Raises:
        ValueError: if an initializer, a regularizer or a constraint is unknown, or
            another setting is not a boolean.
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

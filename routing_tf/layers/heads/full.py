"""Full attention: the reference for every sparse pattern."""

import keras

from routing_tf.layers.heads.head_group import HeadGroup
from routing_tf.layers.support.masks import combine_masks
from routing_tf.layers.support.masks import segment_mask


@keras.saving.register_keras_serializable("routing_tf")
class FullHeads(HeadGroup):
    """Heads whose queries see every key, or every earlier key with a causal mask.

    Work and memory grow with the square of the length.

    Args:
        num_heads: number of heads in the group.
        **kwargs: arguments of `HeadGroup`; relative positions are in tokens.

    Call arguments and Returns: as in `HeadGroup`.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    attention = layers.MixedAttention([layers.FullHeads(2)], key_dim=8)
    assert attention(np.ones((1, 10, 16)), use_causal_mask=True).shape == (1, 10, 16)
    ```

    Reference: Vaswani et al. (2017), section 3.2.
    """

    has_one_softmax = True
    compares_by_products = True
    supports_segments = True
    remembers_key_heads = True

    def sees(self, query, keys, cache):
        return keys >= 0, keys - query

    def attend(self, inputs, training=None):
        mask, bias = (
            None if x is None else x[:, :, None, :]
            for x in (inputs.value_mask, inputs.token_bias)
        )
        if inputs.segments is not None:
            own = segment_mask(inputs.segments, lambda x: x, lambda x: x)
            mask = combine_masks(mask, own)
        return self.dot_product(
            inputs.query,
            inputs.key,
            inputs.value,
            attention_mask=mask,
            bias=bias,
            use_causal_mask=inputs.use_causal_mask,
            training=training,
        )

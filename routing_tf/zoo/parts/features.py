"""Inputs of head groups that also read the tokens which their queries are made from."""

import dataclasses
from typing import Any

from keras import ops

from routing_tf.layers.support.head_inputs import HeadInputs
from routing_tf.layers.support.lengths import numbers


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FeatureInputs(HeadInputs):
    """Inputs of heads that read features.

    Args:
        features: `<float>[batch, length, dim]`, the tokens that queries are made from,
            in the order of their positions.
    """

    features: Any = None

    @property
    def differentiated(self):
        return [*super().differentiated, "features"]

    def tokens(self, first, number):
        features = ops.take(self.features, first + numbers(number), axis=1)
        return dataclasses.replace(super().tokens(first, number), features=features)


class ReadsFeatures:
    """The part of a `HeadGroup` that gets features, before it in the base classes."""

    def __call__(self, query=None, key=None, value=None, *, features=None, **options):
        if "inputs" in options:
            return super().__call__(**options)
        if features is None:
            raise ValueError(
                "`features` must be given, because the heads read the inputs of the "
                "queries. Received: features=None. Call the `MixedAttention` that "
                "holds the group"
            )
        self.input_dim = features.shape[-1]
        return super().__call__(query, key, value, source=features, **options)

    def dim_of_features(self, features_shape):
        """Returns the size of a token, when the group is built."""
        return self.input_dim if features_shape is None else features_shape[-1]

    def with_features(self, inputs):
        """Returns `FeatureInputs`, given `HeadInputs` as `prepared` returns them."""
        features, positions = inputs.source, inputs.positions
        if positions is not None:
            features = positions.arrange(features[:, None])[:, 0]
        features = ops.cast(features, self.compute_dtype)
        fields = {x.name: getattr(inputs, x.name) for x in dataclasses.fields(inputs)}
        return FeatureInputs(**fields, features=features)

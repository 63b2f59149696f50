"""Settings that say how the centroids of clusters move."""

import dataclasses

from routing_tf.layers.support.configs import Settings
from routing_tf.layers.support.configs import setting
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_not_negative
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_share

UPDATE_RULES = ("ema", "paper")
CENTROID_INITIALIZATIONS = ("normal", "tokens")


@dataclasses.dataclass(frozen=True)
class Clustering(Settings):
    """Settings of `OnlineKMeans`, which all layers with centroids take by name.

    Args:
        decay: share of the old average of the centroids kept at each training step, in
            [0, 1]. Defaults to 0.999.
        commitment_weight: factor of the commitment loss, at least 0. Defaults to 1e-4.
        ema: whether centroids follow moving averages (True, the default), or the
            gradient of a codebook loss.
        update_rule: `"ema"` (the default): sums and counts are averaged and divided,
            with Laplace smoothing (the release). `"paper"`:
            `c <- decay * c + (1 - decay) / 2 * (sum of queries + sum of keys)`, as
            Algorithm 1, line 31, has it.
        revive_after: number of training steps. A centroid that no token of the global
            batch chose for that many steps in a row is set to a token of the last step,
            with the count 1. Cluster j takes the token at the place
            `(j + 0.5) / num_clusters` among all real tokens (with queries and keys:
            among the keys). If a batch was counted in parts (`hold_updates`), it takes
            the normalised sum of the tokens at that place in each part. None (the
            default): centroids stay where they are.
        centroid_initialization: `"normal"` (the default): centroids start as random
            vectors. `"tokens"`: the first training step sets all of them to tokens,
            as `revive_after` does.
        balance_rate: how fast clusters become even, at least 0. Each cluster has a
            bias, which is added to its scores and moves by
            `balance_rate * dim * (1 - load)` at each training step, where `load` is its
            number of tokens divided by the mean of all clusters, at most 2. 0.0 (the
            default): no bias.
        anchor_weight: how much of a fixed random vector, its anchor, is added to each
            centroid for scoring, at least 0. Equal centroids would stay equal, because
            equal scores never separate their tokens; different anchors separate the
            tokens as random hashing does, until the centroids differ again. 0.0 (the
            default): no anchors.

    Raises:
        ValueError: if one of `update_rule`, `revive_after`, `centroid_initialization`
            and `balance_rate` is not the default with `ema=False`.

    Reference: paper, section 4.1. Biases that balance loads without a loss: Wang et al.
    (2024), https://arxiv.org/abs/2408.15664.
    """

    decay: float = setting(0.999, check_share)
    commitment_weight: float = setting(1e-4, check_not_negative)
    ema: bool = setting(True, check_flag)
    update_rule: str = setting("ema", check_choice, UPDATE_RULES)
    revive_after: int | None = setting(None, check_optional_integer)
    centroid_initialization: str = setting(
        "normal", check_choice, CENTROID_INITIALIZATIONS
    )
    balance_rate: float = setting(0.0, check_not_negative)
    anchor_weight: float = setting(0.0, check_not_negative)

    def __post_init__(self):
        super().__post_init__()
        if not self.ema:
            self._check_averages_alone()

    def _check_averages_alone(self):
        """Refuses settings of moving averages where there are none."""
        if self.update_rule != "ema":
            raise ValueError(
                "`update_rule` is the rule of the moving averages, and needs "
                f"`ema=True`. Received: update_rule={self.update_rule!r}, "
                f"ema={self.ema}"
            )
        if self.revives:
            raise ValueError(
                "`revive_after` must be None and `centroid_initialization` 'normal' "
                "where gradients train the centroids. Received: "
                f"revive_after={self.revive_after}, "
                f"centroid_initialization={self.centroid_initialization!r}, "
                f"ema={self.ema}"
            )
        if self.balance_rate:
            raise ValueError(
                "`balance_rate` must be 0 where gradients train the centroids. "
                f"Received: balance_rate={self.balance_rate}, ema={self.ema}"
            )

    def set_attributes(self, layer):
        """Gives a layer an attribute for each setting, as Keras has arguments."""
        layer.clustering = self
        layer.decay = self.decay
        layer.commitment_weight = self.commitment_weight
        layer.ema = self.ema
        layer.update_rule = self.update_rule
        layer.revive_after = self.revive_after
        layer.centroid_initialization = self.centroid_initialization
        layer.balance_rate = self.balance_rate
        layer.anchor_weight = self.anchor_weight

    @property
    def revives(self):
        """Whether centroids may be set to tokens."""
        return self.revive_after is not None or self.centroid_initialization == "tokens"

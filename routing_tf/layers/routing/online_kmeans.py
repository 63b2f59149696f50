"""Centroids that follow the tokens assigned to them."""

import dataclasses
import functools
import random

import keras
from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support import parts_of_batches
from routing_tf.layers.support import tensors
from routing_tf.layers.support.backends import stated_gradient
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import Settings
from routing_tf.layers.support.configs import setting
from routing_tf.layers.support.keras_internals import OwnLosses
from routing_tf.layers.support.parts_of_batches import update_or_hold
from routing_tf.layers.support.replicas import sum_of_earlier_replicas
from routing_tf.layers.support.tensors import product
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_not_negative
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_share

LAYER_NORM_EPSILON = 1e-6
# More steps than float32 can count one by one. Such a centroid never had a token.
NEVER = 2.0**25

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


def normalize(tokens):
    """Layer-normalises the last axis, without scale or bias, in float32.

    Reference: `layer_norm(scaling=False)` of the release.
    """
    tokens = ops.cast(tokens, "float32")
    mean = functools.partial(ops.mean, axis=-1, keepdims=True)

    @stated_gradient
    def standardize(tokens):
        centred = tokens - mean(tokens)
        scale = ops.rsqrt(mean(ops.square(centred)) + LAYER_NORM_EPSILON)
        output = centred * scale

        def gradient(upstream):
            # It takes half as many passes over the tokens as the derived gradient.
            along = output * mean(upstream * output)
            return scale * (upstream - mean(upstream) - along)

        return output, gradient

    return standardize(tokens)


def _num_tokens(tokens, mask):
    """Returns the number of real tokens in all heads."""
    shape = ops.shape(tokens)[:-1]
    if mask is not None:
        return ops.sum(ops.broadcast_to(mask, shape))
    total = ops.ones((), "float32")
    for size in shape:
        total = total * ops.cast(size, "float32")
    return total


@keras.saving.register_keras_serializable("routing_tf")
class OnlineKMeans(ConfiguredLayer, OwnLosses):
    """Scores tokens against centroids and, in training, moves the centroids.

    Each head has its own centroids. A token is assigned to the centroid with the
    largest dot product. The commitment loss draws tokens to their centroids, and the
    centroids follow an exponential moving average of their tokens.

    State (float32, never cast, never in gradients when `ema=True`): `centroids`
    `(heads, clusters, dim)`, and with the rule `"ema"` also `counts`
    `(heads, clusters)` and `sums` `(heads, clusters, dim)`; with `revive_after` or
    `centroid_initialization="tokens"` also `empty_steps` `(heads, clusters)`, the
    number of training steps since the last one with a token; with `balance_rate` also
    `biases` `(heads, clusters)`; with `anchor_weight` also `anchors`
    `(heads, clusters, dim)`, which never move. It is written only if `training=True`
    and the layer is trainable, from statistics that are summed over all replicas: by an
    all-reduce under `tf.distribute` on TensorFlow, and on JAX because the layer sees
    the global batch. A call writes at once, unless `hold_updates` is open.
    `keras.remat` would run a function again and move the centroids twice;
    `TransformerBlock(remat=True)` moves them once.

    The loss of replicas is that of the global batch, wherever the padding is.

    Args:
        num_clusters: number of centroids of each head.
        smoothing_epsilon: pseudo-count of the Laplace smoothing, in tokens. Defaults
            to 1e-5.
        **kwargs: arguments of `Clustering`, such as `decay`, which say how centroids
            move, and of `keras.layers.Layer`, such as `name`.

    Call arguments:
        tokens: `<float>[batch, heads, length, dim]`, normalised (`normalize`); or a
            tuple of one or two such tensors, queries and keys. Both are scored before
            the centroids move, and then move the centroids one after the other.
        token_mask: `<bool>`, broadcastable to `[batch, heads, length]`, True for real
            tokens; None for no padding; a tuple if `tokens` is a tuple.
        training: whether the centroids move.

    Returns:
        Scores `<float32>[batch, heads, length, num_clusters]`, or a tuple of them.

    Example:

    ```python
    import numpy as np
    from routing_tf.layers import OnlineKMeans

    kmeans = OnlineKMeans(num_clusters=4)
    tokens = np.random.normal(size=(2, 3, 10, 6)).astype("float32")
    assert kmeans(tokens, training=True).shape == (2, 3, 10, 4)
    ```

    Reference: paper, section 4.1; `online_kmeans` of the release.
    """

    #: Where the average of the cluster counts starts.
    counts_initializer = "ones"

    num_clusters = Argument(check_positive_integer)
    smoothing_epsilon = Argument(check_not_negative)

    def __init__(self, num_clusters, *, smoothing_epsilon=1e-5, **kwargs):
        clustering, kwargs = Clustering.taken_from(kwargs)
        super().__init__(**kwargs)
        self.num_clusters = num_clusters
        self.smoothing_epsilon = smoothing_epsilon
        clustering.set_attributes(self)

    def build(self, tokens_shape):
        if isinstance(tokens_shape[0], (list, tuple)):
            tokens_shape = tokens_shape[0]
        _, heads, _, dim = tokens_shape
        shape = (heads, self.num_clusters, dim)
        # Both have one seed, because the sums start at the centroids.
        seed = random.randint(1, 2**31 - 1)

        def initial_centroids(shape, dtype=None):
            return normalize(keras.random.normal(shape, seed=seed))

        def initial_anchors(shape, dtype=None):
            return normalize(keras.random.normal(shape, seed=seed + 1))

        def add_state(name, shape, initializer, trainable=False):
            return self.add_weight(
                name=name,
                shape=shape,
                initializer=initializer,
                dtype="float32",
                trainable=trainable,
                autocast=False,
            )

        self.centroids = add_state(
            "centroids", shape, initial_centroids, trainable=not self.ema
        )
        if self.ema and self.update_rule == "ema":
            self.counts = add_state("counts", shape[:2], self.counts_initializer)
            self.sums = add_state("sums", shape, initial_centroids)
        if self.clustering.revives:
            by_tokens = self.centroid_initialization == "tokens"
            start = keras.initializers.Constant(NEVER) if by_tokens else "zeros"
            self.empty_steps = add_state("empty_steps", shape[:2], start)
        if self.balance_rate:
            self.biases = add_state("biases", shape[:2], "zeros")
        if self.anchor_weight:
            self.anchors = add_state("anchors", shape, initial_anchors)

    def call(self, tokens, token_mask=None, training=None):
        single = not isinstance(tokens, (list, tuple))
        streams, masks = ([tokens], [token_mask]) if single else (tokens, token_mask)
        masks = masks or [None] * len(streams)
        streams = [ops.cast(stream, "float32") for stream in streams]
        centroids = ops.convert_to_tensor(self.centroids)
        if backends.IS_TORCH:
            # Its gradients keep what tokens are multiplied by; `move` writes over it.
            centroids = ops.copy(centroids)
        fixed = ops.stop_gradient(centroids)
        products = [product(stream, fixed, transpose_y=True) for stream in streams]
        scores = products
        if self.anchor_weight or self.balance_rate:
            pairs = zip(products, streams, strict=True)
            scores = [self._shifted(*each) for each in pairs]
        nearest = [tensors.place_of_largest(s) for s in scores]
        nearest = [
            backends.one_hot(x, self.num_clusters, dtype="float32") for x in nearest
        ]
        sums = self.losses_of(streams, products, nearest, masks, centroids)
        parts_of_batches.add_batch_loss(self, None, *sums, parts_of_batches.mean)
        if training and self.trainable and self.ema:
            update_or_hold(self, self._statistics(streams, nearest, masks))
        return scores[0] if single else tuple(scores)

    def scores(self, tokens):
        """Returns the scores of tokens, without adding a loss or moving state.

        Args:
            tokens: as in a call.
        """
        centroids = ops.stop_gradient(ops.convert_to_tensor(self.centroids))
        tokens = ops.cast(tokens, "float32")
        scores = product(tokens, centroids, transpose_y=True)
        if self.anchor_weight or self.balance_rate:
            return self._shifted(scores, tokens)
        return scores

    def _shifted(self, scores, tokens):
        """Adds the other parts of a score to products with the centroids."""
        if self.anchor_weight:
            anchors = ops.convert_to_tensor(self.anchors)
            products = product(tokens, anchors, transpose_y=True)
            scores = scores + self.anchor_weight * products
        if self.balance_rate:
            scores = scores + ops.convert_to_tensor(self.biases)[:, None]
        return scores

    def losses_of(self, streams, scores, nearest, masks, centroids):
        """Returns two lists, sums of the losses of tokens and numbers of tokens.

        The arguments have an entry for each stream; `scores` are without biases and
        anchors, `nearest` is one-hot.
        """
        masks = [None if mask is None else ops.cast(mask, "float32") for mask in masks]
        numbers = [_num_tokens(*stream) for stream in zip(streams, masks, strict=True)]
        sums = [
            self._loss(*stream, centroids)
            for stream in zip(streams, scores, nearest, masks, strict=True)
        ]
        return sums, numbers

    def _loss(self, tokens, scores, nearest, mask, centroids):
        share = ops.ones((), "float32") if mask is None else mask

        # |token - centroid|^2 from the scores, which are products of the two, takes
        # fewer passes over the tokens. It is exact up to the rounding of |token|^2, so
        # a loss of zero may come out slightly negative.
        norms = ops.sum(ops.square(ops.stop_gradient(centroids)), axis=-1)[:, None]
        squares = ops.sum(ops.square(tokens), axis=-1)
        squares = squares + ops.sum(nearest * (norms - 2 * scores), axis=-1)
        loss = self.commitment_weight * ops.sum(squares * share)
        if not self.ema:
            own = product(nearest, centroids)
            squares = ops.square(ops.stop_gradient(tokens) - own)
            loss = loss + ops.sum(ops.sum(squares, axis=-1) * share)
        # The mean is that over the entries of tokens.
        return loss / tokens.shape[-1]

    def _statistics(self, streams, nearest, masks):
        """Returns sums over the tokens of this replica, which move the centroids."""
        statistics, chosen = [], 0.0
        for tokens, assigned, mask in zip(streams, nearest, masks, strict=True):
            if mask is not None:
                assigned = assigned * ops.cast(mask, assigned.dtype)[..., None]
            statistics += [
                self.count(assigned),
                ops.sum(ops.matmul(ops.swapaxes(assigned, 2, 3), tokens), axis=0),
            ]
            chosen = chosen + ops.sum(assigned, axis=(0, 2))
        if self.clustering.revives:
            statistics += [chosen, self._candidates(streams[-1], masks[-1])]
        return [ops.stop_gradient(statistic) for statistic in statistics]

    def move(self, statistics):
        """Moves the centroids one step.

        A call does this itself, unless `hold_updates` is open.

        Args:
            statistics: list of tensors as `hold_updates` collects them, added up one by
                one over all parts and all replicas of the batch (`sum_over_replicas`).
        """
        statistics = list(statistics)
        if self.clustering.revives:
            *statistics, chosen, candidates = statistics
        counts, sums = statistics[0::2], statistics[1::2]
        if self.update_rule == "paper":
            self._move_as_in_the_paper(sums)
        else:
            for count, total in zip(counts, sums, strict=True):
                self._move_averages(count, total)
        if self.clustering.revives:
            self._revive(candidates, chosen)
        if self.balance_rate:
            self._balance(sum(counts))

    def _candidates(self, tokens, mask):
        """Picks a token of the global batch for each cluster, evenly spread.

        Returns `[heads, clusters, dim]`, 0 where the token is on another replica.
        """
        batch, _, length, _ = ops.shape(tokens)
        real = ops.ones((1, 1, 1), "int32") if mask is None else ops.cast(mask, "int32")
        heads = ops.shape(real)[1]
        real = ops.broadcast_to(real, (batch, heads, length))
        # Ranks run through the rows of the batch.
        real = ops.reshape(ops.transpose(real, (1, 0, 2)), (heads, batch * length))
        earlier, total = sum_of_earlier_replicas(ops.sum(real, axis=-1))
        ranks = ops.cumsum(real, axis=-1) - 1 + earlier[:, None]
        # floor((j + 0.5) * total / clusters), in parts that int32 can hold.
        parts = 2 * self.num_clusters
        odd = 2 * ops.arange(self.num_clusters, dtype="int32") + 1
        total = total[:, None]
        wanted = odd * (total // parts) + odd * (total % parts) // parts
        chosen = ops.logical_and(
            ranks[:, None] == wanted[..., None], ops.cast(real, "bool")[:, None]
        )
        chosen = ops.reshape(chosen, (heads, self.num_clusters, batch, length))
        chosen = ops.broadcast_to(
            chosen, (tokens.shape[1], self.num_clusters, batch, length)
        )
        return ops.einsum("hkbl,bhld->hkd", ops.cast(chosen, "float32"), tokens)

    def _revive(self, candidates, chosen):
        """Sets centroids that have been empty for too long to candidates."""
        before = ops.convert_to_tensor(self.empty_steps)
        seen = ops.any(chosen > 0, axis=-1, keepdims=True)  # all padding: unknown
        steps = ops.where(chosen > 0, ops.zeros_like(before), before + 1)
        is_dead = before >= NEVER
        if self.revive_after is not None:
            is_dead = ops.logical_or(is_dead, steps >= self.revive_after)
        found = ops.any(candidates != 0, axis=-1)
        revived = ops.logical_and(ops.logical_and(is_dead, seen), found)
        steps = ops.where(revived, ops.zeros_like(steps), steps)
        self.empty_steps.assign(ops.where(seen, steps, before))
        # Candidates of the parts of a batch have been added up.
        candidates = normalize(candidates)

        def revive(variable, value):
            old = ops.convert_to_tensor(variable)
            mask = revived[..., None] if len(old.shape) == 3 else revived
            variable.assign(ops.where(mask, value, old))

        revive(self.centroids, candidates)
        if self.update_rule == "ema":
            revive(self.counts, ops.ones_like(chosen))
            revive(self.sums, candidates)

    def _balance(self, counts):
        """Moves the biases in favour of clusters with few tokens in this step."""
        mean = ops.mean(counts, axis=-1, keepdims=True)
        load = ops.minimum(counts / ops.maximum(mean, 1e-9), 2.0)
        moved = self.balance_rate * self.centroids.shape[-1] * (1.0 - load)
        # Padding alone says nothing.
        moved = ops.where(mean > 0, moved, ops.zeros_like(moved))
        self.biases.assign_add(moved)

    def count(self, assigned):
        """Returns numbers of tokens `<float32>[H, K]` of one-hot `[B, H, L, K]`."""
        return ops.sum(assigned, axis=(0, 2))

    def _move_averages(self, count, total):
        keep = self.decay
        counts = keep * ops.convert_to_tensor(self.counts) + (1 - keep) * count
        sums = keep * ops.convert_to_tensor(self.sums) + (1 - keep) * total
        self.counts.assign(counts)
        self.sums.assign(sums)
        epsilon = self.smoothing_epsilon
        tokens = ops.sum(counts, axis=-1, keepdims=True)
        smoothed = (counts + epsilon) / (tokens + self.num_clusters * epsilon) * tokens
        # Before the first token, the counts are zero.
        empty = ops.cast(tokens == 0, sums.dtype)
        moved = sums / (smoothed + empty)[..., None]
        old = ops.convert_to_tensor(self.centroids)
        self.centroids.assign(ops.where(empty[..., None] > 0, old, moved))

    def _move_as_in_the_paper(self, sums):
        # With shared queries and keys, one set of tokens counts as both halves.
        total = sums[0] + sums[-1]
        self.centroids.assign(
            self.decay * ops.convert_to_tensor(self.centroids)
            + (1 - self.decay) / 2 * total
        )

    def get_config(self):
        return {**super().get_config(), **self.clustering.to_dict()}

    def compute_output_spec(self, tokens, *args, **kwargs):
        single = not isinstance(tokens, (list, tuple))
        shapes = [x.shape for x in ([tokens] if single else tokens)]
        shapes = self.compute_output_shape(shapes)
        scores = tuple(keras.KerasTensor(shape, dtype="float32") for shape in shapes)
        return scores[0] if single else scores

    def compute_output_shape(self, tokens_shape):
        if isinstance(tokens_shape[0], (list, tuple)):
            return tuple((*shape[:-1], self.num_clusters) for shape in tokens_shape)
        return (*tokens_shape[:-1], self.num_clusters)

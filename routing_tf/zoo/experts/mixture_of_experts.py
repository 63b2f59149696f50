"""A feed-forward network whose tokens each pass through one or two of many experts."""

import math

import keras
from keras import ops

from routing_tf.layers.support import backends
from routing_tf.layers.support import parts_of_batches
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.keras_internals import OwnLosses
from routing_tf.layers.support.parts_of_batches import update_or_hold
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_not_negative
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_rate
from routing_tf.layers.support.validation import check_seed
from routing_tf.layers.support.validation import initializer
from routing_tf.zoo.experts.routes import PLACES
from routing_tf.zoo.experts.routes import Routes
from routing_tf.zoo.experts.routes import load_balance
from routing_tf.zoo.experts.routes import load_sums
from routing_tf.zoo.experts.routes import num_dropped
from routing_tf.zoo.experts.routes import places_of
from routing_tf.zoo.experts.routes import router_z
from routing_tf.zoo.experts.routes import router_z_sum
from routing_tf.zoo.parts import refusals

__all__ = ["MixtureOfExperts"]

ACTIVATIONS = ("relu", "gelu", "geglu")
SECOND_CHOICES = ("always", "random")
STATISTICS = ("load_balancing_loss", "router_z_loss", "dropped")
# What makes the first two of sums over tokens.
LOSSES = (load_balance, router_z)


@keras.saving.register_keras_serializable("routing_tf")
class MixtureOfExperts(ConfiguredLayer, OwnLosses):
    """Feed-forward networks, the experts, of which a router chooses one for each token.

    The router is a linear map with a softmax over the experts. With `top_k=1` a token
    passes through its most probable expert, whose output is multiplied by its
    probability; with `top_k=2` through two, weighted by their probabilities over the
    sum of both. An expert has `capacity` places for the tokens of a sequence. A choice
    that finds no place is dropped: it adds nothing, so a token without any place has
    an output of zero, and only the residual connection around the layer passes it on.

    Switch has `top_k=1` and a `router_jitter` of 0.01; GShard `top_k=2`,
    `second_choice="random"` and `places="by_choice"`; ST-MoE `top_k=2`,
    `activation="geglu"` and a `z_loss_weight` of 0.001; GLaM `top_k=2` and
    `activation="geglu"`. They have experts in every other block or in fewer.

    In these papers the capacity grows with the length and belongs to several sequences,
    and GShard places second choices after the first ones of all tokens, so that other
    sequences and later tokens decide who finds a place. Here it is a fixed number for
    each sequence, and by default places are given token by token, in the order of the
    positions: no later token and no other sequence influences an output, and calls
    with a cache give the outputs of one pass.

    In a step of training two losses are added: the load balancing loss of Switch,
    `num_experts * sum(f * p)`, where f is the share of tokens whose first choice is an
    expert and p its mean probability (1 if all are equal), and the router z-loss of
    ST-MoE, the mean of `logsumexp(logits)**2` over the real tokens of the batch; f and
    p are means over those of each replica. `statistics` is a dict of their last
    values, before the weights, under `"load_balancing_loss"` and `"router_z_loss"`, and
    of the number of choices that found no place, `"dropped"`. It is written by calls
    with `training=True`; `route` tells of single tokens.

    Kernels of the experts have the paths `.../expert_{input,gate,output}_kernel` and
    the shape `[num_experts, ...]`, biases likewise. To share out the experts among
    devices, give `keras.distribution.ModelParallel` a layout map with
    `layout_map[".*expert_.*_kernel"] = ("experts", None, None)` and
    `layout_map[".*expert_.*_bias"] = ("experts", None)`.

    Args:
        num_experts: number of experts.
        intermediate_dim: size between the two linear maps of an expert.
        capacity: number of tokens of a sequence for which an expert has places,
            however long the sequence is. With `length * top_k / num_experts`, balanced
            experts just suffice; papers take 1 to 2 times as much.
        top_k: number of experts of a token, 1 or 2. Defaults to 1.
        activation: between the maps: `"relu"`, `"gelu"` (tanh form), or `"geglu"`,
            which gates one projection with the GELU of another and has no biases.
            Defaults to `"relu"`.
        second_choice: `"always"`, or `"random"`: in training a second expert is taken
            with twice the probability of its weight, as in GShard. Otherwise it always
            is. Defaults to `"always"`.
        places: who finds a place first. `"by_token"`: earlier tokens. `"by_choice"`:
            first choices of all tokens, then second ones, as in GShard; with `top_k=2`
            later tokens influence earlier outputs. `"by_probability"`: so, too, and
            tokens with more probable experts before others (batch prioritized routing
            of V-MoE); later tokens influence earlier outputs. Defaults to `"by_token"`.
        router_jitter: in training inputs of the router are multiplied by random numbers
            between `1 - router_jitter` and `1 + router_jitter`. Defaults to 0.0.
        load_balancing_weight: weight of the load balancing loss. Defaults to 0.01.
        z_loss_weight: weight of the router z-loss. Defaults to 0.0.
        dropout: rate of dropped intermediate values, in [0, 1). Defaults to 0.0.
        kernel_initializer: initializer of the router, and of the kernels of each
            expert. Defaults to `"glorot_uniform"`.
        seed: integer, for jitter, random choices and dropout; None (the default) for
            another one each time.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`. The
            router computes in float32 under every policy.

    Call arguments:
        inputs: `<float>[batch, length, dim]`.
        mask: `<bool>[batch, length]`, True for real tokens; None for no padding.
            Defaults to the Keras mask of `inputs`. Padding takes no place, has no part
            in the losses, and its outputs are zero.
        training: whether jitter, random choices and dropout are on, and losses are
            added and statistics written.
        cache: what `make_cache` or an earlier call returned, for calls that go on
            after earlier tokens; None (the default) for none.

    Returns:
        `<float>[batch, length, dim]`; with a cache, a pair: this tensor, and the cache
        with the tokens of `inputs`.

    Raises:
        ValueError: if `second_choice="random"` has no second choice; when called, with
            a cache unless places are given by token.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers
    from routing_tf import zoo

    experts = zoo.MixtureOfExperts(4, 32, capacity=8, top_k=2, activation="geglu")
    block = layers.TransformerBlock(
        layers.MixedAttention([layers.RoutedHeads(2, 3, 8)], key_dim=8), experts
    )
    x = np.random.default_rng(0).normal(size=(2, 24, 16)).astype("float32")
    real = np.arange(24) < np.array([[24], [20]])
    assert block(x, padding_mask=real, training=True).shape == (2, 24, 16)
    print(int(experts.statistics["dropped"]), "choices found no place")
    ```

    Reference: Fedus et al., "Switch Transformers" (https://arxiv.org/abs/2101.03961);
    Lepikhin et al., "GShard" (https://arxiv.org/abs/2006.16668), algorithm 1; Zoph et
    al., "ST-MoE" (https://arxiv.org/abs/2202.08906), equation 5; Du et al., "GLaM"
    (https://arxiv.org/abs/2112.06905); Riquelme et al., "Scaling Vision with Sparse
    Mixture of Experts" (https://arxiv.org/abs/2106.05974), section 4.
    """

    num_experts = Argument(check_positive_integer)
    intermediate_dim = Argument(check_positive_integer)
    capacity = Argument(check_positive_integer)
    top_k = Argument(check_positive_integer)
    second_choice = Argument(check_choice, SECOND_CHOICES)
    places = Argument(check_choice, PLACES)
    router_jitter = Argument(check_rate)
    load_balancing_weight = Argument(check_not_negative)
    z_loss_weight = Argument(check_not_negative)
    dropout = Argument(check_rate)
    kernel_initializer = Argument(initializer)
    seed = Argument(check_seed)

    def __init__(
        self,
        num_experts,
        intermediate_dim,
        capacity,
        top_k=1,
        activation="relu",
        second_choice="always",
        places="by_token",
        router_jitter=0.0,
        load_balancing_weight=0.01,
        z_loss_weight=0.0,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_experts = num_experts
        self.intermediate_dim = intermediate_dim
        self.capacity = capacity
        self.top_k = top_k
        check_choice("top_k", self.top_k, (1, 2))
        check_choice("activation", activation, ACTIVATIONS)
        # In a call, `keras.RematScope` puts a function in place of `activation`.
        self.activation = self._activation = activation
        self.second_choice = second_choice
        self.places = places
        self.router_jitter = router_jitter
        self.load_balancing_weight = load_balancing_weight
        self.z_loss_weight = z_loss_weight
        self.dropout = dropout
        self.kernel_initializer = kernel_initializer
        self.seed = seed
        self._check_choices()
        self.seed_generator = None
        if router_jitter or second_choice == "random":
            self.seed_generator = keras.random.SeedGenerator(self.seed)
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=self.seed, dtype=self.dtype_policy
        )

    @property
    def loss_names(self):
        """Names of the losses that training adds."""
        weights = self.load_balancing_weight, self.z_loss_weight
        return [name for name, weight in zip(STATISTICS, weights) if weight]

    def _check_choices(self):
        if self.top_k > self.num_experts:
            raise ValueError(
                "`top_k` must be at most `num_experts`. Received: "
                f"top_k={self.top_k}, num_experts={self.num_experts}"
            )
        if self.second_choice == "random" and self.top_k == 1:
            raise ValueError(
                '`second_choice="random"` needs a second choice. Received: top_k=1. '
                "Set `top_k=2`, or leave `second_choice` out"
            )

    def build(self, inputs_shape):
        refusals.tokens_shape(self, inputs_shape)
        self.dim = dim = inputs_shape[-1]
        hidden = self.intermediate_dim
        self.router_kernel = self.add_weight(
            name="router_kernel",
            shape=(dim, self.num_experts),
            initializer=self._initializer_of_expert(self.num_experts),
            dtype="float32",
            autocast=False,
        )
        self.input_kernel = self._add_kernel("input", dim, hidden)
        if self.activation == "geglu":
            self.gate_kernel = self._add_kernel("gate", dim, hidden)
        self.output_kernel = self._add_kernel("output", hidden, dim)
        if self.activation != "geglu":
            self.input_bias = self._add_bias("input", hidden)
            self.output_bias = self._add_bias("output", dim)
        state = {"trainable": False, "autocast": False}
        self.statistics = {
            name: self.add_weight((), "zeros", "float32", name=name, **state)
            for name in STATISTICS
        }

    def _add_kernel(self, name, input_dim, output_dim):
        def initial_values(shape, dtype=None):
            own = map(self._initializer_of_expert, range(self.num_experts))
            return ops.stack([each(shape[1:], dtype=dtype) for each in own])

        shape = (self.num_experts, input_dim, output_dim)
        return self.add_weight(shape, initial_values, name=f"expert_{name}_kernel")

    def _initializer_of_expert(self, expert):
        """Returns an initializer whose numbers differ from those of other experts."""
        initializer = self.kernel_initializer
        if not isinstance(initializer, keras.initializers.Initializer):
            return initializer
        config = initializer.get_config()
        seed = config.get("seed")
        if isinstance(seed, dict):  # of a generator, which goes on by itself
            return initializer
        if isinstance(seed, int):
            config["seed"] += expert
        return type(initializer).from_config(config)

    def _add_bias(self, name, dim):
        return self.add_weight(
            name=f"expert_{name}_bias",
            shape=(self.num_experts, dim),
            initializer="zeros",
        )

    def make_cache(self, batch_size):
        """Makes an empty cache `<int32>[batch, num_experts]`, of places that are taken.

        Raises:
            ValueError: unless places are given by token.
        """
        self._check_cache()
        return ops.zeros((batch_size, self.num_experts), dtype="int32")

    def _check_cache(self):
        if self.places != "by_token":
            raise ValueError(
                "A cache needs places that do not depend on later tokens. Received: "
                f'places={self.places!r}. Set `places="by_token"`'
            )

    def call(self, inputs, mask=None, training=None, cache=None):
        if cache is not None:
            self._check_cache()
        x, real = self._tokens(inputs, mask)
        logits = self._logits(x, training)
        probabilities = ops.softmax(logits, axis=-1)
        routes, taken = self._routes(probabilities, real, training, cache)
        output = self._through_experts(x, routes, training)
        if cache is not None:
            return output, taken
        if training:
            self._add_losses(logits, probabilities, routes, real)
        return output

    def route(self, inputs, mask=None):
        """Returns the `Routes` of tokens without a cache and not in training.

        They are a named tuple of `experts`, `weights`, `places`, `is_chosen` and
        `is_placed`, each `[batch, length, top_k]`.
        """
        x, real = self._tokens(ops.convert_to_tensor(inputs), mask)
        probabilities = ops.softmax(self._logits(x), axis=-1)
        return self._routes(probabilities, real)[0]

    def _tokens(self, inputs, mask):
        refusals.tokens_shape(self, inputs.shape, self.dim)
        return refusals.without_padding(inputs, mask)

    def _logits(self, x, training=None):
        """Returns the logits of the experts `<float32>[batch, length, num_experts]`."""
        x = ops.cast(x, "float32")
        if training and self.router_jitter:
            x = x * keras.random.uniform(
                ops.shape(x),
                1 - self.router_jitter,
                1 + self.router_jitter,
                dtype="float32",
                seed=self.seed_generator,
            )
        return ops.matmul(x, ops.convert_to_tensor(self.router_kernel))

    def _routes(self, probabilities, real, training=None, cache=None):
        """Returns `Routes`, and the places taken as in a cache."""
        weights, experts = ops.top_k(probabilities, self.top_k)
        experts = ops.cast(experts, "int32")
        if self.top_k == 2:
            weights = weights / ops.sum(weights, axis=-1, keepdims=True)
        is_chosen = ops.broadcast_to(real[..., None], ops.shape(experts))
        if training and self.second_choice == "random":
            drawn = keras.random.uniform(
                ops.shape(weights), dtype="float32", seed=self.seed_generator
            )
            is_first = ops.arange(self.top_k) == 0
            is_taken = ops.logical_or(is_first, drawn < 2 * weights)
            is_chosen = ops.logical_and(is_chosen, is_taken)
        choices = backends.one_hot(experts, self.num_experts, dtype="int32")
        choices = choices * ops.cast(is_chosen, "int32")[..., None]
        places = places_of(choices, probabilities, self.places)
        taken = ops.sum(choices, axis=(1, 2))
        rank = places
        if cache is not None:
            rank = rank + ops.sum(choices * cache[:, None, None], axis=-1)
            taken = taken + cache
        is_placed = ops.logical_and(is_chosen, rank < self.capacity)
        routes = Routes(experts, weights, places, is_chosen, is_placed)
        return routes, ops.minimum(taken, self.capacity)

    def _through_experts(self, x, routes, training):
        """Returns the weighted sums of what the experts of each token return.

        All places are rows of one matrix, by expert, sequence and place.
        """
        batch, length, dim = ops.shape(x)
        # In a call, no more tokens of a sequence come to an expert than there are.
        rows = self.capacity if x.shape[1] is None else min(self.capacity, x.shape[1])
        size = self.num_experts * batch * rows
        sequence = ops.arange(batch, dtype="int32")[:, None, None]
        slots = (routes.experts * batch + sequence) * rows + routes.places
        # One more row is for those without a place.
        slots = ops.where(routes.is_placed, slots, size)
        tokens = ops.reshape(ops.arange(batch * length, dtype="int32"), (batch, length))
        tokens = ops.broadcast_to(tokens[..., None], ops.shape(slots))
        # A place that is left empty computes with the first token, for nobody.
        tokens_of_slots = ops.segment_sum(
            ops.reshape(tokens, (-1,)), ops.reshape(slots, (-1,)), size + 1
        )
        tokens_of_slots = ops.cast(tokens_of_slots[:size], "int32")
        placed = ops.take(ops.reshape(x, (-1, dim)), tokens_of_slots, axis=0)
        placed = ops.reshape(placed, (self.num_experts, batch * rows, dim))
        outputs = ops.reshape(self._experts(placed, training), (-1, dim))
        outputs = ops.take(outputs, ops.where(routes.is_placed, slots, 0), axis=0)
        outputs = ops.where(routes.is_placed[..., None], outputs, 0)
        weights = ops.cast(routes.weights, outputs.dtype)[..., None]
        return ops.sum(outputs * weights, axis=2)

    def _experts(self, x, training):
        """Computes all experts, of `<float>[num_experts, rows, dim]`."""
        hidden = ops.matmul(x, ops.convert_to_tensor(self.input_kernel))
        if self._activation == "geglu":
            gate = ops.matmul(x, ops.convert_to_tensor(self.gate_kernel))
            hidden = ops.gelu(hidden, approximate=True) * gate
        else:
            hidden = hidden + ops.convert_to_tensor(self.input_bias)[:, None]
            is_gelu = self._activation == "gelu"
            hidden = ops.gelu(hidden) if is_gelu else ops.relu(hidden)
        hidden = self.dropout_layer(hidden, training=training)
        output = ops.matmul(hidden, ops.convert_to_tensor(self.output_kernel))
        if self._activation != "geglu":
            output = output + ops.convert_to_tensor(self.output_bias)[:, None]
        return output

    def _add_losses(self, logits, probabilities, routes, real):
        real = ops.cast(real, "float32")
        counts = [ops.sum(real), load_sums(routes, real, self.num_experts)]
        own = [
            ops.sum(probabilities * real[..., None], axis=(0, 1)),
            router_z_sum(logits, real),
        ]
        sums = [*counts, *map(ops.stop_gradient, own), num_dropped(routes)]
        update_or_hold(self, sums)
        weights = self.load_balancing_weight, self.z_loss_weight
        for index, weight in enumerate(weights):
            if weight:
                own_sums = [weight * own[index]]
                parts_of_batches.add_batch_loss(
                    self, STATISTICS[index], own_sums, counts, LOSSES[index]
                )

    def move(self, statistics):
        """Writes the statistics of a step; see `OnlineKMeans.move`."""
        *counts, probabilities, z_loss, dropped = statistics
        own = zip(LOSSES, (probabilities, z_loss), strict=True)
        losses = [loss([x], counts) for loss, x in own]
        for name, value in zip(STATISTICS, [*losses, dropped], strict=True):
            self.statistics[name].assign(value)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape


def _in_a_model(place, num_experts=8, top_k=2, **options):
    """Two of eight experts in every other block, as in GLaM, or in the only one."""
    if place.index % 2 == 0 and place.num_blocks > 1:
        return None
    return MixtureOfExperts(
        num_experts,
        place.intermediate_dim,
        # A quarter more than an even share.
        capacity=math.ceil(1.25 * place.max_length * top_k / num_experts),
        top_k=top_k,
        activation="geglu",
        **options,
    )


FEED_FORWARDS = {"mixture_of_experts": _in_a_model}

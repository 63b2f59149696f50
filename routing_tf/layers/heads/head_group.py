"""The interface of all attention patterns."""

import dataclasses

import keras
from keras import ops

from routing_tf.layers.caches.recent_tokens import Stepwise
from routing_tf.layers.softmax import queries_and_keys
from routing_tf.layers.softmax.queries_and_keys import consecutive
from routing_tf.layers.softmax.queries_and_keys import rotate
from routing_tf.layers.softmax.scaled_dot_product import ScaledDotProduct
from routing_tf.layers.support import head_inputs
from routing_tf.layers.support import head_inputs as shift
from routing_tf.layers.support.configs import Argument
from routing_tf.layers.support.configs import ConfiguredLayer
from routing_tf.layers.support.configs import deserialize
from routing_tf.layers.support.head_inputs import HeadInputs
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.layers.support.masks import large_negative
from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import of_length
from routing_tf.layers.support.validation import check_choice
from routing_tf.layers.support.validation import check_flag
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_optional_number
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_positive_number
from routing_tf.layers.support.validation import check_seed
from routing_tf.layers.support.validation import initializer

# Hides a token from all queries that see another one.
LEAST_WEIGHTED_BIAS = -5e8
TOKEN_BIAS_WEIGHTS = (None, "fixed", "trainable")


def of_one_length(inputs, reason):
    """Returns `HeadInputs` whose value is as long as the query, as far as is known.

    Raises a `ValueError` if it is not.
    """
    length, memory_length = length_of(inputs.query, 2), length_of(inputs.value, 2)
    if is_known(length, memory_length) and length != memory_length:
        raise ValueError(
            f"`query` and `value` must have the same length: {reason}. Received: "
            f"lengths {length} and {memory_length}. Use `FullHeads` or `RoutedHeads` "
            "for another sequence"
        )
    return dataclasses.replace(inputs, value=of_length(inputs.value, 2, length))


def refuse_comparison(group, name, neutral, value):
    """Raises the `ValueError` of heads whose weights are not a softmax of products."""
    raise ValueError(
        f"`{name}` must be {neutral} for {type(group).__name__}: not all of their "
        "weights are a softmax of products of queries and keys. Received: "
        f"{name}={value!r} for {group.name!r}. Leave it out, or use heads such as "
        "`RoutedHeads` or `LocalHeads`"
    )


def refuse_segments(group, reason):
    """Raises the `ValueError` of heads that cannot have `segment_ids`."""
    raise ValueError(
        f"`segment_ids` cannot be used with `{type(group).__name__}`: {reason}. "
        f"Received: segment_ids for {group.name!r}. Leave them out, with one document "
        "in each row, or use heads such as `RoutedHeads` or `LocalHeads`"
    )


class HeadGroup(Stepwise, ConfiguredLayer):
    """Heads of a `MixedAttention` that follow one pattern.

    A group maps projected queries, keys and values of its own heads to outputs of the
    same length. It knows nothing about other groups, projections or the model.
    Subclasses implement `attend`; to attend step by step, they also implement `sees`
    and `cache_length`, or the methods that make and use caches.

    Args:
        num_heads: number of heads in the group.
        max_relative_position: largest relative position with an embedding of its own,
            in tokens (in ranks for routed heads); None (the default) for no relative
            positions.
        dropout: rate of dropped attention weights, in [0, 1). Defaults to 0.0.
        embeddings_initializer: initializer of the relative position tables. Defaults
            to `"glorot_uniform"`.
        relative_key_initializer: initializer of the table of the keys, see
            `RelativePosition`; None (the default) for `embeddings_initializer`.
        token_bias_weight: factor of a token bias: `"trainable"` or `"fixed"`, a scalar
            weight that starts at 1; None (the default) for no factor.
        key_shift: which key a position offers with its value: its own (0, the default),
            or that of the token before it (1). With 1, a query finds earlier content
            that is similar to its own, and reads what followed it: an induction head
            (Olsson et al., 2022). A query does not see its own key then, and returns
            zero if it sees nothing. 1 needs self-attention under a causal mask.
        dropout_seed: integer seed of the dropout and of all other random draws of the
            heads; None (the default) for a random one.
        rotary_positions: whether queries and keys are turned by the position of their
            token before they are compared (RoFormer), so that logits also depend on the
            distance. A shifted key keeps the position of its own token. Positions count
            in the order of the sequence. Needs self-attention and keys of an even size.
            Defaults to False.
        rotary_wavelength: base of the wavelengths of rotary positions. Defaults to
            10000.
        rotary: a Keras layer that turns queries and keys instead, such as that of a
            trained model; it sets `rotary_positions`. It is called with
            `<float>[batch, heads, length, key_dim]` and the positions of the tokens,
            `<int32>`, broadcastable to `[batch, heads, length]`. None (the default) for
            the rotary positions of this package.
        attention_implementation: how the attention inside a window or a cluster is
            computed: `"plain"` (the default), `"auto"`, `"cudnn"`, `"splash"` or
            `"xla"`, see `ScaledDotProduct`.
        logit_soft_cap: a positive number c, for logits `c * tanh(logits / c)` before
            the bias and masks are added, see `ScaledDotProduct`; None (the default)
            for that of the `MixedAttention` that holds the group.
        qk_norm: whether each query and each key of a head is divided by the root of its
            mean square and multiplied by a learned scale, one vector for the queries of
            the group and one for its keys, before rotary positions turn them (Gemma 3).
            Logits are then products of these, times `key_dim**-0.5`. Clusters are
            chosen by the same vectors as without it, blocks by those that are compared.
            Defaults to False.
        **kwargs: arguments of `keras.layers.Layer`, such as `name` and `dtype`. Without
            a `dtype` the group has that of the `MixedAttention` that holds it.

    Call arguments:
        inputs: `HeadInputs` as `prepared` returns them. A group that is called on its
            own also takes the arguments of `HeadInputs.of`: query, key and value, and
            the others by name.
        training: whether dropout is on and state moves.

    Returns:
        `<float>[batch, heads, length, value_dim]`.

    Raises:
        ValueError: if `logit_soft_cap` or `qk_norm` is given to heads whose weights are
            not a softmax of products; when built, if keys have an odd size for rotary
            positions; when called, if `use_causal_mask=True` and query and value differ
            in length, if `key_shift=1` comes without a causal mask or with another
            sequence as value, or if rotary positions come with another sequence.
    """

    #: Whether the group wants keys of its own in self-attention.
    needs_keys = True
    #: Sizes of a token of the layer that holds the group, and of a key and a value.
    input_dim = key_dim = value_dim = None
    #: Whether one softmax sees all keys of a query.
    has_one_softmax = False
    #: Whether all logits are products of queries and keys that `dot_product` weighs.
    #: `logit_soft_cap` and `qk_norm` need that.
    compares_by_products = False
    #: Whether the pattern keeps inside the segments of packed sequences.
    supports_segments = False
    #: Whether queries and keys are compared as `prepared` returns them. Else the group
    #: calls `rotated` for what it compares.
    compares_inputs = True
    #: Whether caches hold only keys and values of key heads, which are repeated where
    #: queries read them. Else `prepared` repeats them.
    remembers_key_heads = False
    #: Whether the group has flaws of the original release, for its weights alone.
    has_flaws = False
    #: The layer that attends inside each window or cluster.
    dot_product_class = ScaledDotProduct

    num_heads = Argument(check_positive_integer)
    max_relative_position = Argument(check_optional_integer)
    embeddings_initializer = Argument(initializer)
    relative_key_initializer = Argument(initializer)
    token_bias_weight = Argument(check_choice, TOKEN_BIAS_WEIGHTS)
    key_shift = Argument(shift.check_key_shift)
    dropout_seed = Argument(check_seed)
    rotary_positions = Argument(check_flag)
    rotary_wavelength = Argument(check_positive_number)

    def __init__(
        self,
        num_heads,
        max_relative_position=None,
        dropout=0.0,
        embeddings_initializer="glorot_uniform",
        relative_key_initializer=None,
        token_bias_weight=None,
        key_shift=0,
        dropout_seed=None,
        rotary_positions=False,
        rotary_wavelength=10000,
        attention_implementation="plain",
        logit_soft_cap=None,
        qk_norm=False,
        rotary=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self._follows_dtype = kwargs.get("dtype") is None
        # None is what the config of a group says whose layer decides.
        self._leaves_dtype_open = self._follows_dtype and "dtype" in kwargs
        self.num_heads = num_heads
        # The layer that holds the group may set a smaller one.
        self.num_key_value_heads = self.num_heads
        self.max_relative_position = max_relative_position
        self.dropout = dropout
        self.embeddings_initializer = embeddings_initializer
        self.relative_key_initializer = relative_key_initializer
        self.token_bias_weight = token_bias_weight
        self.key_shift = key_shift
        self.dropout_seed = dropout_seed
        self.rotary_positions = rotary_positions
        self.rotary = check_rotary(rotary)
        if self.rotary is not None:
            self.rotary_positions = True
        self.rotary_wavelength = rotary_wavelength
        self.attention_implementation = attention_implementation
        self.dot_product = self.dot_product_class(
            max_relative_position=self.max_relative_position,
            dropout=dropout,
            embeddings_initializer=embeddings_initializer,
            relative_key_initializer=relative_key_initializer,
            seed=self.dropout_seed,
            attention_implementation=attention_implementation,
            name="dot_product",
            dtype=self.dtype_policy,
        )
        self.set_soft_cap(logit_soft_cap)
        self.set_qk_norm(qk_norm)

    def build(self, query_shape, key_shape, value_shape):
        self.set_sizes(query_shape[-1], value_shape[-1])
        if self.rotary_positions and self.rotary is None and query_shape[-1] % 2:
            raise ValueError(
                "`key_dim` must be even with `rotary_positions=True`, because pairs of "
                f"entries are turned. Received: key_dim={query_shape[-1]}"
            )
        self.dot_product.build(query_shape, key_shape, value_shape)
        if self.qk_norm:
            self.query_scale, self.key_scale = (
                self.add_weight(
                    name=f"{name}_scale",
                    shape=query_shape[-1:],
                    initializer="ones",
                    autocast=False,
                )
                for name in ("query", "key")
            )
        if self.token_bias_weight is not None:
            self.bias_weight = self.add_weight(
                name="token_bias_weight",
                shape=(),
                initializer="ones",
                autocast=False,
                trainable=self.token_bias_weight == "trainable",
            )

    @property
    def num_key_heads(self):
        """Number of heads of the keys and values that `prepared` returns."""
        return self.num_key_value_heads if self.remembers_key_heads else self.num_heads

    def set_sizes(self, key_dim, value_dim):
        """Sets the sizes of a key and of a value of one head."""
        self.key_dim = key_dim
        self.value_dim = value_dim

    def follow_dtype(self, dtype_policy):
        """Takes the dtype policy of a `MixedAttention`, unless it was given its own."""
        if not self._follows_dtype or self.built:
            return
        own = self.dtype_policy
        for layer in (self, *layers_inside(self)):
            # Others, such as centroids, have one for themselves.
            if layer.dtype_policy is own:
                layer.dtype_policy = dtype_policy
        self._leaves_dtype_open = True

    def get_config(self):
        config = super().get_config()
        return {**config, "dtype": None} if self._leaves_dtype_open else config

    def set_soft_cap(self, logit_soft_cap):
        """Sets `logit_soft_cap`; raises a `ValueError` if the group cannot have it."""
        logit_soft_cap = check_optional_number("logit_soft_cap", logit_soft_cap)
        if logit_soft_cap is not None and not self.compares_by_products:
            refuse_comparison(self, "logit_soft_cap", None, logit_soft_cap)
        self.logit_soft_cap = self.dot_product.logit_soft_cap = logit_soft_cap

    def set_qk_norm(self, qk_norm):
        """Sets `qk_norm`; raises a `ValueError` if the group cannot have it."""
        check_flag("qk_norm", qk_norm)
        if qk_norm and not self.compares_by_products:
            refuse_comparison(self, "qk_norm", False, qk_norm)
        self.qk_norm = qk_norm

    def __call__(
        self, query=None, key=None, value=None, *, inputs=None, training=None, **options
    ):
        if inputs is None:
            if not self.built:
                self.build(
                    *(None if x is None else x.shape for x in (query, key, value))
                )
            inputs = self.prepared(HeadInputs.of(query, key, value, **options))
        # None would hide what an outer call says.
        known = {} if training is None else {"training": training}
        return super().__call__(inputs=inputs, **known)

    def call(self, inputs, training=None):
        needs = self.key_shift or inputs.value.shape[1] != self.num_heads
        inputs = self.shifted(inputs) if needs else inputs
        return self.attend(inputs, training=training)

    def prepared(self, inputs):
        """Returns `HeadInputs` as this group reads them.

        Args:
            inputs: `HeadInputs` as any group may get them.

        Raises:
            ValueError: if the group cannot attend in this way.
        """
        query, key, value = inputs.query, inputs.key, inputs.value
        bias = inputs.token_bias
        if inputs.segments is not None and not self.supports_segments:
            refuse_segments(self, "their pattern crosses the borders of segments")
        if inputs.use_causal_mask:
            length = query.shape[2]
            if length is None or length != value.shape[2]:
                value = self._of_length(query, value)
        if self.key_shift:
            shift.check_key_shift_call(inputs)
        if self.rotary_positions and inputs.is_cross_attention:
            raise ValueError(
                "`rotary_positions=True` needs self-attention, because tokens of two "
                "sequences have no distance. Received: is_cross_attention=True. Use a "
                "group without them for attention to another sequence"
            )
        query, key, value = (
            None if x is None else ops.cast(x, self.compute_dtype)
            for x in (query, key, value)
        )
        if self.compares_inputs and self.qk_norm:
            query, key = self.normalized(query, key)
        if self.compares_inputs and self.rotary_positions:
            query, key = (self.rotated(x, inputs) for x in (query, key))
        inputs = dataclasses.replace(
            inputs,
            query=query,
            key=key,
            value=value,
            token_bias=None if bias is None else self._weighted(bias),
        )
        if self.remembers_key_heads or self.num_key_value_heads == self.num_heads:
            return inputs
        return self.for_queries(inputs)

    def normalized(self, query, key):
        """Returns scaled queries, and keys, with `qk_norm`; not yet turned.

        Args:
            query: `<float>[batch, heads, length, key_dim]`, or None.
            key: likewise.
        """
        # Projections have already multiplied queries by the factor.
        given = (query, self.query_scale, self.key_dim**-0.5), (key, self.key_scale)
        return [
            None if x is None else queries_and_keys.normalized(x, *options)
            for x, *options in given
        ]

    def rotated(self, x, inputs):
        """Returns queries or keys as they are compared, turned by their positions.

        Args:
            x: `<float>[batch, heads, length, key_dim]`, or None.
            inputs: the `HeadInputs` that they come from.
        """
        if x is None or not self.rotary_positions:
            return x
        # Turned queries are also compared with tables of relative positions, so it
        # matters where in its document a token stands.
        segments = inputs.segments
        places = None if segments is None else segments.query_places
        return self.turned(x, inputs.first_position, places)

    def turned(self, x, first_position=0, positions=None):
        """Returns `<float>[B, H, L, D]` turned by positions.

        `positions`, broadcastable to `[B, H, L]`, default to those from
        `first_position`.
        """
        if self.rotary is None:
            return rotate(x, first_position, self.rotary_wavelength, positions)
        if positions is None:
            positions = consecutive(x, first_position)[None, None]
        return ops.cast(self.rotary(x, positions), x.dtype)

    def _of_length(self, query, value):
        """Returns `value`; refuses one of another length than `query`."""
        lengths = query.shape[2], value.shape[2]
        if None in lengths:
            return of_length(value, 2, length_of(query, 2))
        if lengths[0] != lengths[1]:
            raise ValueError(
                "`use_causal_mask=True` compares positions in one sequence, so `query` "
                "and `value` must have the same length. Received: lengths "
                f"{lengths[0]} and {lengths[1]}. Leave the causal mask out in "
                "attention to another sequence."
            )
        return value

    def shifted(self, inputs):
        """Returns `HeadInputs` as `attend` reads them: for each head, and shifted."""
        if inputs.value.shape[1] != self.num_heads:
            inputs = self.for_queries(inputs)
        return shift.offer_previous_keys(inputs) if self.key_shift else inputs

    def for_queries(self, inputs):
        """Returns `HeadInputs` with a key and a value for each head of queries."""
        key, value = (
            head_inputs.for_queries(x, self.num_heads)
            for x in (inputs.key, inputs.value)
        )
        return dataclasses.replace(inputs, key=key, value=value)

    def attend(self, inputs, training=None):
        """The pattern: from `HeadInputs` to `<float>[batch, heads, length, value_dim]`.

        Args:
            inputs: `HeadInputs` as `shifted` returns them.
            training: whether dropout is on and state moves. Defaults to None, which
                means no.
        """
        raise NotImplementedError

    def has_softmax_alone(self, inputs, training):
        """Returns whether one softmax, and nothing else, turns logits into weights."""
        needs_logits = self.dot_product.needs_logits(False, training)
        is_alone = needs_logits is None and inputs.token_bias is None
        return self.has_one_softmax and is_alone

    def _weighted(self, bias):
        bias = ops.cast(bias, self.compute_dtype)
        if self.token_bias_weight is None:
            return bias
        # With the square, the second derivative of the weight is finite too.
        least = max(LEAST_WEIGHTED_BIAS, large_negative(bias.dtype) / 2)
        return ops.maximum(bias, least) * ops.cast(self.bias_weight, bias.dtype)

    def padding_mask(self, mask):
        """Returns the mask of padding that queries see, arranged in windows."""
        return mask

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return (*query_shape[:-1], value_shape[-1])


def check_rotary(rotary):
    """Returns the layer `rotary`, or that of its config; None for None."""
    layer = deserialize(rotary)
    if layer is None or isinstance(layer, keras.layers.Layer):
        return layer
    raise ValueError(
        "`rotary` must be a Keras layer that is called with vectors and their "
        f"positions, or None. Received: rotary={rotary!r}. "
        "`rotary_positions=True` needs no layer"
    )

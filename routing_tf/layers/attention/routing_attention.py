"""The drop-in multi-head attention layer."""

import keras

from routing_tf.layers.attention.mixed_attention import MixedAttention
from routing_tf.layers.heads.local import LocalHeads
from routing_tf.layers.heads.routed import RoutedHeads
from routing_tf.layers.routing.online_kmeans import Clustering
from routing_tf.layers.support.validation import check_non_negative_integer
from routing_tf.layers.support.validation import check_optional_integer
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import check_seed
from routing_tf.layers.support.validation import initializer
from routing_tf.layers.support.validation import is_integer

# Settings of `clustering` that are arguments of the layer, too, with their defaults.
NAMED = {"routing_scope": "full", "prefix_block_size": None, "exploring_queries": 0}
CLUSTERING = (
    *Clustering.names(),
    *NAMED,
    *("query_cluster", "clusters_per_query"),
)


@keras.saving.register_keras_serializable("routing_tf")
class RoutingAttention(MixedAttention):
    """Multi-head attention with routed heads and, optionally, local heads.

    A near drop-in replacement for `keras.layers.MultiHeadAttention`: `attention(x)` and
    `attention(x, x, x)` are self-attention. Routed heads attend inside clusters of
    tokens with similar content, and local heads inside blocks, so the cost does not
    grow with the square of the length. Under a causal mask, no output depends on a
    later token, except with `routing="expert_choice"`, the paper's rule, where later
    tokens take part in choosing the members of clusters. `RoutedHeads` and `LocalHeads`
    say what queries see of another sequence.

    Args:
        num_heads: number of all heads.
        key_dim: size of a query or key of one head.
        num_clusters: number of clusters of each routed head. About `length /
            attention_window` covers the sequence once.
        attention_window: number of tokens in a cluster. A window longer than the input
            is cut to it.
        num_local_heads: number of heads that are local; the others are routed. Defaults
            to 0.
        local_block_size: length of a local block, in tokens; None (the default) for
            `attention_window`. A local query sees its own and the neighbouring blocks.
        routing: `"expert_choice"`, each cluster chooses its tokens, or
            `"token_choice"`, each token chooses its cluster, see `RoutedHeads`. None
            (the default): token choice in self-attention under a causal mask, and
            expert choice elsewhere.
        value_dim: size of a value of one head; None (the default) for `key_dim`.
        output_dim: size of the output; None (the default) for the size of the query.
        max_relative_position: largest relative position with an embedding of its own,
            in tokens (in ranks for routed heads); None (the default) for no relative
            positions.
        share_query_key: whether routed heads use one projection for queries and keys,
            if query and value have the same depth. Defaults to True.
        clustering: dict of further arguments of `RoutedHeads` for its clusters: those
            of `Clustering`, `query_cluster`, `clusters_per_query`, `routing_scope`,
            `prefix_block_size` and `exploring_queries`; or a `Clustering`. None (the
            default) for none.
        key_shift: which key a position offers with its value, in all heads: its own (0,
            the default), or that of the token before it (1), so that a query finds what
            followed similar tokens. 1 needs self-attention under a causal mask.
        dropout: rate of dropped attention weights, in [0, 1). Defaults to 0.0.
        seed: integer seed of the dropout and of exploring queries; None (the default)
            for a random one.
        kernel_initializer: initializer of all projections and of the relative position
            tables. Defaults to `"glorot_uniform"`.
        rotary_positions: whether all heads turn queries and keys by the position of
            their token, see `HeadGroup`. Defaults to False.
        attention_implementation: how the attention inside a window or a cluster is
            computed, see `ScaledDotProduct`: `"plain"` (the default) or `"auto"`.
        **kwargs: `routing_scope` and `prefix_block_size` of `RoutedHeads` and
            `exploring_queries` of `ClusteredHeads`, which take precedence over those in
            `clustering`; arguments of `MixedAttention`, such as `use_bias` (defaults to
            False, unlike in `keras.layers.MultiHeadAttention`), `num_key_value_heads`
            (with `share_query_key=False`), `use_gate`, `logit_soft_cap`, `qk_norm` and
            `remat`; and those of `keras.layers.Layer`, such as `name`.

    Call arguments and Returns: as in `MixedAttention`.

    Raises:
        ValueError: when built, if `key_dim` is less than 2 with routed heads; when
            called, as in `MixedAttention` and `RoutedHeads`.

    Example:

    ```python
    import numpy as np
    from routing_tf import layers

    attention = layers.RoutingAttention(
        num_heads=4, key_dim=16, num_clusters=4, attention_window=32, num_local_heads=2
    )
    x = np.random.normal(size=(2, 128, 64)).astype("float32")
    assert attention(x, use_causal_mask=True).shape == (2, 128, 64)

    cross_attention = layers.RoutingAttention(
        num_heads=4, key_dim=16, num_clusters=4, attention_window=32
    )
    memory = np.random.normal(size=(2, 96, 64)).astype("float32")
    assert cross_attention(x, value=memory).shape == (2, 128, 64)
    ```

    Reference: Roy, Saffar, Vaswani, Grangier, "Efficient Content-Based Sparse Attention
    with Routing Transformers" (https://arxiv.org/abs/2003.05997).
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        num_clusters=None,
        attention_window=None,
        num_local_heads=0,
        local_block_size=None,
        routing=None,
        value_dim=None,
        output_dim=None,
        max_relative_position=None,
        share_query_key=True,
        clustering=None,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        key_shift=0,
        seed=None,
        rotary_positions=False,
        attention_implementation="plain",
        **kwargs,
    ):
        num_heads = check_positive_integer("num_heads", num_heads)
        num_local_heads = _check_num_local_heads(num_local_heads, num_heads)
        if num_local_heads < num_heads:
            _check_is_given("num_clusters", num_clusters)
        _check_is_given("attention_window", attention_window)
        attention_window = check_positive_integer("attention_window", attention_window)
        seed = check_seed("seed", seed)
        initializer("kernel_initializer", kernel_initializer)
        local_block_size = check_optional_integer("local_block_size", local_block_size)
        clustering = _clustering(clustering, kwargs)
        shared = {
            "max_relative_position": max_relative_position,
            "dropout": dropout,
            "key_shift": key_shift,
            "rotary_positions": rotary_positions,
            "attention_implementation": attention_implementation,
            "embeddings_initializer": kernel_initializer,
            "dtype": kwargs.get("dtype"),
        }
        groups = []
        num_routed = num_heads - num_local_heads
        if num_routed:
            groups.append(
                RoutedHeads(
                    num_routed,
                    num_clusters=num_clusters,
                    attention_window=attention_window,
                    routing=routing,
                    share_query_key=share_query_key,
                    dropout_seed=seed,
                    name="routed_heads",
                    **clustering,
                    **shared,
                )
            )
        if num_local_heads:
            block = (local_block_size or attention_window,)
            groups.append(
                LocalHeads(
                    num_local_heads,
                    block,
                    # Different from the draws of the routed heads.
                    dropout_seed=None if seed is None else seed + 1,
                    name="local_heads",
                    **shared,
                )
            )
        super().__init__(
            groups,
            key_dim,
            value_dim=value_dim,
            output_dim=output_dim,
            kernel_initializer=kernel_initializer,
            **kwargs,
        )
        self.num_clusters = int(num_clusters) if num_routed else num_clusters
        self.attention_window = attention_window
        self.num_local_heads = num_local_heads
        self.local_block_size = local_block_size
        self.routing = routing
        self.max_relative_position = groups[0].max_relative_position
        self.share_query_key = share_query_key
        self.clustering = clustering
        self.routing_scope = clustering["routing_scope"]
        self.prefix_block_size = clustering["prefix_block_size"]
        self.exploring_queries = clustering["exploring_queries"]
        self.dropout = dropout
        self.key_shift = groups[0].key_shift
        self.seed = seed
        self.rotary_positions = rotary_positions
        self.attention_implementation = attention_implementation

    def get_config(self):
        config = super().get_config()
        del config["head_groups"]
        return config


def _clustering(clustering, kwargs):
    """Returns the argument as a dict, with those of `NAMED`, taken from `kwargs`."""
    clustering = Clustering.given_as("clustering", clustering, CLUSTERING)
    for name, default in NAMED.items():
        clustering.setdefault(name, default)
        if name in kwargs:
            clustering[name] = kwargs.pop(name)
    for name, check in (
        ("prefix_block_size", check_optional_integer),
        ("exploring_queries", check_non_negative_integer),
    ):
        clustering[name] = check(name, clustering[name])
    return clustering


def _check_is_given(name, value):
    if value is None:
        raise ValueError(
            f"`{name}` must be a positive integer. Received: {name}=None. The window "
            "is the number of tokens that a token sees in its cluster, such as 64; "
            "about `length / attention_window` clusters cover a sequence once"
        )


def _check_num_local_heads(num_local_heads, num_heads):
    if not is_integer(num_local_heads) or not 0 <= num_local_heads <= num_heads:
        raise ValueError(
            "`num_local_heads` counts the local heads among all `num_heads` heads, so "
            f"it must be in the range [0, {num_heads}]. Received: "
            f"num_local_heads={num_local_heads!r}, num_heads={num_heads}"
        )
    return int(num_local_heads)

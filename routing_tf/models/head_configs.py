"""How models attend: what all heads share, and the heads of each kind."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Settings that all heads of a model share.

    `Hyperparameters` has them together with all others.

    Args:
        key_dim: size of a query or key of one head; None for `hidden_dim` divided by
            the number of heads.
        value_dim: size of a value of one head; None for `key_dim`.
        num_key_value_heads: heads of keys and values of each attention layer, see
            `MixedAttention`; None for as many as query heads. Needs
            `share_query_key=False` if there are heads with clusters.
        use_gate: whether a gate multiplies the outputs of heads, see
            `ProjectionConfig`.
        logit_soft_cap: a positive number that logits of attention approach and do not
            exceed, see `MixedAttention`; None for no limit.
        qk_norm: whether queries and keys pass a norm with learned scales, see
            `MixedAttention`.
        attention_bias: whether the projections of attention have biases.
        sparse_projections: whether queries, keys and values of self-attention are made
            by few weights, see `zoo.SparseProjectionAttention`. Needs equal sizes of
            queries and values, a key head for each head, and neither
            `local_block_width` nor `compatibility`.
        shared_head_projection: whether each head's output passes through one more
            matrix, the same for all heads (the release).
        project_shared_keys: whether keys are also projected for heads that share the
            queries and do not read them (the release).
        entmax_alpha: None for the softmax; for sparse weights in all heads, a number
            from 1.001 to 2 or `"learned"`, see `zoo.EntmaxDotProduct`.
        rotary_positions: whether heads of self-attention have rotary positions instead
            of relative ones, see `HeadGroup`; needs an even `key_dim`.
        max_relative_position: largest relative position with an embedding of its own.
        relative_key_stddev: standard deviation of the initial relative positions of
            keys; 0 for the initializer of the other weights. Routed heads may have
            another, see `routed_relative_key_stddev`.
        attention_dropout: rate of dropped attention weights.
        remat_attention: whether training recomputes only the activations between the
            projections of attention, which takes less time; or `"weights"` for only the
            attention weights, which need most memory and little time, see
            `MixedAttention`.
        attention_implementation: how the attention inside a window or a cluster is
            computed: `"plain"`, or `"auto"` for the kernels of cuDNN on JAX with a GPU,
            and of splash attention with a TPU, see `ScaledDotProduct`.
    """

    key_dim: int | None = None
    value_dim: int | None = None
    num_key_value_heads: int | None = None
    use_gate: bool = False
    logit_soft_cap: float | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    sparse_projections: bool = False
    shared_head_projection: bool = False
    project_shared_keys: bool = False
    entmax_alpha: float | str | None = None
    rotary_positions: bool = False
    max_relative_position: int = 513
    relative_key_stddev: float = 0.0
    attention_dropout: float = 0.0
    remat_attention: bool | str = False
    attention_implementation: str = "plain"


@dataclasses.dataclass(frozen=True)
class LocalHeadsConfig:
    """Settings of heads that see tokens by position: local, strided and factorized.

    `Hyperparameters` has them together with all others.

    Args:
        num_local_heads: heads of each block that attend in local blocks.
        local_block_length: length of a local block, in tokens; in rows with
            `local_block_width`.
        local_block_width: width of rectangular blocks of an image, in tokens; None for
            blocks of the sequence.
        local_flange_blocks: number of neighbouring local blocks that a query sees on
            each side.
        local_dilation: distance of consecutive tokens in a local block of
            self-attention, see `LocalHeads`; 1 for blocks of neighbours.
        memory_block_length: length of the blocks of an encoder's output, which local
            heads pair with those of the decoder; None for the length that gives the
            same number of blocks.
        memory_flange_blocks: number of neighbouring blocks of an encoder's output that
            a query sees on each side; None for `local_flange_blocks`.
        local_relative_positions: whether local heads use relative positions.
        local_key_shift: which key a position offers with its value in the local and
            factorized heads of a decoder's self-attention: its own (0), or that of the
            token before it (1), see `HeadGroup`.
        num_strided_heads: heads of each block that attend to the same place in the
            other local blocks.
        strided_relative_positions: whether strided heads use relative positions,
            which are differences of block.
        num_factorized_heads: heads of each block with the factorized attention of the
            Sparse Transformer, whose stride is `local_block_length`.
        factorized_pattern: `"strided"` for the nearest tokens and those at multiples of
            the stride, or `"fixed"` for the query's block and the summaries of all
            blocks.
        factorized_arrangement: how the two halves of a pattern are combined:
            `"interleaved"`, alternating from block to block, beginning with the first
            half; `"merged"`, both in every head; or `"separate"`, each in half of the
            heads.
        num_summary_columns: length of the summary of a block, see `FixedHeads`.
        distinct_summaries: whether heads have different summaries, see `FixedHeads`.
    """

    num_local_heads: int = 4
    local_block_length: int = 256
    local_block_width: int | None = None
    local_flange_blocks: int = 1
    local_dilation: int = 1
    memory_block_length: int | None = None
    memory_flange_blocks: int | None = None
    local_relative_positions: bool = True
    local_key_shift: int = 0
    num_strided_heads: int = 0
    strided_relative_positions: bool = False
    num_factorized_heads: int = 0
    factorized_pattern: str = "strided"
    factorized_arrangement: str = "interleaved"
    num_summary_columns: int = 8
    distinct_summaries: bool = False

    @property
    def local_block_shape(self):
        """Length of a local block along each axis of the positions."""
        if self.local_block_width is None:
            return (self.local_block_length,)
        return (self.local_block_length, self.local_block_width)

    @property
    def local_reach(self):
        """Number of tokens that a local head remembers: its block, and those before."""
        block = math.prod(self.local_block_shape)
        return (1 + self.local_flange_blocks) * self.local_dilation * block


@dataclasses.dataclass(frozen=True)
class RoutedHeadsConfig:
    """Settings of heads that see tokens by content, and of their clusters.

    `Hyperparameters` has them together with all others.

    Args:
        num_routed_heads: heads of each block that attend inside clusters.
        num_cluster_strided_heads: heads of each block that attend to every n-th token
            in the order of distance to a centroid.
        num_local_only_layers: number of first blocks, of the decoder and of an encoder,
            in which the routed heads are local, too.
        num_clusters: number of clusters of each routed or cluster-strided head.
        attention_window: number of tokens of a cluster that a query sees.
        routing: the pattern of the routed heads. `"expert_choice"`: each centroid takes
            its best tokens. `"token_choice"`: each token goes to its best centroid.
            `"expert_threshold"`: each centroid takes the tokens above its threshold.
            The last two are strictly causal. `"hashed"`: clusters are buckets of a
            hash. `"random"`: clusters are random. `"full"`: heads see all tokens, as a
            baseline. None: token choice in decoders, expert choice elsewhere. Also a
            pattern of another system, whose sizes follow from `attention_window`:
            `"axial"` (of images), `"bigbird"`, `"block_top_k"`, `"compressed"`,
            `"etc"`, `"fixed"`, `"global_tokens"`, `"indexed"`, `"linear"`,
            `"long_short"`, `"longformer"`, `"luna"`, `"native_sparse"`,
            `"performer"`, `"random_blocks"`, `"random_features"`,
            `"random_synthesizer"`, `"reformer"`, `"sinkhorn"`, `"sliding"`,
            `"strided"` or `"synthesizer"`. Attention to an encoder's output is hashed,
            random or full if `routing` is, and expert choice otherwise.
        routed_heads: heads of any pattern and sizes in place of those of `routing`, in
            a decoder's self-attention. In Python, `num_routed_heads` heads: a
            `HeadGroup`, what `keras.saving.serialize_keras_object` makes of it, or a
            list of these. They have the `dtype` of the model, and the number of a block
            is added to their integer `seed` and `dropout_seed`. All else is their own.
            `num_clusters`, `attention_window`, `share_query_key`, `query_cluster`,
            `clusters_per_query`, `prefix_block_size`, how centroids move (from `ema` to
            `commitment_weight`) and relative positions (`max_relative_position`,
            `relative_key_stddev`, `routed_relative_key_stddev`) are then those of the
            other heads. `routing_scope` must be that of heads with expert choice;
            `routed_key_shift`, `attention_dropout`, `rotary_positions`, `entmax_alpha`,
            `exploring_queries` and `attention_implementation` must be those of the
            heads, or be left out. Without an encoder, `routing` must be None. Or a
            name, which is the same as `routing=name`. None for those of `routing`.
        encoder_routing: the routed heads of an encoder: any name of `routing` except
            `"token_choice"`, `"expert_threshold"`, `"native_sparse"` (they need a
            causal mask) and `"axial"`; or `"block_pair"`, `"clustered_queries"`,
            `"induced"`, `"linformer"` or `"nystrom"`, which have no causal form. None
            for the value of `routing`, or `"expert_choice"` if an encoder cannot have
            it.
        routed_key_shift: which key a position offers with its value in the routed
            (whatever their `routing`), cluster-strided and strided heads of a decoder's
            self-attention: its own (0), or that of the token before it (1), so that
            heads read what followed similar tokens, see `HeadGroup`.
        routing_scope: the tokens that compete in expert choice under a causal mask:
            `"full"` or `"prefix"`, see `RoutedHeads`. Sampling always has the second.
        prefix_block_size: number of queries that are computed at once in the scope
            `"prefix"`; None for `attention_window`.
        routed_relative_positions: whether routed heads use relative positions, which
            are differences of rank inside the cluster. Patterns of other systems have
            relative positions in tokens, or none if they do not compare single keys.
        routed_relative_key_stddev: `relative_key_stddev` of the heads of `routing` and
            `encoder_routing`, where they have relative positions; None for that of the
            other heads.
        cluster_strided_relative_positions: the same for cluster-strided heads.
        share_query_key: whether routed heads share queries and keys.
        query_cluster: whether a token reads the best cluster of its `"query"` or of its
            `"key"`, with separate queries and keys, see `ClusteredHeads`.
        clusters_per_query: number of clusters that a query reads in token choice, each
            with an equal share of `attention_window`, see `RoutedHeads`.
        exploring_queries: how many random queries of each head with clusters see
            everything that the mask lets them see in training, see `ClusteredHeads`; 0
            for none, as in the release.
        ema: whether centroids follow moving averages (True) or gradients.
        centroid_decay: share of the old average kept at each training step.
        centroid_initialization: `"normal"` for random centroids; `"tokens"`: the first
            training step sets them to tokens, see `Clustering`.
        balance_rate: how fast clusters become even, see `Clustering`; 0 for no
            balancing.
        anchor_weight: how much of a fixed random vector is added to each centroid, so
            that equal centroids separate again, see `Clustering`; 0 for no anchors.
        revive_centroids_after: number of training steps without a token after which a
            centroid is set to a token, see `Clustering`; None for never.
        commitment_weight: factor of the clustering loss.
    """

    num_routed_heads: int = 4
    num_cluster_strided_heads: int = 0
    num_local_only_layers: int = 0
    num_clusters: int = 16
    attention_window: int = 256
    routing: str | None = None
    routed_heads: list | dict | str | None = dataclasses.field(default=None, hash=False)
    encoder_routing: str | None = None
    routed_key_shift: int = 0
    routing_scope: str = "full"
    prefix_block_size: int | None = None
    routed_relative_positions: bool = True
    routed_relative_key_stddev: float | None = None
    cluster_strided_relative_positions: bool = True
    share_query_key: bool = True
    query_cluster: str = "query"
    clusters_per_query: int = 1
    exploring_queries: int = 0
    ema: bool = True
    centroid_decay: float = 0.999
    centroid_initialization: str = "normal"
    balance_rate: float = 0.0
    anchor_weight: float = 0.0
    revive_centroids_after: int | None = None
    commitment_weight: float = 1e-4

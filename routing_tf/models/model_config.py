"""What makes a model, documented in this one place."""

import dataclasses

from routing_tf.models.compatibility import EXACT
from routing_tf.models.hyperparameter_checks import HEADS

# Patterns that the release does not have, so they have no flaws.
SOUND_ROUTINGS = ("random", "full")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Settings that decide what a model computes, and in how much memory.

    One class serves all models: decoders of text, encoders with decoders
    (`num_encoder_layers` is not 0) and models of images (`image_height` is given).
    Lengths and windows are in tokens; an image has one token for each channel of a
    pixel. `Hyperparameters` has them together with those of training, and checks that
    they fit each other.

    Args:
        vocabulary_size: number of token ids, including padding and end; for an image,
            number of intensities.
        max_sequence_length: length of the sequences that the model is trained on.
        max_input_length: length of the sequences that an encoder reads.
        image_height: number of rows of an image; None for models of text.
        image_width: number of columns of an image; None for models of text.
        num_channels: number of channels of an image.
        num_classes: number of classes that an image model is conditioned on; None for
            no classes.
        channel_vocabulary_size: rows of the embedding table of each channel of an
            image; None for `vocabulary_size` (the release: always 256).
        position_embeddings: whether embeddings of row and column are added to those of
            an image.
        coordinate_embeddings: whether positions have embeddings of their coordinates,
            see `GridEmbedding`. In an image: embeddings of row, column and channel
            instead of the others, and one table of values for all channels. In a text:
            embeddings of the local block and of the place in it, up to
            `max_sequence_length`.
        num_encoder_layers: number of blocks of the encoder; 0 for no encoder.
        encoder_inputs: what an encoder reads: `"tokens"`, or `"embeddings"` of the
            size `hidden_dim` (the release).
        num_layers: number of transformer blocks of the decoder.
        hidden_dim: size of a token's vector between the blocks.
        embedding_dim: size of the token embeddings; None for `hidden_dim`.
        intermediate_dim: size inside the feed-forward parts.
        feed_forward: `"geglu"`, `"relu"`, `"sigmoid_gelu"` or `"none"`, see
            `FeedForward`. Also a layer of another system: `"mixture_of_experts"`, two
            of eight experts in every other block; `"product_key_memory"`, a memory in
            the middle block; or `"sparse_feed_forward"`. Blocks without such a layer
            have `"geglu"`.
        norm_position: `"pre"` or `"post"`, where each block normalizes.
        key_dim: size of a query or key of one head; None for `hidden_dim` divided by
            the number of heads.
        value_dim: size of a value of one head; None for `key_dim`.
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
        num_routed_heads: heads of each block that attend inside clusters.
        num_cluster_strided_heads: heads of each block that attend to every n-th token
            in the order of distance to a centroid.
        num_strided_heads: heads of each block that attend to the same place in the
            other local blocks.
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
            `"etc"`, `"global_tokens"`, `"indexed"`, `"linear"`, `"long_short"`,
            `"longformer"`, `"luna"`, `"native_sparse"`, `"performer"`,
            `"random_blocks"`, `"random_features"`, `"random_synthesizer"`,
            `"reformer"`, `"sinkhorn"` or `"synthesizer"`. Attention to an encoder's
            output is hashed, random or full if `routing` is, and expert choice
            otherwise.
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
        local_key_shift: the same for local and factorized heads.
        routing_scope: the tokens that compete in expert choice under a causal mask:
            `"full"` or `"prefix"`, see `RoutedHeads`. Sampling always has the second.
        prefix_block_size: number of queries that are computed at once in the scope
            `"prefix"`; None for `attention_window`.
        routed_relative_positions: whether routed heads use relative positions, which
            are differences of rank inside the cluster. Patterns of other systems have
            relative positions in tokens, or none if they do not compare single keys.
        cluster_strided_relative_positions: the same for cluster-strided heads.
        strided_relative_positions: whether strided heads use relative positions,
            which are differences of block.
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
        entmax_alpha: None for the softmax; for sparse weights in all heads, a number
            from 1.001 to 2 or `"learned"`, see `ScaledDotProduct`.
        rotary_positions: whether heads of self-attention have rotary positions instead
            of relative ones, see `HeadGroup`; needs an even `key_dim`.
        max_relative_position: largest relative position with an embedding of its own.
        relative_key_stddev: standard deviation of the initial relative positions of
            keys; 0 for the initializer of the other weights.
        scale_embeddings: whether token embeddings are multiplied by the square root of
            their size.
        timing_signal: whether sinusoidal positions are added to the embeddings.
        restart_positions: whether the positions of `timing_signal` and
            `coordinate_embeddings` restart in each document of packed rows, which the
            segment ids among the inputs of a text model tell apart.
        num_key_value_heads: heads of keys and values of each attention layer, see
            `MixedAttention`; None for as many as query heads. Needs
            `share_query_key=False` if there are heads with clusters.
        use_gate: whether a gate multiplies the outputs of heads, see `MixedAttention`.
        logit_soft_cap: a positive number that logits of attention approach and do not
            exceed, see `MixedAttention`; None for no limit.
        qk_norm: whether queries and keys pass a norm with learned scales, see
            `MixedAttention`.
        attention_bias: whether the projections of attention have biases.
        sparse_projections: whether queries, keys and values of self-attention are made
            by few weights, see `zoo.SparseProjectionAttention`. Needs equal sizes of
            queries and values, a key head for each head, and no
            `local_block_width`.
        shared_head_projection: whether each head's output passes through one more
            matrix, the same for all heads (the release).
        project_shared_keys: whether keys are also projected for heads that share the
            queries and do not read them (the release).
        truncate_length: length to which longer inputs are silently cut (the release);
            None for no limit.
        input_dropout: rate of elements of the encoder's inputs that are set to 0; the
            others are not scaled.
        token_dropout: rate of the decoder's input tokens replaced by id 0.
        embedding_dropout: rate of dropout on the token embeddings.
        residual_dropout: rate of dropout on the output of each part of a block.
        attention_dropout: rate of dropped attention weights.
        drops_inputs: whether the input of the first block also has `residual_dropout`.
        feed_forward_dropout: rate of dropout inside the feed-forward parts.
        remat: whether training recomputes the activations inside a block for the
            gradients instead of storing them: less memory, more time.
        remat_attention: whether training recomputes only the activations between the
            projections of attention, which takes less time; or `"weights"` for only the
            attention weights, which need most memory and little time, see
            `MixedAttention`.
        remat_feed_forward: whether training recomputes only the feed-forward parts.
            Together with `remat_attention`, this needs nearly as little memory as
            `remat`, and less time.
        attention_implementation: how the attention inside a window or a cluster is
            computed: `"plain"`, or `"auto"` for the kernels of cuDNN on JAX with a GPU,
            and of splash attention with a TPU, see `ScaledDotProduct`.
        initializer: `"unit_scaling"`, the uniform one of tensor2tensor; or
            `"fan_in_normal"`, that of the Sparse Transformer: weights are normal with a
            standard deviation of `initializer_gain / sqrt(inputs)`, embeddings with
            `initializer_gain / sqrt(size)`, as is the sum of coordinate embeddings, and
            logits start at 0.
        initializer_gain: scale of the initializer of all weights.
        scale_residual_initializer: whether the initial weights of the last projection
            of each part of a block are divided by `sqrt(2 * layers)` of its stack.
        compatibility: flaws of the release to reproduce: `"trained"`, those that its
            trained weights rely on; `"exact"`, all of them; `"exact_shared_padding"`,
            all, with the padding of the first row for the whole batch
            (`cache_padding_bias`); or None for no flaws. Patterns that the release does
            not have never have flaws.
    """

    vocabulary_size: int = 98302
    max_sequence_length: int = 4096
    max_input_length: int = 4096
    image_height: int | None = None
    image_width: int | None = None
    num_channels: int = 1
    num_classes: int | None = None
    channel_vocabulary_size: int | None = None
    position_embeddings: bool = True
    coordinate_embeddings: bool = False
    num_encoder_layers: int = 0
    encoder_inputs: str = "tokens"
    num_layers: int = 12
    hidden_dim: int = 512
    embedding_dim: int | None = None
    intermediate_dim: int = 2048
    feed_forward: str = "geglu"
    norm_position: str = "pre"
    key_dim: int | None = None
    value_dim: int | None = None
    num_local_heads: int = 4
    local_block_length: int = 256
    local_block_width: int | None = None
    local_flange_blocks: int = 1
    local_dilation: int = 1
    memory_block_length: int | None = None
    memory_flange_blocks: int | None = None
    local_relative_positions: bool = True
    num_routed_heads: int = 4
    num_cluster_strided_heads: int = 0
    num_strided_heads: int = 0
    num_factorized_heads: int = 0
    factorized_pattern: str = "strided"
    factorized_arrangement: str = "interleaved"
    num_summary_columns: int = 8
    distinct_summaries: bool = False
    num_local_only_layers: int = 0
    num_clusters: int = 16
    attention_window: int = 256
    routing: str | None = None
    encoder_routing: str | None = None
    routed_key_shift: int = 0
    local_key_shift: int = 0
    routing_scope: str = "full"
    prefix_block_size: int | None = None
    routed_relative_positions: bool = True
    cluster_strided_relative_positions: bool = True
    strided_relative_positions: bool = False
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
    entmax_alpha: float | str | None = None
    rotary_positions: bool = False
    max_relative_position: int = 513
    relative_key_stddev: float = 0.0
    scale_embeddings: bool = False
    timing_signal: bool = False
    restart_positions: bool = False
    num_key_value_heads: int | None = None
    use_gate: bool = False
    logit_soft_cap: float | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    sparse_projections: bool = False
    shared_head_projection: bool = False
    project_shared_keys: bool = False
    truncate_length: int | None = None
    input_dropout: float = 0.0
    token_dropout: float = 0.0
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    drops_inputs: bool = True
    feed_forward_dropout: float = 0.0
    remat: bool = False
    remat_attention: bool | str = False
    remat_feed_forward: bool = False
    attention_implementation: str = "plain"
    initializer: str = "unit_scaling"
    initializer_gain: float = 1.0
    scale_residual_initializer: bool = False
    compatibility: str | None = None

    @property
    def kind(self):
        """Which model this is: `"text"`, `"seq2seq"` or `"image"`."""
        if self.image_height is not None:
            return "image"
        return "seq2seq" if self.num_encoder_layers else "text"

    @property
    def local_block_shape(self):
        """Length of a local block along each axis of the positions."""
        if self.local_block_width is None:
            return (self.local_block_length,)
        return (self.local_block_length, self.local_block_width)

    @property
    def num_heads(self):
        """Number of heads of each block."""
        return sum(getattr(self, name) for name in HEADS)

    @property
    def size_of_key(self):
        """Size of a query or key of one head."""
        return self.key_dim or self.hidden_dim // self.num_heads

    def sees_later_tokens(self, routing_scope):
        """Tells whether outputs depend on later tokens despite the causal mask.

        Padding does not count, though some flaws of the release let it through.

        Args:
            routing_scope: `"full"` or `"prefix"`, see `RoutedHeads`.

        Returns:
            Name of the responsible setting; None if they do not.
        """
        if self.num_local_only_layers >= self.num_layers:
            return None
        if self.num_routed_heads:
            if self.routing == "expert_choice" and routing_scope == "full":
                return "routing"
            # Padded buckets, and queries that compete for an encoder's output.
            competes = self.num_encoder_layers and self.routing not in SOUND_ROUTINGS
            if self.compatibility and (self.routing == "hashed" or competes):
                return "compatibility"
        # Members from the whole sequence.
        if self.num_cluster_strided_heads and self.compatibility:
            return "compatibility"
        return None

    @property
    def padding_has_influence(self):
        """Whether padding changes the results for real tokens."""
        return self.compatibility in EXACT

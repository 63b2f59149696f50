"""All hyperparameters: what they are, what they can be, and what they mean.

Each is declared here and nowhere else. The checks and the help of commands, the tables
of docs/hyperparameters.md and the checks in Python follow from it. Which values go
together is told by `models.hyperparameters`. This needs the standard library
alone, so that commands can tell mistakes before they import TensorFlow. They do not
wait for dataclasses either: the classes here become some where models need them.
"""

import math

from routing_tf.settings.ranges import COMPATIBILITY
from routing_tf.settings.ranges import COUNT
from routing_tf.settings.ranges import COUNT_OR_NONE
from routing_tf.settings.ranges import ENTMAX_ALPHA
from routing_tf.settings.ranges import FEED_FORWARD
from routing_tf.settings.ranges import FLAG
from routing_tf.settings.ranges import NOT_NEGATIVE
from routing_tf.settings.ranges import NOT_NEGATIVE_OR_NONE
from routing_tf.settings.ranges import OPTIMIZER
from routing_tf.settings.ranges import PATTERN
from routing_tf.settings.ranges import POSITIVE
from routing_tf.settings.ranges import POSITIVE_NUMBER
from routing_tf.settings.ranges import POSITIVE_NUMBER_OR_NONE
from routing_tf.settings.ranges import POSITIVE_OR_NONE
from routing_tf.settings.ranges import RATE
from routing_tf.settings.ranges import REMAT
from routing_tf.settings.ranges import SCHEDULE
from routing_tf.settings.ranges import SHARE
from routing_tf.settings.ranges import SHIFT
from routing_tf.settings.ranges import choice
from routing_tf.settings.ranges import setting
from routing_tf.settings.ranges import settings_of

# Subjects, in the order of the documentation.
SUBJECTS = (
    SIZES := "Size of the model",
    LENGTHS := "Lengths of texts",
    ENCODER := "Encoder",
    IMAGES := "Images",
    HEADS := "Heads",
    LOCAL_BLOCKS := "Local blocks",
    FACTORIZED := "Factorized heads",
    CLUSTERS := "Clusters",
    POSITIONS := "Positions",
    INITIAL_WEIGHTS := "Initial weights",
    DROPOUT := "Dropout",
    MEMORY := "Memory and speed",
    OPTIMIZATION := "Optimization",
)


class ModelConfig:
    """Settings of a model as a whole: sizes, blocks, initial weights, dropout, memory.

    One class serves all models: decoders of text, encoders with decoders
    (`num_encoder_layers` is not 0) and models of images (see `ImageConfig`). Lengths
    are in tokens; an image has one token for each channel of a pixel.

    `Hyperparameters` has these settings together with those of attention
    (`AttentionConfig`, `LocalHeadsConfig` and `RoutedHeadsConfig`), of images and of
    training, and checks that they fit each other.
    """

    vocabulary_size: int = setting(
        98302,
        POSITIVE,
        None,
        """number of token ids, including padding and end; for an image, number of
        intensities.""",
    )
    max_sequence_length: int = setting(
        4096, POSITIVE, LENGTHS, "length of the sequences that the model is trained on."
    )
    max_input_length: int = setting(
        4096, POSITIVE, LENGTHS, "length of the sequences that an encoder reads."
    )
    truncate_length: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        LENGTHS,
        """length to which longer inputs are silently cut (the release); None for no
        limit.""",
    )
    num_encoder_layers: int = setting(
        0, COUNT, ENCODER, "number of blocks of the encoder; 0 for no encoder."
    )
    encoder_inputs: str = setting(
        "tokens",
        choice("tokens", "embeddings"),
        ENCODER,
        """what an encoder reads: `"tokens"`, or `"embeddings"` of the size `hidden_dim`
        (the release).""",
    )
    num_layers: int = setting(
        12, POSITIVE, SIZES, "number of transformer blocks of the decoder."
    )
    hidden_dim: int = setting(
        512, POSITIVE, SIZES, "size of a token's vector between the blocks."
    )
    embedding_dim: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        SIZES,
        "size of the token embeddings; None for `hidden_dim`.",
    )
    intermediate_dim: int = setting(
        2048, POSITIVE, SIZES, "size inside the feed-forward parts."
    )
    feed_forward: str = setting(
        "geglu",
        FEED_FORWARD,
        SIZES,
        """one of {names}. The first are activations of `FeedForward`, and `"none"`
        leaves the part out. The others are layers of other systems:
        `"mixture_of_experts"`, two of eight experts in every other block;
        `"product_key_memory"`, a memory in the middle block; or
        `"sparse_feed_forward"`. Blocks without such a layer have `"geglu"`. The three
        take no rectangular blocks of images.""",
    )
    norm_position: str = setting(
        "pre",
        choice("pre", "post"),
        SIZES,
        '`"pre"` or `"post"`, where each block normalizes.',
        argument="TransformerBlock.norm_position",
    )
    scale_embeddings: bool = setting(
        False,
        FLAG,
        SIZES,
        "whether token embeddings are multiplied by the square root of their size.",
    )
    timing_signal: bool = setting(
        False,
        FLAG,
        POSITIONS,
        "whether sinusoidal positions are added to the embeddings.",
    )
    coordinate_embeddings: bool = setting(
        False,
        FLAG,
        POSITIONS,
        """whether positions have embeddings of their coordinates, see `GridEmbedding`.
        In an image: embeddings of row, column and channel instead of the others, and
        one table of values for all channels. In a text: embeddings of the local block
        and of the place in it, up to `max_sequence_length`.""",
    )
    restart_positions: bool = setting(
        False,
        FLAG,
        POSITIONS,
        """whether the positions of `timing_signal` and `coordinate_embeddings` restart
        in each document of packed rows, which the segment ids among the inputs of a
        text model tell apart.""",
    )
    input_dropout: float = setting(
        0.0,
        RATE,
        DROPOUT,
        """rate of elements of the encoder's inputs that are set to 0; the others are
        not scaled.""",
    )
    token_dropout: float = setting(
        0.0, RATE, DROPOUT, "rate of the decoder's input tokens replaced by id 0."
    )
    embedding_dropout: float = setting(
        0.0, RATE, DROPOUT, "rate of dropout on the token embeddings."
    )
    residual_dropout: float = setting(
        0.0,
        RATE,
        DROPOUT,
        "rate of dropout on the output of each part of a block.",
        argument="TransformerBlock.dropout",
    )
    drops_inputs: bool = setting(
        True,
        FLAG,
        DROPOUT,
        "whether the input of the first block also has `residual_dropout`.",
    )
    feed_forward_dropout: float = setting(
        0.0, RATE, DROPOUT, "rate of dropout inside the feed-forward parts."
    )
    remat: bool = setting(
        False,
        FLAG,
        MEMORY,
        """whether training recomputes the activations inside a block for the gradients
        instead of storing them: less memory, more time.""",
        argument="TransformerBlock.remat",
        may_change=True,
    )
    remat_feed_forward: bool = setting(
        False,
        FLAG,
        MEMORY,
        """whether training recomputes only the feed-forward parts. Together with
        `remat_attention`, this needs nearly as little memory as `remat`, and less
        time.""",
        argument="TransformerBlock.remat_feed_forward",
        may_change=True,
    )
    initializer: str = setting(
        "unit_scaling",
        choice("unit_scaling", "fan_in_normal"),
        INITIAL_WEIGHTS,
        """`"unit_scaling"`, the uniform one of tensor2tensor; or `"fan_in_normal"`,
        that of the Sparse Transformer: weights are normal with a standard deviation of
        `initializer_gain / sqrt(inputs)`, embeddings with `initializer_gain /
        sqrt(size)`, as is the sum of coordinate embeddings, and logits start at 0.""",
    )
    initializer_gain: float = setting(
        1.0, NOT_NEGATIVE, INITIAL_WEIGHTS, "scale of the initializer of all weights."
    )
    scale_residual_initializer: bool = setting(
        False,
        FLAG,
        INITIAL_WEIGHTS,
        """whether the initial weights of the last projection of each part of a block
        are divided by `sqrt(2 * layers)` of its stack.""",
    )
    compatibility: str | None = setting(
        None,
        COMPATIBILITY,
        None,
        """flaws of the release to reproduce: `"trained"`, those that its trained
        weights rely on; `"exact"`, all of them; `"exact_shared_padding"`, all, with the
        padding of the first row for the whole batch (`cache_padding_bias`); or None for
        no flaws. Patterns that the release does not have never have flaws.""",
    )


class ImageConfig:
    """Settings of models of images, which have an `image_height`.

    `Hyperparameters` has them together with all others.
    """

    image_height: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        IMAGES,
        "number of rows of an image; None for models of text.",
    )
    image_width: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        IMAGES,
        "number of columns of an image; None for models of text.",
    )
    num_channels: int = setting(1, POSITIVE, IMAGES, "number of channels of an image.")
    num_classes: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        IMAGES,
        "number of classes that an image model is conditioned on; None for no classes.",
    )
    channel_vocabulary_size: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        IMAGES,
        """rows of the embedding table of each channel of an image; None for
        `vocabulary_size` (the release: always 256).""",
    )
    position_embeddings: bool = setting(
        True,
        FLAG,
        POSITIONS,
        "whether embeddings of row and column are added to those of an image.",
    )


class LocalHeadsConfig:
    """Settings of heads that see tokens by position: local, strided and factorized.

    `Hyperparameters` has them together with all others.
    """

    num_local_heads: int = setting(
        4, COUNT, HEADS, "heads of each block that attend in local blocks."
    )
    local_block_length: int = setting(
        256,
        POSITIVE,
        LOCAL_BLOCKS,
        "length of a local block, in tokens; in rows with `local_block_width`.",
    )
    local_block_width: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        IMAGES,
        """width of rectangular blocks of an image, in tokens; None for blocks of the
        sequence.""",
    )
    local_flange_blocks: int = setting(
        1,
        COUNT,
        LOCAL_BLOCKS,
        "number of neighbouring local blocks that a query sees on each side.",
    )
    local_dilation: int = setting(
        1,
        POSITIVE,
        LOCAL_BLOCKS,
        """distance of consecutive tokens in a local block of self-attention, see
        `LocalHeads`; 1 for blocks of neighbours.""",
    )
    memory_block_length: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        ENCODER,
        """length of the blocks of an encoder's output, which local heads pair with
        those of the decoder; None for the length that gives the same number of
        blocks.""",
    )
    memory_flange_blocks: int | None = setting(
        None,
        COUNT_OR_NONE,
        ENCODER,
        """number of neighbouring blocks of an encoder's output that a query sees on
        each side; None for `local_flange_blocks`.""",
    )
    local_relative_positions: bool = setting(
        True, FLAG, POSITIONS, "whether local heads use relative positions."
    )
    local_key_shift: int = setting(
        0,
        SHIFT,
        HEADS,
        """which key a position offers with its value in the local and factorized heads
        of a decoder's self-attention: its own (0), or that of the token before it (1),
        see `HeadGroup`.""",
    )
    num_strided_heads: int = setting(
        0,
        COUNT,
        HEADS,
        "heads of each block that attend to the same place in the other local blocks.",
    )
    strided_relative_positions: bool = setting(
        False,
        FLAG,
        POSITIONS,
        "whether strided heads use relative positions, which are differences of block.",
    )
    num_factorized_heads: int = setting(
        0,
        COUNT,
        HEADS,
        """heads of each block with the factorized attention of the Sparse Transformer,
        whose stride is `local_block_length`.""",
    )
    factorized_pattern: str = setting(
        "strided",
        choice("strided", "fixed"),
        FACTORIZED,
        """`"strided"` for the nearest tokens and those at multiples of the stride, or
        `"fixed"` for the query's block and the summaries of all blocks.""",
    )
    factorized_arrangement: str = setting(
        "interleaved",
        choice("interleaved", "merged", "separate"),
        FACTORIZED,
        """how the two halves of a pattern are combined: `"interleaved"`, alternating
        from block to block, beginning with the first half; `"merged"`, both in every
        head; or `"separate"`, each in half of the heads.""",
    )
    num_summary_columns: int = setting(
        8, POSITIVE, FACTORIZED, "length of the summary of a block, see `FixedHeads`."
    )
    distinct_summaries: bool = setting(
        False,
        FLAG,
        FACTORIZED,
        "whether heads have different summaries, see `FixedHeads`.",
    )

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


class RoutedHeadsConfig:
    """Settings of heads that see tokens by content, and of their clusters.

    `Hyperparameters` has them together with all others.
    """

    num_routed_heads: int = setting(
        4, COUNT, HEADS, "heads of each block that attend inside clusters."
    )
    num_cluster_strided_heads: int = setting(
        0,
        COUNT,
        HEADS,
        """heads of each block that attend to every n-th token in the order of distance
        to a centroid.""",
    )
    num_local_only_layers: int = setting(
        0,
        COUNT,
        HEADS,
        """number of first blocks, of the decoder and of an encoder, in which the routed
        heads are local, too.""",
    )
    num_clusters: int = setting(
        16,
        POSITIVE,
        CLUSTERS,
        "number of clusters of each routed or cluster-strided head.",
    )
    attention_window: int = setting(
        256, POSITIVE, CLUSTERS, "number of tokens of a cluster that a query sees."
    )
    routing: str | None = setting(
        None,
        PATTERN,
        HEADS,
        """the pattern of the routed heads, one of {names}, or None.
        `"expert_choice"`: each centroid takes its best tokens. `"token_choice"`: each
        token goes to its best centroid. `"expert_threshold"`: each centroid takes the
        tokens above its threshold. The last two are strictly causal. `"hashed"`:
        clusters are buckets of a hash. `"random"`: clusters are random. `"full"`: heads
        see all tokens, as a baseline. None: token choice in decoders, expert choice
        elsewhere. All others are patterns whose sizes follow from `attention_window`;
        `"axial"` is for images, and `encoder_routing` names those that are for encoders
        alone. Attention to an encoder's output is hashed, random or full if `routing`
        is, and expert choice otherwise.""",
    )
    routed_heads: list | dict | str | None = setting(
        None,
        PATTERN,
        HEADS,
        """heads of any pattern and sizes instead of those of `routing`, in a decoder's
        self-attention. In Python, `num_routed_heads` heads: a `HeadGroup`, what
        `keras.saving.serialize_keras_object` makes of it, or a list of these. They have
        the `dtype` of the model, and the number of a block is added to their integer
        `seed` and `dropout_seed`. All else is their own. `num_clusters`,
        `attention_window`, `share_query_key`, `query_cluster`, `clusters_per_query`,
        `prefix_block_size`, how centroids move (from `ema` to `commitment_weight`) and
        relative positions (`max_relative_position`, `relative_key_stddev`,
        `routed_relative_key_stddev`) are then those of the other heads. `routing_scope`
        must be that of heads with expert choice; `routed_key_shift`,
        `attention_dropout`, `rotary_positions`, `entmax_alpha`, `exploring_queries` and
        `attention_implementation` must be those of the heads, or be left out. Without
        an encoder, `routing` must be None. Or a name, which is the same as
        `routing=name`. None for those of `routing`.""",
        hash=False,
    )
    encoder_routing: str | None = setting(
        None,
        PATTERN,
        ENCODER,
        """the routed heads of an encoder: any name of `routing` except
        `"token_choice"`, `"expert_threshold"`, `"native_sparse"` (they need a causal
        mask) and `"axial"`; or `"block_pair"`, `"clustered_queries"`, `"induced"`,
        `"linformer"` or `"nystrom"`, which have no causal form. None for the value of
        `routing`, or `"expert_choice"` if an encoder cannot have it.""",
    )
    routed_key_shift: int = setting(
        0,
        SHIFT,
        HEADS,
        """which key a position offers with its value in the routed (whatever their
        `routing`), cluster-strided and strided heads of a decoder's self-attention: its
        own (0), or that of the token before it (1), so that heads read what followed
        similar tokens, see `HeadGroup`.""",
    )
    routing_scope: str = setting(
        "full",
        choice("full", "prefix"),
        CLUSTERS,
        """the tokens that compete in expert choice under a causal mask: `"full"` or
        `"prefix"`, see `RoutedHeads`. Sampling always has the second.""",
    )
    prefix_block_size: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        CLUSTERS,
        """number of queries that are computed at once in the scope `"prefix"`; None for
        `attention_window`.""",
    )
    routed_relative_positions: bool = setting(
        True,
        FLAG,
        POSITIONS,
        """whether routed heads use relative positions, which are differences of rank
        inside the cluster. Patterns of other systems have relative positions in tokens,
        or none if they do not compare single keys.""",
    )
    routed_relative_key_stddev: float | None = setting(
        None,
        NOT_NEGATIVE_OR_NONE,
        POSITIONS,
        """`relative_key_stddev` of the heads of `routing` and `encoder_routing`, where
        they have relative positions; None for that of the other heads.""",
    )
    cluster_strided_relative_positions: bool = setting(
        True, FLAG, POSITIONS, "the same for cluster-strided heads."
    )
    share_query_key: bool = setting(
        True, FLAG, HEADS, "whether routed heads share queries and keys."
    )
    query_cluster: str = setting(
        "query",
        choice("query", "key"),
        CLUSTERS,
        """whether a token reads the best cluster of its `"query"` or of its `"key"`,
        with separate queries and keys, see `ClusteredHeads`.""",
        argument="ClusteredHeads.query_cluster",
    )
    clusters_per_query: int = setting(
        1,
        POSITIVE,
        CLUSTERS,
        """number of clusters that a query reads in token choice and with
        `routing="multipole"`, each with an equal share of `attention_window`, or of
        what near tokens leave of it, see `RoutedHeads` and `MultipoleHeads`.""",
        without_flaws=True,
    )
    exploring_queries: int = setting(
        0,
        COUNT,
        CLUSTERS,
        """how many random queries of each head with clusters see everything that the
        mask lets them see in training, see `ClusteredHeads`; 0 for none, as in the
        release.""",
        argument="ClusteredHeads.exploring_queries",
        without_flaws=True,
    )
    ema: bool = setting(
        True,
        FLAG,
        CLUSTERS,
        "whether centroids follow moving averages (True) or gradients.",
        argument="Clustering.ema",
    )
    centroid_decay: float = setting(
        0.999,
        SHARE,
        CLUSTERS,
        "share of the old average kept at each training step.",
        argument="Clustering.decay",
    )
    centroid_initialization: str = setting(
        "normal",
        choice("normal", "tokens"),
        CLUSTERS,
        """`"normal"` for random centroids; `"tokens"`: the first training step sets
        them to tokens, see `Clustering`.""",
        argument="Clustering.centroid_initialization",
    )
    balance_rate: float = setting(
        0.0,
        NOT_NEGATIVE,
        CLUSTERS,
        "how fast clusters become even, see `Clustering`; 0 for no balancing.",
        argument="Clustering.balance_rate",
    )
    anchor_weight: float = setting(
        0.0,
        NOT_NEGATIVE,
        CLUSTERS,
        """how much of a fixed random vector is added to each centroid, so that equal
        centroids separate again, see `Clustering`; 0 for no anchors.""",
        argument="Clustering.anchor_weight",
    )
    revive_centroids_after: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        CLUSTERS,
        """number of training steps without a token after which a centroid is set to a
        token, see `Clustering`; None for never.""",
        argument="Clustering.revive_after",
    )
    commitment_weight: float = setting(
        0.0001,
        NOT_NEGATIVE,
        CLUSTERS,
        "factor of the clustering loss.",
        argument="Clustering.commitment_weight",
    )


class AttentionConfig:
    """Settings that all heads of a model share.

    `Hyperparameters` has them together with all others.
    """

    key_dim: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        SIZES,
        """size of a query or key of one head; None for `hidden_dim` divided by the
        number of heads.""",
    )
    value_dim: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        SIZES,
        "size of a value of one head; None for `key_dim`.",
        argument="MixedAttention.value_dim",
    )
    num_key_value_heads: int | None = setting(
        None,
        POSITIVE_OR_NONE,
        HEADS,
        """heads of keys and values of each attention layer, see `MixedAttention`; None
        for as many as query heads. Needs `share_query_key=False` if there are heads
        with clusters.""",
        argument="MixedAttention.num_key_value_heads",
    )
    use_gate: bool = setting(
        False,
        FLAG,
        HEADS,
        "whether a gate multiplies the outputs of heads, see `ProjectionConfig`.",
        argument="MixedAttention.use_gate",
    )
    logit_soft_cap: float | None = setting(
        None,
        POSITIVE_NUMBER_OR_NONE,
        HEADS,
        """a positive number that logits of attention approach and do not exceed, see
        `MixedAttention`; None for no limit.""",
        argument="MixedAttention.logit_soft_cap",
        without_flaws=True,
    )
    qk_norm: bool = setting(
        False,
        FLAG,
        HEADS,
        """whether queries and keys pass a norm with learned scales, see
        `MixedAttention`.""",
        argument="MixedAttention.qk_norm",
        without_flaws=True,
    )
    attention_bias: bool = setting(
        False,
        FLAG,
        HEADS,
        "whether the projections of attention have biases.",
        argument="MixedAttention.use_bias",
    )
    sparse_projections: bool = setting(
        False,
        FLAG,
        HEADS,
        """whether queries, keys and values of self-attention are made by few weights,
        see `zoo.SparseProjectionAttention`. Needs equal sizes of queries and values, a
        key head for each head, and neither `local_block_width` nor `compatibility`.""",
    )
    shared_head_projection: bool = setting(
        False,
        FLAG,
        HEADS,
        """whether each head's output passes through one more matrix, the same for all
        heads (the release).""",
        argument="MixedAttention.shared_head_projection",
    )
    project_shared_keys: bool = setting(
        False,
        FLAG,
        HEADS,
        """whether keys are also projected for heads that share the queries and do not
        read them (the release).""",
        argument="MixedAttention.project_shared_keys",
    )
    entmax_alpha: float | str | None = setting(
        None,
        ENTMAX_ALPHA,
        HEADS,
        """None for the softmax; for sparse weights in all heads, a number from 1.001 to
        2 or `"learned"`, see `zoo.EntmaxDotProduct`.""",
    )
    rotary_positions: bool = setting(
        False,
        FLAG,
        POSITIONS,
        """whether heads of self-attention have rotary positions instead of relative
        ones, see `HeadGroup`; needs an even `key_dim`.""",
    )
    max_relative_position: int = setting(
        513,
        POSITIVE,
        POSITIONS,
        "largest relative position with an embedding of its own.",
    )
    relative_key_stddev: float = setting(
        0.0,
        NOT_NEGATIVE,
        POSITIONS,
        """standard deviation of the initial relative positions of keys; 0 for the
        initializer of the other weights. Routed heads may have another, see
        `routed_relative_key_stddev`.""",
    )
    attention_dropout: float = setting(
        0.0,
        RATE,
        DROPOUT,
        "rate of dropped attention weights.",
        argument="HeadGroup.dropout",
    )
    remat_attention: bool | str = setting(
        False,
        REMAT,
        MEMORY,
        """whether training recomputes only the activations between the projections of
        attention, which takes less time; or `"weights"` for only the attention weights,
        which need most memory and little time, see `MixedAttention`.""",
        argument="MixedAttention.remat",
        may_change=True,
    )
    attention_implementation: str = setting(
        "plain",
        choice("plain", "auto", "cudnn", "splash", "xla"),
        MEMORY,
        """how the attention inside a window or a cluster is computed: `"plain"`, or
        `"auto"` for the kernels of cuDNN on JAX with a GPU, and of splash attention
        with a TPU, see `ScaledDotProduct`.""",
        argument="HeadGroup.attention_implementation",
    )


class TrainingConfig:
    """Settings that decide how a model is trained.

    `Hyperparameters` has them together with those of the model.
    """

    optimizer: str = setting(
        "adam",
        OPTIMIZER,
        OPTIMIZATION,
        """one of {names}, see `routing_tf.optimizers`. `"adafactor"` is the rule of
        tensor2tensor; `"muon"` is Muon for the matrices between layers, and Adam for
        everything else.""",
    )
    learning_rate: float = setting(
        0.001, NOT_NEGATIVE, OPTIMIZATION, "the factor `constant` of the schedule."
    )
    learning_rate_schedule: str = setting(
        "constant*linear_warmup*cosine_decay",
        SCHEDULE,
        OPTIMIZATION,
        'factors joined by `*`, see `FactorSchedule`, or `"noam"`.',
    )
    warmup_steps: int = setting(
        100, POSITIVE, OPTIMIZATION, "steps of the schedule's warm-up."
    )
    adam_beta_1: float = setting(
        0.9, RATE, OPTIMIZATION, "decay of Adam's first moment."
    )
    adam_beta_2: float = setting(
        0.98, RATE, OPTIMIZATION, "decay of Adam's second moment."
    )
    adam_epsilon: float = setting(
        1e-09, POSITIVE_NUMBER, OPTIMIZATION, "Adam's smallest divisor."
    )
    weight_decay: float = setting(
        0.0,
        NOT_NEGATIVE,
        OPTIMIZATION,
        """factor of the sum of squared weights / 2 in the training loss; with `"adamw"`
        and `"muon"`, the share of all matrices that a step subtracts, times the
        learning rate.""",
    )
    gradient_clip_norm: float = setting(
        0.0,
        NOT_NEGATIVE,
        OPTIMIZATION,
        "largest global norm of the gradients; 0 for no limit.",
    )
    batch_tokens: int = setting(
        8192, POSITIVE, OPTIMIZATION, "tokens in one training batch."
    )
    train_steps: int = setting(
        10000,
        POSITIVE,
        OPTIMIZATION,
        "number of training steps, unless a run names another number.",
        may_change=True,
    )


#: The classes that declare hyperparameters.
CLASSES = (
    ModelConfig,
    ImageConfig,
    LocalHeadsConfig,
    RoutedHeadsConfig,
    AttentionConfig,
    TrainingConfig,
)
#: The `Setting` of each hyperparameter, by name.
HYPERPARAMETERS = {
    name: own for cls in CLASSES for name, own in settings_of(cls).items()
}


def by_subject():
    """Returns a dict of the names that commands can change, by subject."""
    return {
        subject: [n for n, own in HYPERPARAMETERS.items() if own.subject == subject]
        for subject in SUBJECTS
    }


def check(name, value):
    """Returns the value of a hyperparameter, see `Range.check`."""
    return HYPERPARAMETERS[name].values.check(name, value)


def read(name, text, where=""):
    """Returns the value that a text has for a hyperparameter, see `Range.read`."""
    return HYPERPARAMETERS[name].values.read(name, text, where)


def arguments_of(name, hyperparameters):
    """Returns the arguments of a class that are hyperparameters, in a dict.

    Args:
        name: the name of the class, as in `Setting.argument`.
        hyperparameters: `models.Hyperparameters`.
    """
    found = {}
    for own_name, own in HYPERPARAMETERS.items():
        cls, _, argument = (own.argument or "").partition(".")
        if cls == name:
            found[argument] = getattr(hyperparameters, own_name)
    return found

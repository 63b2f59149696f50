"""All settings of a model and of its training, each documented here and only here."""

import dataclasses

from routing_tf.files.misspelt import did_you_mean
from routing_tf.models.compatibility import EXACT
from routing_tf.models.compatibility import level_of
from routing_tf.models.hyperparameter_checks import HEADS
from routing_tf.models.hyperparameter_checks import check

# What the release does not have, so that it has no flaws.
SOUND_ROUTINGS = ("random", "full")


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Settings of a model, and of how it is trained.

    One class serves all models: decoders of text, encoders with decoders
    (`num_encoder_layers` is not 0) and models of images (`image_height` is given).
    Lengths and windows are in tokens; an image has one for each channel of a pixel.

    Args:
        vocabulary_size: number of token ids, padding and end included; of an image,
            number of intensities.
        max_sequence_length: length of the sequences the model is trained on.
        max_input_length: length of the sequences that an encoder reads.
        image_height: number of rows of an image; None for models of text.
        image_width: number of columns of an image; None for models of text.
        num_channels: number of channels of an image.
        num_classes: number of classes an image model is conditioned on; None for none.
        channel_vocabulary_size: rows of the embedding table of each channel of an
            image; None for `vocabulary_size` (the release: 256 in any case).
        position_embeddings: whether embeddings of row and column are added to those of
            an image.
        coordinate_embeddings: whether positions have embeddings of their coordinates,
            see `GridEmbedding`: in an image, in place of the others, of row, column and
            channel, with one table of values for all channels; in a text of the local
            block and the place in it, up to `max_sequence_length`.
        num_encoder_layers: number of blocks of the encoder; 0 for no encoder.
        encoder_inputs: what an encoder reads: `"tokens"`, or `"embeddings"` of the
            size `hidden_dim` (the release).
        num_layers: number of transformer blocks of the decoder.
        hidden_dim: size of a token's vector between the blocks.
        embedding_dim: size of the token embeddings; None for `hidden_dim`.
        intermediate_dim: size inside the feed-forward parts.
        feed_forward: `"geglu"`, `"relu"`, `"sigmoid_gelu"` or `"none"`, see
            `FeedForward`.
        norm_position: `"pre"` or `"post"`, where each block normalizes.
        key_dim: size of a query or key of one head; None for `hidden_dim` divided by
            the number of heads.
        value_dim: size of a value of one head; None for `key_dim`.
        num_local_heads: heads of each block that attend in local blocks.
        local_block_length: length of a local block; of an image with
            `local_block_width`, in rows.
        local_block_width: None for blocks of the sequence; else blocks of an image
            are rectangles of so many tokens in a row.
        local_flange_blocks: neighbouring local blocks a query sees on a side.
        local_dilation: how many tokens further on the next one in a local block of
            self-attention is, see `LocalHeads`; 1 for blocks of neighbours.
        memory_block_length: length of the blocks of an encoder's output that local
            heads pair with those of the decoder; None for the length that gives as
            many blocks.
        memory_flange_blocks: neighbouring blocks of an encoder's output that a query
            sees on a side of its own; None for `local_flange_blocks`.
        local_relative_positions: whether local heads use relative positions.
        num_routed_heads: heads of each block that attend inside clusters.
        num_cluster_strided_heads: heads of each block that attend to every n-th token
            in the order of distance to a centroid.
        num_strided_heads: heads of each block that attend to their place in the
            other local blocks.
        num_factorized_heads: heads of each block with the factorized attention of the
            Sparse Transformer, whose stride is `local_block_length`.
        factorized_pattern: `"strided"`, the nearest tokens and those that a multiple of
            the stride away, or `"fixed"`, the own block and the summaries of all.
        factorized_arrangement: how the two halves of a pattern are put together:
            `"interleaved"`, in turns from block to block, the first half in the first
            block; `"merged"`, both in every head; or `"separate"`, each in half of the
            heads.
        num_summary_columns: length of the summary of a block, see `FixedHeads`.
        distinct_summaries: whether heads have different summaries, see `FixedHeads`.
        num_local_only_layers: number of first blocks, of the decoder and of an encoder,
            in which the routed heads are local ones too.
        num_clusters: number of clusters of each routed or cluster-strided head.
        attention_window: number of tokens in a cluster.
        routing: how tokens find their cluster: `"expert_choice"` (each centroid takes
            its best tokens), `"token_choice"` (each token goes to its best centroid) or
            `"expert_threshold"` (each centroid takes the tokens above its threshold),
            both strictly causal, `"hashed"` (the clusters are buckets of a hash),
            `"random"`, or `"full"`: no clusters, the heads see all tokens, as a
            baseline. None for what is sound: token choice in decoders, expert choice
            elsewhere. Also a pattern of another system, with sizes after
            `attention_window`: `"axial"` (of images), `"bigbird"`, `"block_top_k"`,
            `"compressed"`, `"etc"`, `"global_tokens"`, `"linear"`, `"long_short"`,
            `"longformer"`, `"luna"`, `"native_sparse"`, `"performer"`,
            `"random_blocks"`, `"random_features"`, `"random_synthesizer"`,
            `"reformer"`, `"sinkhorn"` or `"synthesizer"`. Attention to an encoder's
            output is hashed, random or full if `routing` is, and expert choice with all
            other names.
        encoder_routing: the routed heads of an encoder: any name of `routing` except
            `"token_choice"`, `"expert_threshold"`, `"native_sparse"` (they need a
            causal mask) and `"axial"`; or `"block_pair"`, `"clustered_queries"`,
            `"induced"`, `"linformer"` or `"nystrom"`, which have no causal form. None
            for the name that `routing` has, or `"expert_choice"` where an encoder
            cannot have that.
        routed_key_shift: whose key a position offers with its own value in the routed
            heads (whatever their `routing`) and the cluster-strided and strided ones of
            a decoder's self-attention: its own (0), or that of the token before it (1),
            so that they read what followed similar tokens, see `HeadGroup`.
        local_key_shift: the same for local and factorized heads.
        routing_scope: the tokens that compete in expert choice under a causal mask:
            `"full"` or `"prefix"`, see `RoutedHeads`. Sampling is always in the
            second.
        prefix_block_size: number of queries that go at once with the scope
            `"prefix"`; None for `attention_window`.
        routed_relative_positions: whether routed heads use relative positions, which
            are differences of rank inside the cluster. Patterns of other systems have
            those in tokens, or none where they compare no single keys.
        cluster_strided_relative_positions: the same for cluster-strided heads.
        strided_relative_positions: whether strided heads use relative positions,
            which are differences of block.
        share_query_key: whether routed heads share queries and keys.
        query_cluster: with separate queries and keys, whether a token reads the best
            cluster of its `"query"`, or of its `"key"`, see `ClusteredHeads`.
        clusters_per_query: in token choice, number of clusters that a query reads, each
            with an equal share of `attention_window`, see `RoutedHeads`.
        exploring_queries: how many random queries of each head with clusters see all
            that the mask lets them see while training, see `ClusteredHeads`; 0 for
            none, as in the release.
        ema: whether centroids follow moving averages (True) or gradients.
        centroid_decay: share of the old average kept at each training step.
        centroid_initialization: `"normal"` for random centroids; `"tokens"`: the first
            training step sets them to tokens, see `OnlineKMeans`.
        balance_rate: how fast clusters are made even, see `OnlineKMeans`; 0: never.
        anchor_weight: how much of a fixed random vector is added to each centroid, so
            that those that meet part again, see `OnlineKMeans`; 0: nothing.
        revive_centroids_after: number of training steps without a token after which a
            centroid is set to one, see `OnlineKMeans`; None for never.
        commitment_weight: factor of the clustering loss.
        entmax_alpha: None for the softmax, or sparse weights of all heads in its place,
            see `ScaledDotProduct`: a number from 1.001 to 2, or `"learned"`.
        rotary_positions: whether heads of self-attention have rotary positions in place
            of relative ones, see `HeadGroup`; an even `key_dim` then.
        max_relative_position: largest relative position with an embedding of its own.
        relative_key_stddev: standard deviation of the initial relative positions of
            keys; 0 for the initializer of all other weights.
        scale_embeddings: whether token embeddings are multiplied by the square root of
            their size.
        timing_signal: whether sinusoidal positions are added to the embeddings.
        restart_positions: whether these positions and those on a grid start anew in
            each document of packed rows, told by `segment_ids` of a text model.
        num_key_value_heads: heads of keys and values of each attention, see
            `MixedAttention`; None for as many as heads of queries. Needs
            `share_query_key=False` where there are heads with clusters.
        use_gate: whether what heads return passes a gate, see `MixedAttention`.
        logit_soft_cap: a positive number that logits of attention approach and do not
            exceed, see `MixedAttention`; None for no limit.
        qk_norm: whether queries and keys pass a norm with learned scales, see
            `MixedAttention`.
        attention_bias: whether the projections of attention have biases.
        shared_head_projection: whether each head's output passes through one more
            matrix, the same for all heads (the release).
        project_shared_keys: whether keys are projected also for heads that share the
            queries and never read them (the release).
        truncate_length: longer inputs are silently truncated to this length (the
            release); None: nothing is cut.
        input_dropout: rate of elements of the encoder's inputs that are set to 0, the
            others unscaled.
        token_dropout: rate of the decoder's input tokens replaced by id 0.
        embedding_dropout: rate of dropout on the token embeddings.
        residual_dropout: rate of dropout on the output of each part of a block.
        attention_dropout: rate of dropped attention weights.
        drops_inputs: whether the input of the first block has `residual_dropout` too.
        feed_forward_dropout: rate of dropout inside the feed-forward parts.
        remat: whether training recomputes the activations inside a block for the
            gradients instead of keeping them: less memory, more time.
        remat_attention: whether it recomputes only what lies between the projections
            of attention: less time. Or `"weights"`, for only the attention weights,
            which need most memory and little time; see `MixedAttention`.
        remat_feed_forward: whether it recomputes only the feed-forward parts. Together
            with `remat_attention`, nearly as little memory as `remat`, and less time.
        attention_implementation: what computes the attention inside a window or a
            cluster: `"plain"`, or `"auto"` for the kernels of cuDNN on JAX with a GPU,
            and of splash attention with a TPU, see `ScaledDotProduct`.
        initializer: `"unit_scaling"`, the uniform one of tensor2tensor; or
            `"fan_in_normal"`, that of the Sparse Transformer: weights are normal with a
            deviation of `initializer_gain / sqrt(inputs)`, embeddings of
            `initializer_gain / sqrt(size)`, the embeddings of coordinates together the
            same, and logits start at 0.
        initializer_gain: scale of the initializer of all weights.
        scale_residual_initializer: whether the initial weights of the last projection
            of each part of a block are divided by `sqrt(2 * layers)` of its stack.
        optimizer: `"adafactor"` (the tensor2tensor rule), `"adam"`, `"adamw"`, or
            `"muon"`: for the matrices between layers, with Adam for all else.
        learning_rate: the factor `constant` of the schedule.
        learning_rate_schedule: factors joined by `*`, see `FactorSchedule`, or
            `"noam"`.
        warmup_steps: steps of the schedule's warm-up.
        adam_beta_1: decay of Adam's first moment.
        adam_beta_2: decay of Adam's second moment.
        adam_epsilon: Adam's smallest divisor.
        weight_decay: factor of the sum of squared weights / 2 in the training loss;
            with `"adamw"` and `"muon"` the share of all matrices that a step takes
            away, times the learning rate.
        gradient_clip_norm: largest global norm of the gradients; 0 for no limit.
        batch_tokens: tokens in one training batch.
        train_steps: number of training steps of a run that names no other.
        compatibility: flaws of the release to reproduce: `"trained"`, those that its
            trained weights rely on; `"exact"`, all of them; `"exact_shared_padding"`,
            all, with the padding of the first row for the whole batch
            (`cache_padding_bias`); or None, the sound way. Kinds of heads that the
            release does not have are always sound.

    Example:

    ```python
    from routing_tf.models.hyperparameters import Hyperparameters

    small = Hyperparameters(num_layers=2, hidden_dim=64, num_local_heads=4)
    assert small.replace(num_layers=3).num_layers == 3
    ```

    Reference: `sparse_transformer_local` of the release; `release/conversion.py` maps
    its names.
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
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    learning_rate_schedule: str = "constant*linear_warmup*cosine_decay"
    warmup_steps: int = 100
    adam_beta_1: float = 0.9
    adam_beta_2: float = 0.98
    adam_epsilon: float = 1e-9
    weight_decay: float = 0.0
    gradient_clip_norm: float = 0.0
    batch_tokens: int = 8192
    train_steps: int = 10000
    compatibility: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "compatibility", level_of(self.compatibility))
        check(self)

    @classmethod
    def from_dict(cls, fields):
        """Returns the hyperparameters of a dict, such as `to_dict` returns.

        Args:
            fields: dict of some or all fields. All those of an earlier version of the
                package, as in a saved model, keep the meaning that they had there.

        Raises:
            ValueError: if a field is unknown or not valid.
        """
        is_saved = "compatibility" in fields and "train_steps" in fields
        if is_saved and not fields.get("share_query_key", True):
            fields = {"query_cluster": "key", **fields}
        return cls().replace(**fields)

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
        """Tells whether outputs depend on later tokens, in spite of the causal mask.

        Padding aside, which some flaws of the release let through.

        Args:
            routing_scope: `"full"` or `"prefix"`, see `RoutedHeads`.

        Returns:
            Name of the setting by which they do; None if they do not.
        """
        if self.num_local_only_layers >= self.num_layers:
            return None
        if self.num_routed_heads:
            if self.routing == "expert_choice" and routing_scope == "full":
                return "routing"
            # Filled up buckets, and queries that compete for an encoder's output.
            competes = self.num_encoder_layers and self.routing not in SOUND_ROUTINGS
            if self.compatibility and (self.routing == "hashed" or competes):
                return "compatibility"
        # Members from the whole sequence.
        if self.num_cluster_strided_heads and self.compatibility:
            return "compatibility"
        return None

    @property
    def padding_has_influence(self):
        """Whether padding changes what is computed of real tokens."""
        return self.compatibility in EXACT

    def replace(self, **changes):
        """Returns a copy with some fields changed.

        Raises:
            ValueError: for an unknown field, with the list of valid names.
        """
        unknown = sorted(set(changes) - set(field_names()))
        if unknown:
            hints = [did_you_mean(name, field_names()) for name in unknown]
            raise ValueError(
                f"Unknown hyperparameters: {', '.join(unknown)}.{''.join(hints)} "
                f"Valid names are: {', '.join(field_names())}"
            )
        return dataclasses.replace(self, **changes)

    def to_dict(self):
        """Returns the fields as a plain dict that JSON can hold."""
        return dataclasses.asdict(self)


def field_names():
    """Returns the names of all hyperparameters."""
    return [field.name for field in dataclasses.fields(Hyperparameters)]


def parse_overrides(text):
    """Reads `"name=value,name=value"`, as a command line has it, into typed fields."""
    fields = {field.name: field.type for field in dataclasses.fields(Hyperparameters)}
    del fields["compatibility"]
    overrides = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            raise ValueError(
                "Hyperparameters are given as name=value, joined by commas. "
                f"Received: {item!r}"
            )
        if name not in fields:
            raise ValueError(
                f"Unknown hyperparameter. Received: {item!r}."
                f"{did_you_mean(name, fields)} Valid names are: "
                f"{', '.join(sorted(fields))}"
            )
        overrides[name] = _parse_value(name, value, fields[name])
    return overrides


def _parse_value(name, value, kind):
    booleans = {"true": True, "1": True, "false": False, "0": False}
    try:
        if kind is bool:
            return booleans[value.lower()]
        if name == "entmax_alpha":
            words = {"none": None, "learned": "learned"}
            low = value.lower()
            return words[low] if low in words else float(value)
        if kind == (bool | str):
            return booleans.get(value.lower(), value)
        for own in (int, float, str):
            if kind == (own | None):
                return None if value.lower() == "none" else own(value)
        return kind(value)
    except (KeyError, ValueError):
        words = str(kind).replace(" | ", " or ").replace("None", "none")
        expected = kind.__name__ if isinstance(kind, type) else words
        raise ValueError(
            f"`{name}` must be of type {expected}. Received: {name}={value!r}"
        ) from None

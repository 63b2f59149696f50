"""All settings of a model and of its training, each documented here and only here."""

import dataclasses
import math

from routing_tf.layers.clustering import CENTROID_INITIALIZATIONS
from routing_tf.layers.heads.clustered import QUERY_CLUSTERS
from routing_tf.layers.heads.head_group import check_key_shift
from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_non_negative_integer
from routing_tf.layers.validation import check_positive_integer
from routing_tf.layers.validation import check_rate
from routing_tf.models.compatibility import EXACT
from routing_tf.models.compatibility import level_of

ROUTINGS = (None, "expert_choice", "token_choice", "hashed", "random", "full")
# What the release does not have, so that it has no flaws.
SOUND_ROUTINGS = ("random", "full")
_POSITIVE = (
    "vocabulary_size",
    "max_sequence_length",
    "max_input_length",
    "num_layers",
    "num_channels",
    "hidden_dim",
    "intermediate_dim",
    "local_block_length",
    "num_clusters",
    "attention_window",
    "max_relative_position",
    "warmup_steps",
    "batch_tokens",
    "train_steps",
)
_HEADS = (
    "num_local_heads",
    "num_routed_heads",
    "num_cluster_strided_heads",
    "num_strided_heads",
)
_COUNTS = (
    *_HEADS,
    "num_encoder_layers",
    "num_local_only_layers",
    "local_flange_blocks",
)
_NOT_NEGATIVE = (
    "commitment_weight",
    "balance_rate",
    "relative_key_stddev",
    "initializer_gain",
    "learning_rate",
    "weight_decay",
    "gradient_clip_norm",
)


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
        num_encoder_layers: number of blocks of the encoder; 0 for no encoder.
        encoder_inputs: what an encoder reads: `"tokens"`, or `"embeddings"` of the
            size `hidden_dim` (the release).
        num_layers: number of transformer blocks of the decoder.
        hidden_dim: size of a token's vector between the blocks.
        embedding_dim: size of the token embeddings; None for `hidden_dim`.
        intermediate_dim: size inside the feed-forward parts.
        feed_forward: `"geglu"`, `"relu"` or `"none"`.
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
        num_local_only_layers: number of first blocks in which the routed heads are
            local ones too.
        num_clusters: number of clusters of each routed or cluster-strided head.
        attention_window: number of tokens in a cluster.
        routing: how tokens find their cluster: `"expert_choice"` (each centroid takes
            its best tokens), `"token_choice"` (each token goes to its best centroid;
            strictly causal; encoders and attention to their output use expert choice),
            `"hashed"` (the clusters are buckets of a hash), `"random"`, or `"full"`: no
            clusters, the heads see all tokens, as a baseline. None for what is sound:
            token choice in decoders, expert choice elsewhere.
        routed_key_shift: whose key a position offers with its own value in the routed
            heads (whatever their `routing`) and the cluster-strided and strided ones of
            a decoder's self-attention: its own (0), or that of the token before it (1),
            with which they find what followed their like, see `HeadGroup`.
        local_key_shift: the same for local heads.
        routing_scope: the tokens that compete in expert choice under a causal mask:
            `"full"` or `"prefix"`, see `RoutedHeads`. Sampling is always in the
            second.
        prefix_block_size: number of queries that go at once with the scope
            `"prefix"`; None for `attention_window`.
        routed_relative_positions: whether routed heads use relative positions, which
            are differences of rank inside the cluster.
        cluster_strided_relative_positions: the same for cluster-strided heads.
        strided_relative_positions: whether strided heads use relative positions,
            which are differences of block.
        share_query_key: whether routed heads share queries and keys.
        query_cluster: with separate queries and keys, whether a token reads the best
            cluster of its `"query"`, or of its `"key"`, see `ClusteredHeads`.
        ema: whether centroids follow moving averages (True) or gradients.
        centroid_decay: share of the old average kept at each training step.
        centroid_initialization: `"normal"` for random centroids; `"tokens"`: the first
            training step sets them to tokens, see `OnlineKMeans`.
        balance_rate: how fast clusters are made even, see `OnlineKMeans`; 0: not.
        revive_centroids_after: number of training steps without a token after which a
            centroid is set to one, see `OnlineKMeans`; None for never.
        commitment_weight: factor of the clustering loss.
        max_relative_position: largest relative position with an embedding of its own.
        relative_key_stddev: standard deviation of the initial relative positions of
            keys; 0 for the initializer of all other weights.
        scale_embeddings: whether token embeddings are multiplied by the square root of
            their size.
        timing_signal: whether sinusoidal positions are added to the embeddings.
        shared_head_projection: whether each head's output passes through one more
            matrix, the same for all heads (the release).
        project_shared_keys: whether keys are projected also for heads that share the
            queries and never read them (the release).
        truncate_length: longer inputs are cut to this length without a word (the
            release); None: nothing is cut.
        input_dropout: rate of elements of the encoder's inputs that are set to 0, the
            others unscaled.
        token_dropout: rate of the decoder's input tokens replaced by id 0.
        embedding_dropout: rate of dropout on the token embeddings.
        residual_dropout: rate of dropout on the output of each part of a block.
        attention_dropout: rate of dropped attention weights.
        feed_forward_dropout: rate of dropout inside the feed-forward parts.
        remat: whether training computes the activations inside a block once more for
            the gradients, in place of keeping them: less memory, more time.
        remat_attention: whether it does so with what lies between the projections of
            attention alone: nearly as little memory, and less time.
        initializer_gain: scale of the uniform unit scaling initializer of all weights.
        optimizer: `"adafactor"` (the tensor2tensor rule) or `"adam"`.
        learning_rate: the factor `constant` of the schedule.
        learning_rate_schedule: factors joined by `*`, see `FactorSchedule`, or
            `"noam"`.
        warmup_steps: steps of the schedule's warm-up.
        adam_beta_1: decay of Adam's first moment.
        adam_beta_2: decay of Adam's second moment.
        adam_epsilon: Adam's smallest divisor.
        weight_decay: factor of the sum of squared weights / 2 in the training loss.
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

    Reference: `sparse_transformer_local` of the release; `presets.py` maps its names.
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
    memory_block_length: int | None = None
    memory_flange_blocks: int | None = None
    local_relative_positions: bool = True
    num_routed_heads: int = 4
    num_cluster_strided_heads: int = 0
    num_strided_heads: int = 0
    num_local_only_layers: int = 0
    num_clusters: int = 16
    attention_window: int = 256
    routing: str | None = None
    routed_key_shift: int = 0
    local_key_shift: int = 0
    routing_scope: str = "full"
    prefix_block_size: int | None = None
    routed_relative_positions: bool = True
    cluster_strided_relative_positions: bool = True
    strided_relative_positions: bool = False
    share_query_key: bool = True
    query_cluster: str = "query"
    ema: bool = True
    centroid_decay: float = 0.999
    centroid_initialization: str = "normal"
    balance_rate: float = 0.0
    revive_centroids_after: int | None = None
    commitment_weight: float = 1e-4
    max_relative_position: int = 513
    relative_key_stddev: float = 0.0
    scale_embeddings: bool = False
    timing_signal: bool = False
    shared_head_projection: bool = False
    project_shared_keys: bool = False
    truncate_length: int | None = None
    input_dropout: float = 0.0
    token_dropout: float = 0.0
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    remat: bool = False
    remat_attention: bool = False
    initializer_gain: float = 1.0
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
        for field in dataclasses.fields(self):
            self._check_type(field)
        check_choice("feed_forward", self.feed_forward, ("geglu", "relu", "none"))
        check_choice("norm_position", self.norm_position, ("pre", "post"))
        check_choice("optimizer", self.optimizer, ("adafactor", "adam"))
        check_choice("routing", self.routing, ROUTINGS)
        check_choice("routing_scope", self.routing_scope, ROUTING_SCOPES)
        check_choice(
            "centroid_initialization",
            self.centroid_initialization,
            CENTROID_INITIALIZATIONS,
        )
        check_choice("query_cluster", self.query_cluster, QUERY_CLUSTERS)
        check_choice("encoder_inputs", self.encoder_inputs, ("tokens", "embeddings"))
        for name in _POSITIVE:
            check_positive_integer(name, getattr(self, name))
        for name in _COUNTS:
            check_non_negative_integer(name, getattr(self, name))
        for name in _names_ending_in("_dropout"):
            check_rate(name, getattr(self, name))
        for name in ("routed_key_shift", "local_key_shift"):
            check_key_shift(name, getattr(self, name))
            if getattr(self, name) and self.compatibility is not None:
                raise ValueError(
                    f"`{name}=1` must come without flaws of the release: a query that "
                    "sees nothing would see later tokens. Received: "
                    f"compatibility={self.compatibility!r}. Leave one of the two out"
                )
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"`{name}` must be finite and not negative. "
                    f"Received: {name}={value}"
                )
        self._check_heads()
        self._check_centroids()
        self._check_image()

    def _check_type(self, field):
        value = getattr(self, field.name)
        if field.type == (int | None):
            if value is not None:
                check = check_positive_integer
                if field.name == "memory_flange_blocks":
                    check = check_non_negative_integer
                check(field.name, value)
        elif field.type == (str | None):
            if value is not None and type(value) is not str:
                raise ValueError(
                    f"`{field.name}` must be a name or None. Received: "
                    f"{field.name}={value!r}"
                )
        elif field.type is float and type(value) is int:
            object.__setattr__(self, field.name, float(value))
        elif type(value) is not field.type:
            raise ValueError(
                f"`{field.name}` must be of type {field.type.__name__}. "
                f"Received: {field.name}={value!r}"
            )

    def _check_heads(self):
        received = ", ".join(f"{name}={getattr(self, name)}" for name in _HEADS)
        if not self.num_heads:
            raise ValueError(
                f"The numbers of heads must not all be zero. Received: {received}"
            )
        if self.key_dim is None and self.hidden_dim % self.num_heads:
            raise ValueError(
                "`hidden_dim` must be a multiple of the number of heads unless "
                f"`key_dim` is given. Received: hidden_dim={self.hidden_dim}, "
                f"{received}"
            )

    def _check_centroids(self):
        moves = self.revive_centroids_after, self.centroid_initialization
        if not self.ema and self.balance_rate:
            raise ValueError(
                "`balance_rate` must be 0 where gradients train the centroids. "
                f"Received: balance_rate={self.balance_rate}, ema={self.ema}"
            )
        if not self.ema and moves != (None, "normal"):
            raise ValueError(
                "`revive_centroids_after` must be None and `centroid_initialization` "
                "'normal' where gradients train the centroids. Received: "
                f"revive_centroids_after={moves[0]}, "
                f"centroid_initialization={moves[1]!r}, ema={self.ema}"
            )

    def _check_image(self):
        sizes = (self.image_height, self.image_width)
        if (sizes[0] is None) != (sizes[1] is None):
            raise ValueError(
                "`image_height` and `image_width` must be given together. Received: "
                f"image_height={sizes[0]}, image_width={sizes[1]}"
            )
        if self.kind == "image":
            tokens = math.prod(sizes) * self.num_channels
            if self.num_encoder_layers or self.max_sequence_length != tokens:
                raise ValueError(
                    "A model of images has no encoder, and `max_sequence_length` is "
                    f"height * width * channels, {tokens}. Received: "
                    f"num_encoder_layers={self.num_encoder_layers}, "
                    f"max_sequence_length={self.max_sequence_length}"
                )
        elif self.local_block_width is not None or self.num_classes is not None:
            raise ValueError(
                "`local_block_width` and `num_classes` are settings of image models, "
                "which have an `image_height`. Received: "
                f"local_block_width={self.local_block_width}, "
                f"num_classes={self.num_classes}"
            )

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
        return sum(getattr(self, name) for name in _HEADS)

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
            raise ValueError(
                f"Unknown hyperparameters: {', '.join(unknown)}. Valid names are: "
                f"{', '.join(field_names())}"
            )
        return dataclasses.replace(self, **changes)

    def to_dict(self):
        """Returns the fields as a plain dict that JSON can hold."""
        return dataclasses.asdict(self)


def field_names():
    """Returns the names of all hyperparameters."""
    return [field.name for field in dataclasses.fields(Hyperparameters)]


def parse_overrides(text):
    """Reads `"name=value,name=value"` into a dict of hyperparameters.

    Args:
        text: the overrides, as a command line passes them; empty for none.

    Returns:
        Dict of names and values of the fields' types.

    Raises:
        ValueError: for an unknown name or a value of another type.
    """
    fields = {field.name: field.type for field in dataclasses.fields(Hyperparameters)}
    del fields["compatibility"]
    overrides = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, separator, value = (part.strip() for part in item.partition("="))
        if name not in fields or not separator:
            raise ValueError(
                "Hyperparameters are given as name=value, joined by commas. "
                f"Received: {item!r}. Valid names are: {', '.join(sorted(fields))}"
            )
        overrides[name] = _parse_value(name, value, fields[name])
    return overrides


def _parse_value(name, value, kind):
    booleans = {"true": True, "1": True, "false": False, "0": False}
    try:
        if kind is bool:
            return booleans[value.lower()]
        if kind in (int | None, str | None):
            if value.lower() == "none":
                return None
            return int(value) if kind == (int | None) else value
        return kind(value)
    except (KeyError, ValueError):
        expected = "int or none" if kind == (int | None) else kind.__name__
        raise ValueError(
            f"`{name}` must be of type {expected}. Received: {name}={value!r}"
        ) from None


def _names_ending_in(ending):
    return [name for name in field_names() if name.endswith(ending)]

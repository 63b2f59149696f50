"""All settings of a model and of its training."""

import dataclasses
import math
from collections.abc import Mapping

from routing_tf import optimizers
from routing_tf.files.names import did_you_mean
from routing_tf.layers.heads.routed import check_clusters_per_query
from routing_tf.models import feed_forwards
from routing_tf.models import patterns
from routing_tf.models.pattern_checks import check_names
from routing_tf.models.pattern_checks import check_patterns
from routing_tf.models.pattern_checks import check_registered
from routing_tf.models.pattern_checks import check_same_name
from routing_tf.models.patterns import as_configs
from routing_tf.settings import hyperparameters as settings
from routing_tf.settings.ranges import EXACT
from routing_tf.settings.ranges import make_dataclass

HEADS = (
    "num_local_heads",
    "num_routed_heads",
    "num_cluster_strided_heads",
    "num_strided_heads",
    "num_factorized_heads",
)

# Patterns that the release does not have, so they have no flaws.
SOUND_ROUTINGS = ("random", "full")
for _cls in settings.CLASSES:
    make_dataclass(_cls)


@dataclasses.dataclass(frozen=True)
class Hyperparameters(*reversed(settings.CLASSES)):
    """Settings of a model, and of how it is trained.

    These are all fields of `ModelConfig`, `ImageConfig`, `AttentionConfig`,
    `LocalHeadsConfig`, `RoutedHeadsConfig` and `TrainingConfig`, which say what they
    mean. Change a few with `replace`, or pass them to `from_preset`.
    [Hyperparameters](docs/hyperparameters.md) sorts them by subject, and says how
    commands set them.

    Args:
        **fields: any of the fields, each of which has a default.

    Raises:
        ValueError: if a field is invalid, or fields do not fit each other.

    Example:

    ```python
    from routing_tf.models.hyperparameters import Hyperparameters

    small = Hyperparameters(num_layers=2, hidden_dim=64, num_local_heads=4)
    assert small.replace(num_layers=3).num_layers == 3
    ```

    Reference: `sparse_transformer_local` of the release; `release/conversion.py` maps
    its names.
    """

    def __post_init__(self):
        heads = self.routed_heads
        if isinstance(heads, str):
            check_same_name(heads, self.routing)
            object.__setattr__(self, "routing", heads)
            object.__setattr__(self, "routed_heads", None)
        elif heads is not None:
            object.__setattr__(self, "routed_heads", as_configs(heads))
        check(self)

    @property
    def kind(self):
        """Which model this is: `"text"`, `"seq2seq"` or `"image"`."""
        if self.image_height is not None:
            return "image"
        return "seq2seq" if self.num_encoder_layers else "text"

    @property
    def num_heads(self):
        """Number of heads of each block."""
        return sum(getattr(self, name) for name in HEADS)

    @property
    def size_of_key(self):
        """Size of a query or key of one head."""
        return self.key_dim or self.hidden_dim // self.num_heads

    def sees_later_tokens(self, routing_scope):
        """Returns whether outputs depend on later tokens despite the causal mask.

        Padding does not count, though some flaws of the release let it through.

        Args:
            routing_scope: `"full"` or `"prefix"`, see `RoutedHeads`.

        Returns:
            Name of the responsible setting; None if they do not.
        """
        if self.num_local_only_layers >= self.num_layers:
            return None
        if self.num_routed_heads:
            name, routings = "routing", [self.routing]
            if self.routed_heads is not None:
                name = "routed_heads"
                routings = [own["config"].get("routing") for own in self.routed_heads]
            if "expert_choice" in routings and routing_scope == "full":
                return name
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

    @classmethod
    def from_dict(cls, fields):
        """Returns the hyperparameters of a dict with some or all of the fields."""
        is_dict = isinstance(fields, Mapping)
        if not is_dict or not all(isinstance(name, str) for name in fields):
            raise ValueError(
                "`fields` must be a dict of hyperparameters by name. Received: "
                f"fields={fields!r}"
            )
        return cls().replace(**fields)

    def replace(self, **changes):
        """Returns a copy with some fields changed.

        New `routed_heads` take the place of the heads that `routing` names; `routing`
        stays in a model with an encoder, which also has such heads.

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
        heads = changes.get("routed_heads")
        encoder = changes.get("num_encoder_layers", self.num_encoder_layers)
        if isinstance(heads, str) or heads is not None and not encoder:
            changes.setdefault("routing", None)
        return dataclasses.replace(self, **changes)

    def to_dict(self):
        """Returns the fields as a plain dict that JSON can represent."""
        return dataclasses.asdict(self)


def field_names():
    """Returns the names of all hyperparameters."""
    return list(settings.HYPERPARAMETERS)


def parse_overrides(text):
    """Reads `"name=value,name=value"`, as a command line has it, into typed fields.

    Of two values of one name, the last counts.
    """
    fields = [name for name in field_names() if name != "compatibility"]
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
        overrides[name] = settings.read(name, value)
    return overrides


def check(h):
    """Raises a `ValueError` unless all `Hyperparameters` are valid and compatible."""
    for name in settings.HYPERPARAMETERS:
        if name != "routed_heads":  # a list of configs by now
            value = settings.check(name, getattr(h, name))
            object.__setattr__(h, name, value)
    check_names(h)
    check_registered("optimizer", h.optimizer, optimizers.OPTIMIZERS)
    _check_feed_forward(h)
    for name in ("routed_key_shift", "local_key_shift"):
        if getattr(h, name) and h.compatibility is not None:
            raise ValueError(
                f"`{name}=1` must come without flaws of the release: a query that sees "
                "nothing would see later tokens. Received: "
                f"compatibility={h.compatibility!r}. Leave one of the two out"
            )
    _check_clusters_per_query(h)
    _check_flaws_of_the_release(h)
    _check_heads(h)
    _check_key_heads(h)
    _check_sparse_projections(h)
    _check_rotary(h)
    _check_entmax(h)
    _check_dilation(h)
    _check_factorized(h)
    _check_centroids(h)
    _check_image(h)
    check_patterns(h)
    _check_coordinates(h)
    _check_restart(h)


def _check_clusters_per_query(h):
    number = h.clusters_per_query
    if not patterns.reads_clusters(h):
        check_clusters_per_query(h)
    elif number > max(1, min(h.num_clusters, h.attention_window // 2)):
        raise ValueError(
            "`clusters_per_query` must be at most `num_clusters` and half of "
            f"`attention_window` with `routing={h.routing!r}`. Received: "
            f"clusters_per_query={number} with num_clusters={h.num_clusters} and "
            f"attention_window={h.attention_window}"
        )


def _check_feed_forward(h):
    name = h.feed_forward
    if name in feed_forwards.OWN:
        return
    names = (*feed_forwards.OWN, *feed_forwards.all_makers())
    check_registered("feed_forward", name, names)
    if h.compatibility is not None:
        raise ValueError(
            f"`feed_forward={name!r}` must come without flaws of the release, which "
            f"has no such layers. Received: compatibility={h.compatibility!r}. Leave "
            "one of the two out"
        )
    if h.local_block_width is not None:
        raise ValueError(
            f"`feed_forward={name!r}` must come without `local_block_width`, because "
            "the layer takes sequences, and no positions on two axes. Received: "
            f"local_block_width={h.local_block_width}. Leave one of the two out"
        )


def _check_heads(h):
    received = ", ".join(f"{name}={getattr(h, name)}" for name in HEADS)
    if not h.num_heads:
        raise ValueError(
            f"The numbers of heads must not all be zero. Received: {received}"
        )
    if h.key_dim is None and h.hidden_dim % h.num_heads:
        raise ValueError(
            "`hidden_dim` must be a multiple of the number of heads unless "
            f"`key_dim` is given. Received: hidden_dim={h.hidden_dim}, "
            f"{received}"
        )


def _check_key_heads(h):
    number = h.num_key_value_heads
    if number in (None, h.num_heads):
        return
    counts = {name: getattr(h, name) for name in HEADS}
    received = ", ".join(f"{name}={count}" for name, count in counts.items())
    received = f"Received: num_key_value_heads={number}, {received}"
    if h.compatibility is not None:
        raise ValueError(
            "`num_key_value_heads` must be None with flaws of the release, which has "
            f"no grouped queries. {received}, compatibility={h.compatibility!r}"
        )
    per_key = h.num_heads // number
    if h.num_heads % number or any(count % per_key for count in counts.values()):
        raise ValueError(
            "`num_key_value_heads` must divide the number of heads, and the quotient "
            f"must divide the number of heads of each pattern. {received}"
        )
    shared = h.num_cluster_strided_heads
    pattern = patterns.find(h.routing)
    may_share = pattern.has_centroids if pattern else h.routing != "full"
    if h.routed_heads is None and may_share:
        shared += h.num_routed_heads
    if shared and h.share_query_key:
        raise ValueError(
            "`num_key_value_heads` must be None (or the number of heads) with shared "
            f"queries and keys. {received}, share_query_key=True. Pass "
            "`share_query_key=False`"
        )


def _check_flaws_of_the_release(h):
    """Refuses settings that heads with these flaws do not have."""
    for name, own in settings.HYPERPARAMETERS.items():
        value = getattr(h, name)
        is_refused = own.without_flaws and value != own.default
        if is_refused and h.compatibility is not None:
            raise ValueError(
                f"`{name}` must be {own.default} with flaws of the release, which has "
                f"none. Received: {name}={value!r} with "
                f"compatibility={h.compatibility!r}. Leave one of the two out"
            )


def _check_sparse_projections(h):
    fitting = {
        "num_key_value_heads": (None, h.num_heads),
        "value_dim": (None, h.size_of_key),
        "local_block_width": (None,),
        "compatibility": (None,),
    }
    for name, values in fitting.items():
        if h.sparse_projections and getattr(h, name) not in values:
            raise ValueError(
                f"`{name}` must be {' or '.join(map(str, values))} with "
                "`sparse_projections=True`. Received: "
                f"{name}={getattr(h, name)!r}. Leave one of the two out"
            )


def _check_rotary(h):
    if h.rotary_positions and (h.compatibility is not None or h.size_of_key % 2):
        raise ValueError(
            "`rotary_positions=True` must come with an even `key_dim`, and without "
            f"flaws of the release. Received: key_dim={h.size_of_key}, "
            f"compatibility={h.compatibility!r}"
        )


def _check_entmax(h):
    if h.entmax_alpha is not None and h.compatibility is not None:
        raise ValueError(
            "`entmax_alpha` must come without flaws of the release, which has a "
            f"softmax. Received: entmax_alpha={h.entmax_alpha!r} with "
            f"compatibility={h.compatibility!r}. Leave one of the two out"
        )
    if h.entmax_alpha is not None and h.clusters_per_query > 1:
        raise ValueError(
            "`clusters_per_query` must be 1 with `entmax_alpha`, whose weights in "
            "several clusters cannot be joined. Received: clusters_per_query="
            f"{h.clusters_per_query} with entmax_alpha={h.entmax_alpha!r}"
        )
    slides = h.num_factorized_heads and h.factorized_pattern == "strided"
    if h.entmax_alpha is not None and slides:
        raise ValueError(
            "`entmax_alpha` must be None with `factorized_pattern='strided'`, whose "
            "sliding windows join parts of a softmax. Received: "
            f"entmax_alpha={h.entmax_alpha!r} with "
            f"num_factorized_heads={h.num_factorized_heads}. Leave it out, or use "
            "`factorized_pattern='fixed'`"
        )


def _check_dilation(h):
    if h.local_dilation == 1:
        return
    if h.local_block_width is not None or h.compatibility is not None:
        raise ValueError(
            "`local_dilation` must be 1 for blocks that are rectangles, and with flaws "
            f"of the release. Received: local_dilation={h.local_dilation}, "
            f"local_block_width={h.local_block_width}, "
            f"compatibility={h.compatibility!r}. Leave it out"
        )


def _check_factorized(h):
    if not h.num_factorized_heads:
        return
    if h.local_block_width is not None:
        raise ValueError(
            "`local_block_width` must be None with factorized heads, whose stride is "
            f"along the sequence. Received: local_block_width={h.local_block_width}, "
            f"num_factorized_heads={h.num_factorized_heads}"
        )
    if h.factorized_arrangement == "separate" and h.num_factorized_heads % 2:
        raise ValueError(
            "`num_factorized_heads` must be even if each half of the heads has half of "
            f"the pattern. Received: num_factorized_heads={h.num_factorized_heads}, "
            "factorized_arrangement='separate'"
        )
    is_fixed = h.factorized_pattern == "fixed"
    if is_fixed and h.num_summary_columns > h.local_block_length:
        raise ValueError(
            "`num_summary_columns` must not exceed the block. Received: "
            f"num_summary_columns={h.num_summary_columns}, "
            f"local_block_length={h.local_block_length}"
        )


def _check_restart(h):
    if h.restart_positions and h.kind == "image":
        raise ValueError(
            "`restart_positions` is only for texts, whose rows may pack documents. "
            f"Received: restart_positions=True with kind={h.kind!r}. Leave it out"
        )


def _check_coordinates(h):
    if not h.coordinate_embeddings:
        return
    if h.kind == "seq2seq" or not h.position_embeddings:
        raise ValueError(
            "`coordinate_embeddings` are position embeddings of decoders without an "
            "encoder. Received: coordinate_embeddings=True, "
            f"position_embeddings={h.position_embeddings}, "
            f"num_encoder_layers={h.num_encoder_layers}"
        )


def _check_centroids(h):
    moves = h.revive_centroids_after, h.centroid_initialization
    if not h.ema and h.balance_rate:
        raise ValueError(
            "`balance_rate` must be 0 where gradients train the centroids. "
            f"Received: balance_rate={h.balance_rate}, ema={h.ema}"
        )
    if not h.ema and moves != (None, "normal"):
        raise ValueError(
            "`revive_centroids_after` must be None and `centroid_initialization` "
            "'normal' where gradients train the centroids. Received: "
            f"revive_centroids_after={moves[0]}, "
            f"centroid_initialization={moves[1]!r}, ema={h.ema}"
        )


def _check_image(h):
    sizes = (h.image_height, h.image_width)
    if (sizes[0] is None) != (sizes[1] is None):
        raise ValueError(
            "`image_height` and `image_width` must be given together. Received: "
            f"image_height={sizes[0]}, image_width={sizes[1]}"
        )
    if h.kind == "image":
        tokens = math.prod(sizes) * h.num_channels
        if h.num_encoder_layers or h.max_sequence_length != tokens:
            raise ValueError(
                "A model of images has no encoder, and `max_sequence_length` is "
                f"height * width * channels, {tokens}. Received: "
                f"num_encoder_layers={h.num_encoder_layers}, "
                f"max_sequence_length={h.max_sequence_length}"
            )
    elif h.local_block_width is not None or h.num_classes is not None:
        raise ValueError(
            "`local_block_width` and `num_classes` are settings of image models, "
            "which have an `image_height`. Received: "
            f"local_block_width={h.local_block_width}, "
            f"num_classes={h.num_classes}"
        )

"""All settings of a model and of its training."""

import dataclasses
from collections.abc import Mapping

from routing_tf.files.names import did_you_mean
from routing_tf.models.hyperparameter_checks import HEADS
from routing_tf.models.hyperparameter_checks import check
from routing_tf.models.pattern_checks import check_same_name
from routing_tf.models.routed_heads import as_configs
from routing_tf.settings import hyperparameters as settings
from routing_tf.settings.ranges import EXACT
from routing_tf.settings.ranges import make_dataclass

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

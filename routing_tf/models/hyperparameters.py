"""All settings of a model and of its training."""

import dataclasses

from routing_tf.files.misspelt import did_you_mean
from routing_tf.models.compatibility import level_of
from routing_tf.models.hyperparameter_checks import check
from routing_tf.models.model_config import ModelConfig
from routing_tf.models.training_config import TrainingConfig


@dataclasses.dataclass(frozen=True)
class Hyperparameters(TrainingConfig, ModelConfig):
    """Settings of a model, and of how it is trained.

    These are all fields of `ModelConfig` and of `TrainingConfig`, which say what they
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
        object.__setattr__(self, "compatibility", level_of(self.compatibility))
        check(self)

    @classmethod
    def from_dict(cls, fields):
        """Returns the hyperparameters of a dict, such as `to_dict` returns.

        Args:
            fields: dict of some or all fields. All fields of an earlier version of the
                package, as in a saved model, keep their meaning of that version.

        Raises:
            ValueError: if a field is unknown or invalid.
        """
        is_saved = "compatibility" in fields and "train_steps" in fields
        if is_saved and not fields.get("share_query_key", True):
            fields = {"query_cluster": "key", **fields}
        return cls().replace(**fields)

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
        """Returns the fields as a plain dict that JSON can represent."""
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

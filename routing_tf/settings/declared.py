"""How a hyperparameter is declared: a field with its range, subject and meaning."""

import dataclasses

from routing_tf.settings.ranges import Range

# What docstrings have for the names of a registry.
NAMES = "those of [Hyperparameters](docs/hyperparameters.md)"


@dataclasses.dataclass(frozen=True)
class Setting:
    """The declaration of a hyperparameter.

    Args:
        default: its default value.
        values: `Range` of its values.
        subject: what it is about, a title of the documentation; None for one that
            commands cannot change.
        meaning: what it decides, in a sentence that goes on after its name. `{names}`
            stands for the names of the registry of its range.
        argument: class and name of the argument that has its value, such as
            `"MixedAttention.use_bias"`; models pass it on. None if they do more.
        without_flaws: whether only the default goes with flaws of the release.
        may_change: whether a run can continue with another value.
    """

    default: object
    values: Range
    subject: str | None
    meaning: str
    argument: str | None = None
    without_flaws: bool = False
    may_change: bool = False


def setting(default, values, subject, meaning, hash=None, **options):
    """Returns the field of a hyperparameter; for its arguments, see `Setting`."""
    own = Setting(default, values, subject, " ".join(meaning.split()), **options)
    return dataclasses.field(default=default, hash=hash, metadata={"setting": own})


def settings_of(cls):
    """Returns the `Setting` of each field of a class, by name."""
    fields = [
        item for item in vars(cls).items() if isinstance(item[1], dataclasses.Field)
    ]
    return {name: field.metadata["setting"] for name, field in fields}


def make_dataclass(cls):
    """Makes a dataclass of a class with fields, and documents them."""
    import inspect
    import textwrap

    lines = [
        textwrap.fill(
            f"{name}: {own.meaning.replace('{names}', NAMES)}",
            width=80,
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, own in settings_of(cls).items()
    ]
    cls.__doc__ = "\n".join([inspect.getdoc(cls), "", "Args:", *lines])
    dataclasses.dataclass(frozen=True)(cls)

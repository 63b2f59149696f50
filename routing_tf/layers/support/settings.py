"""Settings that layers take by name."""

import dataclasses
import difflib
from collections.abc import Mapping


def setting(default, check, *options):
    """Returns a field of `Settings`; `check` and `options` as in `Argument`."""
    return dataclasses.field(default=default, metadata={"check": (check, *options)})


class Settings:
    """Settings that a layer takes by name.

    Subclasses are frozen dataclasses, whose fields `setting` makes.
    """

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check, *options = field.metadata["check"]
            value = check(field.name, getattr(self, field.name), *options)
            object.__setattr__(self, field.name, value)

    @classmethod
    def names(cls):
        """Returns the names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def given_as(cls, name, value, keys=None):
        """Returns the argument `name`, such settings, a dict or None, as a dict.

        Its keys are those of the settings, or the given ones.
        """
        if isinstance(value, cls):
            return value.to_dict()
        if not isinstance(value, (Mapping, type(None))):
            raise ValueError(
                f"`{name}` must be a dict, a `{cls.__name__}` or None. Received: "
                f"{name}={value!r}"
            )
        keys, value = keys or cls.names(), dict(value or {})
        unknown = [key for key in value if key not in keys]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), keys, n=1)
            raise ValueError(
                f"`{name}` must have only the keys {', '.join(keys)}. Received: "
                f"{name}={value}." + "".join(f" Did you mean {x!r}?" for x in near)
            )
        return value

    @classmethod
    def taken_from(cls, arguments):
        """Returns the settings among keyword arguments, and the other arguments."""
        settings = {name: arguments[name] for name in cls.names() if name in arguments}
        others = {name: x for name, x in arguments.items() if name not in settings}
        return cls(**settings), others

    def to_dict(self):
        """Returns the settings by their names."""
        return {name: getattr(self, name) for name in self.names()}

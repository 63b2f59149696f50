"""Declarations of hyperparameters, and the ranges of values that they can have."""

import dataclasses
import math
import numbers
import struct

from routing_tf.files.names import did_you_mean

# What docstrings have for the names of a registry.
NAMES = "those of [Hyperparameters](docs/hyperparameters.md)"

NONE = {"none": None}
SWITCH = {"true": True, "1": True, "false": False, "0": False}
# The smallest number that float32 has all digits of; processors take others for 0.
TINY = 2.0**-126

SCHEDULE_FACTORS = (
    "constant",
    "linear_warmup",
    "rsqrt_decay",
    "rsqrt_normalized_decay",
    "rsqrt_hidden_size",
    "cosine_decay",
)


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a hyperparameter can have.

    Args:
        rule: what they are, for messages.
        kind: `int`, `float` or `str`; None if there are only `words`.
        least: the smallest number.
        below: a number that is larger than all.
        words: dict of other values, by what command lines have for them.
        factors: names that a text joins by `*`. Defaults to none, for any text.
        registry: name of the registry that has all names that there are, see
            `settings.registries`. Defaults to none, for any name.
    """

    rule: str
    kind: type | None = None
    least: float = -math.inf
    below: float = math.inf
    words: dict = dataclasses.field(default_factory=dict)
    factors: tuple = ()
    registry: str | None = None

    def check(self, name, value):
        """Returns the value as Python's own type, or raises a `ValueError`."""
        try:
            return self._find(value)
        except ValueError:
            raise ValueError(self._message(name, value, repr(value))) from None

    def read(self, name, text, where=""):
        """Returns the value of a hyperparameter that a command line has as text.

        `where` says for the message where the text is, such as ``" in `--hparams`"``;
        otherwise see `check`.
        """
        try:
            return self._read(text)
        except ValueError:
            is_number = text.lstrip("-").replace(".", "", 1).isdecimal()
            shown = text if is_number else repr(text)
            raise ValueError(self._message(name, text, shown, where)) from None

    def _find(self, value):
        for word in self.words.values():
            if type(value) is type(word) and value == word:
                return word
        if self.kind is str and type(value) is str and self._joins_factors(value):
            return value
        wanted = {int: numbers.Integral, float: numbers.Real}.get(self.kind, ())
        is_number = isinstance(value, wanted) and not isinstance(value, bool)
        if is_number and self.least <= _as_computed(value) < self.below:
            return self.kind(value)
        raise ValueError(self.rule)

    def _read(self, text):
        for word in (text, text.lower()):
            if word in self.words:
                return self.words[word]
        if self.kind is None:
            raise ValueError(self.rule)
        return self._find(self.kind(text))

    def _joins_factors(self, text):
        names = {name.strip() for name in text.split("*")}
        return not self.factors or names <= set(self.factors)

    def _message(self, name, value, shown, where=""):
        hint = self._rounded(value)
        if not hint and isinstance(value, str):
            words = [word for word in self.words.values() if isinstance(word, str)]
            last = value.rpartition("*")[-1].strip() if self.factors else value
            hint = did_you_mean(last, (*words, *self.factors))
        message = f"`{name}`{where} must be {self.rule}. Received: {name}={shown}"
        return f"{message}.{hint}" if hint else message

    def _rounded(self, value):
        """Returns a sentence if only rounding puts a value out of its range, or ""."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return ""
        if self.kind is float and self.least <= number < self.below:
            return f" Models compute in float32, with {_as_computed(number)}"
        return ""


def _as_computed(number):
    """Returns the number that models compute with: they round to float32."""
    if isinstance(number, numbers.Integral):
        return number
    try:
        (number,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        return math.copysign(math.inf, number)
    return 0.0 if abs(number) < TINY else number


def choice(*names):
    """Returns the range of a few words."""
    words = dict(zip(names, names, strict=True))
    return Range(f"one of {', '.join(map(repr, names))}", words=words)


POSITIVE = Range("a positive integer", int, 1)
POSITIVE_OR_NONE = Range("a positive integer or None", int, 1, words=NONE)
COUNT = Range("an integer of at least 0", int, 0)
COUNT_OR_NONE = Range("an integer of at least 0 or None", int, 0, words=NONE)
SHIFT = Range("0 or 1", int, 0, 2)
NOT_NEGATIVE = Range("a finite number of at least 0", float, 0)
NOT_NEGATIVE_OR_NONE = Range(
    "a finite number of at least 0 or None", float, 0, words=NONE
)
POSITIVE_NUMBER = Range("a positive number", float, math.ulp(0.0))
POSITIVE_NUMBER_OR_NONE = Range(
    "a positive number or None", float, math.ulp(0.0), words=NONE
)
RATE = Range("a number of at least 0 and less than 1", float, 0, 1)
SHARE = Range("a number from 0 to 1", float, 0, math.nextafter(1, 2))
FLAG = Range("True or False", words=SWITCH)
# Names that the layers have themselves stand here, others in the registries.
PATTERN = Range(
    "a name or None",
    str,
    words=NONE
    | {
        name: name
        for name in (
            *("expert_choice", "token_choice", "expert_threshold"),
            *("hashed", "random", "full"),
        )
    },
    registry="PATTERNS",
)
FEED_FORWARD = Range(
    "a name",
    str,
    words={name: name for name in ("geglu", "relu", "sigmoid_gelu", "none")},
    registry="FEED_FORWARDS",
)
OPTIMIZER = Range("a name", str, registry="OPTIMIZERS")
#: Flaws of the release: all of them without and with the padding of the first row for
#: the whole batch, those that its weights rely on, and none.
EXACT = ("exact", "exact_shared_padding")
COMPATIBILITY = choice(None, "trained", *EXACT)
ENTMAX_ALPHA = Range(
    "a number from 1.001 to 2, 'learned' or None",
    float,
    1.001,
    math.nextafter(2, 3),
    words={"learned": "learned", **NONE},
)
REMAT = Range("True, False or 'weights'", words={"weights": "weights", **SWITCH})
SCHEDULE = Range(
    f"'noam', or names out of {', '.join(map(repr, SCHEDULE_FACTORS))} joined by '*'",
    str,
    words={"noam": "noam"},
    factors=SCHEDULE_FACTORS,
)


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

"""What commands refuse at once in the values of hyperparameters.

Which values go together is told later, by the hyperparameters themselves.
"""

import ast
import pathlib
import sys

from routing_tf.files.misspelt import did_you_mean
from routing_tf.settings import hyperparameters

ZOO = pathlib.Path(__file__).parents[1] / "zoo"
# Names that layers and models have themselves; where the zoo has further ones.
PATTERNS = (
    *("expert_choice", "token_choice", "expert_threshold"),
    *("hashed", "random", "full"),
)
FEED_FORWARDS = ("geglu", "relu", "sigmoid_gelu", "none")
NAMED = {
    "routing": (PATTERNS, "PATTERNS"),
    "routed_heads": (PATTERNS, "PATTERNS"),
    "encoder_routing": (PATTERNS, "PATTERNS"),
    "feed_forward": (FEED_FORWARDS, "FEED_FORWARDS"),
}


def check(flag, name, value):
    """Raises a `ValueError` if a hyperparameter can never have a value.

    Args:
        flag: name of the flag, for the message.
        name: name of a hyperparameter.
        value: what the flag says of it, a string.
    """
    found = hyperparameters.read(name, value, f" in `--{flag}`")
    if name not in NAMED or found is None or "routing_tf.models" in sys.modules:
        return  # a user may have registered others
    choices = choices_of(name)
    if choices is not None and found not in choices:
        listed = f" Choices are: {', '.join(choices)}"
        raise ValueError(
            f"`{name}` in `--{flag}` must be a choice that there is. Received: "
            f"{name}={found!r}.{did_you_mean(found, choices) or listed}"
        )


def choices_of(name):
    """Returns the names that a hyperparameter of `NAMED` can have; None for unknown.

    The files of the zoo are read and not run, because they import Keras.
    """
    own, variable = NAMED[name]
    found = []
    for path in ZOO.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if variable not in text:
            continue
        for statement in ast.parse(text).body:
            targets = getattr(statement, "targets", [])
            if [getattr(target, "id", None) for target in targets] != [variable]:
                continue
            try:
                found += map(ast.literal_eval, statement.value.keys)
            except (AttributeError, ValueError):  # no dict of plain names
                return None
    return [*own, *sorted(found)]

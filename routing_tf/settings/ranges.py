"""What each hyperparameter can be.

Which values go together, and which names users have registered, is told by
`models.hyperparameter_checks`.
"""

import dataclasses
import math
import numbers
import struct

from routing_tf.files.misspelt import did_you_mean

_NONE = {"none": None}
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
# The smallest number that float32 has all digits of; processors take others for 0.
_TINY = 2.0**-126

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
        holds: function that tells whether a text of `kind` is in the range.
    """

    rule: str
    kind: type | None = None
    least: float = -math.inf
    below: float = math.inf
    words: dict = dataclasses.field(default_factory=dict)
    holds: object = None

    def find(self, value):
        """Returns a value as Python's own type; raises a `ValueError` for others."""
        for word in self.words.values():
            if type(value) is type(word) and value == word:
                return word
        if self.kind is str and type(value) is str and self._holds(value):
            return value
        wanted = {int: numbers.Integral, float: numbers.Real}.get(self.kind, ())
        is_number = isinstance(value, wanted) and not isinstance(value, bool)
        if is_number and self.least <= _as_computed(value) < self.below:
            return self.kind(value)
        raise ValueError(self.rule)

    def read(self, text):
        """Returns the value that a text stands for; raises a `ValueError` for none."""
        for word in (text, text.lower()):
            if word in self.words:
                return self.words[word]
        if self.kind is None:
            raise ValueError(self.rule)
        return self.find(self.kind(text))

    def _holds(self, value):
        return self.holds is None or self.holds(value)


def _as_computed(number):
    """Returns the number that models compute with: they round to float32."""
    if isinstance(number, numbers.Integral):
        return number
    try:
        (number,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        return math.copysign(math.inf, number)
    return 0.0 if abs(number) < _TINY else number


def _choice(*names):
    words = dict(zip(names, names, strict=True))
    return Range(f"one of {', '.join(map(repr, names))}", words=words)


def _is_schedule(text):
    factors = [name.strip() for name in text.split("*")]
    return text == "noam" or set(factors) <= set(SCHEDULE_FACTORS)


_POSITIVE = Range("a positive integer", int, 1)
_POSITIVE_OR_NONE = Range("a positive integer or None", int, 1, words=_NONE)
_COUNT = Range("an integer of at least 0", int, 0)
_COUNT_OR_NONE = Range("an integer of at least 0 or None", int, 0, words=_NONE)
_SHIFT = Range("0 or 1", int, 0, 2)
_NOT_NEGATIVE = Range("a finite number of at least 0", float, 0)
_NOT_NEGATIVE_OR_NONE = Range(
    "a finite number of at least 0 or None", float, 0, words=_NONE
)
_POSITIVE_NUMBER = Range("a positive number", float, math.ulp(0.0))
_POSITIVE_NUMBER_OR_NONE = Range(
    "a positive number or None", float, math.ulp(0.0), words=_NONE
)
_RATE = Range("a number of at least 0 and less than 1", float, 0, 1)
_SHARE = Range("a number from 0 to 1", float, 0, math.nextafter(1, 2))
_FLAG = Range("True or False", words=_SWITCH)
_NAME = Range("a name", str)
_NAME_OR_NONE = Range("a name or None", str, words=_NONE)

RANGES = {
    # Sizes and lengths.
    "vocabulary_size": _POSITIVE,
    "max_sequence_length": _POSITIVE,
    "max_input_length": _POSITIVE,
    "truncate_length": _POSITIVE_OR_NONE,
    "num_encoder_layers": _COUNT,
    "encoder_inputs": _choice("tokens", "embeddings"),
    "num_layers": _POSITIVE,
    "hidden_dim": _POSITIVE,
    "embedding_dim": _POSITIVE_OR_NONE,
    "intermediate_dim": _POSITIVE,
    # Blocks.
    "feed_forward": _NAME,
    "norm_position": _choice("pre", "post"),
    "scale_embeddings": _FLAG,
    "timing_signal": _FLAG,
    "coordinate_embeddings": _FLAG,
    "restart_positions": _FLAG,
    "input_dropout": _RATE,
    "token_dropout": _RATE,
    "embedding_dropout": _RATE,
    "residual_dropout": _RATE,
    "drops_inputs": _FLAG,
    "feed_forward_dropout": _RATE,
    "remat": _FLAG,
    "remat_feed_forward": _FLAG,
    "initializer": _choice("unit_scaling", "fan_in_normal"),
    "initializer_gain": _NOT_NEGATIVE,
    "scale_residual_initializer": _FLAG,
    # Images.
    "image_height": _POSITIVE_OR_NONE,
    "image_width": _POSITIVE_OR_NONE,
    "num_channels": _POSITIVE,
    "num_classes": _POSITIVE_OR_NONE,
    "channel_vocabulary_size": _POSITIVE_OR_NONE,
    "position_embeddings": _FLAG,
    # All heads.
    "key_dim": _POSITIVE_OR_NONE,
    "value_dim": _POSITIVE_OR_NONE,
    "num_key_value_heads": _POSITIVE_OR_NONE,
    "use_gate": _FLAG,
    "logit_soft_cap": _POSITIVE_NUMBER_OR_NONE,
    "qk_norm": _FLAG,
    "attention_bias": _FLAG,
    "sparse_projections": _FLAG,
    "shared_head_projection": _FLAG,
    "project_shared_keys": _FLAG,
    "entmax_alpha": Range(
        "a number from 1.001 to 2, 'learned' or None",
        float,
        1.001,
        math.nextafter(2, 3),
        words={"learned": "learned", **_NONE},
    ),
    "rotary_positions": _FLAG,
    "max_relative_position": _POSITIVE,
    "relative_key_stddev": _NOT_NEGATIVE,
    "attention_dropout": _RATE,
    "remat_attention": Range(
        "True, False or 'weights'", words={"weights": "weights", **_SWITCH}
    ),
    "attention_implementation": _choice("plain", "auto", "cudnn", "splash", "xla"),
    # Heads that see tokens by position.
    "num_local_heads": _COUNT,
    "local_block_length": _POSITIVE,
    "local_block_width": _POSITIVE_OR_NONE,
    "local_flange_blocks": _COUNT,
    "local_dilation": _POSITIVE,
    "memory_block_length": _POSITIVE_OR_NONE,
    "memory_flange_blocks": _COUNT_OR_NONE,
    "local_relative_positions": _FLAG,
    "local_key_shift": _SHIFT,
    "num_strided_heads": _COUNT,
    "strided_relative_positions": _FLAG,
    "num_factorized_heads": _COUNT,
    "factorized_pattern": _choice("strided", "fixed"),
    "factorized_arrangement": _choice("interleaved", "merged", "separate"),
    "num_summary_columns": _POSITIVE,
    "distinct_summaries": _FLAG,
    # Heads that see tokens by content.
    "num_routed_heads": _COUNT,
    "num_cluster_strided_heads": _COUNT,
    "num_local_only_layers": _COUNT,
    "num_clusters": _POSITIVE,
    "attention_window": _POSITIVE,
    "routing": _NAME_OR_NONE,
    "encoder_routing": _NAME_OR_NONE,
    "routed_key_shift": _SHIFT,
    "routing_scope": _choice("full", "prefix"),
    "prefix_block_size": _POSITIVE_OR_NONE,
    "routed_relative_positions": _FLAG,
    "routed_relative_key_stddev": _NOT_NEGATIVE_OR_NONE,
    "cluster_strided_relative_positions": _FLAG,
    "share_query_key": _FLAG,
    "query_cluster": _choice("query", "key"),
    "clusters_per_query": _POSITIVE,
    "exploring_queries": _COUNT,
    "ema": _FLAG,
    "centroid_decay": _SHARE,
    "centroid_initialization": _choice("normal", "tokens"),
    "balance_rate": _NOT_NEGATIVE,
    "anchor_weight": _NOT_NEGATIVE,
    "revive_centroids_after": _POSITIVE_OR_NONE,
    "commitment_weight": _NOT_NEGATIVE,
    # Training.
    "optimizer": _choice("adafactor", "adam", "adamw", "muon"),
    "learning_rate": _NOT_NEGATIVE,
    "learning_rate_schedule": Range(
        f"'noam', or names out of {', '.join(map(repr, SCHEDULE_FACTORS))} joined by "
        "'*'",
        str,
        holds=_is_schedule,
    ),
    "warmup_steps": _POSITIVE,
    "adam_beta_1": _RATE,
    "adam_beta_2": _RATE,
    "adam_epsilon": _POSITIVE_NUMBER,
    "weight_decay": _NOT_NEGATIVE,
    "gradient_clip_norm": _NOT_NEGATIVE,
    "batch_tokens": _POSITIVE,
    "train_steps": _POSITIVE,
    # Names in command lines; in Python, heads of any kind.
    "routed_heads": _NAME_OR_NONE,
}


def check(name, value):
    """Returns the value of a hyperparameter as Python's own type.

    Args:
        name: name of the hyperparameter.
        value: its value.

    Raises:
        ValueError: if it is not in its range.
    """
    try:
        return RANGES[name].find(value)
    except ValueError:
        raise ValueError(_message(name, value, repr(value))) from None


def read(name, text, where=""):
    """Returns the value of a hyperparameter that a command line has as text.

    `where` says for the message where the text is, such as ``" in `--hparams`"``;
    otherwise see `check`.
    """
    try:
        return RANGES[name].read(text)
    except ValueError:
        is_number = text.lstrip("-").replace(".", "", 1).isdecimal()
        shown = text if is_number else repr(text)
        raise ValueError(_message(name, text, shown, where)) from None


def _message(name, value, shown, where=""):
    own = RANGES[name]
    hint = _rounded(own, value)
    if not hint and isinstance(value, str):
        choices = [word for word in own.words.values() if isinstance(word, str)]
        if name == "learning_rate_schedule":
            value, choices = value.rpartition("*")[-1].strip(), SCHEDULE_FACTORS
        hint = did_you_mean(value, choices)
    message = f"`{name}`{where} must be {own.rule}. Received: {name}={shown}"
    return f"{message}.{hint}" if hint else message


def _rounded(own, value):
    """Returns a sentence if only rounding puts a value out of its range, or ""."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return ""
    if own.kind is float and own.least <= number < own.below:
        return f" Models compute in float32, with {_as_computed(number)}"
    return ""

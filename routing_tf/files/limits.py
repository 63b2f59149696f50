"""Limits of files from strangers, and reading within them."""

import dataclasses
import json
import math
import pathlib

PLAIN = (str, int, float, type(None))


@dataclasses.dataclass
class Limits:
    """The limits of a file.

    Args:
        max_json_bytes: size of a JSON file, such as a config.
        max_json_depth: depth of nested lists and objects in it.
        max_text_bytes: size of a vocabulary file, or of a `.keras` file without its
            weights.
        max_tokens: number of lines of a vocabulary file.
        max_token_length: number of characters of such a line.
        max_size: largest whole number among hyperparameters, and largest length.
        max_layers: largest number of blocks of an encoder or a decoder.
        max_flange_blocks: largest number of neighbouring blocks that local heads see.
        max_block_size: number of sub-pixels of a block of an image.
        max_input_length: number of tokens that an encoder takes, whatever the text.
        max_remembered: number of tokens that heads may remember for a shorter or an
            endless text.
    """

    max_json_bytes: int = 2**20
    max_json_depth: int = 32
    max_text_bytes: int = 2**26
    max_tokens: int = 2**22
    max_token_length: int = 2**16
    max_size: int = 2**24
    max_layers: int = 256
    max_flange_blocks: int = 256
    max_block_size: int = 2**16
    max_input_length: int = 2**16
    max_remembered: int = 2**16

    def check(self, name, value, what, source):
        """Raises a `ValueError` if `value`, which counts `what`, is above a limit."""
        largest = getattr(self, name)
        if value > largest:
            raise ValueError(
                f"A file must keep to `routing_tf.files.safe_loading.LIMITS.{name}`, "
                f"{largest:,}. Received: {value:,} {what} in {str(source)!r}. If you "
                "trust the file, set this limit higher"
            )


LIMITS = Limits()


def read_json(path):
    """Reads a JSON file of at most `max_json_bytes` and `max_json_depth`."""
    return parse_json(_read(path, "max_json_bytes"), path)


def read_lines(path):
    """Returns the lines of a UTF-8 vocabulary file within `LIMITS`."""
    # Tokens may contain characters at which str.splitlines would break a line.
    try:
        text = _read(path, "max_text_bytes").decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"A vocabulary must be text in UTF-8. Received: {str(path)!r}: {error}"
        ) from error
    LIMITS.check("max_tokens", text.count("\n") + 1, "lines", path)
    lines = text.split("\n") if text else []
    longest = max(map(len, lines), default=0)
    LIMITS.check("max_token_length", longest, "characters in a line", path)
    return lines


def _read(path, limit):
    size = pathlib.Path(path).stat().st_size
    LIMITS.check(limit, size, "bytes", path)
    return pathlib.Path(path).read_bytes()


def parse_json(data, source):
    """Parses bytes of JSON of limited depth; see `read_json`."""
    try:
        found = json.loads(data)
    except RecursionError:
        found, depth = None, math.inf
    except ValueError as error:
        raise ValueError(
            f"A JSON file must be complete. Received: {str(source)!r}: {error}. Save "
            "or copy it again"
        ) from error
    else:
        depth = sum(1 for _ in nested_values(found)) - 1
    LIMITS.check("max_json_depth", depth, "nested values", source)
    return found


def nested_values(value):
    """Yields all values inside a value of JSON, one list for each depth."""
    level = [value]
    while level:
        yield level
        lists = [v.values() if isinstance(v, dict) else v for v in level]
        level = [item for v in lists if not isinstance(v, PLAIN) for item in v]

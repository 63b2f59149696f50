"""The kinds of flags that commands have, and copies of their choices and defaults.

Each function returns what `define` takes: a function of the flag's name and values.
Importing the originals of the copies takes seconds, because it imports TensorFlow.

Some options of problems are paths. Their names tell which: `files` and those that end
in `_files` are lists of paths, `folder` is a folder, and `vocabulary` a file unless it
is the name of a tokenizer.
"""

import functools
import os

from absl import flags

from routing_tf.files import named_files
from routing_tf.files.named_files import check_exists

ROUTING_SCOPES = ("full", "prefix")
PRECISIONS = ("float32", "bfloat16", "float16")
STRATEGIES = ("one", "mirrored", "multi_worker", "tpu")
ON_NAN = ("stop", "skip")

# For `generate`.
MAX_DEFAULT_LENGTH = 2**16
DEFAULT_LABELS = 10

# For `analyse`, by `--what`.
DEFAULT_LENGTHS = {"jsd": 512, "maps": 256, "reads": 256}
DEFAULT_EXAMPLES = {"causality": 64, "decoding": 4}


# Flags belong to the command that defines them, whose `--help` shows them.
flags.disclaim_key_flags()


class _PathParser(flags.ArgumentParser):
    """Reads a path, whose leading `~` is the home directory."""

    syntactic_help = "a path"

    def parse(self, argument):
        if not argument.strip():
            raise ValueError(
                "The value must be a path. Received: an empty one, as from a variable "
                "that is not set"
            )
        return os.path.expanduser(argument)


class _PathsParser(_PathParser):
    """Reads paths separated by commas."""

    syntactic_help = "paths separated by commas"

    def parse(self, argument):
        paths = named_files.split_paths(argument)
        return named_files.join_paths(map(super().parse, paths)) or super().parse("")


def define(values, table):
    """Defines the flags of a table of names and results of the functions below."""
    for name, define_flag in table.items():
        define_flag(name=name, flag_values=values)


def path(text, required=False):
    """A flag that is a path, with `~` as the home directory; never empty."""
    return _flag(flags.DEFINE, None, text, parser=_PathParser(), required=required)


def paths(text):
    """A flag that is a list of paths separated by commas; see `path`."""
    return _flag(flags.DEFINE, None, text, parser=_PathsParser())


def choice(default, names, text, required=False):
    """A flag that is one of several names."""
    options = {"enum_values": names, "required": required}
    return _flag(flags.DEFINE_enum, default, text, **options)


def integer(default, smallest, text, largest=None):
    """A flag that is a whole number in a range."""
    bounds = {"lower_bound": smallest, "upper_bound": largest}
    return _flag(flags.DEFINE_integer, default, text, **bounds)


def number(default, text):
    """A flag that is a number."""
    return _flag(flags.DEFINE_float, default, text)


def switch(default, text):
    """A flag that is on or off."""
    return _flag(flags.DEFINE_bool, default, text)


def string(default, text, required=False):
    """A flag that is a text."""
    return _flag(flags.DEFINE_string, default, text, required=required)


def strings(text):
    """A flag that is a list of texts separated by commas."""
    return _flag(flags.DEFINE_list, None, text)


def repeated(text):
    """A flag that is a text, and may be repeated."""
    return _flag(flags.DEFINE_multi_string, [], text)


def _flag(define_flag, default, text, required=False, **options):
    if required:
        text += " Required."
        define_flag = functools.partial(_define_required, define_flag)
    return functools.partial(define_flag, default=default, help=text, **options)


def _define_required(define_flag, name, flag_values, help, **options):
    define_flag(name=name, flag_values=flag_values, help=help, **options)
    names = f" ({'|'.join(options['enum_values'])})" if "enum_values" in options else ""
    flags.register_validator(
        name,
        lambda value: value is not None,
        message=f"--{name} must be given{names}: {help.removesuffix(' Required.')}",
        flag_values=flag_values,
    )


def check_problem_options(options):
    """Raises a `ValueError` if an option is a path that does not exist."""
    for item in options.problem_option:
        name, _, value = (part.strip() for part in item.partition("="))
        flag, value = f"problem_option={name}", os.path.expanduser(value)
        # What was made of images is in the data folder, without them too.
        if not value or name == "folder" and options.data_dir:
            continue
        if _is_path(name, value):
            check_exists(flag, value)
        if _is_list(name):
            named_files.find_files(f"--{flag}", value)


def parse_problem_options(items):
    """Reads the values of the flag, name=value, into a dict.

    Values are strings; paths among them are absolute.
    """
    options = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator:
            raise ValueError(
                f"`--problem_option` must be name=value. Received: {item!r}"
            )
        name, value = name.strip(), value.strip()
        if name in options:
            raise ValueError(
                f"`--problem_option={name}` must be given once. Received: {item!r} "
                f"after {name}={options[name]!r}"
            )
        if _is_path(name, value) or _is_list(name):
            value = absolute_paths(value) if _is_list(name) else _absolute_path(value)
            if not value:
                raise ValueError(
                    f"`--problem_option={name}` must name a path. Received: {item!r}"
                )
        options[name] = value
    return options


def absolute_paths(paths):
    """Paths separated by commas, so that the run can continue from any folder."""
    return named_files.join_paths(map(_absolute_path, named_files.split_paths(paths)))


def _is_path(name, value):
    return (
        name == "folder" or name == "vocabulary" and value not in ("bytes", "subwords")
    )


def _is_list(name):
    return name == "files" or name.endswith("_files")


def _absolute_path(path):
    return path and os.path.abspath(os.path.expanduser(path))

"""The flag `--problem_option`: options of problems, some of which are paths.

Their names tell which: `files` and those that end in `_files` are lists of paths,
`folder` is a folder, and `vocabulary` a file unless it is the name of a tokenizer.
"""

import os

from routing_tf.files import named_files
from routing_tf.files.named_files import check_exists

TOKENIZERS = ("bytes", "subwords")


def check(options):
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


def parse(items):
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
            value = absolute(value) if _is_list(name) else _absolute_path(value)
            if not value:
                raise ValueError(
                    f"`--problem_option={name}` must name a path. Received: {item!r}"
                )
        options[name] = value
    return options


def absolute(paths):
    """Paths separated by commas, so that the run can continue from any folder."""
    return named_files.join_paths(map(_absolute_path, named_files.split_paths(paths)))


def _is_path(name, value):
    return name == "folder" or name == "vocabulary" and value not in TOKENIZERS


def _is_list(name):
    return name == "files" or name.endswith("_files")


def _absolute_path(path):
    return path and os.path.abspath(os.path.expanduser(path))

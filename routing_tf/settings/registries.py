"""The names that files of this package register, read without running them.

Running them takes seconds, because they import Keras. So a name is a plain string in
its file: a key of a dict, or the argument of `@register`.
"""

import ast
import functools
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1]
# The folders whose files have the dict of a registry.
FOLDERS = {"PATTERNS": "zoo", "FEED_FORWARDS": "zoo", "OPTIMIZERS": "optimizers"}


@functools.cache
def names(registry):
    """Returns the sorted keys of the dicts of a name in all files of its folder.

    None if a file has another expression there, whose keys only running it could tell.
    """
    found = []
    for tree in _files(FOLDERS[registry], registry):
        for statement in tree.body:
            targets = getattr(statement, "targets", [])
            if [getattr(target, "id", None) for target in targets] != [registry]:
                continue
            try:
                found += map(ast.literal_eval, statement.value.keys)
            except (AttributeError, ValueError):
                return None
    return sorted(found)


def choices(values):
    """Returns all names that are in a `Range` with a registry; None if unknown."""
    registered = names(values.registry)
    if registered is None:
        return None
    return [*filter(None, values.words.values()), *registered]


@functools.cache
def problems():
    """Returns a dict of the problems, with the first lines of their docstrings."""
    found = {}
    for tree in _files("problems/datasets", "@register("):
        for definition in tree.body:
            for decorator in getattr(definition, "decorator_list", []):
                if getattr(getattr(decorator, "func", None), "id", None) == "register":
                    name = ast.literal_eval(decorator.args[0])
                    found[name] = ast.get_docstring(definition).splitlines()[0]
    return dict(sorted(found.items()))


def _files(folder, text):
    """Yields the syntax of the files that have a text."""
    for path in sorted(PACKAGE.joinpath(folder).rglob("*.py")):
        content = path.read_text(encoding="utf-8")
        if text in content:
            yield ast.parse(content)

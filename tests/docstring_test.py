"""Runs every Python example of the documentation and of the package's docstrings."""

import ast
import pathlib
import re
import textwrap

import keras
import pytest

from routing_tf.files import safe_loading
from routing_tf.models import patterns
from routing_tf.problems import registry
from tests import tracing

ROOT = pathlib.Path(__file__).parents[1]
FENCED = r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```"
EXAMPLE = re.compile(FENCED, re.MULTILINE | re.DOTALL)
ON_JAX = keras.backend.backend() == "jax"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(node, name):
    """Yields name, first line and text of each docstring at or below `node`."""
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
        docstring = node.body[0].value
        yield name, docstring.lineno, docstring.value
    for child in ast.iter_child_nodes(node):
        child_name = getattr(child, "name", None)
        yield from docstrings(child, f"{name}.{child_name}" if child_name else name)


def texts():
    for path in sorted(ROOT.glob("routing_tf/**/*.py")):
        tree = ast.parse(path.read_text(), filename=path)
        for name, line, text in docstrings(tree, ""):
            yield path, name.removeprefix("."), line, text
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        yield path, "", 1, path.read_text()


def marks(path):
    """Those of the README run always, all others with the checks of documentation."""
    if path.name == "README.md":
        return [pytest.mark.slow] if ON_JAX else []
    return [pytest.mark.thorough]


def examples():
    for path, name, first_line, text in texts():
        for match in EXAMPLE.finditer(text):
            before = text[: match.start()].rstrip().rpartition("\n")[2]
            line = first_line + text.count("\n", 0, match.start("code"))
            yield pytest.param(
                path,
                line,
                textwrap.dedent(match["code"]),
                id=f"{path.relative_to(ROOT)}:{name or line}",
                marks=[
                    pytest.mark.skipif("no-test" in before, reason="no-test"),
                    *marks(path),
                ],
            )


@pytest.fixture(autouse=True)
def fresh_keras(tmp_path, monkeypatch):
    """Each example starts in an empty folder, and what it changes is undone.

    Neither in Keras nor in the registries of problems, patterns and trusted packages.
    """
    monkeypatch.chdir(tmp_path)
    for module, name in ((registry, "_PROBLEMS"), (patterns, "_REGISTERED")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.setattr(safe_loading, "PACKAGES", set(safe_loading.PACKAGES))
    keras.utils.set_random_seed(0)
    with tracing.eager():
        yield
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("path, line, code", list(examples()))
def test_example_runs(path, line, code):
    # The empty lines make a traceback point at the example's place in its own file.
    program = compile("\n" * (line - 1) + code, path, "exec")
    exec(program, {"__name__": "__main__"})

"""Writes BUILD, the Bazel targets of this repository, from the imports of its files.

    python tools/build_file.py           writes BUILD
    python tools/build_file.py --check   prints a diff and fails if BUILD is stale

Every file is one target: a test, a program or a library.
"""

import ast
import configparser
import difflib
import graphlib
import importlib.util
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("benchmarks", "routing_tf", "tests", "tools")
# These read the source tree itself, so they have no target: pytest alone runs them.
SOURCE_READERS = ("tests/build_file_test.py", "tests/docstring_test.py")
# Files that a module reads.
DATA = {
    "routing_tf/problems/builders/enwik8.py": [
        "routing_tf/problems/builders/checksums.tsv"
    ],
    "routing_tf/problems/builders/wikitext103.py": [
        "routing_tf/problems/builders/checksums.tsv"
    ],
    "tests/problems/builders/enwik8_test.py": ["tests/problems/builders/dummy_data/**"],
    "tests/problems/builders/wikitext103_test.py": [
        "tests/problems/builders/dummy_data/**"
    ],
    "tests/golden_cases.py": ["tests/golden/**"],
    "tests/models/preset_variables_test.py": ["tests/models/preset_variables.json"],
    "tests/preset_table_test.py": [
        "docs/presets.md",
        "tests/models/preset_variables.json",
    ],
}
HEADER = '''\
"""Written by tools/build_file.py from the imports; not edited by hand."""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])
'''


def third_party():
    """Returns the label of each distribution in setup.cfg, by its import name."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"].values()
    lines = "\n".join([config["options"]["install_requires"], *extras])
    names = {name.replace("-", "_") for name in re.findall(r"^[\w-]+", lines, re.M)}
    imports = {name.removesuffix("_py"): name for name in names}  # absl_py
    imports["sklearn"] = imports.pop("scikit_learn")
    return {name: f"@pypi//{package}" for name, package in imports.items()}


def local_modules():
    """Returns the file of each module of the repository, by its dotted name."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    paths = sorted(file.relative_to(ROOT) for file in files)
    paths = [path for path in paths if path.as_posix() not in SOURCE_READERS]
    return {target(path).replace("/", "."): path for path in paths}


def target(path):
    return path.with_suffix("").as_posix().removesuffix("/__init__")


def imported(tree, package, modules):
    """Yields the dotted names of the modules that `tree` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in modules else base


def needed_unseen(module, tree, modules):
    """Yields what a test needs without importing it."""
    yield from ("pytest", "tensorflow")  # TensorFlow: the default backend of Keras
    for node in ast.walk(tree):  # names of modules, as in `python -m routing_tf.train`
        if isinstance(node, ast.Constant) and node.value in modules:
            yield node.value
    for name in modules:
        if name.endswith(".conftest") and module.startswith(name[: -len("conftest")]):
            yield name


def dependencies(module, tree, modules, labels):
    """Returns the local modules and the third-party labels that `module` needs."""
    path = modules[module]
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    names = set(imported(tree, package, modules))
    if path.name.endswith("_test.py"):
        names.update(needed_unseen(module, tree, modules))
    names.discard(module)
    local, outside = names & modules.keys(), set()
    for name in names - local:
        top = name.split(".")[0]
        if top in labels:
            outside.add(labels[top])
        elif top not in sys.stdlib_module_names:
            sys.exit(f"{path} imports {name}: no file, and not in setup.cfg")
    return local, outside


def rule(module, path, tree, deps):
    """Returns the target of one file, laid out as buildifier does."""
    kind = "py_library"
    attributes = {"name": target(path), "testonly": False, "srcs": [path.as_posix()]}
    if path.name.endswith("_test.py"):
        kind = "py_test"
        attributes["args"] = ["-p no:cacheprovider", path.as_posix()]
        attributes["data"] = ["pyproject.toml", *DATA.get(path.as_posix(), [])]
        attributes["env_inherit"] = ["KERAS_BACKEND", "ROUTING_TF_REFERENCE_DIR"]
        attributes["main_module"] = "pytest"
    elif "if __name__ == '__main__':" in ast.unparse(tree):
        kind = "py_binary"
        attributes["testonly"] = path.parts[0] == "tests"
        attributes["main_module"] = module
    elif path.parts[0] == "tests":
        attributes["testonly"] = True
        attributes["data"] = DATA.get(path.as_posix())
    attributes["deps"] = deps
    lines = [f"    {key} = {literal(v)},\n" for key, v in attributes.items() if v]
    return f"{kind}(\n{''.join(lines)})\n"


def literal(value):
    if isinstance(value, list) and any("*" in item for item in value):
        return f"glob({json.dumps(value)})"
    if isinstance(value, list) and len(value) > 1:
        return "[\n" + "".join(f'        "{item}",\n' for item in value) + "    ]"
    return "True" if value is True else json.dumps(value)


def build_file():
    modules, labels = local_modules(), third_party()
    rules, graph = [HEADER], {}
    for name, path in modules.items():
        tree = ast.parse((ROOT / path).read_text())
        graph[name], outside = dependencies(name, tree, modules, labels)
        deps = sorted(f":{target(modules[local])}" for local in graph[name])
        rules.append(rule(name, path, tree, deps + sorted(outside)))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        sys.exit("Modules import each other: " + " <- ".join(error.args[1]))
    return "\n".join(rules)


def main(arguments):
    path = ROOT / "BUILD"
    new = build_file()
    if arguments != ["--check"]:
        path.write_text(new)
        return 0
    lines = path.read_text().splitlines(), new.splitlines()
    print(*difflib.unified_diff(*lines, "BUILD", "imports", lineterm=""), sep="\n")
    return int(lines[0] != lines[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

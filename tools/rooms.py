"""Counts the imports between the rooms of the package, and finds circles of folders.

A room is a folder or a file at the top of the package; the commands, with what
stands for them at the top, are one. Imports inside functions count as well.

Usage: python tools/rooms.py [FOLDER OF A PACKAGE]
"""

import argparse
import ast
import collections
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / "routing_tf"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", nargs="?", type=pathlib.Path, default=PACKAGE)
    print("\n".join(report(parser.parse_args().package)))


def report(package):
    """Yields lines: the rooms that each room imports, the totals, and circles."""
    found = list(imports(package.resolve()))
    names = rooms(package)
    arrows = between(found, lambda path: room_of(path, names))
    num_arrows = 0
    for room in names:
        others = [f"{to} ({arrows[room, to]})" for to in names if (room, to) in arrows]
        num_arrows += len(others)
        yield f"{room}: {', '.join(others)}" if others else room
    yield f"{len(names)} rooms, {num_arrows} arrows"
    # What a folder's `__init__.py` offers does not make the folder need it.
    needed = [(a, b) for a, b in found if a.name != "__init__.py"]
    for level, place in (
        ("rooms", lambda path: room_of(path, names)),
        ("folders", lambda path: folder_of(path, names)),
        ("files", lambda path: path.as_posix()),
    ):
        circles = circles_of(between(needed, place))
        yield f"{len(circles)} circles of {level}"
        yield from (f"  {' <-> '.join(circle)}" for circle in circles)


def rooms(package):
    """Returns the names of the rooms of a package."""
    paths = [path.relative_to(package) for path in package.resolve().rglob("*.py")]
    commands = {path.stem for path in paths if path.parts[0] == "cli"} | {"__main__"}
    tops = {pathlib.Path(path.parts[0]).stem for path in paths} - {"__init__"}
    return sorted({"cli" if top in commands else top for top in tops})


def room_of(path, names):
    """Returns the room that a file, relative to the package, is in."""
    top = pathlib.Path(path.parts[0]).stem
    return top if top in names or top == "__init__" else "cli"


def folder_of(path, names):
    """Returns the folder of a file, or the room of one at the top."""
    return path.parent.as_posix() if len(path.parts) > 1 else room_of(path, names)


def between(found, place):
    """Counts imports by pairs of places, `place(path)`, that differ."""
    pairs = ((place(a), place(b)) for a, b in found)
    return collections.Counter((a, b) for a, b in pairs if a != b)


def imports(package):
    """Yields pairs of files, relative to the package: one imports from the other."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in names_imported(node):
                target = file_of(name, package)
                if target is not None:
                    yield path.relative_to(package), target.relative_to(package)


def names_imported(node):
    """Returns the dotted names that a node of the syntax tree imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def file_of(name, package):
    """Returns the file of a module, or of what is in it; None outside the package."""
    parts = name.split(".")
    if parts[0] != package.name:
        return None
    while parts:
        path = package.parent.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        parts.pop()
    return None


def circles_of(arrows):
    """Returns groups of nodes that reach each other along arrows, sorted."""
    after = collections.defaultdict(set)
    for a, b in arrows:
        after[a].add(b)
    reached = {node: reachable(node, after) for node in after}
    groups = {
        tuple(sorted(b for b in ends if a in reached.get(b, ())))
        for a, ends in reached.items()
        if a in ends
    }
    return sorted(groups)


def reachable(node, after):
    """Returns the nodes that a node reaches along arrows."""
    reached, waiting = set(), [node]
    while waiting:
        new = after.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


if __name__ == "__main__":
    main()

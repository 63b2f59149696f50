"""Breaks each promise of `tests/promises/*.toml` once and sees whether its test fails.

Usage: python tools/break_promises.py [--only WORD] [--list] [--backend tensorflow]

An entry names a promise, a test that shows it, and a change of the package that breaks
it. The change is made in a copy of the package; its test must pass without the change,
which the test suite shows, and fail with it. Prints a line for each promise and exits
with 1 if a broken promise goes unnoticed.
"""

import argparse
import collections
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
KINDS = ("golden", "property", "fault", "bad input", "command")
FIELDS = {"kind", "text", "test", "file", "old", "new"}
COPIED = ("routing_tf", "tests", "tools", "benchmarks", "docs")
# Exit codes of pytest: tests have failed; the test file cannot even be imported.
CAUGHT = (1, 2)


def promises(folder=ROOT):
    """Returns all promises, each with the name of its file as `area`.

    Raises:
        ValueError: if an entry cannot be used as it stands.
    """
    found = []
    for path in sorted((folder / "tests" / "promises").glob("*.toml")):
        entries = tomllib.loads(path.read_text()).get("promise", [])
        for number, entry in enumerate(entries, start=1):
            if problem := _problem(entry, folder):
                raise ValueError(f"{path.name}, promise {number}: {problem}")
            found.append({"area": path.stem, **entry})
    return found


def _problem(entry, folder):
    """Returns what is wrong with an entry, or None."""
    if missing := FIELDS - set(entry):
        return f"`{min(missing)}` is missing"
    if entry["kind"] not in KINDS:
        return f"`kind` must be one of {KINDS}. Received: {entry['kind']!r}"
    for name in entry["file"], entry["test"].split("::")[0]:
        if not (folder / name).is_file():
            return f"there is no file {name}"
    count = (folder / entry["file"]).read_text().count(entry["old"])
    if count != 1:
        return f"`old` must stand once in {entry['file']}. Received: {count} times"
    return None


def is_caught(entry, folder, backend):
    """Whether the test of a promise fails where the promise is broken.

    Args:
        entry: one of `promises`.
        folder: a copy of the repository, which is as before afterwards.
        backend: what Keras computes with.
    """
    path = folder / entry["file"]
    whole = path.read_text()
    path.write_text(whole.replace(entry["old"], entry["new"]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow"]
    if entry.get("select"):
        command += ["-k", entry["select"]]
    try:
        finished = subprocess.run(
            [*command, entry["test"]],
            cwd=folder,
            env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        path.write_text(whole)
    if finished.returncode not in (0, *CAUGHT):
        print(finished.stdout, file=sys.stderr)
    return finished.returncode in CAUGHT


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="word in the area or the text")
    parser.add_argument("--list", action="store_true", help="break nothing")
    parser.add_argument("--backend", default="tensorflow")
    options = parser.parse_args()
    chosen = [e for e in promises() if options.only in f"{e['area']}: {e['text']}"]
    if options.list:
        for entry in chosen:
            print(f"{entry['area']} ({entry['kind']}): {entry['text']}")
        kinds = collections.Counter(entry["kind"] for entry in chosen)
        print(", ".join(f"{kind}: {number}" for kind, number in kinds.items()))
        return 0
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, folder)
        for entry in chosen:
            caught = is_caught(entry, folder, options.backend)
            unnoticed += not caught
            told = "noticed  " if caught else "UNNOTICED"
            print(f"{told} {entry['area']}: {entry['text']}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} broken promises are noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())

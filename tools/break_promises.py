"""Breaks each promise of `tests/promises/*.toml` once and sees whether its test fails.

Usage: python tools/break_promises.py [--only WORD] [--list] [--backend tensorflow]
                                      [--trust_unbroken]

An entry names a promise, the tests that show it, and a change of the package that
breaks it. The change is made in a copy of the package; the tests must pass before, and
fail with it. All tests but the slow ones are meant, or those of its `marks` (`-m` of
pytest). Prints a line for each promise and exits with 1 if a broken promise goes
unnoticed. `--trust_unbroken` takes half the time where all tests have just passed.
"""

import argparse
import collections
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
KINDS = ("golden", "property", "fault", "bad input", "command")
FIELDS = {"kind", "text", "test", "file", "old", "new"}
COPIED = ("routing_tf", "tests", "tools", "benchmarks", "docs")
# Exit codes of pytest: tests have failed; the test file cannot even be imported.
CAUGHT = (1, 2)
NOTICED = "noticed"


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
    tests = [name.split("::")[0] for name in entry["test"].split()]
    for name in entry["file"], *tests:
        if not (folder / name).exists():
            return f"there is no {name}"
    count = (folder / entry["file"]).read_text().count(entry["old"])
    if count != 1:
        return f"`old` must stand once in {entry['file']}. Received: {count} times"
    return None


def judge(entry, folder, trust_unbroken):
    """Says what the tests of a promise do, before and after it is broken.

    Args:
        entry: one of `promises`.
        folder: a copy of the repository, which is as before afterwards.
        trust_unbroken: whether the tests are known to pass before.

    Returns:
        `NOTICED`, or what is wrong.
    """
    if not trust_unbroken and (code := _run(entry, folder)) != 0:
        return f"FAILS UNBROKEN (pytest's exit code is {code})"
    path = folder / entry["file"]
    whole = path.read_text()
    path.write_text(whole.replace(entry["old"], entry["new"]))
    try:
        code = _run(entry, folder)
    finally:
        path.write_text(whole)
    # What a broken promise leaves to a signal has not passed either.
    is_caught = code in CAUGHT or code < 0
    return NOTICED if is_caught else f"UNNOTICED (pytest's exit code is {code})"


def _run(entry, folder):
    """Runs the tests of a promise and returns pytest's exit code."""
    # A new process each, forked from one that has imported what takes long.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras", "pytest"])
    process = context.Process(target=_pytest, args=(entry, folder))
    process.start()
    process.join()
    return process.exitcode


def _pytest(entry, folder):
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    import pytest

    marks = entry.get("marks", "not slow")
    options = ["-q", "-x", "-m", marks, "-p", "no:cacheprovider"]
    if entry.get("select"):
        options += ["-k", entry["select"]]
    sys.exit(pytest.main([*options, *entry["test"].split()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="word in the area or the text")
    parser.add_argument("--list", action="store_true", help="break nothing")
    parser.add_argument("--backend", default="tensorflow")
    parser.add_argument("--trust_unbroken", action="store_true")
    options = parser.parse_args()
    chosen = [e for e in promises() if options.only in f"{e['area']}: {e['text']}"]
    if options.list:
        for entry in chosen:
            print(f"{entry['area']} ({entry['kind']}): {entry['text']}")
        kinds = collections.Counter(entry["kind"] for entry in chosen)
        print(", ".join(f"{kind}: {number}" for kind, number in kinds.items()))
        return 0
    os.environ["KERAS_BACKEND"] = options.backend
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, folder)
        for entry in chosen:
            told = judge(entry, folder, options.trust_unbroken)
            unnoticed += told != NOTICED
            print(f"{told} - {entry['area']}: {entry['text']}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} broken promises are noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())

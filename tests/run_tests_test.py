"""Tests that the parts of `tools/run_tests.py` leave out no test."""

from tools import run_tests


def files_of(paths):
    """Returns the files of tests that one call of pytest finds."""
    ignored = [path.removeprefix("--ignore=") for path in paths if path[0] == "-"]
    found = set()
    for path in paths:
        place = run_tests.ROOT / path
        found |= {place} if place.is_file() else set(place.glob("**/*_test.py"))
    return {
        file
        for file in found
        if not any(file.is_relative_to(run_tests.ROOT / path) for path in ignored)
    }


def test_all_parts_together_have_every_file():
    processes = run_tests.processes(["tensorflow"], run_tests.PARTS)
    found = set().union(*(files_of(paths) for _, paths in processes))
    assert found == set((run_tests.ROOT / "tests").glob("**/*_test.py"))

"""Finished runs in a file, and tables of them."""

import json
import os
import pathlib
import statistics


class Record:
    """The finished runs in a JSON file, one a line, which need not be there yet.

    `runs` is a list of dicts: `settings`, and what was found. `flag` is what messages
    call the file.
    """

    def __init__(self, path, flag="--results"):
        self.path = pathlib.Path(path)
        self.runs = []
        self._flag = flag
        self._read()

    def find(self, settings):
        """Returns the run with these settings, or None."""
        return next((run for run in self.runs if run["settings"] == settings), None)

    def missing(self, all_settings):
        """Returns the settings that no run has."""
        return [settings for settings in all_settings if not self.find(settings)]

    def add(self, settings, found):
        """Writes a run into the file at once, instead of one with its settings."""
        self._read()  # another process may have written
        self.runs = [run for run in self.runs if run["settings"] != settings]
        self.runs.append({"settings": settings, **found})
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.write_text(f'{{"runs": [\n{lines}\n]}}\n')
        part.replace(self.path)

    def _read(self):
        if not self.path.exists():
            return
        try:
            self.runs = json.loads(self.path.read_text())["runs"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self._flag} must be a file that this command wrote, or a new one. "
                f"Received: {str(self.path)!r}, which is no record of runs: {error}"
            ) from error


def table(heads, rows):
    """Returns the lines of a table in Markdown.

    Rows are lists of a cell for each of the `heads`: a string, or the list of the
    accuracies of all seeds, empty where nothing was run.
    """
    lines = [heads, ["---"] * len(heads)]
    lines += [[_shown(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def mean_and_each(numbers):
    """Returns a cell: the mean, and each number in brackets; "-" for none."""
    each = ", ".join(f"{number:.3f}" for number in numbers)
    return f"{statistics.mean(numbers):.3f} ({each})" if numbers else "-"


def _shown(cell):
    if isinstance(cell, str):
        return cell
    if not cell:
        return "-"
    spread = f" ± {statistics.stdev(cell):.3f}" if len(cell) > 1 else ""
    return f"{statistics.mean(cell):.3f}{spread} ({len(cell)})"

"""The source code of the running Python's standard library."""

import os
import pathlib
import platform
import sysconfig

from routing_tf.files.splits import SPLITS
from routing_tf.problems.own_files import split_of_file
from routing_tf.problems.registry import register
from routing_tf.problems.text import TextProblem


@register("python_source")
class PythonSource(TextProblem):
    """The source code of the running Python's standard library; no download.

    All `*.py` files in the order of their paths, without installed packages
    (`site-packages`, `dist-packages`), folders named `test` or `tests`, and files
    that cannot be read. Each file belongs to one split, chosen by a hash of its
    path inside the library: about 90 % are for training, 5 % for validation and
    5 % for testing. The same Python version gives the same data.

    Args:
        **options: arguments of `TextProblem`; `data_dir` is not used.

    Raises:
        ValueError: from `prepare`, if this Python has no source files, or too few.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("python_source", sequence_length=256)
    inputs, targets, weights = next(iter(problem.dataset("train", batch_size=2)))
    print(problem.tokenizer.detokenize(targets[0]))
    ```
    """

    ignored_folders = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

    def load(self):
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        texts = {split: [] for split in SPLITS}
        for path in self._source_files(library):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            if text:
                name = path.relative_to(library).as_posix()
                texts[split_of_file(name)].append(text)
        sizes = {split: sum(map(len, texts[split])) for split in SPLITS}
        if min(sizes.values()) < self.sequence_length:
            raise ValueError(
                "The problem 'python_source' needs the source files of Python's "
                f"standard library. Found in {str(library)!r}, in bytes: {sizes} for "
                f"windows of {self.sequence_length}. Use the problem 'text_files' with "
                "your own files, or a shorter sequence_length."
            )
        return texts

    def _source_files(self, library):
        """The paths of all files that belong to the corpus, in order."""
        paths = []
        for folder, subfolders, names in os.walk(library):
            subfolders[:] = set(subfolders) - self.ignored_folders
            paths += [pathlib.Path(folder, n) for n in names if n.endswith(".py")]
        return sorted(paths, key=lambda path: path.relative_to(library).as_posix())

    def describe_split(self, split):
        texts = self.load_split(split)
        files = "file" if len(texts) == 1 else "files"
        return f"{sum(map(len, texts)):,} bytes of {len(texts)} {files}"

    def describe(self, *splits):
        python = platform.python_version()
        return f"{super().describe(*splits)}; library of Python {python}"

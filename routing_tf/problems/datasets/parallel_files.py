"""Pairs of texts from the user's own files."""

import functools
import itertools

from absl import logging

from routing_tf.files import raw_files
from routing_tf.files.named_files import identity
from routing_tf.files.named_files import named_paths
from routing_tf.files.names import SPLITS
from routing_tf.problems.registry import register
from routing_tf.problems.seq2seq import Seq2SeqProblem
from routing_tf.problems.sources import HELD_OUT_SHARE
from routing_tf.problems.sources import OwnFiles
from routing_tf.problems.sources import check_no_raw_dir
from routing_tf.problems.sources import separate


@register("parallel_files")
class ParallelFiles(Seq2SeqProblem):
    r"""Your own pairs of texts: a file of sources and one of targets, by lines.

    Line n of a target file belongs to line n of the source file; pairs with an empty
    side are left out, and a warning counts them. Of files for all splits, the last 5 %
    of the lines are for testing and the 5 % before them for validation, unless these
    splits have files of their own, which are then left out of those to train on. Files
    must be UTF-8, as they are or packed by gzip.

    Args:
        source_files: a list of paths or glob patterns, or one string of them separated
            by commas, as for `text_files`.
        target_files: the same number of files, in the same order; one file may serve
            several sources.
        validation_source_files: the same, for the validation split.
        validation_target_files: the same, for the validation split.
        test_source_files: the same, for the test split.
        test_target_files: the same, for the test split.
        vocabulary: as for `Seq2SeqProblem`; "subwords" needs a `data_dir`. Defaults to
            "bytes".
        **options: arguments of `Seq2SeqProblem`.

    Example:
    ```python
    import pathlib
    from routing_tf import problems

    numbers = range(100)
    pathlib.Path("numbers").write_text("".join(f"{n}\n" for n in numbers))
    pathlib.Path("squares").write_text("".join(f"{n * n}\n" for n in numbers))
    problem = problems.get(
        "parallel_files", source_files="numbers", target_files="squares"
    )
    ```
    """

    storage = "parallel_files"
    has_own_files = True
    default_vocabulary = "bytes"
    default_hparams_set = "pairs_small"
    default_sequence_length = 256
    default_input_length = 256

    def __init__(
        self,
        source_files=None,
        target_files=None,
        validation_source_files=None,
        validation_target_files=None,
        test_source_files=None,
        test_target_files=None,
        **options,
    ):
        super().__init__(**options)
        self.files = {
            "train": (source_files, target_files),
            "validation": (validation_source_files, validation_target_files),
            "test": (test_source_files, test_target_files),
        }
        for split, (sources, targets) in self.files.items():
            if bool(sources) != bool(targets) or (split == "train" and not sources):
                prefix = "" if split == "train" else f"{split}_"
                raise ValueError(
                    f"`{prefix}source_files` and `{prefix}target_files` must both name "
                    f"files. Received: {sources!r} and {targets!r}"
                )
        if self.vocabulary == "subwords" and not self.data_dir:
            raise ValueError(
                "`data_dir` must name a folder for the vocabulary if vocabulary="
                f"'subwords'. Received: data_dir={self.data_dir!r}"
            )

    def make_source(self, raw_dir):
        check_no_raw_dir(self, raw_dir, "`source_files` and `target_files`")
        return Lines(self.files)


class Lines(OwnFiles):
    """Pairs of lines of a source file and a target file, without empty ones."""

    def __init__(self, files):
        super().__init__()
        self.files = files
        self._counts, self._told = {}, set()

    @functools.cached_property
    def _named(self):
        """For each split the pairs of paths that its options name, each pair once."""
        named = {split: self._pairs(split) for split in SPLITS}
        return separate(
            named,
            "`{0}_source_files` with `{0}_target_files`".format,
            _identity_of_pair,
        )

    def _pairs(self, split):
        prefix = "" if split == "train" else f"{split}_"
        sources, targets = (
            named_paths(f"{prefix}{side}_files", files)
            for side, files in zip(("source", "target"), self.files[split])
        )
        if len(sources) != len(targets):
            raise ValueError(
                f"`{prefix}source_files` and `{prefix}target_files` must have the same "
                f"number of files. Received: {len(sources)} and {len(targets)} files"
            )
        # Pairs are formed before any name is left out.
        pairs = {_identity_of_pair(pair): pair for pair in zip(sources, targets)}
        return list(pairs.values())

    @property
    def _held_out(self):
        """The splits without their own files, the last one first."""
        return [s for s in ("test", "validation") if not self.files[s][0]]

    def files_of(self, split):
        split = "train" if split in self._held_out else split
        return list(itertools.chain.from_iterable(self._named[split]))

    def identity(self, split):
        return {**super().identity(split), "held_out": self._held_out}

    def _num_lines(self, sources, targets):
        """The number of lines of two files, which must be the same."""
        if (sources, targets) in self._counts:
            return self._counts[sources, targets]
        numbers = [sum(1 for _ in raw_files.read_lines(p)) for p in (sources, targets)]
        if numbers[0] != numbers[1]:
            raise ValueError(
                "A source file and its target file must have the same number of lines. "
                f"Received: {sources!r} with {numbers[0]:,} and {targets!r} with "
                f"{numbers[1]:,}"
            )
        self._counts[sources, targets] = numbers[0]
        return numbers[0]

    def _lines(self, split, number):
        """The first line of a split in files with this number of lines, and its end."""
        share, end = number * HELD_OUT_SHARE // 100, number
        for held_out in self._held_out:
            if split == held_out:
                return end - share, end
            end -= share
        return 0, end

    def examples(self, split, start):
        return itertools.islice(self._examples(split), start, None)

    def _examples(self, split):
        own, num_empty = "train" if split in self._held_out else split, 0
        for paths in self._named[own]:
            number = self._num_lines(*paths)
            first, end = self._lines(split, number) if own == "train" else (0, number)
            lines = zip(*map(raw_files.read_lines, paths))
            for (_, source), (_, target) in itertools.islice(lines, first, end):
                if source.strip() and target.strip():
                    yield source.strip(), target.strip()
                else:
                    num_empty += 1
        if num_empty and split not in self._told:
            self._told.add(split)
            message = "%s: %s pairs are left out, as a side of them is empty"
            logging.warning(message, split, f"{num_empty:,}")

    def splits(self):
        return [s for s in SPLITS if any(True for _ in self.examples(s, 0))]


def _identity_of_pair(paths):
    return tuple(map(identity, paths))

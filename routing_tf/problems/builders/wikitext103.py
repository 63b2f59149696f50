"""The articles of WikiText-103, as a tfds builder."""

import re

import tensorflow_datasets as tfds

from routing_tf.files import named_files
from routing_tf.files import raw_files

URL = "https://s3.amazonaws.com/research.metamind.io/wikitext"
# By config: the folder that the zip file has.
FOLDERS = {"tokens": "wikitext-103", "raw": "wikitext-103-raw"}
SPLITS = {"train": "train", "validation": "valid", "test": "test"}
# " = Title = "; a section has two or more: " = = Section = = ".
HEADING = re.compile(r"\s*= [^=].* =\s*")


class Wikitext103(tfds.core.GeneratorBasedBuilder):
    """WikiText-103: good and featured articles of the English Wikipedia.

    The config "tokens", the default, reads the version with words that are split and
    rare words replaced by `<unk>`; "raw" the one with all words. An example is
    `{"text": bytes}`, one article in UTF-8. It begins at its title, a line such as " =
    Title = " between empty lines; text before the first title belongs to the first
    article. The articles of a split, in order, are the text of its file, character for
    character. Only splits with existing files are made.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="tokens", description="Rare words are <unk>."),
        tfds.core.BuilderConfig(name="raw", description="All words."),
    ]
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"""\
For the config "tokens": `wikitext-103-v1.zip`, or at least one of `wiki.train.tokens`,
`wiki.valid.tokens` and `wiki.test.tokens`, in the folder itself or in `wikitext-103`
below it. For the config "raw": `wikitext-103-raw-v1.zip`, or `wiki.train.raw`,
`wiki.valid.raw` and `wiki.test.raw`, there or in `wikitext-103-raw`. The files may also
be called `train.txt`, `valid.txt` and `test.txt`. If there is nothing at all, the zip
file is downloaded from {URL}.
"""

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description="Good and featured articles of the English Wikipedia.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://huggingface.co/datasets/Salesforce/wikitext",
            citation=(
                "@misc{merity2016pointer, title={Pointer Sentinel Mixture Models}, "
                "author={Stephen Merity and Caiming Xiong and James Bradbury and "
                "Richard Socher}, year={2016}, eprint={1609.07843}, "
                "archivePrefix={arXiv}, primaryClass={cs.CL}}"
            ),
            license="Creative Commons Attribution-ShareAlike",
            disable_shuffling=True,
        )

    @property
    def _zip_name(self):
        return f"{FOLDERS[self.builder_config.name]}-v1.zip"

    def _names(self):
        """The names of the files by split, those of the distribution first."""
        ending = self.builder_config.name
        yield {split: f"wiki.{name}.{ending}" for split, name in SPLITS.items()}
        yield {split: f"{name}.txt" for split, name in SPLITS.items()}

    def find_files(self, folder):
        """Returns the raw files as `{split: (path, member of a zip file or None)}`.

        All come from one place: the first one that has any of them.
        """
        folder = tfds.core.Path(folder)
        for place in (folder, folder / FOLDERS[self.builder_config.name]):
            for names in self._names():
                paths = {split: place / name for split, name in names.items()}
                files = {s: (path, None) for s, path in paths.items() if path.is_file()}
                if files:
                    return files
        path = folder / self._zip_name
        return self._find_members(path) if path.is_file() else {}

    def _find_members(self, path):
        members = {name.rpartition("/")[2]: name for name in raw_files.members(path)}
        names = next(self._names())
        files = {s: (path, members[n]) for s, n in names.items() if n in members}
        if not files:
            raise ValueError(
                f"{named_files.place(path)} must have one of the members "
                f"{', '.join(names.values())}. Received: a zip file of "
                f"{raw_files.listing(raw_files.members(path))}"
            )
        return files

    def _split_generators(self, dl_manager):
        folder = raw_files.given_folder(dl_manager)
        if folder is None:
            path = dl_manager.download(f"{URL}/{self._zip_name}")
            files = self._find_members(path)
        else:
            files = self.find_files(folder)
        if not files:
            names = [name for names in self._names() for name in names.values()]
            raise raw_files.no_files_error(self, folder, [self._zip_name, *names])
        return {split: self._generate_examples(*file) for split, file in files.items()}

    def _generate_examples(self, path, member):
        for key, article in enumerate(read_articles(path, member)):
            yield key, {"text": article}


def read_articles(path, member=None):
    r"""Yields the articles of a file of WikiText; joined, they are its text.

    Example:
    ```python
    import pathlib
    from routing_tf.problems.builders import wikitext103

    pathlib.Path("wiki").write_text("\n = A = \n\n a \n\n = B = \n\n b \n")
    list(wikitext103.read_articles("wiki"))  # ["\n = A = \n\n a \n\n", " = B = ..."]
    ```
    """
    lines = []  # of the current article
    has_title = has_words = False
    candidate = None  # the place in them of what is a title if an empty line follows
    for number, line in raw_files.read_lines(path, member, keep_ends=True):
        empty = not line.strip()
        if not empty and not has_words:
            has_words = True
            _check_words(line, named_files.place(path, member, number))
        if candidate is not None and empty:
            if has_title:
                yield "".join(lines[:candidate])
                lines = lines[candidate:]
            has_title = True
        after_empty = not lines or not lines[-1].strip()
        # Formulas look like titles: " = 1 <unk> = " in the middle of a paragraph.
        candidate = len(lines) if after_empty and HEADING.fullmatch(line) else None
        lines.append(line)
    yield "".join(lines)


def _check_words(line, where):
    """Refuses files of the problem enwik8, which have the same names."""
    if all(word.isdigit() for word in line.split()):
        raise ValueError(
            f"{where} must have words, as the articles of WikiText do. Received: "
            f"integers, {line.strip()[:40]!r}"
        )

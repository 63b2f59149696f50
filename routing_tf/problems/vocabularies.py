"""Subword vocabularies that problems copy or learn."""

import hashlib
import pathlib
import shutil

from routing_tf.files import atomic
from routing_tf.tokenizers import SubwordTokenizer

VOCABULARY_SIZE = 1 << 15
# Size of the training texts, evenly spread, from which a vocabulary is learned.
VOCABULARY_BYTES = 50_000_000


def given_vocabulary(path, raw_dir):
    """Returns the path of the vocabulary of this name among raw files; or None."""
    given = raw_dir and pathlib.Path(raw_dir, path.name)
    return given if given and given.is_file() else None


def make_vocabulary(path, raw_dir, texts):
    """Copies the vocabulary among the raw files, or learns one from `texts()`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if given := given_vocabulary(path, raw_dir):
        with atomic.whole(path) as partial:
            shutil.copyfile(given, partial)
    else:
        tokens = SubwordTokenizer.build_vocabulary(texts(), VOCABULARY_SIZE)
        SubwordTokenizer(tokens).save_vocabulary(path)


def digest(tokenizer, size=8):
    """Returns a few characters that identify a vocabulary."""
    content = "\n".join(tokenizer.get_vocabulary()).encode("utf-8")
    return hashlib.sha256(content).hexdigest()[:size]

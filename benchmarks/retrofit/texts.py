"""Texts to calibrate with, and others to score."""

import os
import pathlib
import sysconfig

import numpy as np
from absl import flags

#: Texts that are scored, and those of the same kind that centroids come from.
SCORED = {
    "WikiText": ["wikitext/test.txt"],
    "Python source": ["argparse.py", "_pydecimal.py"],
}
CALIBRATION = {"WikiText": ["wikitext/valid.txt"], "Python source": ["tarfile.py"]}
#: Tokens of each kind of text in the calibration.
CALIBRATION_LENGTH = 4096
#: Enough characters for any number of tokens that are scored.
MOST_CHARACTERS = 1_000_000


def define_folder(values):
    """Defines the flag `--texts` in `values`, an `absl.flags.FlagValues`."""
    flags.DEFINE_string(
        "texts",
        os.path.join(os.environ.get("ROUTING_TF_REFERENCE_DIR", "."), "data"),
        "Folder of the texts.",
        flag_values=values,
    )


def ids_of(tokenizer, names, folder, limit):
    """Returns the first ids of a text, `<int32>[limit]`, or fewer if it is shorter.

    Args:
        tokenizer: of the model.
        names: the parts of the text: paths below `folder`, or names of files of
            Python's standard library.
        folder: where texts are.
        limit: number of ids.
    """
    library = sysconfig.get_paths()["stdlib"]
    paths = (pathlib.Path(folder if "/" in x else library, x) for x in names)
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    text = text[: min(8 * limit, MOST_CHARACTERS)]
    return np.asarray(tokenizer(text), "int32")[:limit]


def windows_of(tokenizer, names, folder, length, number):
    """Returns pieces of a text that follow each other, `<int32>[number, length]`."""
    ids = ids_of(tokenizer, names, folder, length * number)
    return ids[: len(ids) // length * length].reshape(-1, length)


def calibration_of(tokenizer, folder, length=2048):
    """Returns ids of all kinds of text, `<int32>[number, length]`."""
    number = CALIBRATION_LENGTH // length
    parts = [
        windows_of(tokenizer, names, folder, length, number)
        for names in CALIBRATION.values()
    ]
    return np.concatenate(parts)

"""Checks of archives and files of weights from strangers."""

import math
import pathlib
import zipfile

import h5py

from routing_tf.files.limits import LIMITS

WEIGHTS = "model.weights.h5"


def check_members(members, source):
    """Checks the members of a `.keras` file, which Keras unpacks."""
    allowed = {"config.json", "metadata.json", WEIGHTS}
    others = [
        member.filename
        for member in members
        if member.filename not in allowed and not member.filename.startswith("assets/")
    ]
    if others:
        raise ValueError(
            "A .keras file must hold what Keras writes: config.json, metadata.json, "
            f"{WEIGHTS} and assets. Received: {str(source)!r} with {others[:3]}. "
            "Save the model again"
        )
    weights = [member for member in members if member.filename == WEIGHTS]
    packed = [m for m in weights if m.compress_type != zipfile.ZIP_STORED]
    stored = sum(member.compress_size for member in members)
    # Members that overlap would be unpacked several times.
    if packed or stored > pathlib.Path(source).stat().st_size:
        raise ValueError(
            "Weights in a .keras file must not be compressed, and no bytes stand for "
            f"two members. Received: {str(source)!r}. Save the model again, which "
            "compresses nothing"
        )
    sizes = {m.filename: m.file_size for m in members if m not in weights}
    LIMITS.check("max_text_bytes", sum(sizes.values()), "bytes unpacked", source)
    for name in ("config.json", "metadata.json"):
        LIMITS.check("max_json_bytes", sizes.get(name, 0), "bytes unpacked", source)


def check_weights(file, source):
    """Returns the actual bytes of each array of an HDF5 file."""
    sizes = []

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            if item.dtype.kind not in "biufV":
                raise ValueError(f"{name} holds no numbers")
            sizes.append(math.prod(item.shape or ()) * item.dtype.itemsize)

    try:
        with h5py.File(file, "r") as weights:
            weights.visititems(add)
            num_bytes = weights.id.get_filesize()
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "Weights must be a whole HDF5 file of numbers. Received: "
            f"{str(source)!r}: {error}. Save or copy the model again"
        ) from error
    if sum(sizes) > num_bytes:
        raise ValueError(
            "Weights must be stored as they are. Received: arrays of "
            f"{sum(sizes):,} bytes in the {num_bytes:,} bytes of {str(source)!r}. Save "
            "the model again, which compresses nothing"
        )
    return sizes

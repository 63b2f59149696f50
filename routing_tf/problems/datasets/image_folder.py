"""The user's own images, in folders."""

import contextlib
import functools
import glob
import io
import itertools
import math
import os
import pathlib

import numpy as np
import tensorflow as tf
from absl import logging
from PIL import Image
from PIL import ImageOps

from routing_tf.files import named_files
from routing_tf.files.names import SPLITS
from routing_tf.layers.support.validation import check_choice
from routing_tf.problems import array_store
from routing_tf.problems.arguments import boolean
from routing_tf.problems.arguments import integer_at_least
from routing_tf.problems.image import ImageProblem
from routing_tf.problems.registry import register
from routing_tf.problems.sources import OwnFiles
from routing_tf.problems.sources import separate
from routing_tf.problems.sources import split_of_file

# Whatever its name says, a file may have any of these formats.
ENDINGS = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp")
FORMS = "PNG, JPEG, GIF, BMP or WebP"
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")  # as Pillow calls them
# Images without prepared arrays are held in memory: at most this many bytes.
MAX_BYTES_IN_MEMORY = 4 << 30
# What to do about images of other sizes, and of large ones.
SMALLER = (
    "To cut and scale images, pass --problem_option=resize=true "
    "--problem_option=height=32 --problem_option=width=32, or another size"
)
# Largest number of tokens of images whose size is not named: that of 64 x 64 x 3.
MAX_DEFAULT_LENGTH = 12_288
# Largest number of pixels of one picture, more than any camera has.
MAX_PIXELS = 1 << 27


@register("image_folder")
class ImageFolder(ImageProblem):
    """Images of your own, PNG, JPEG, GIF, BMP or WebP, in folders.

    In the folder are `train`, `validation` and `test`, and in each of them either
    images, or a folder of images for each class; classes are numbered in the order of
    their names. Without such folders for the splits, each image belongs to one of
    them, chosen by a hash of its path: about 90 % are for training, 5 % for validation
    and 5 % for testing. An image that links give several names is read once, and never
    trained on if it is held out.

    Photos are turned upright, as the orientation in their EXIF data says; transparency
    is dropped, and of several frames the first one is read. A warning counts files of
    other kinds, which are left out.

    A model's height, width, channels and classes follow from the images when `train`
    starts. Images with more tokens than 64 x 64 x 3 are refused unless `height` and
    `width` are named.

    No `datagen` is needed. Data that it has prepared is read in place; otherwise all
    images of a split are held in memory.

    Args:
        folder: string, the folder with the images. Defaults to `data_dir`.
        height: integer, pixels. Defaults to that of the first image.
        width: integer, pixels. Defaults to that of the first image.
        channels: integer, 1 or 3, to which images are converted. Defaults to that of
            the first image, which all must have.
        resize: boolean, whether images of another size are cut at the edges, as little
            as possible, to the ratio of `height` and `width`, and then scaled by the
            means of areas. Defaults to False: they are an error.
        **options: arguments of `ImageProblem`.

    Raises:
        ValueError: if an option is out of range, images are both next to and inside
            class folders, an image is for both validation and testing, or an image is
            damaged or of another size.

    Example:
    ```python
    import pathlib
    import tensorflow as tf
    from routing_tf import problems

    for split in ("train", "validation"):
        pathlib.Path("flags", split).mkdir(parents=True)
        png = tf.io.encode_png(tf.zeros((4, 6, 3), "uint8"))
        pathlib.Path("flags", split, "black.png").write_bytes(png.numpy())
    problem = problems.get("image_folder", folder="flags")
    problem.image_shape  # (4, 6, 3)
    inputs, targets, weights = next(iter(problem.dataset("train", batch_size=1)))
    ```
    """

    storage = "image_folder"
    has_own_files = True
    default_hparams_set = "images_small"

    def __init__(
        self,
        data_dir=None,
        folder=None,
        height=None,
        width=None,
        channels=None,
        resize=False,
        sequence_length=None,
        **options,
    ):
        super().__init__(data_dir=data_dir, **options)
        if not folder and not data_dir:
            raise ValueError(
                "`folder` or `data_dir` must name the folder with the images. "
                f"Received: folder={folder!r}, data_dir={data_dir!r}"
            )
        sizes = {"height": height, "width": width, "channels": channels}
        self.sizes = {
            name: size if size is None else integer_at_least(1, name, size)
            for name, size in sizes.items()
        }
        check_choice("channels", self.sizes["channels"], (1, 3, None))
        self.resize = boolean("resize", resize)
        self.folder_of_images = folder or data_dir
        self._take_shape(sequence_length)

    def make_source(self, raw_dir):
        return Images(raw_dir or self.folder_of_images, self.sizes, self.resize)

    def _take_shape(self, sequence_length=None):
        """Takes classes and shape from the images, or from arrays made from them."""
        shape, self.num_classes = self.source.shape, len(self.source.classes)
        made = [split for split in SPLITS if self._has_arrays(split)]
        if shape is None and made:
            identity = array_store.identity_of(self.folder(made[0]))
            shape, self.num_classes = tuple(identity["shape"]), len(identity["classes"])
            wanted = tuple(self.sizes.values())
            if any(size not in (None, real) for size, real in zip(wanted, shape)):
                raise ValueError(
                    "`height`, `width` and `channels` must be those of the prepared "
                    f"images, {shape}, which are not in {self.source.folder!r} any "
                    f"more. Received: {wanted}"
                )
        if shape is not None:
            self.set_shape(shape, sequence_length)

    def _has_arrays(self, split):
        return bool(self.data_dir) and array_store.is_complete(self.folder(split))

    def identity(self, split):
        if self.source.shape is None and self._has_arrays(split):
            return array_store.identity_of(self.folder(split))
        return super().identity(split)

    def available_splits(self):
        return [s for s in SPLITS if self.source.paths[s] or self.is_made(s)]

    def prepare_source(self):
        self._take_shape()
        self._check_found()

    def _check_found(self):
        if self.image_shape is None:
            raise ValueError(
                f"The folder of images must hold some, {', '.join(ENDINGS)}; name "
                f"it with the option `folder`. Received: {self.source.folder!r}"
            )

    def read_split(self, split):
        self._check_found()
        if not self.is_made(split):
            self._check_images(split)
        return super().read_split(split)

    def _check_images(self, split):
        number = len(self.source.paths[split])
        if not number:
            sizes = {name: len(paths) for name, paths in self.source.paths.items()}
            folder = self.source.folder
            raise ValueError(
                f"The split {split!r} of image_folder must have images. Received: "
                f"{folder!r} with {sizes}. Sort them into the folders "
                f"{', '.join(SPLITS)} in it, or choose other splits with train_split "
                "and eval_split"
            )
        size = number * math.prod(self.image_shape)
        if size > MAX_BYTES_IN_MEMORY:
            raise ValueError(
                f"Images must fit into memory, {MAX_BYTES_IN_MEMORY:,} bytes for each "
                f"split, or be prepared with `{self.command} "
                f"--raw_dir={self.source.folder}`. Received: {number:,} images of "
                f"{self.image_shape} in the split {split!r}"
            )

    def fit_hyperparameters(self, hyperparameters):
        self._check_found()
        fitting = super().fit_hyperparameters(hyperparameters)
        # A run that continues has the size already.
        if fitting != hyperparameters:
            self._check_length()
        return fitting

    def _check_length(self):
        """Refuses large images, such as photos, unless their size is named."""
        is_named = self.sizes["height"] and self.sizes["width"]
        if self.sequence_length > MAX_DEFAULT_LENGTH and not is_named:
            height, width, channels = self.image_shape
            raise ValueError(
                "`height` and `width` must be named to train on images of more than "
                f"{MAX_DEFAULT_LENGTH:,} tokens, one for each channel of a pixel. "
                f"Received: images of {height} x {width} x {channels}, "
                f"{self.sequence_length:,} tokens. {SMALLER}"
            )

    def check_hyperparameters(self, hyperparameters):
        self._check_found()
        super().check_hyperparameters(hyperparameters)


class Images(OwnFiles):
    """The images in a folder.

    `sizes` maps "height", "width" and "channels" to integers, or to `None` for those of
    the first image. `paths` maps each split to a dictionary from path, in order, to the
    name of the image's class, which is empty if there are no classes.
    """

    def __init__(self, folder, sizes, resize):
        super().__init__()
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self.sizes = sizes
        self.resize = resize
        self.paths = self._find()
        self.classes = sorted(set().union(*(c.values() for c in self.paths.values())))

    def _find(self):
        bases = {split: os.path.join(self.folder, split) for split in SPLITS}
        if any(map(os.path.isdir, bases.values())):
            paths = {split: _images(base) for split, base in bases.items()}
            paths = separate(paths, lambda split: repr(bases[split]))
        else:
            bases, paths = dict.fromkeys(SPLITS, self.folder), {s: [] for s in SPLITS}
            for path in _images(self.folder):
                name = pathlib.Path(path).relative_to(self.folder).as_posix()
                paths[split_of_file(name)].append(path)
        found = {
            split: {path: _class_of(path, bases[split]) for path in paths[split]}
            for split in SPLITS
        }
        classes = {
            name: path for paths in found.values() for path, name in paths.items()
        }
        if "" in classes and len(classes) > 1:
            raise ValueError(
                "Either all images or none must be in class folders. Received: the "
                f"classes {sorted(set(classes) - {''})}, and beside them "
                f"{classes['']!r}"
            )
        return found

    @functools.cached_property
    def shape(self):
        """Height, width and channels of the images; `None` if there are none."""
        first = next((path for split in SPLITS for path in self.paths[split]), None)
        if first is None:
            return None
        if None not in self.sizes.values():
            return tuple(self.sizes.values())
        found = read_image(first).shape
        return tuple(size or real for size, real in zip(self.sizes.values(), found))

    def files_of(self, split):
        return list(self.paths[split])

    def identity(self, split):
        return {
            **super().identity(split),
            "shape": list(self.shape),
            "classes": self.classes,
            "resize": self.resize,
            "upright": True,  # arrays of earlier versions are not
            **self._read_anew(split),
        }

    def _read_anew(self, split):
        """Earlier versions took the numbers of a BMP file's palette for its pixels."""
        has_bmp = any(path.lower().endswith(".bmp") for path in self.paths[split])
        return {"palettes": True} if has_bmp else {}

    def examples(self, split, start):
        for path, name in itertools.islice(self.paths[split].items(), start, None):
            yield {"image": self._image(path), "label": self.classes.index(name)}

    def _image(self, path):
        height, width, channels = self.shape
        image = read_image(path, self.sizes["channels"])
        if image.shape[-1] != channels:
            raise ValueError(
                "Images must have as many channels as the first one, "
                f"{channels}. Received: {path!r} with {image.shape[-1]}. To convert "
                "images, pass --problem_option=channels=3, or 1"
            )
        if image.shape[:2] == (height, width):
            return image
        if not self.resize:
            raise ValueError(
                f"Images must have {height} x {width} pixels (height x width), as the "
                f"first one has or options say. Received: {path!r} with "
                f"{image.shape[0]} x {image.shape[1]}. {SMALLER}"
            )
        return resized(image, height, width)


def _images(folder):
    """The paths of the images in a folder and those below it, in order, each once."""
    # A folder with prepared data is not a class.
    folders = named_files.folders_below(folder, ignored=("routing_tf",))
    files = [
        path
        for parent in folders
        for path in glob.glob(os.path.join(glob.escape(parent), "*"))
        if not os.path.isdir(path)
    ]
    found = [path for path in files if path.lower().endswith(ENDINGS)]
    others = len(files) - len(found)
    if others:
        first = min(set(files) - set(found))
        message = "left out of %s: %s of other kinds than %s, such as %s"
        logging.warning(message, folder, f"{others:,}", FORMS, first)
    return named_files.each_once(sorted(found))


def _class_of(path, base):
    """The name of the folder of an image that is directly below `base`."""
    parts = pathlib.Path(path).relative_to(base).parts[:-1]
    return parts[0] if parts else ""


def read_image(path, channels=None):
    """Reads a file as a NumPy array `<uint8>[height, width, channels]`, upright.

    `channels` are 1 or 3; `None` for those of the file, without transparency. The
    orientation in EXIF data is applied, and of several frames the first one is read. Of
    values of 16 bits, the upper 8 are kept.
    """
    named_files.check_regular(path)
    try:
        return _pixels(pathlib.Path(path).read_bytes(), path, channels)
    except _TooLarge as error:
        raise ValueError(
            f"The image {str(path)!r} must have at most {MAX_PIXELS:,} pixels. "
            f"Received: {error}"
        ) from error
    except Exception as error:  # Pillow raises many classes for damaged files
        raise ValueError(
            f"The file {str(path)!r} must be an undamaged image, {FORMS}. Received: "
            f"{error}"
        ) from error


class _TooLarge(Exception):
    """A picture that needs too much memory, before it is decoded."""


def _pixels(content, path, channels):
    image = _opened(content)
    # A GIF has a palette, which may happen to be grey.
    is_grey = image.format != "GIF" and image.mode in ("1", "L", "LA", "I", "I;16")
    has_frames = image.format in ("GIF", "PNG", "WEBP")  # a JPEG may have previews
    if has_frames and getattr(image, "is_animated", False):
        message = "only the first frame of %s is read, as of all files with several"
        logging.log_first_n(logging.WARNING, f"{message} frames", 1, path)
    image.load()
    image.info.pop("transparency", None)
    with contextlib.suppress(Exception):  # damaged EXIF data does not count
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "I;16"):  # Pillow would cut values at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype("uint8"))
    image = image.convert("RGB")
    if channels == 1 or (channels is None and is_grey):
        return np.array(image.convert("L"))[..., None]
    return np.array(image)


def _opened(content):
    """Returns a picture that is not decoded yet."""
    try:
        Image.open(io.BytesIO(content), formats=FORMATS).verify()  # checksums of PNG
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _TooLarge(error) from error
    if image.width * image.height > MAX_PIXELS:
        raise _TooLarge(f"{image.height:,} x {image.width:,} (height x width)")
    return image


def resized(image, height, width):
    """Crops the centre of an image to a ratio, and scales it by means of areas."""
    old_height, old_width, _ = image.shape
    kept_height = min(old_height, max(1, round(old_width * height / width)))
    kept_width = min(old_width, max(1, round(old_height * width / height)))
    top, left = (old_height - kept_height) // 2, (old_width - kept_width) // 2
    kept = image[top : top + kept_height, left : left + kept_width]
    scaled = tf.image.resize(kept, (height, width), method="area").numpy()
    return np.round(scaled).astype("uint8")

"""Tests of pixels, orientations and frames of picture files of all forms."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from routing_tf.problems.datasets import image_folder

PIXELS = np.repeat(np.arange(6, dtype="uint8").reshape(2, 3, 1) * 40, 8, axis=0)
PIXELS = np.repeat(PIXELS, 8, axis=1)[..., 0]
# What viewers show of the numbers 0 to 5 in two rows, by EXIF orientation.
SHOWN = {
    1: [[0, 1, 2], [3, 4, 5]],
    2: [[2, 1, 0], [5, 4, 3]],
    3: [[5, 4, 3], [2, 1, 0]],
    4: [[3, 4, 5], [0, 1, 2]],
    5: [[0, 3], [1, 4], [2, 5]],
    6: [[3, 0], [4, 1], [5, 2]],
    7: [[5, 2], [4, 1], [3, 0]],
    8: [[2, 5], [1, 4], [0, 3]],
}
# Eight colours whose parts have 1 bit, so that all forms can hold them, and their
# places in a picture whose rows end inside of bytes and words.
COLOURS = np.array([[n >> 2 & 1, n >> 1 & 1, n & 1] for n in range(8)], "uint8") * 255
PLACES = np.array([[1, 2, 4, 7, 0], [0, 4, 4, 4, 3], [6, 5, 1, 0, 2]], "uint8")
RGB = COLOURS[PLACES]
GREY = np.array([[0, 255, 85], [170, 85, 0]], "uint8")


def encoded(pixels, form, mode=None, **options):
    """The bytes of a file that Pillow writes, with `mode` named by it."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    image = image if mode is None else image.convert(mode)
    image.save(file, form, **options)
    return file.getvalue()


def packed(numbers, bits):
    """Rows of numbers of so many bits as bytes, the first number on top."""
    kept = np.unpackbits(numbers[..., None], axis=-1)[..., 8 - bits :]
    return [row.tobytes() for row in np.packbits(kept.reshape(len(numbers), -1), -1)]


def png(shape, kind, bits, rows, chunks=b"", interlaced=0):
    """A PNG file: `kind` is its type of colour, `rows` are bytes without a filter."""

    def chunk(name, data):
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    head = struct.pack(">IIBBBBB", shape[1], shape[0], bits, kind, 0, 0, interlaced)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = (b"IHDR", head), *chunks, (b"IDAT", data), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def png_of_16_bits(pixels, kind):
    rows = [(row * np.uint16(256) + 77).astype(">u2").tobytes() for row in pixels]
    return png(pixels.shape, kind, 16, rows)


def interlaced_png(pixels):
    """The seven passes of Adam7."""
    starts = (0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4)
    starts += (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)
    parts = [pixels[top::down, left::right] for top, left, down, right in starts]
    rows = [row.tobytes() for part in parts if part.size for row in part]
    return png(pixels.shape, 2, 8, rows, interlaced=1)


def bmp(size, bits, data, palette=b"", compression=0, masks=()):
    """A BMP file with a header of Windows; a negative height is top-down."""
    width, height = size
    number, length = len(palette) // 4, 40 + 4 * len(masks)
    head = struct.pack(
        "<IiiHHII", length, width, height, 1, bits, compression, len(data)
    )
    head += struct.pack("<iiII", 0, 0, number, 0) + struct.pack(
        f"<{len(masks)}I", *masks
    )
    start = 14 + len(head) + len(palette)
    file = struct.pack("<IHHI", start + len(data), 0, 0, start)
    return b"BM" + file + head + palette + data


def words(rows):
    """Rows of a BMP file, each of whole words of 4 bytes."""
    return b"".join(row + bytes(-len(row) % 4) for row in rows)


def os2_bmp(numbers, palette):
    """An 8-bit BMP file with the short header of OS/2."""
    height, width = numbers.shape
    data = words(row.tobytes() for row in numbers[::-1])
    head = struct.pack("<IHHHH", 12, width, height, 1, 8) + palette
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(head)) + head + data


def run_lengths(numbers):
    """The 8-bit compression of BMP: here each run is one pixel."""
    rows = [b"".join(bytes([1, x]) for x in row) for row in numbers.tolist()]
    return b"\0\0".join(rows) + b"\0\1"


def in_words(pixels, shifts, kind):
    """Pixels as integers, whose parts of 255 or 0 are 5 or 8 bits from these shifts."""
    bits = 31 if kind == "<u2" else 255
    parts = pixels.astype(kind) // 255 * bits
    return (parts << np.array(shifts, kind)).sum(axis=-1, dtype=kind)


BGR = np.concatenate([COLOURS[:, ::-1], np.zeros((8, 1), "uint8")], axis=1).tobytes()
TABLE = np.concatenate([COLOURS, COLOURS]).tobytes()
SIZE = PLACES.shape[::-1]
UP = PLACES[::-1]
RED_FIRST = in_words(RGB, (0, 8, 16), "<u4"), (0xFF, 0xFF00, 0xFF0000, 0xFF000000)
OF_16_BITS = in_words(RGB, (10, 5, 0), "<u2")
WITH_ALPHA = np.dstack([RGB, PLACES * 30])
FILES = {
    "png": (encoded(RGB, "PNG"), RGB),
    "png, alpha": (encoded(WITH_ALPHA, "PNG"), RGB),
    "png, 16 bits": (png_of_16_bits(RGB, 2), RGB),
    "png, 16 bits, alpha": (png_of_16_bits(WITH_ALPHA, 6), RGB),
    "png, interlaced": (interlaced_png(RGB), RGB),
    "png, palette of 4 bits": (
        png(PLACES.shape, 3, 4, packed(PLACES, 4), [(b"PLTE", TABLE)]),
        RGB,
    ),
    "png, transparent palette": (
        png(
            *(PLACES.shape, 3, 8, [row.tobytes() for row in PLACES]),
            [(b"PLTE", TABLE), (b"tRNS", bytes(range(0, 240, 30)))],
        ),
        RGB,
    ),
    "png, grey": (encoded(GREY, "PNG"), GREY),
    "png, grey of 1 bit": (
        png((2, 3), 0, 1, packed(GREY // 255, 1)),
        GREY // 255 * 255,
    ),
    "png, grey of 2 bits": (png((2, 3), 0, 2, packed(GREY // 85, 2)), GREY),
    "png, grey of 16 bits": (png_of_16_bits(GREY, 0), GREY),
    "png, grey, alpha": (encoded(np.dstack([GREY, GREY]), "PNG"), GREY),
    "gif": (encoded(RGB, "GIF", "P", palette=Image.Palette.ADAPTIVE), RGB),
    "webp": (encoded(RGB, "WEBP", lossless=True), RGB),
    "webp, alpha": (encoded(WITH_ALPHA, "WEBP", lossless=True, exact=True), RGB),
    "bmp, 1 bit": (
        bmp((3, 2), 1, words(packed(GREY[::-1] // 255, 1)), BGR[4:8] + BGR[24:28]),
        COLOURS[np.where(GREY == 255, 6, 1)],
    ),
    "bmp, 4 bits": (bmp(SIZE, 4, words(packed(UP, 4)), BGR), RGB),
    "bmp, 8 bits": (bmp(SIZE, 8, words(row.tobytes() for row in UP), BGR), RGB),
    "bmp, 8 bits, runs": (bmp(SIZE, 8, run_lengths(UP), BGR, 1), RGB),
    "bmp, 16 bits": (bmp(SIZE, 16, words(x.tobytes() for x in OF_16_BITS[::-1])), RGB),
    "bmp, 24 bits": (encoded(RGB, "BMP"), RGB),
    "bmp, 24 bits, top-down": (
        bmp((5, -3), 24, words(row[:, ::-1].tobytes() for row in RGB)),
        RGB,
    ),
    "bmp, 32 bits": (bmp((5, -3), 32, in_words(RGB, (16, 8, 0), "<u4").tobytes()), RGB),
    "bmp, red first": (
        bmp((5, -3), 32, RED_FIRST[0].tobytes(), compression=3, masks=RED_FIRST[1]),
        RGB,
    ),
    "bmp, grey": (encoded(GREY, "BMP"), GREY),
    "bmp of OS/2": (
        os2_bmp(PLACES, np.resize(COLOURS[:, ::-1], (256, 3)).tobytes()),
        RGB,
    ),
}


def read(tmp_path, content, *channels):
    path = tmp_path / "a.png"  # whatever it is called
    path.write_bytes(content)
    return image_folder.read_image(path, *channels)


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_what_the_file_says(tmp_path, name):
    content, expected = FILES[name]
    is_grey = expected.ndim == 2
    image = read(tmp_path, content)
    assert image.dtype == "uint8"
    np.testing.assert_array_equal(image[..., 0] if is_grey else image, expected)
    # A second opinion on the file itself, and on its grey.
    pillow = Image.open(io.BytesIO(content))
    if "16 bits" not in name:
        np.testing.assert_array_equal(read(tmp_path, content, 3), pillow.convert("RGB"))
    grey = expected if is_grey else np.round(expected @ [0.299, 0.587, 0.114])
    np.testing.assert_allclose(read(tmp_path, content, 1)[..., 0], grey, atol=1)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_photos_are_nearly_what_was_written(tmp_path, mode):
    colour = np.full((16, 16, 3), (200, 100, 50), "uint8")
    image = read(tmp_path, encoded(colour, "JPEG", mode, quality=100))
    expected = [124] if mode == "L" else [200, 100, 50]
    np.testing.assert_allclose(image, np.broadcast_to(expected, image.shape), atol=3)
    assert image.shape == (16, 16, len(expected))


@pytest.mark.parametrize(
    "content",
    [
        bmp((5, 3), 32, bytes(60), b"", 3, (1, 2, 4)),
        bmp((5, 3), 2, bytes(12), bytes(16)),
        FILES["bmp, 8 bits"][0][:-9],
        FILES["png, alpha"][0].replace(b"IDATx", b"IDATy"),
        encoded(RGB, "TIFF"),
        b"",
    ],
    ids=["bit fields", "2 bits", "cut", "checksum", "TIFF", "empty"],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, content):
    with pytest.raises(ValueError, match=r"/a\.png'.* Received: "):
        read(tmp_path, content)


def exif(orientation, order="<"):
    """EXIF data with another entry in front of the orientation."""
    entries = [(0x0100, 3, 1, 7, 0), (0x0112, 3, 1, orientation, 0)]
    mark = b"II*\0" if order == "<" else b"MM\0*"
    table = b"".join(struct.pack(f"{order}HHIHH", *entry) for entry in entries)
    return b"Exif\0\0" + mark + struct.pack(f"{order}IH", 8, 2) + table + bytes(4)


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_upright(tmp_path, form, orientation):
    data = exif(orientation, "<>"[orientation % 2])
    image = read(tmp_path, encoded(PIXELS, form, exif=data))
    expected = np.array(SHOWN[orientation], "uint8") * 40
    np.testing.assert_allclose(image[4::8, 4::8, 0], expected, atol=3)
    assert image.shape[:2] == tuple(8 * n for n in expected.shape)


@pytest.mark.parametrize("data", [exif(9), exif(6)[:23], exif(6)[:10], b"Exif\0\0"])
def test_damaged_orientations_do_not_count(tmp_path, data):
    image = read(tmp_path, encoded(PIXELS, "JPEG", exif=data, quality=100))
    np.testing.assert_allclose(image[..., 0], PIXELS, atol=3)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_several_frames_the_first_one_is_read(tmp_path, caplog, form):
    frames = [np.full((4, 4, 3), level, "uint8") for level in (80, 160)]
    others = [Image.fromarray(frame) for frame in frames[1:]]
    options = {"lossless": True} if form == "WEBP" else {}
    for rest in ([], others):
        content = encoded(frames[0], form, save_all=True, append_images=rest, **options)
        np.testing.assert_array_equal(read(tmp_path, content, 3), frames[0])
    messages = [record.getMessage() for record in caplog.records]
    # A program says so once.
    assert len(messages) == (form == "GIF")
    assert all("only the first frame of" in message for message in messages)

"""Tests of what picture files say about their pixels."""

import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf

from routing_tf.problems import image_files
from routing_tf.problems.datasets import image_folder

PIXELS = np.repeat(np.arange(6, dtype="uint8").reshape(2, 3, 1) * 40, 8, axis=0)
PIXELS = np.repeat(PIXELS, 8, axis=1)
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


def exif(orientation, order="<", before=()):
    """EXIF data with other entries in front of the orientation."""
    entries = [*before, (0x0112, 3, 1, orientation, 0)]
    mark = b"II*\0" if order == "<" else b"MM\0*"
    table = b"".join(struct.pack(f"{order}HHIHH", *entry) for entry in entries)
    return mark + struct.pack(f"{order}IH", 8, len(entries)) + table + bytes(4)


def jpeg(data, marker=0xE1):
    plain = tf.io.encode_jpeg(PIXELS, quality=100).numpy()
    segment = struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data
    return plain[:2] + segment + plain[2:]


def png(data, name=b"eXIf"):
    plain = tf.io.encode_png(PIXELS).numpy()
    chunk = name + data
    chunk = struct.pack(">I", len(data)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return plain[:33] + chunk + plain[33:]


def webp(name, data):
    """The parts of a WebP file, without the pixels."""
    space = data + b"\0" * (len(data) % 2)
    parts = b"VP8X" + struct.pack("<I", 10) + bytes(4)
    parts += struct.pack("<HBHB", 2, 0, 1, 0)
    parts += b"odd " + struct.pack("<I", 3) + b"abc\0"
    parts += name + struct.pack("<I", len(data)) + space
    return b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WEBP" + parts


def gif(num_frames):
    """A GIF of 1 x 1 pixels with a table of colours, as short as can be."""
    extension = b"\x21\xf9\x04" + bytes(4) + b"\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    table = bytes([0, 0, 0, 255, 255, 255])
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0)
    return head + table + (extension + frame) * num_frames + b"\x3b"


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("form", ["jpeg", "png"])
def test_images_are_turned_upright(tmp_path, form, orientation):
    data = exif(orientation, "<>"[orientation % 2])
    content = jpeg(b"Exif\0\0" + data) if form == "jpeg" else png(data)
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    image = image_folder.read_image(path)
    expected = np.array(SHOWN[orientation], "uint8") * 40
    np.testing.assert_allclose(image[4::8, 4::8, 0], expected, atol=3)
    assert image.shape == (*(8 * n for n in expected.shape), 1)


@pytest.mark.parametrize("order", "<>")
def test_orientation(order):
    data = exif(8, order, [(0x0100, 3, 1, 7, 0), (0x010F, 2, 9, 7, 0)])
    named = b"Exif\0\0" + data
    for content in (jpeg(named), png(data), webp(b"EXIF", data), webp(b"EXIF", named)):
        assert image_files.orientation(content) == 8
    # Filling and other segments may come first.
    content = jpeg(named)
    assert image_files.orientation(content[:2] + b"\xff\xff" + content[2:]) == 8
    first = jpeg(b"http://ns.adobe.com/xap/1.0/\0")
    assert image_files.orientation(first[:35] + content[2:]) == 8


@pytest.mark.parametrize(
    "content",
    [
        jpeg(b"Exif\0\0" + exif(9)),
        jpeg(b"Exif\0\0" + exif(0)),
        jpeg(b"Exif\0\0" + exif(6)[:17]),
        jpeg(b"Exif\0\0II*\0\xff\xff\xff\xff"),
        jpeg(b"Exif\0\0"),
        jpeg(exif(6)),
        jpeg(b"Exif\0\0" + exif(6), marker=0xE2),
        jpeg(b"Exif\0\0" + exif(6))[:20],
        png(b""),
        webp(b"EXIF", exif(6))[:-14],
        gif(1),
        b"no image",
        b"",
    ],
)
def test_what_says_nothing_is_left_as_it_is(content):
    assert image_files.orientation(content) == 1


def test_more_frames_are_told(tmp_path, caplog):
    for name, num_frames in (("one", 1), ("two", 2), ("three", 3)):
        path = tmp_path / f"{name}.gif"
        path.write_bytes(gif(num_frames))
        assert image_folder.read_image(path).shape[:2] == (1, 1)
        assert image_files.has_more_frames(gif(num_frames)) == (num_frames > 1)
    [record] = caplog.records
    assert f"only the first frame of {tmp_path}/two.gif is read" in record.getMessage()
    assert not image_files.has_more_frames(gif(2)[:-14])
    assert image_files.has_more_frames(png(bytes(8), b"acTL"))
    assert image_files.has_more_frames(webp(b"ANIM", bytes(6)))
    assert not image_files.has_more_frames(webp(b"EXIF", bytes(6)))


def test_webp_of_several_frames_is_refused(tmp_path):
    (tmp_path / "a.webp").write_bytes(webp(b"ANIM", bytes(6)))
    with pytest.raises(ValueError, match="a.webp' must have one frame"):
        image_folder.read_image(tmp_path / "a.webp")


@pytest.mark.parametrize(
    "content, size",
    [
        (png(b""), (16, 24)),
        (gif(1), (1, 1)),
        (b"BM" + bytes(16) + struct.pack("<ii", 5, -3), (3, 5)),
        (webp(b"EXIF", b""), (2, 3)),
        (b"RIFF....WEBPVP8L" + bytes(5) + struct.pack("<I", 6 + (4 << 14)), (5, 7)),
        (
            b"RIFF....WEBPVP8 " + bytes(10) + struct.pack("<HH", 7 + (1 << 14), 5),
            (5, 7),
        ),
        (png(b"")[:20], (0, 0)),
        (b"", (0, 0)),
    ],
)
def test_size(content, size):
    assert image_files.size(content) == size


def test_webp_is_read(tmp_path):
    # 1 x 1 pixel, as `cwebp -lossless` writes it.
    content = bytes.fromhex(
        "524946461a000000574542505650384c0d0000002f00000010071011118888fe0700"
    )
    (tmp_path / "a.webp").write_bytes(content)
    assert image_folder.read_image(tmp_path / "a.webp").shape[:2] == (1, 1)
    assert image_files.size(content) == (1, 1)


def bmp(pixels):
    """A BMP file of `<uint8>[height, width, 3]`; a row takes whole words of 4 bytes."""
    height, width, _ = pixels.shape
    rows = [row.tobytes() + bytes(-3 * width % 4) for row in pixels[::-1, :, ::-1]]
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    size = 54 + sum(map(len, rows))
    return b"BM" + struct.pack("<IHHI", size, 0, 0, 54) + head + b"".join(rows)


@pytest.mark.parametrize("form", ["gif", "bmp", "png", "jpg"])
def test_all_forms_are_converted(tmp_path, form):
    colour = np.full((4, 4, 3), (200, 100, 50), "uint8")
    content = {
        "gif": gif(1),
        "bmp": bmp(colour),
        "png": tf.io.encode_png(colour).numpy(),
        "jpg": tf.io.encode_jpeg(colour, quality=100).numpy(),
    }[form]
    (tmp_path / "a").write_bytes(content)
    assert image_folder.read_image(tmp_path / "a").shape[2] == 3
    assert image_folder.read_image(tmp_path / "a", 3).shape[2] == 3
    gray = image_folder.read_image(tmp_path / "a", 1)
    assert gray.shape[2] == 1
    if form != "gif":
        # 0.299 of red, 0.587 of green and 0.114 of blue.
        np.testing.assert_allclose(gray, 124, atol=5)

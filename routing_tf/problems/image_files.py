"""Size, orientation and number of frames of picture files."""

import struct

# The parts of a file with EXIF data, and its tag for the orientation.
EXIF_PARTS = (b"Exif", b"eXIf", b"EXIF")
ORIENTATION_TAG = 0x0112
# The parts of PNG and WebP files that show more than one frame.
ANIMATION_PARTS = (b"acTL", b"ANIM")
# Segments of JPEG: the compressed pixels, one of an application, those without data.
SCAN, APP1, BARE = 0xDA, 0xE1, {0x01, *range(0xD0, 0xDA)}


def size(content):
    """Returns height and width of a picture from its first bytes; 0 if unknown.

    JPEG is left to TensorFlow.
    """
    try:
        if content.startswith(b"\x89PNG"):
            width, height = struct.unpack_from(">II", content, 16)
        elif content.startswith(b"GIF8"):
            width, height = struct.unpack_from("<HH", content, 6)
        elif content.startswith(b"BM"):
            width, height = struct.unpack_from("<ii", content, 18)
        elif _is_webp(content):
            height, width = _webp_size(content)
        else:
            height = width = 0
    except struct.error:  # a damaged file
        height = width = 0
    return abs(height), abs(width)


def orientation(content):
    """Returns the orientation of a picture, 1 to 8 as in EXIF; 1 without EXIF data.

    `content` are the bytes of a JPEG, PNG or WebP file.
    """
    exif = next((data for name, data in _parts(content) if name in EXIF_PARTS), b"")
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (number,) = struct.unpack_from(f"{order}H", exif, start)
        for place in range(start + 2, start + 2 + 12 * number, 12):
            entry = struct.unpack_from(f"{order}HHIH", exif, place)
            if entry[:3] == (ORIENTATION_TAG, 3, 1):
                return entry[3] if 1 <= entry[3] <= 8 else 1
    except struct.error:  # damaged, so it does not count
        pass
    return 1


def upright(image, orientation):
    """Turns an array `[height, width, channels]` by its EXIF orientation.

    Example:
    ```python
    import numpy as np
    from routing_tf.problems import image_files

    sideways = np.array([[[1], [2], [3]]])
    image_files.upright(sideways, 6)  # [[[1]], [[2]], [[3]]]
    ```
    """
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return image


def has_more_frames(content):
    """Tells whether a GIF, PNG or WebP file has more than one frame."""
    if content.startswith(b"GIF8"):
        return _gif_has_more_frames(content)
    return any(name in ANIMATION_PARTS for name, _ in _parts(content))


def _is_webp(content):
    return content.startswith(b"RIFF") and content[8:12] == b"WEBP"


def _webp_size(content):
    kind = content[12:16]
    if kind == b"VP8X":
        low_width, high_width, low_height, high_height = struct.unpack_from(
            "<HBHB", content, 24
        )
        width, height = (high_width << 16) + low_width, (high_height << 16) + low_height
        return height + 1, width + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", content, 26)
    return height & 0x3FFF, width & 0x3FFF


def _parts(content):
    """Yields name and data of the complete parts of a file."""
    try:
        if content.startswith(b"\xff\xd8"):
            yield from _jpeg_segments(content)
        elif content.startswith(b"\x89PNG"):
            yield from _chunks(content, 8, ">I4s", lambda size: size + 4)
        elif _is_webp(content):
            yield from _chunks(content, 12, "<4sI", lambda size: size + size % 2)
    except struct.error:
        return


def _chunks(content, place, header, space):
    """Chunks that begin with a name and a size; `space` of the size is their length."""
    while place + 8 <= len(content):
        name, size = struct.unpack_from(header, content, place)
        if isinstance(name, int):
            name, size = size, name
        place += 8
        yield name, content[place : place + size]
        place += space(size)


def _jpeg_segments(content):
    """The segments before the pixels; only those of EXIF have a name."""
    place = 2
    while place + 2 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker == SCAN:
            return
        if marker == 0xFF:  # filling
            place += 1
            continue
        place += 2
        if marker in BARE:
            continue
        (size,) = struct.unpack_from(">H", content, place)
        data = content[place + 2 : place + size]
        if marker == APP1 and data.startswith(b"Exif\0\0"):
            yield b"Exif", data
        place += size


def _gif_has_more_frames(content):
    def table(flags):
        """The bytes of a table of colours, if there is one."""
        return 3 << (flags & 7) + 1 if flags & 0x80 else 0

    try:
        place, num_frames = 13 + table(content[10]), 0
        while content[place] in b"\x21\x2c":  # an extension or a frame
            if content[place] == 0x2C:
                num_frames += 1
                place += 10 + table(content[place + 9]) + 1
            else:
                place += 2
            if num_frames == 2:
                return True
            while content[place]:  # blocks, each after its size
                place += 1 + content[place]
            place += 1
    except IndexError:  # cut off
        pass
    return False

"""Tests of pictures."""

import numpy as np
import pytest
import tensorflow as tf
from matplotlib import figure

from routing_tf.analysis import pictures

PNG = b"\x89PNG\r\n\x1a\n"


def read(path):
    content = path.read_bytes()
    assert content.startswith(PNG)
    return tf.io.decode_png(content, channels=3).numpy()


def test_maps(tmp_path):
    maps = {"routed_heads": np.zeros((2, 9, 9)), "local_heads": np.eye(9)[None]}
    pictures.draw_maps(maps, "block_3", tmp_path / "maps.png")
    image = read(tmp_path / "maps.png")
    assert image.std() > 0
    height, width, _ = image.shape
    assert width > 2 * height  # three panels in a row
    # The weights of the last head alone are dark.
    dark = (image.max(axis=-1) < 60).mean(axis=0)
    assert dark[width * 2 // 3 :].sum() > 2 * dark[: width // 3].sum()


@pytest.mark.parametrize("length, tokens", [(5, list("ab$_$")), (100, None)])
def test_axes_of_maps_name_positions(length, tokens, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *_, **__: figures.append(self)
    )
    maps = {"local_heads": np.eye(length)[None]}
    pictures.draw_maps(maps, "", tmp_path / "maps.png", tokens)
    panel, scale = figures[0].axes
    for axis in (panel.xaxis, panel.yaxis):
        ticks, labels = axis.get_ticklocs(), axis.get_ticklabels()
        assert len(ticks) <= 24 and all(tick == int(tick) for tick in ticks)
        for tick, label in zip(ticks, labels, strict=True):
            name = "" if tokens is None else f"{tokens[tick]} "
            assert label.get_text() == f"{name}{tick}"
    assert scale.get_ylabel() == "attention weight"
    assert scale.get_ylim() == (0, 1)
    figures[0].draw_without_rendering()  # a dollar begins no formula


def test_many_heads(tmp_path):
    pictures.draw_maps({"local_heads": np.zeros((6, 4, 4))}, "", tmp_path / "a.png")
    height, width, _ = read(tmp_path / "a.png").shape
    assert width < 2 * height


def test_text(tmp_path):
    text = "costs $5 or $6\n" * 3
    ways = [False, True]
    areas = []
    for way in ways:
        pieces = [pictures.Piece(character, way) for character in text]
        pictures.draw_text(pieces, "title", tmp_path / "text.png")
        image = read(tmp_path / "text.png").astype(int)
        # Yellow: much red, little blue.
        areas.append((image[..., 0] - image[..., 2] > 100).mean())
    assert areas[0] == 0
    assert areas[1] > 0.05


def test_a_piece_with_a_colour_of_its_own(tmp_path):
    pieces = [pictures.Piece(text, False) for text in ("ab\n", "c" * 40, "d")]
    blue = []
    for number in (None, 1, 2):
        pictures.draw_text(pieces, "title", tmp_path / "text.png", number)
        image = read(tmp_path / "text.png").astype(int)
        blue.append((image[..., 2] - image[..., 0] > 50).sum())
    assert blue[0] == 0
    assert blue[1] > 20 * blue[2] > 0


def test_lay_out():
    pieces = [
        pictures.Piece("ab", True),
        pictures.Piece("\n", False),
        pictures.Piece("\tcd", True),
    ]
    cells = pictures.lay_out(pieces, num_columns=5)
    assert cells == [
        (0, 0, "a", True),
        (0, 1, "b", True),
        (0, 2, "↵", False),
        *[(1, column, " ", True) for column in range(4)],
        (1, 4, "c", True),
        (2, 0, "d", True),
    ]
    assert pictures.lay_out([]) == []

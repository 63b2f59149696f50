"""Folders of raw files and of prepared data."""

import pytest


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"

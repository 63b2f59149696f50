"""Models of these tests run eagerly on TensorFlow: they are looked into once."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def all_eager(eager):
    """Every module of these tests is eager."""

"""Models of these tests run eagerly on TensorFlow, but where a test asks for more."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def all_eager(eager):
    """Tests of what is compiled take the fixture `compiled`."""

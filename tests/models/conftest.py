"""Models of these tests run eagerly on TensorFlow, but where a test asks for more."""

import pytest

from tests import tracing


@pytest.fixture(autouse=True, scope="module")
def eager():
    with tracing.eager():
        yield


@pytest.fixture
def traced():
    """For tests of what is compiled."""
    with tracing.traced():
        yield

"""What builders refuse."""

import pathlib

import pytest

from routing_tf.problems import builders


@pytest.fixture
def refusal():
    """The message with which a builder refuses; it leaves nothing behind."""

    def refusal(builder, raw_dir=None):
        with pytest.raises(ValueError) as refused:
            builders.prepare(builder, raw_dir)
        assert not pathlib.Path(builder.data_dir_root).exists()
        return str(refused.value)

    return refusal

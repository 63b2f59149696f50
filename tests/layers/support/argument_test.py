"""Tests of declared arguments; `tests/layers/refusals_test` tries each wrong value."""

import numpy as np
import pytest

from routing_tf import layers


def test_arguments_are_checked_whenever_they_are_set():
    heads = layers.MultipoleHeads(np.int64(2), 4, 4)
    assert type(heads.num_heads) is int
    with pytest.raises(ValueError, match="`num_sinks`.*num_sinks=-1"):
        heads.num_sinks = -1
    heads.num_sinks = 2
    assert heads.num_sinks == heads.get_config()["num_sinks"] == 2

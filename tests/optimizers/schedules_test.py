"""Tests of the learning rate schedules, against tensor2tensor's numbers first."""

import json
import pathlib

import keras
import numpy as np
import pytest

from routing_tf.optimizers import FactorSchedule
from routing_tf.optimizers import NoamSchedule

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "training"
CASES = json.loads((GOLDEN / "learning_rate.json").read_text())
CASES = {name: case for name, case in CASES.items() if "steps" in case}


def schedule_of(hparams):
    """The schedule that tensor2tensor builds from `hparams`."""
    if hparams["learning_rate_schedule"] == "legacy":
        return NoamSchedule(
            hparams["learning_rate"],
            hparams["learning_rate_warmup_steps"],
            hparams["hidden_size"],
            optimizer_factor=0.002 if hparams["optimizer"] == "adam" else 1.0,
        )
    return FactorSchedule(
        hparams["learning_rate_schedule"],
        constant=hparams["learning_rate_constant"],
        warmup_steps=hparams["learning_rate_warmup_steps"],
        hidden_dim=hparams["hidden_size"],
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_equals_tensor2tensor(name, dtype):
    if dtype == "int64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no int64 by default")
    case = CASES[name]
    schedule = schedule_of(case["hparams"])
    rates = [
        schedule(keras.ops.convert_to_tensor(step, dtype=dtype))
        for step in case["steps"]
    ]
    rates = [keras.ops.convert_to_numpy(rate) for rate in rates]
    assert {rate.dtype.name for rate in rates} == {"float32"}
    np.testing.assert_allclose(rates, case["values"], rtol=1e-6)


def test_single_factor_is_a_float32_tensor():
    rate = FactorSchedule("constant", constant=0.25)(7)
    assert keras.ops.is_tensor(rate)
    assert keras.backend.standardize_dtype(rate.dtype) == "float32"
    assert float(rate) == 0.25


@pytest.mark.parametrize(
    "schedule",
    [
        FactorSchedule(),
        FactorSchedule("rsqrt_hidden_size*cosine_decay", 0.1, 20, 64, 300),
        NoamSchedule(0.1, 4000, 512, optimizer_factor=0.002),
    ],
)
def test_serialization_inside_an_optimizer(schedule):
    optimizer = keras.optimizers.SGD(schedule)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    config = keras.optimizers.deserialize(config).get_config()["learning_rate"]
    copy = keras.optimizers.schedules.deserialize(config)
    assert type(copy) is type(schedule)
    assert copy.get_config() == schedule.get_config()
    assert float(copy(250)) == float(schedule(250))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"factors": "constant*rsqrt"},
            "`factors`.*'rsqrt_normalized_decay'.*factors='",
        ),
        ({"factors": None}, "`factors`.*factors=None"),
        ({"warmup_steps": 0}, "`warmup_steps`.*warmup_steps=0"),
        ({"factors": "rsqrt_hidden_size"}, "Received: hidden_dim=None"),
        ({"factors": "cosine_decay"}, "Received: decay_steps=None"),
        (
            {"factors": "cosine_decay", "warmup_steps": 9, "decay_steps": 9},
            "Received: decay_steps=9, warmup_steps=9",
        ),
    ],
)
def test_invalid_factor_schedule(arguments, message):
    with pytest.raises(ValueError, match=message):
        FactorSchedule(**arguments)


@pytest.mark.parametrize("name", ["warmup_steps", "hidden_dim"])
def test_invalid_noam_schedule(name):
    arguments = {"learning_rate": 0.1, "warmup_steps": 4000, "hidden_dim": 512}
    message = f"`{name}`.*Received: {name}=0.5"
    with pytest.raises(ValueError, match=message):
        NoamSchedule(**{**arguments, name: 0.5})

"""Tests of the Adafactor optimizer, against tensor2tensor's numbers first."""

import pathlib

import keras
import numpy as np
import pytest

from routing_tf.optimizers import Adafactor
from routing_tf.optimizers import FactorSchedule

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "training" / "adafactor.npz"
VARIANTS = {
    "release": {},
    "no_param_scale": {"scale_by_parameter": False},
    "adam_decay": {"decay_type": "adam"},
}
SLOT_NAMES = {"slot_vr": "row_moment", "slot_vc": "column_moment", "slot_v": "moment"}


def apply(optimizer, gradients, variables):
    gradients = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
    optimizer.apply(gradients, variables)


def to_numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def slots_of(optimizer):
    """Slots by their names, without those of the base class."""
    slots = {variable.name: variable for variable in optimizer.variables}
    return {k: v for k, v in slots.items() if k not in ("iteration", "learning_rate")}


def regression_model(optimizer, jit_compile):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(5, 4, name="embedding"),
            keras.layers.Dense(2, name="dense"),
        ]
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
    return model


def regression_data():
    random = np.random.default_rng(0)
    ids = np.array([[1, 1, 3], [1, 0, 3]], dtype="int32")
    return ids, random.normal(size=(2, 3, 2)).astype("float32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_tensor2tensor(variant):
    golden = np.load(GOLDEN)
    rates = [float(rate) for rate in golden["in/learning_rates"]]
    optimizer = Adafactor(rates[0], **VARIANTS[variant])
    names = [f"v{index}" for index in range(5)]
    variables = [keras.Variable(golden[f"var/{name}"], name=name) for name in names]
    optimizer.build(variables)
    slots = slots_of(optimizer)
    compared = 0
    for step, rate in enumerate(rates):
        optimizer.learning_rate = rate
        gradients = [golden[f"in/grad_{name}_step{step}"] for name in names]
        apply(optimizer, gradients, variables)
        actual = {}
        for name, variable in zip(names, variables):
            actual[name] = variable
            for golden_name, slot_name in SLOT_NAMES.items():
                actual[f"{golden_name}_{name}"] = slots.get(f"{name}_{slot_name}")
        for name, value in actual.items():
            key = f"out/{variant}/{name}_step{step}"
            if key in golden:
                expected = golden[key]
                error = np.max(np.abs(to_numpy(value) - expected))
                assert error <= 1e-5 * np.max(np.abs(expected)), key
                compared += 1
    assert compared == sum(key.startswith(f"out/{variant}/") for key in golden)


def test_keeps_no_slot_of_full_size_for_a_matrix():
    variables = [
        keras.Variable(np.ones((3, 4, 5), "float32"), name="kernel"),
        keras.Variable(np.ones((5,), "float32"), name="bias"),
    ]
    optimizer = Adafactor()
    optimizer.build(variables)
    shapes = {name: tuple(slot.shape) for name, slot in slots_of(optimizer).items()}
    assert shapes == {
        "kernel_row_moment": (3, 4),
        "kernel_column_moment": (3, 5),
        "bias_moment": (5,),
    }


def test_stays_finite_with_a_single_live_entry():
    variable = keras.Variable(np.ones((4, 6), "float32"))
    gradient = np.zeros((4, 6), "float32")
    gradient[1, 2] = 1.0
    apply(Adafactor(0.1), [gradient], [variable])
    np.testing.assert_array_equal(to_numpy(variable) != 1.0, gradient != 0.0)
    assert np.all(np.isfinite(to_numpy(variable)))


def test_clipping_threshold_bounds_the_update():
    gradients = np.random.default_rng(0).normal(size=(2, 6)).astype("float32")
    gradients[1] *= 100.0

    def second_update(threshold):
        variable = keras.Variable(np.zeros((6,), "float32"))
        optimizer = Adafactor(
            1.0, clipping_threshold=threshold, scale_by_parameter=False
        )
        apply(optimizer, [gradients[0]], [variable])
        before = to_numpy(variable)
        apply(optimizer, [gradients[1]], [variable])
        return np.sqrt(np.mean((to_numpy(variable) - before) ** 2))

    assert second_update(None) > 1.1
    assert second_update(0.5) == pytest.approx(0.5, rel=1e-5)


def test_momentum_averages_the_updates():
    gradients = np.random.default_rng(0).normal(size=(4, 3, 5)).astype("float32")

    def trajectory(beta_1):
        variable = keras.Variable(np.zeros((3, 5), "float32"), name="kernel")
        optimizer = Adafactor(0.1, beta_1=beta_1, scale_by_parameter=False)
        values = [to_numpy(variable)]
        for gradient in gradients:
            apply(optimizer, [gradient], [variable])
            values.append(to_numpy(variable))
        return np.diff(values, axis=0), slots_of(optimizer)

    updates, slots = trajectory(0.0)
    assert "kernel_momentum" not in slots
    averaged, slots = trajectory(0.9)
    assert tuple(slots["kernel_momentum"].shape) == (3, 5)
    expected = np.zeros((3, 5))
    for update, actual in zip(updates, averaged):
        expected = 0.9 * expected + 0.1 * update
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (5, 6)])
def test_bfloat16_variables_are_updated_in_float32(shape):
    random = np.random.default_rng(0)

    def rounded(x):
        return to_numpy(keras.ops.cast(x, "bfloat16"))

    start, gradient = rounded(random.normal(size=(2, *shape)))
    reference = keras.Variable(start, name="x")
    variable = keras.Variable(start, dtype="bfloat16", name="x")
    apply(Adafactor(0.1), [gradient], [reference])
    optimizer = Adafactor(0.1)
    optimizer.apply([keras.ops.cast(gradient, "bfloat16")], [variable])
    assert variable.dtype == "bfloat16"
    assert {slot.dtype for slot in slots_of(optimizer).values()} == {"float32"}
    np.testing.assert_array_equal(to_numpy(variable), rounded(to_numpy(reference)))


@pytest.mark.parametrize("arguments", [{}, {"global_clipnorm": 0.1}])
def test_repeated_ids_equal_the_one_hot_formulation(arguments):
    ids, targets = regression_data()

    def train(embedding, inputs):
        model = keras.Sequential([keras.Input(inputs.shape[1:]), embedding])
        model.compile(Adafactor(0.1, **arguments), loss="mse", jit_compile=False)
        model.set_weights([table])
        for _ in range(3):
            model.train_on_batch(inputs, targets)
        return model.get_weights()[0]

    table = np.random.default_rng(1).normal(size=(5, 2)).astype("float32")
    looked_up = train(keras.layers.Embedding(5, 2), ids)
    multiplied = train(
        keras.layers.Dense(2, use_bias=False), np.eye(5, dtype="float32")[ids]
    )
    np.testing.assert_allclose(looked_up, multiplied, atol=1e-6)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="JAX gradients are dense"
)
def test_sparse_bfloat16_gradient_is_merged_in_float32():
    import tensorflow as tf

    def sparse(values):
        return tf.IndexedSlices(
            tf.cast(values, tf.bfloat16), tf.zeros(len(values), tf.int64), (2, 1)
        )

    # 256 + 1 is 256 in bfloat16, so a sum in bfloat16 would lose every 1.
    values = np.array([[256.0]] + 256 * [[1.0]], "float32")
    variable = keras.Variable(np.ones((2, 1), "float32"), name="table")
    optimizer = Adafactor()
    optimizer.apply([sparse(values)], [variable])
    moment = slots_of(optimizer)["table_row_moment"]
    np.testing.assert_allclose(to_numpy(moment), [512.0**2, 0.0], atol=1e-20)


def test_fit_with_and_without_jit():
    ids, targets = regression_data()
    trained = []
    for jit_compile in (False, True):
        optimizer = Adafactor(FactorSchedule(constant=0.1), beta_1=0.5)
        model = regression_model(optimizer, jit_compile)
        start = model.get_weights()
        model.fit(ids, targets, batch_size=2, epochs=2, verbose=0)
        trained.append(model.get_weights())
        assert all(np.any(a != b) for a, b in zip(start, trained[-1]))
    for plain, compiled in zip(*trained):
        np.testing.assert_allclose(plain, compiled, rtol=1e-4, atol=1e-6)


def test_config_round_trip():
    arguments = {
        "beta_1": 0.5,
        "beta_2": 0.99,
        "decay_type": "adam",
        "decay_exponent": 0.7,
        "clipping_threshold": None,
        "scale_by_parameter": False,
        "epsilon_1": 1e-20,
        "epsilon_2": 1e-2,
        "name": "mine",
        "global_clipnorm": 2.0,
    }
    optimizer = Adafactor(FactorSchedule(constant=0.3), **arguments)
    config = keras.optimizers.serialize(optimizer)
    copy = keras.optimizers.deserialize(config)
    assert isinstance(copy, Adafactor)
    assert copy.get_config() == optimizer.get_config()
    assert arguments.items() <= copy.get_config().items()
    assert copy.get_config()["learning_rate"]["config"]["constant"] == 0.3


def test_saved_model_continues_where_it_stopped(tmp_path):
    ids, targets = regression_data()
    model = regression_model(Adafactor(0.1, beta_1=0.5), jit_compile=False)
    model.train_on_batch(ids, targets)
    model.save(tmp_path / "model.keras")
    copy = keras.saving.load_model(tmp_path / "model.keras")
    for either in (model, copy):
        either.train_on_batch(ids, targets)
    expected = model.variables + model.optimizer.variables
    actual = copy.variables + copy.optimizer.variables
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-6)


@pytest.mark.parametrize(
    "name, value, requirement",
    [
        ("decay_type", "x", "one of 'pow', 'adam'"),
        ("beta_1", 1.0, "in [0, 1)"),
        ("beta_1", None, "in [0, 1)"),
        ("beta_2", 0.0, "in (0, 1)"),
        ("decay_exponent", -0.8, "positive"),
        ("clipping_threshold", 0.0, "positive or None"),
        ("epsilon_1", 0.0, "positive"),
        ("epsilon_2", "small", "positive"),
    ],
)
def test_invalid_argument(name, value, requirement):
    with pytest.raises(ValueError) as error:
        Adafactor(**{name: value})
    expected = f"`{name}` must be {requirement}. Received: {name}={value!r}"
    assert str(error.value) == expected

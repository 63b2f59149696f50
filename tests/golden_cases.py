"""The golden cases of the original release; running layers on either backend.

Everything is NumPy in and NumPy out. On JAX a layer runs compiled, which takes a
fraction of the time that compiling its operations one by one would take.
"""

import dataclasses
import functools
import json
import pathlib

import keras
import numpy as np

FOLDER = pathlib.Path(__file__).parent / "golden"
# The test cases are tiny: compiling takes much longer than running.
QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}


def compiler_options():
    """Returns options of `jax.jit` for tests; a GPU's compiler knows none of them."""
    import jax

    return QUICK_TO_COMPILE if jax.default_backend() == "cpu" else None


class Case:
    """One golden file: its settings as `config` and its arrays by their names."""

    def __init__(self, path):
        self.name = pathlib.Path(path).stem
        with np.load(FOLDER / path) as file:
            self.arrays = {name: file[name] for name in file.files}
        self.config = json.loads(str(self.arrays.pop("config_json", "{}")))

    def __getitem__(self, name):
        return self.arrays[name]

    def __contains__(self, name):
        return name in self.arrays

    def group(self, prefix):
        """Returns the arrays below `prefix/` by the rest of their names."""
        start = f"{prefix}/"
        return {
            name.removeprefix(start): array
            for name, array in self.arrays.items()
            if name.startswith(start)
        }


def paths(pattern):
    """Returns the golden files that fit a pattern, as `load` takes them."""
    found = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob(pattern))
    if not found:
        raise ValueError(f"No golden file fits the pattern. Received: {pattern!r}")
    return found


def load(path):
    """Returns a golden case by its path below `tests/golden`."""
    return Case(path)


def relative_error(actual, expected):
    """Returns `max |actual - expected| / max |expected|`."""
    difference = _largest(_float64(actual) - _float64(expected))
    scale = _largest(_float64(expected))
    return difference / scale if scale else np.inf * difference if difference else 0.0


def assert_close(actual, expected, tolerance, absolute_floor=0.0, label=""):
    """Fails unless the relative error or the largest difference is small enough."""
    actual, expected = _float64(actual), _float64(expected)
    assert actual.shape == expected.shape, f"{label}: {actual.shape}, {expected.shape}"
    error = relative_error(actual, expected)
    difference = _largest(actual - expected)
    assert error <= tolerance or difference <= absolute_floor, (
        f"{label}: relative error {error:.2e} > {tolerance:.0e}, "
        f"largest difference {difference:.2e}"
    )


def run(layer, *arguments, **options):
    """Calls a built layer once and returns outputs and losses.

    Args:
        layer: a layer or model; state that it writes stays written. Its settings, such
            as `trainable`, must not change between calls with the same options.
        *arguments: arrays, None, or dicts of them.
        **options: call arguments by name; arrays, and structures of them, are traced.

    Returns:
        Outputs, and the list of losses.
    """
    if keras.backend.backend() != "jax":
        outputs = layer(*arguments, **options)
        return to_numpy(outputs), to_numpy(list(layer.losses))
    arrays = {k: v for k, v in options.items() if _are_arrays(v)}
    fixed = tuple((k, v) for k, v in options.items() if k not in arrays)
    outputs, state, losses = _compiled_call(layer, fixed)(
        _values(layer.trainable_variables),
        _values(layer.non_trainable_variables),
        arguments,
        arrays,
    )
    _assign(layer.non_trainable_variables, state)
    return to_numpy(outputs), to_numpy(losses)


def _are_arrays(structure):
    leaves = keras.tree.flatten(structure)
    return bool(leaves) and all(isinstance(leaf, np.ndarray) for leaf in leaves)


@dataclasses.dataclass
class Result:
    """What one differentiated call gave, in NumPy; a gradient may be None.

    Attributes:
        outputs: what the layer returned.
        losses: list of the losses that the layer added.
        inputs: gradients of the differentiated arguments, by name.
        variables: gradients of the trainable variables, by name.
    """

    outputs: object
    losses: list
    inputs: dict
    variables: dict


def gradients(layer, objective, arguments, wrt=(), variables=None):
    """Calls a built layer once and differentiates a function of what it gave.

    Args:
        layer: a layer or model; state that it writes stays written.
        objective: function of the outputs and the list of losses; returns a scalar.
        arguments: dict of all call arguments by name.
        wrt: names of the arguments, float arrays, to differentiate with respect to.
        variables: dict of Keras variables by name, trainable or not; None for the
            trainable variables of `layer` by their paths.

    Returns:
        A `Result`.
    """
    if variables is None:
        variables = {variable.path: variable for variable in layer.variables}
    variables = {name: v for name, v in variables.items() if v.trainable}
    on_backend = {
        "tensorflow": _gradients_tensorflow,
        "jax": _gradients_jax,
        "torch": _gradients_torch,
    }[keras.backend.backend()]
    return on_backend(layer, objective, arguments, wrt, variables)


def gradient(function):
    """Returns the gradient of a scalar function of tensors by the first of them."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(function)

    def on_tensorflow(first, *rest):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(first)
            value = function(first, *rest)
        return tape.gradient(value, first)

    def on_torch(first, *rest):
        import torch

        first = first.clone().requires_grad_(True)
        return torch.autograd.grad(function(first, *rest), first)[0]

    return on_tensorflow if keras.backend.backend() == "tensorflow" else on_torch


def to_numpy(structure):
    """Returns a structure of tensors and variables as arrays; None stays None."""

    def convert(x):
        if x is None:
            return None
        return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(x))

    return keras.tree.map_structure(convert, structure, none_is_leaf=True)


def _gradients_tensorflow(layer, objective, arguments, wrt, variables):
    import tensorflow as tf

    tensors = {name: tf.convert_to_tensor(arguments[name]) for name in wrt}
    with tf.GradientTape() as tape:
        tape.watch(list(tensors.values()))
        outputs = layer(**{**arguments, **tensors})
        losses = list(layer.losses)
        value = objective(outputs, losses)
    by_input, by_variable = tape.gradient(
        value, [tensors, {name: v.value for name, v in variables.items()}]
    )
    by_variable = {
        name: None if gradient is None else tf.convert_to_tensor(gradient)
        for name, gradient in by_variable.items()
    }
    return Result(*(to_numpy(x) for x in (outputs, losses, by_input, by_variable)))


def _gradients_jax(layer, objective, arguments, wrt, variables):
    import jax

    trainable = layer.trainable_variables
    rest = {name: value for name, value in arguments.items() if name not in wrt}

    def function(inputs, values, state):
        outputs, state, losses = _stateless_call(
            layer, values, state, (), {**rest, **inputs}
        )
        return objective(outputs, losses), (outputs, state, losses)

    differentiate = jax.jit(
        jax.grad(function, argnums=(0, 1), has_aux=True),
        compiler_options=compiler_options(),
    )
    (by_input, by_value), (outputs, state, losses) = differentiate(
        {name: arguments[name] for name in wrt},
        _values(trainable),
        _values(layer.non_trainable_variables),
    )
    _assign(layer.non_trainable_variables, state)
    by_id = {id(v): gradient for v, gradient in zip(trainable, by_value, strict=True)}
    by_variable = {name: by_id[id(v)] for name, v in variables.items()}
    return Result(*(to_numpy(x) for x in (outputs, losses, by_input, by_variable)))


def _gradients_torch(layer, objective, arguments, wrt, variables):
    import torch

    tensors = {name: keras.ops.convert_to_tensor(arguments[name]) for name in wrt}
    for tensor in tensors.values():
        tensor.requires_grad_(True)
    outputs = layer(**{**arguments, **tensors})
    losses = list(layer.losses)
    values = [*tensors.values(), *(v.value for v in variables.values())]
    gradients = torch.autograd.grad(
        objective(outputs, losses), values, allow_unused=True
    )
    by_input = dict(zip(tensors, gradients))
    by_variable = dict(zip(variables, gradients[len(tensors) :], strict=True))
    return Result(*(to_numpy(x) for x in (outputs, losses, by_input, by_variable)))


@functools.lru_cache(maxsize=8)
def _compiled_call(layer, options):
    import jax

    def call(trainable, state, arguments, arrays):
        return _stateless_call(
            layer, trainable, state, arguments, {**arrays, **dict(options)}
        )

    return jax.jit(call, compiler_options=compiler_options())


def _stateless_call(layer, trainable, state, arguments, options):
    """As `Layer.stateless_call`, which casts no inputs and hands on no masks."""
    variables = layer.trainable_variables + layer.non_trainable_variables
    values = zip(variables, [*trainable, *state], strict=True)
    with keras.StatelessScope(list(values), collect_losses=True) as scope:
        outputs = layer(*arguments, **options)
        losses = list(layer.losses)
    state = [scope.get_current_value(v) for v in layer.non_trainable_variables]
    return outputs, state, losses


def _values(variables):
    return [variable.value for variable in variables]


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _float64(x):
    return np.asarray(x).astype("float64")


def _largest(x):
    return np.abs(x).max() if x.size else 0.0

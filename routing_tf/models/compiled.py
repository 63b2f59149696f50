"""Compiling functions that call a model, on each backend."""

import keras

_MAX_KEPT = 32


def compiled(model, function):
    """Compiles a function of tensors that calls a model without changing it.

    The compiled function sees the weights that the model has when it is called, and
    follows its `compile`: with `run_eagerly` nothing is compiled, and `jit_compile`
    decides whether XLA is used. JAX has no other compiler.
    """
    if keras.backend.backend() not in ("tensorflow", "jax"):
        raise ValueError(
            "The backend must be tensorflow or jax. Received: "
            f"keras.backend.backend()={keras.backend.backend()!r}. Set KERAS_BACKEND"
        )
    kept = {}

    def call(*arguments, **options):
        way = way_of(model)
        if way not in kept:
            kept[way] = _compiled_in_a_way(model, function, way)
        return kept[way](*arguments, **options)

    return call


def way_of(model):
    """Returns how a model is compiled: `"eager"`, `"graph"` or `"xla"`."""
    if model.run_eagerly:
        return "eager"
    if model.jit_compile:
        return "xla"
    return "graph" if keras.backend.backend() == "tensorflow" else "eager"


def compiled_once(model, function, key=()):
    """Returns the result of `compiled`, and reuses the last ones of a model.

    The function must have a unique name. `key` distinguishes its uses, for example by
    shapes of arguments: TensorFlow would compile the second one for any shape.
    """
    # Keras would look for layers in an attribute that it tracks.
    kept = vars(model).setdefault("_compiled_functions", {})
    # A compiled function does not know weights that LoRA or `quantize` add later.
    key = (function.__qualname__, *key, len(model.weights))
    if key not in kept:
        if len(kept) == _MAX_KEPT:
            del kept[next(iter(kept))]
        kept[key] = compiled(model, function)
    return kept[key]


def _compiled_in_a_way(model, function, way):
    if way == "eager":
        return function
    if keras.backend.backend() == "jax":
        return _compiled_on_jax(model, function)
    import tensorflow as tf

    return tf.function(function, jit_compile=way == "xla", autograph=False)


def _compiled_on_jax(model, function):
    import jax

    @jax.jit
    def stateless(values, *arguments):
        variables = list(zip(model.variables, values, strict=True))
        with keras.StatelessScope(variables):
            return function(*arguments)

    def call(*arguments):
        return stateless([variable.value for variable in model.variables], *arguments)

    return call

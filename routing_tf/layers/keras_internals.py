"""Private names of Keras that the package needs; tested with Keras 3.15."""


def declare_call_argument(layer, name):
    """Lets a layer take a call argument that reaches all layers called inside.

    As `training` does: layers that declare it and have it in their `call` get it, in
    models of the functional API too.

    Args:
        layer: a layer that was not called yet.
        name: name of the argument.
    """
    layer._register_call_context_args(name)

"""Classes that stand for a class of `layers` in saved files."""

import keras


def registered_as(base):
    """Returns a decorator that registers a class, and names it as its base.

    Keras finds weights in a file by the class names of layers, and files of earlier
    versions have those of the base. Messages say its `__qualname__`, which stays.
    """

    def register(cls):
        keras.saving.register_keras_serializable("routing_tf", cls.__name__)(cls)
        cls.__name__ = base.__name__
        return cls

    return register

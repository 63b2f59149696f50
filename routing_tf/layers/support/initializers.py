"""Initializers for several weights of one layer."""

import keras


def cloned(initializer):
    """Returns a copy of an initializer, so that unseeded weights start differently."""
    if isinstance(initializer, keras.initializers.Initializer):
        return initializer.clone()
    return initializer

"""Losses that replicas do not mix up."""

import threading
import weakref

import keras

_of_thread = threading.local()


class OwnLosses(keras.layers.Layer):
    """A layer whose added losses are those of its replica alone.

    `tf.distribute` runs each replica in a thread, and lets the threads take turns
    wherever replicas add something up. Keras keeps the losses of a layer in one list,
    so a replica that adds up in a call would find those of all others there, or none.
    Here each thread has its own list.
    """

    @property
    def _losses(self):
        return _lists().setdefault(self, [])

    @_losses.setter
    def _losses(self, value):
        _lists()[self] = list(value)


def _lists():
    """The lists of this thread, by layer."""
    if not hasattr(_of_thread, "lists"):
        _of_thread.lists = weakref.WeakKeyDictionary()
    return _of_thread.lists

"""Constructor arguments that a class declares, with what they may be."""


class Argument:
    """A constructor argument, checked whenever the attribute of its name is set.

    ```python
    from routing_tf import layers
    from routing_tf.layers.support.argument import Argument
    from routing_tf.layers.support.validation import check_positive_integer


    class WideHeads(layers.FullHeads):
        width = Argument(check_positive_integer)

        def __init__(self, num_heads, width=2, **kwargs):
            super().__init__(num_heads, **kwargs)
            self.width = width
    ```

    Args:
        check: function of the name, the value and the options that returns the value to
            keep, or raises a `ValueError`; see `validation`.
        *options: further arguments of `check`, such as choices.
    """

    # There is no `__get__`: attributes are read from the instance, at no cost.

    def __init__(self, check, *options):
        self._check, self._options = check, options

    def __set_name__(self, owner, name):
        self._name = name

    def __set__(self, instance, value):
        value = self._check(self._name, value, *self._options)
        instance.__dict__[self._name] = value

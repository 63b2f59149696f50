"""Hyperparameters as data, for Python and for commands: the standard library alone."""

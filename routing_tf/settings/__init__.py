"""Hyperparameters as data, for Python and for commands, without other packages."""

"""The names of the problems."""

import inspect

from routing_tf.files.names import did_you_mean

_PROBLEMS = {}


def register(name):
    """Registers a `Problem` class under a name; for use as a decorator.

    The first line of the class's docstring describes it in lists of problems.

    Args:
        name: string, the name for `problems.get`, and the attribute `name` of the
            class.

    Example:
    ```python
    from routing_tf import problems


    @problems.register("alphabet")
    class Alphabet(problems.TextProblem):
        def load_split(self, split):
            return ["abcdefghijklmnopqrstuvwxyz"] * 10
    ```
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"`name` must be a string. Received: name={name!r}")

    def add(problem_class):
        if not hasattr(problem_class, "load_split"):
            raise ValueError(
                "`problems.register` must be used on a class of problems, such as a "
                f"`TextProblem`. Received: {problem_class!r} for name={name!r}"
            )
        known = _PROBLEMS.get(name)
        # A class may replace its own older version, as when a notebook cell that
        # defines it is run again.
        if known is not None and _identity(known) != _identity(problem_class):
            raise ValueError(
                "`name` must not be taken by another problem; choose another one. "
                f"Received: name={name!r}, already the name of {_identity(known)}"
            )
        problem_class.name = name
        _PROBLEMS[name] = problem_class
        return problem_class

    return add


def names():
    """Returns the names of all registered problems, as a sorted list."""
    return sorted(_PROBLEMS)


def get(name, data_dir=None, **options):
    """Returns the problem of this name, whose data is not read yet.

    Args:
        name: string, one of `problems.names()`.
        data_dir: string, the folder with the problem's data, for problems that need
            one.
        **options: the problem's own options, such as `sequence_length`; strings, as
            from a command line, are read.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("python_source", sequence_length=256)
    inputs, targets, weights = next(iter(problem.dataset("train", batch_size=4)))
    ```
    """
    problem_class = get_class(name)
    _check_options(name, problem_class, options)
    problem = problem_class(data_dir=data_dir, **options)
    problem.given_options = dict(options)
    return problem


def get_class(name):
    """Returns the `Problem` class registered under a name."""
    if name not in _PROBLEMS:
        listing = "\n".join(f"  {known}: {summary(known)}" for known in names())
        raise ValueError(
            f"`name` must be a registered problem. Received: name={name!r}."
            f"{did_you_mean(name, names())} Registered problems:\n{listing}"
        )
    return _PROBLEMS[name]


def default_hparams_set(name):
    """Returns the name of the hyperparameters that fit a problem."""
    return get_class(name).default_hparams_set


def _check_options(name, problem_class, options):
    known, takes_any = _options_of(problem_class)
    unknown = sorted(set(options) - known)
    if unknown and not takes_any:
        names = sorted(known - {"data_dir"})
        raise ValueError(
            f"`options` of the problem {name!r} must be among {names}. Received: "
            f"{unknown}.{did_you_mean(unknown[0], names)}"
        )


def _options_of(problem_class):
    """The names of a problem's options, and whether it takes any others."""
    known = set()
    for parent in problem_class.__mro__:
        if "__init__" not in vars(parent):
            continue
        parameters = inspect.signature(parent.__init__).parameters.values()
        rest = {p.name for p in parameters if p.kind is p.VAR_KEYWORD}
        known |= {p.name for p in parameters} - rest - {"self"}
        # `**options` stands for those of the base class, up to Problem.
        if not rest or parent is object:
            return known, False
    return known, True


def _identity(problem_class):
    return f"{problem_class.__module__}.{problem_class.__qualname__}"


def summary(name):
    """Returns the first line of the docstring of a problem."""
    lines = (inspect.getdoc(_PROBLEMS[name]) or "").splitlines()
    return lines[0] if lines else "(no description)"

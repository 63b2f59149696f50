"""The common part of all commands: flags that name a problem, and errors for people.

A command reads its flags before it imports TensorFlow and Keras, which takes seconds.
Functions that run later import the modules that need them.
"""

import contextlib
import gc
import importlib
import os
import re
import sys
import tempfile

from absl import app
from absl import flags
from absl import logging

from routing_tf.cli import first_checks
from routing_tf.cli import flag_kinds

# Flags defined here belong to the command, whose `--help` shows them.
flags.disclaim_key_flags()

INTERRUPTED = 130
HELP = {"--help", "-help", "-h", "-?"}
# The start of TensorFlow's lines that are not errors, the line before the first one,
# and the missing driver of a GPU, which it calls an error.
NOTE = re.compile(
    rb"[IW]\d{4} |WARNING: All log messages before absl::|E\d{4} .*call to cuInit: "
)
BACKENDS = ("tensorflow", "jax")
DEFAULT_PROBLEM = "python_source"


def main(run, define_flags):
    """Defines the flags of a process's command, and runs it."""
    command_name = run.__module__.rpartition(".")[2]
    sys.argv[0] = f"python -m routing_tf.{command_name}"  # what --help shows
    define_flags()
    own = flags.FLAGS.get_key_flags_for_module(run.__module__)
    for flag in own:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    said = None
    if not HELP.isdisjoint(sys.argv[1:]):
        about = sys.modules["__main__"].__doc__
        said = f"{about}\nflags:\n\n{sys.argv[0]}:\n{_help(own)}"
    elif "--problem=list" in sys.argv[1:] and "problem" in flags.FLAGS:
        # Also without the flags that are required.
        said = None if "--import" in " ".join(sys.argv) else _list_of_problems()
    if said:
        with contextlib.suppress(BrokenPipeError):
            print(said, flush=True)
        return
    sys.stdout.reconfigure(errors="replace")

    def run_command(argv):
        code = command(run, flags.FLAGS, argv)
        gc.freeze()  # The end of the process would walk through all graphs.
        return code

    app.run(run_command)


def _help(own):
    """Returns what `--help` says of flags: required ones first, others by subject.

    The subject is that of the code that defines them; absl would sort them by name.
    """
    lines = []
    for flag in sorted(own, key=lambda flag: not flag.help.endswith(" Required.")):
        flags.FLAGS.register_key_flag_for_module(f"--{flag.name}", flag)
        _, _, text = flags.FLAGS.module_help(f"--{flag.name}").split("\n", 2)
        lines.append(text.replace("\n    (default: [])", ""))
    return re.sub(r"\(default: '(.*)'\)", r"(default: \1)", "\n".join(lines))


def command(run, options, argv):
    """Runs a command, and reports errors that users can fix in one line on stderr.

    If nobody reads standard output any more, as with `head`, it ends quietly. Returns
    the exit code, which is the result of `run`, a function of `options`; None stands
    for 0. `argv` is the command line without its flags, as `absl.app.run` passes it.
    """
    try:
        code = _run(run, options, argv)
        sys.stdout.flush()  # here, and not when Python ends
        return code
    except BrokenPipeError:
        # The reader of stdout, such as `head`, has closed it; Python would complain
        # again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(run, options, argv):
    try:
        if len(argv) > 1:
            raise ValueError(
                f"Flags must be written as --name=value. Received: {argv[1:]}"
            )
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # tensorflow-datasets tells a lot
        lists_problems = "problem" in options and options.problem == "list"
        if not lists_problems or options["import"].value:
            _prepare(options)
        if lists_problems:
            print(_list_of_problems())
            return 0
        with named_by_flags({name: name for name in options}):
            return run(options)
    except (KeyboardInterrupt, SystemError) as error:
        # C code may turn an interrupt into a SystemError.
        if not _comes_of_interrupt(error):
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except _errors_of_users() as error:
        logging.debug("--verbosity=1 shows where", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1


def _prepare(options):
    """Checks flags, and imports Keras and the modules of the user."""
    modules = options["import"].value or []
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where `python -m` looks, too
    first_checks.check(options)
    use_backend(options.backend)
    for name in modules:
        _import(name)


def _import(name):
    """Imports a module of the user, whose errors name it."""
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ValueError(
            "`--import` must name modules that can be imported. Received: "
            f"--import={name}, which raised {type(error).__name__}: {error}. "
            "--verbosity=1 shows where"
        ) from error


def _list_of_problems():
    from routing_tf.settings import registries

    found = registries.problems()
    if "routing_tf.problems" in sys.modules:  # where others may be registered
        from routing_tf.problems import registry

        found = {name: registry.summary(name) for name in registry.names()}
    return "\n".join(map(": ".join, found.items()))


def _comes_of_interrupt(error):
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _errors_of_users():
    """Errors that users can fix; those of TensorFlow only if it has been imported."""
    errors = (ValueError, FloatingPointError, OSError)
    if "tensorflow" not in sys.modules:
        return errors
    import tensorflow as tf

    return (*errors, tf.errors.OpError)


def use_backend(name):
    """Imports Keras with the backend `name`; None for that of the environment.

    Raises:
        ValueError: if Keras already has another backend.
        SystemExit: if Keras cannot import its backend.
    """
    if name is not None and "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    try:
        with without_notes_of_tensorflow(), _never_collected():
            import keras
            import tensorflow as tf

            tf.config.list_physical_devices()  # looks for a GPU, and complains
    except (ImportError, ValueError) as error:
        sys.exit(
            "error: Keras must have a backend that it can import, tensorflow or jax. "
            f"Received: KERAS_BACKEND={os.environ.get('KERAS_BACKEND')!r}: {error}"
        )
    running = keras.backend.backend()
    if running not in BACKENDS:
        raise ValueError(
            "The backend of Keras must be tensorflow or jax. Received: "
            f"{running}. Pass --backend or set KERAS_BACKEND"
        )
    if name not in (None, running):
        raise ValueError(
            "`--backend` must be that of the Keras that this process has imported "
            f"already, {running}. Received: --backend={name}"
        )
    if running != "tensorflow":
        # TensorFlow then only reads data, and must not take the accelerator's memory.
        tf.config.set_visible_devices([], "GPU")


@contextlib.contextmanager
def _never_collected():
    """Keeps the garbage collector from what is imported here, now and later."""
    if "keras" in sys.modules:
        yield  # nothing of weight is left to import
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def without_notes_of_tensorflow():
    """Hides TensorFlow's lines about processors and accelerators at its import.

    Later lines are hidden, too: real errors of TensorFlow are raised, and its other
    error lines, such as a processor without AVX-512, are not errors. If
    TF_CPP_MIN_LOG_LEVEL is 0 or 1, the lines of this level are shown.
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") in ("0", "1"):
        yield
        return
    # The level does not apply yet to lines that are written while libraries are loaded.
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            lines = (line for line in file if not NOTE.match(line))
            sys.stderr.write(b"".join(lines).decode(errors="replace"))


def refuse(options, names, reason):
    """Raises a `ValueError` if one of these flags is given; see `refuse_flags`."""
    refuse_flags([name for name in names if options[name].present], reason)


def refuse_flags(given, reason):
    """Raises a `ValueError` if there are flags that have no effect.

    `reason` says why: "with ..." or "without ...".
    """
    if given:
        names = ", ".join(f"--{name}" for name in given)
        verb, they = ("has", "it") if len(given) == 1 else ("have", "them")
        raise ValueError(f"{names} {verb} no effect {reason}; remove {they}")


@contextlib.contextmanager
def named_by_flags(names):
    """Replaces arguments in the message of a `ValueError` by their flags.

    "`seed` must be ... Received: seed=x" then names `--seed`. Text of the user, as in
    `--hparams=seed=x`, does not change. `names` is a dict of flags by arguments.
    """
    try:
        yield
    except ValueError as error:
        arguments = "|".join(map(re.escape, names))
        named = rf"(?<![-\w.=,'\"])({arguments})(?=[`=])"
        message = re.sub(named, lambda match: f"--{names[match[1]]}", str(error))
        raise ValueError(message) from error


BACKEND = {
    "backend": flag_kinds.choice(
        None,
        BACKENDS,
        "Backend of Keras. Default: that of KERAS_BACKEND or of Keras's settings, or "
        "else tensorflow.",
    ),
    "import": flag_kinds.strings(
        "Modules of your own to import first, separated by commas. They register head "
        "groups, feed-forward layers, optimizers and problems, whose names other flags "
        "then take. Each is found from the working directory, as by `import`."
    ),
}
CHECKPOINT = {
    "checkpoint": flag_kinds.choice(
        "last",
        ("last", "best"),
        "Which checkpoint of the run to use: the last one, or the best one, with the "
        "lowest held-out loss.",
    )
}
OPTIONS = {
    "problem_option": flag_kinds.repeated(
        "A further option of the problem, as name=value"
    )
}
DATA = {
    "problem": flag_kinds.string(
        None,
        "Name of the problem; --problem=list lists all. Default: that of the run; for "
        f"a new run, text_files if --files is given, or else {DEFAULT_PROBLEM}.",
    ),
    "data_dir": flag_kinds.path("Folder with the problem's data."),
    "files": flag_kinds.paths(
        "Files or glob patterns for the problem text_files, separated by commas. Put "
        "names with commas in double quotes: --files='\"a, b.txt\",c.txt'."
    ),
    **OPTIONS,
}
COMPLETION_FLAGS = ("num_images", "split", *DATA)


def problem_fields(options, earlier=None):
    """Reads the flags of `DATA` into the fields of `RunConfig` that name a problem.

    If a flag is missing, the settings of the run `earlier`, if any, apply. Paths are
    absolute.
    """
    default = "text_files" if options.files else DEFAULT_PROBLEM
    if earlier is not None and not options.files:
        default = earlier.problem
    problem = options.problem or default
    fields = {"problem": problem, "data_dir": options.data_dir, "problem_options": {}}
    if earlier is not None and problem == earlier.problem:
        fields["data_dir"] = options.data_dir or earlier.data_dir
        fields["problem_options"] = dict(earlier.problem_options)
    if fields["data_dir"]:
        fields["data_dir"] = os.path.abspath(fields["data_dir"])
    own = flag_kinds.parse_problem_options(options.problem_option)
    fields["problem_options"].update(own)
    if options.files:
        if "files" in own:
            raise ValueError(
                "Files must be named by `--files` or by `--problem_option=files`, not "
                f"by both. Received: --files={options.files!r} and "
                f"--problem_option=files={own['files']!r}"
            )
        fields["problem_options"]["files"] = flag_kinds.absolute_paths(options.files)
    return fields


def open_run(options, split=None):
    """Returns the path of a run's checkpoint, and its problem or the one of the flags.

    Of the problem, only `split` is loaded, if one is given.
    """
    from routing_tf.training import loading

    checkpoint, config = loading.find_run(options.model_dir, options.checkpoint)
    fields = problem_fields(options, config)
    has_own_data = not any(getattr(options, name) for name in DATA)
    return checkpoint, loading.open_problem(
        checkpoint, config, fields, split, has_own_data
    )

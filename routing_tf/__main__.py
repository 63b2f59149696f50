"""Lists the commands, or runs one: `python -m routing_tf train --model_dir=my_run`."""

import importlib
import runpy
import sys

from routing_tf.files.names import did_you_mean

# In the order of the work.
COMMANDS = (
    "datagen",
    "train",
    "evaluate",
    "generate",
    "analyse",
    "export",
    "convert",
    "sparsify",
)


def main():
    """Runs the command that the first argument names; returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "help"):
        print(listing())
        return 0
    if name not in COMMANDS:
        print(
            f"error: The first argument must be a command. Received: {name!r}."
            f"{did_you_mean(name, COMMANDS)}\n{listing()}",
            file=sys.stderr,
        )
        return 1
    del sys.argv[1]
    runpy.run_module(f"routing_tf.{name}", run_name="__main__", alter_sys=True)
    return 0


def listing():
    """Returns a line for each command."""
    lines = ["Commands; `python -m routing_tf COMMAND --help` lists the flags of one:"]
    for name in COMMANDS:
        module = importlib.import_module(f"routing_tf.{name}")
        lines.append(f"  {name:<9} {module.__doc__.splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

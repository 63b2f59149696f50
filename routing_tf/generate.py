"""The command `generate`, as `python -m routing_tf.generate`."""

from routing_tf.cli.generate import __doc__ as __doc__
from routing_tf.cli.generate import define_flags as define_flags
from routing_tf.cli.generate import main
from routing_tf.cli.generate import run as run

if __name__ == "__main__":
    main()

"""The command `export`, as `python -m routing_tf.export`."""

from routing_tf.cli.export import __doc__ as __doc__
from routing_tf.cli.export import define_flags as define_flags
from routing_tf.cli.export import main
from routing_tf.cli.export import run as run

if __name__ == "__main__":
    main()

"""The command `convert`, as `python -m routing_tf.convert`."""

from routing_tf.cli.convert import __doc__ as __doc__
from routing_tf.cli.convert import define_flags as define_flags
from routing_tf.cli.convert import main
from routing_tf.cli.convert import run as run

if __name__ == "__main__":
    main()

"""The command `evaluate`, as `python -m routing_tf.evaluate`."""

from routing_tf.cli.evaluate import __doc__ as __doc__
from routing_tf.cli.evaluate import define_flags as define_flags
from routing_tf.cli.evaluate import main
from routing_tf.cli.evaluate import run as run

if __name__ == "__main__":
    main()

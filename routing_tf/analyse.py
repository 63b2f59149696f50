"""The command `analyse`, as `python -m routing_tf.analyse`."""

from routing_tf.cli.analyse import __doc__ as __doc__
from routing_tf.cli.analyse import define_flags as define_flags
from routing_tf.cli.analyse import main
from routing_tf.cli.analyse import run as run

if __name__ == "__main__":
    main()

"""The command `sparsify`, as `python -m routing_tf.sparsify`."""

from routing_tf.cli.sparsify import __doc__ as __doc__
from routing_tf.cli.sparsify import define_flags as define_flags
from routing_tf.cli.sparsify import main
from routing_tf.cli.sparsify import run as run

if __name__ == "__main__":
    main()

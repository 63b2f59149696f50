"""The command `train`, as `python -m routing_tf.train`."""

from routing_tf.cli.train import __doc__ as __doc__
from routing_tf.cli.train import define_flags as define_flags
from routing_tf.cli.train import main
from routing_tf.cli.train import run as run

if __name__ == "__main__":
    main()

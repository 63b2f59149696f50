"""The command `datagen`, as `python -m routing_tf.datagen`."""

from routing_tf.cli.datagen import __doc__ as __doc__
from routing_tf.cli.datagen import define_flags as define_flags
from routing_tf.cli.datagen import main
from routing_tf.cli.datagen import run as run

if __name__ == "__main__":
    main()

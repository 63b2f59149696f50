"""Lists the commands, or runs one: `python -m routing_tf train --model_dir=my_run`."""

import sys

from routing_tf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

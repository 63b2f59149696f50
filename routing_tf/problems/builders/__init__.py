"""Data sets that tensorflow-datasets does not have itself.

`prepare` writes a data set to its folder, `read_in_order` reads it back; both also
work with the builders of tensorflow-datasets.
"""

from routing_tf.problems.builders.preparation import prepare
from routing_tf.problems.builders.preparation import read_in_order
from routing_tf.problems.builders.wikipedia import Enwik8
from routing_tf.problems.builders.wikipedia import Wikitext103

__all__ = ["Enwik8", "Wikitext103", "prepare", "read_in_order"]

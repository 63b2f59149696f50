"""Problems: named data sets with their tokenizer, as batches for training.

`problems.names()` lists them, `problems.get(name)` makes one,
`problems.register(name)` adds one.
"""

from routing_tf.problems.image import Digits
from routing_tf.problems.image import ImageProblem
from routing_tf.problems.problem import Problem
from routing_tf.problems.registry import default_hparams_set
from routing_tf.problems.registry import get
from routing_tf.problems.registry import names
from routing_tf.problems.registry import register
from routing_tf.problems.text import PythonSource
from routing_tf.problems.text import TextFiles

__all__ = [
    "Digits",
    "ImageProblem",
    "Problem",
    "PythonSource",
    "TextFiles",
    "default_hparams_set",
    "get",
    "names",
    "register",
]

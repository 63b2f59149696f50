"""Problems: named data sets with their tokenizer, as batches for training.

`problems.names()` lists them, `problems.get(name)` makes one,
`problems.register(name)` adds one.
"""

from routing_tf.problems.datasets.image_folder import ImageFolder
from routing_tf.problems.datasets.own_texts import PythonSource
from routing_tf.problems.datasets.own_texts import TextFiles
from routing_tf.problems.datasets.pairs import Arxiv
from routing_tf.problems.datasets.pairs import Pubmed
from routing_tf.problems.datasets.pairs import WmtProblem
from routing_tf.problems.datasets.parallel_files import ParallelFiles
from routing_tf.problems.datasets.pg19 import Pg19Length8k
from routing_tf.problems.datasets.small_images import Cifar10
from routing_tf.problems.datasets.small_images import Digits
from routing_tf.problems.datasets.small_images import Imagenet64
from routing_tf.problems.datasets.small_images import Mnist
from routing_tf.problems.datasets.wikipedia import Enwik8
from routing_tf.problems.datasets.wikipedia import Wikitext103
from routing_tf.problems.image import ImageProblem
from routing_tf.problems.prepared import PreparedProblem
from routing_tf.problems.problem import Problem
from routing_tf.problems.registry import default_hparams_set
from routing_tf.problems.registry import get
from routing_tf.problems.registry import get_class
from routing_tf.problems.registry import names
from routing_tf.problems.registry import register
from routing_tf.problems.seq2seq import Seq2SeqProblem
from routing_tf.problems.sources import OwnFiles
from routing_tf.problems.sources import Source
from routing_tf.problems.sources import TfdsSource
from routing_tf.problems.text import TextProblem
from routing_tf.problems.windows import Tokens

__all__ = [
    "Arxiv",
    "Cifar10",
    "Digits",
    "Enwik8",
    "ImageFolder",
    "ImageProblem",
    "Imagenet64",
    "Mnist",
    "OwnFiles",
    "ParallelFiles",
    "Pg19Length8k",
    "PreparedProblem",
    "Problem",
    "Pubmed",
    "PythonSource",
    "Seq2SeqProblem",
    "Source",
    "TextFiles",
    "TextProblem",
    "TfdsSource",
    "Tokens",
    "Wikitext103",
    "WmtProblem",
    "default_hparams_set",
    "get",
    "get_class",
    "names",
    "register",
]

"""The patterns of places of the Sparse Transformer, by name for models.

The heads are those of `routing_tf.layers`; queries see the same places whatever the
tokens say.

Reference: Child et al., "Generating Long Sequences with Sparse Transformers"
(https://arxiv.org/abs/1904.10509), section 4.3, in the form that merges near and far.
"""

from routing_tf.layers.heads.fixed import FixedHeads
from routing_tf.layers.heads.sliding import SlidingHeads
from routing_tf.zoo.parts.pattern import Pattern
from routing_tf.zoo.parts.pattern import share


def _sliding(sizes):
    return {"radius": sizes.attention_window - 1}


def _strided(sizes):
    return {"radius": share(sizes, 2), "is_strided": True}


def _fixed(sizes):
    block = share(sizes, 2)
    num_blocks = -(-sizes.max_length // block)
    # Own block and the summaries of all others have half of the window each.
    columns = min(max(1, block // num_blocks), block)
    return {"block_shape": (block,), "num_summary_columns": columns}


PATTERNS = {
    "sliding": Pattern(
        SlidingHeads, _sliding, is_bounded=True, refuses=("entmax_alpha",)
    ),
    "strided": Pattern(
        SlidingHeads, _strided, has_relative_positions=False, refuses=("entmax_alpha",)
    ),
    "fixed": Pattern(FixedHeads, _fixed, has_relative_positions=False),
}

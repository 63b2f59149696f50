"""The heads of the zoo in tests of all heads: a new pattern has its rows here."""

import functools

from routing_tf import zoo

HEADS = 2
RELATIVE = {"max_relative_position": 5, "embeddings_initializer": "zeros"}
native_sparse = functools.partial(
    zoo.NativeSparseHeads, HEADS, 4, 2, 4, 3, attention_window=6, **RELATIVE
)
synthesizer = functools.partial(zoo.SynthesizerHeads, HEADS, max_length=50)

# Each class, for six tokens or more.
SMALL = {
    "AxialHeads": functools.partial(zoo.AxialHeads, HEADS, width=3),
    "BlockPairHeads": functools.partial(zoo.BlockPairHeads, HEADS),
    "BlockTopKHeads": functools.partial(zoo.BlockTopKHeads, HEADS, 3, 2),
    "ClusteredQueryHeads": functools.partial(
        zoo.ClusteredQueryHeads, HEADS, 2, 2, num_iterations=1
    ),
    "CompressedHeads": functools.partial(
        zoo.CompressedHeads, HEADS, ratio=2, attention_window=2
    ),
    "FeatureMapHeads": functools.partial(
        zoo.FeatureMapHeads, HEADS, "positive", num_features=4
    ),
    "GlobalHeads": functools.partial(
        zoo.GlobalHeads, HEADS, (0, 3), 4, num_learned_tokens=1
    ),
    "InducedHeads": functools.partial(zoo.InducedHeads, HEADS, 3),
    "LinformerHeads": functools.partial(zoo.LinformerHeads, HEADS, 8, 4),
    "LongShortHeads": functools.partial(zoo.LongShortHeads, HEADS, 3, 2),
    "LunaHeads": functools.partial(zoo.LunaHeads, HEADS, 3),
    "NativeSparseHeads": functools.partial(zoo.NativeSparseHeads, HEADS, 4, 2, 4, 3),
    "NystromHeads": functools.partial(zoo.NystromHeads, HEADS, 3),
    "RandomBlockHeads": functools.partial(zoo.RandomBlockHeads, HEADS, 1, 2),
    "SinkhornHeads": functools.partial(zoo.SinkhornHeads, HEADS, 4),
    "SynthesizerHeads": functools.partial(
        zoo.SynthesizerHeads, HEADS, max_length=8, rank=3
    ),
}
ONLY_CAUSAL = ("NativeSparseHeads",)
WITHOUT_DROPOUT = ("FeatureMapHeads", "NystromHeads")

# What has a causal form, for up to 50 tokens, of which most queries see a few.
CAUSAL = {
    "linear": functools.partial(zoo.FeatureMapHeads, HEADS, chunk_length=4),
    "performer": functools.partial(
        zoo.FeatureMapHeads, HEADS, "positive", num_features=9, chunk_length=2
    ),
    "random_features": functools.partial(
        zoo.FeatureMapHeads, HEADS, "fourier", num_features=9
    ),
    "global": functools.partial(zoo.GlobalHeads, HEADS, (0, 11, 30), 4, **RELATIVE),
    "learned": functools.partial(zoo.GlobalHeads, HEADS, (2,), None, 3),
    "random_blocks": functools.partial(zoo.RandomBlockHeads, HEADS, 3, 2, **RELATIVE),
    "row": functools.partial(zoo.AxialHeads, HEADS, 1, 6, **RELATIVE),
    "column": functools.partial(zoo.AxialHeads, HEADS, 0, 6, **RELATIVE),
    "criss_cross": functools.partial(zoo.AxialHeads, HEADS, None, 6),
    "best_blocks": functools.partial(zoo.BlockTopKHeads, HEADS, 4, 3, **RELATIVE),
}
# Of these there are no keys to shift, or they refuse that.
UNSHIFTED = {
    "synthesizer": synthesizer,
    "synthesizer_factors": functools.partial(synthesizer, rank=7),
    "random_logits": functools.partial(synthesizer, "random"),
    "random_factors": functools.partial(synthesizer, "random", rank=3),
    "native_sparse": native_sparse,
    "native_sparse_shared": functools.partial(native_sparse, share_branches=True),
}
# They remember as much of a text of any length.
LINEAR = ("linear", "performer", "random_features")
BOUNDED = (*LINEAR, "row")

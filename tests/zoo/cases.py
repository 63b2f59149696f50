"""The heads of the zoo in tests of all heads: a new pattern has its rows here."""

import functools

from routing_tf import zoo

HEADS = 2
RELATIVE = {"max_relative_position": 5, "embeddings_initializer": "zeros"}
native_sparse = functools.partial(
    zoo.NativeSparseHeads, HEADS, 4, 2, 4, 3, attention_window=6, **RELATIVE
)
synthesizer = functools.partial(zoo.SynthesizerHeads, HEADS, max_length=50)
compressed = functools.partial(zoo.CompressedHeads, HEADS)

# What has a causal form, for up to 50 tokens, of which most queries see a few.
CAUSAL = {
    "linear": functools.partial(zoo.FeatureMapHeads, HEADS, chunk_length=4),
    "performer": functools.partial(
        zoo.FeatureMapHeads, HEADS, "positive", num_features=9, chunk_length=2
    ),
    "random_features": functools.partial(
        zoo.FeatureMapHeads, HEADS, "fourier", num_features=9
    ),
    "global": functools.partial(zoo.GlobalHeads, HEADS, (0, 8, 30), 4, **RELATIVE),
    "learned": functools.partial(zoo.GlobalHeads, HEADS, (2,), None, 3),
    "random_blocks": functools.partial(zoo.RandomBlockHeads, HEADS, 3, 2, **RELATIVE),
    "row": functools.partial(zoo.AxialHeads, HEADS, 1, 6, **RELATIVE),
    "column": functools.partial(zoo.AxialHeads, HEADS, 0, 6, **RELATIVE),
    "criss_cross": functools.partial(zoo.AxialHeads, HEADS, None, 6),
    "best_blocks": functools.partial(zoo.BlockTopKHeads, HEADS, 4, 3, **RELATIVE),
    "mixed_blocks": functools.partial(
        zoo.BlockTopKHeads, HEADS, 4, 3, mix="scores", **RELATIVE
    ),
    "indexed": functools.partial(zoo.IndexedHeads, HEADS, 6, 2, 4, 2, **RELATIVE),
    "indexed_copies": functools.partial(
        zoo.IndexedHeads, HEADS, 3, 2, 4, 2, gather_length=1, **RELATIVE
    ),
}
# Of these there are no keys to shift, or they refuse that.
UNSHIFTED = {
    "synthesizer": synthesizer,
    "synthesizer_factors": functools.partial(synthesizer, rank=7),
    "random_logits": functools.partial(synthesizer, "random"),
    "random_factors": functools.partial(synthesizer, "random", rank=3),
    "native_sparse": native_sparse,
    "native_sparse_shared": functools.partial(native_sparse, share_branches=True),
    "convolution": compressed,
    "convolution_and_window": functools.partial(
        compressed, ratio=4, attention_window=6, **RELATIVE
    ),
    "mean": functools.partial(compressed, "mean", 5, attention_window=3),
    "max": functools.partial(compressed, "max", 2),
    "long_short": functools.partial(zoo.LongShortHeads, HEADS, 5, 4, 2, **RELATIVE),
    "luna": functools.partial(zoo.LunaHeads, HEADS, 4, chunk_length=3),
    "sinkhorn": functools.partial(
        zoo.SinkhornHeads, HEADS, 4, 3, 0.6, gumbel_noise=False
    ),
}
# What has no causal form.
NOT_CAUSAL = {
    "block_pair": functools.partial(zoo.BlockPairHeads, HEADS, 3, **RELATIVE),
    "long_short_of_the_whole": functools.partial(zoo.LongShortHeads, HEADS, 4, None, 3),
    "induced": functools.partial(zoo.InducedHeads, HEADS, 4),
    "clustered_queries": functools.partial(zoo.ClusteredQueryHeads, HEADS, 3, 4),
    "linformer": functools.partial(zoo.LinformerHeads, HEADS, 50, 4),
    "linformer_of_each_head": functools.partial(
        zoo.LinformerHeads, HEADS, 50, 4, sharing=None
    ),
    "nystrom": functools.partial(zoo.NystromHeads, HEADS, 4, convolution_size=3),
    "nystrom_of_few_tokens": functools.partial(zoo.NystromHeads, HEADS, 20),
}
ALL = {**CAUSAL, **UNSHIFTED, **NOT_CAUSAL}
# One of each class, by its name.
SMALL = {
    ALL[kind].func.__name__: ALL[kind]
    for kind in (
        *("criss_cross", "block_pair", "best_blocks", "clustered_queries", "mean"),
        *("performer", "learned", "indexed", "induced", "linformer", "long_short"),
        *("luna", "native_sparse", "nystrom", "random_blocks", "sinkhorn"),
        "synthesizer_factors",
    )
}
# Few tokens have no other far blocks.
SMALL["RandomBlockHeads"] = functools.partial(zoo.RandomBlockHeads, HEADS, 1, 2)
ONLY_CAUSAL = ("NativeSparseHeads",)
WITHOUT_DROPOUT = ("FeatureMapHeads", "NystromHeads")
WITHOUT_WEIGHTS = ("AxialHeads", "RandomBlockHeads", "SinkhornHeads")
# One logit for several tokens has no place for a bias of each.
COMPRESSED = ("convolution", "convolution_and_window", "mean", "max")
WITHOUT_BIAS = {"native_sparse", "native_sparse_shared", "sinkhorn", *COMPRESSED}
WITHOUT_BIAS |= {kind for kind in NOT_CAUSAL if kind.startswith(("linf", "nystrom"))}
# They attend to another sequence, too; the last one without a cache.
OF_TWO = ("linear", "performer", "best_blocks", "mixed_blocks", "convolution", "max")
OF_TWO += (
    "luna",
    "induced",
    "linformer",
    "linformer_of_each_head",
    "clustered_queries",
)
# They remember as much of a text of any length.
LINEAR = ("linear", "performer", "random_features")
BOUNDED = (*LINEAR, "row")

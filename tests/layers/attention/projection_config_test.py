import keras
import pytest

from routing_tf import layers
from tests.layers import helpers

RARE = {
    **{"shared_head_projection": True, "project_shared_keys": True, "use_bias": True},
    **{"use_gate": True, "bias_initializer": "ones", "output_initializer": "zeros"},
    **{"kernel_regularizer": "l2", "kernel_constraint": "non_neg"},
}
CLUSTERING = {"routing_scope": "prefix", "prefix_block_size": 3, "exploring_queries": 2}


def test_configs_of_earlier_versions():
    """They held the rare settings one by one."""
    attention = layers.RoutingAttention(
        *(4, 8, 3, 5), num_local_heads=1, dtype="mixed_bfloat16", **RARE, **CLUSTERING
    )
    config = attention.get_config()
    earlier = {**config, **config["projection_config"], **CLUSTERING}
    del earlier["projection_config"], earlier["clustering"]
    again = layers.RoutingAttention.from_config(earlier)
    assert helpers.as_json(again.get_config()) == helpers.as_json(config)
    for layer in (attention, again):
        assert isinstance(layer.kernel_regularizer, keras.regularizers.L2)
        assert isinstance(layer.output_initializer, keras.initializers.Zeros)
        assert layer.use_bias and layer.project_shared_keys
        routed, _ = layer.head_groups
        assert {name: getattr(routed, name) for name in CLUSTERING} == CLUSTERING


def test_rare_settings_are_together_in_configs():
    config = layers.RoutingAttention(4, 8, 3, 5).get_config()
    assert len(config.keys() - {"name", "trainable", "dtype"}) <= 24
    assert not set(layers.ProjectionConfig.names()) & config.keys()
    assert config["projection_config"].keys() == set(layers.ProjectionConfig.names())
    assert config["clustering"] == {
        "routing_scope": "full",
        "prefix_block_size": None,
        "exploring_queries": 0,
    }


def test_settings_by_name_go_before_those_together():
    settings = layers.ProjectionConfig(use_bias=True, kernel_constraint="non_neg")
    for given in (settings, settings.to_dict()):
        attention = layers.RoutingAttention(
            *(4, 8, 3, 5), projection_config=given, use_bias=False, use_gate=True
        )
        assert (attention.use_bias, attention.use_gate) == (False, True)
        assert isinstance(attention.kernel_constraint, keras.constraints.NonNeg)
    attention.use_bias = True
    assert attention.get_config()["projection_config"]["use_bias"]
    together = {"routing_scope": "prefix", "exploring_queries": 3}
    attention = layers.RoutingAttention(
        *(4, 8, 3, 5), clustering=together, exploring_queries=0
    )
    assert (attention.routing_scope, attention.exploring_queries) == ("prefix", 0)


def test_refuses_other_settings():
    for others in ({"use_bais": True}, {"dtype": "float16"}):
        with pytest.raises(ValueError, match="`projection_config`.*use_bias, "):
            layers.RoutingAttention(4, 8, 3, 5, projection_config=others)


def test_names_the_setting_that_was_meant():
    with pytest.raises(ValueError, match="Did you mean 'balance_rate'"):
        layers.RoutingAttention(4, 8, 3, 5, clustering={"balance_rat": 0.1})

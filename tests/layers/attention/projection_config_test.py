import keras
import pytest

from routing_tf import layers
from tests.layers import helpers

# What earlier versions saved of a layer.
EARLIER = {
    "name": "attention",
    "trainable": True,
    "dtype": "mixed_bfloat16",
    "activity_regularizer": None,
    "autocast": True,
    "num_heads": 4,
    "key_dim": 8,
    "num_clusters": 3,
    "attention_window": 5,
    "num_local_heads": 1,
    "local_block_size": 4,
    "routing": "expert_choice",
    "routing_scope": "prefix",
    "prefix_block_size": 3,
    "value_dim": 6,
    "output_dim": 7,
    "max_relative_position": 2,
    "share_query_key": False,
    "clustering": {"decay": 0.5},
    "dropout": 0.25,
    "kernel_initializer": keras.initializers.serialize(keras.initializers.Ones()),
    "key_shift": 0,
    "seed": 3,
    "rotary_positions": False,
    "attention_implementation": "plain",
    "exploring_queries": 2,
    "shared_head_projection": True,
    "project_shared_keys": True,
    "block_shape": None,
    "remat": True,
    "use_bias": True,
    "bias_initializer": keras.initializers.serialize(keras.initializers.Ones()),
    "kernel_regularizer": keras.regularizers.serialize(keras.regularizers.L2(0.5)),
    "bias_regularizer": None,
    "kernel_constraint": keras.constraints.serialize(keras.constraints.NonNeg()),
    "bias_constraint": None,
    "output_initializer": keras.initializers.serialize(keras.initializers.Zeros()),
    "num_key_value_heads": 4,
    "use_gate": True,
    "logit_soft_cap": 2.0,
    "qk_norm": True,
}
OBJECTS = {
    "kernel_initializer": keras.initializers.Ones,
    "bias_initializer": keras.initializers.Ones,
    "kernel_regularizer": keras.regularizers.L2,
    "kernel_constraint": keras.constraints.NonNeg,
    "output_initializer": keras.initializers.Zeros,
}


def test_configs_of_earlier_versions():
    attention = layers.RoutingAttention.from_config(EARLIER)
    again = layers.RoutingAttention.from_config(attention.get_config())
    assert helpers.as_json(again.get_config()) == helpers.as_json(
        attention.get_config()
    )
    for layer in (attention, again):
        assert layer.dtype_policy.name == "mixed_bfloat16"
        for name, value in EARLIER.items():
            if name in OBJECTS:
                assert isinstance(getattr(layer, name), OBJECTS[name])
            elif name not in ("dtype", "clustering"):
                assert getattr(layer, name) == value, name
        routed, _ = layer.head_groups
        assert (routed.decay, routed.routing_scope) == (0.5, "prefix")
        assert (routed.prefix_block_size, routed.exploring_queries) == (3, 2)


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
        with pytest.raises(ValueError, match="must have only the keys use_bias, "):
            layers.RoutingAttention(4, 8, 3, 5, projection_config=others)

"""The bridge to the original release: its settings, its variable names, its flaws.

The release is TF1/tensor2tensor code (google-research/routing_transformer). Layers and
models that are built here reproduce its results, flaws included, to float32 precision.
"""

# First: classes of models list its presets.
from routing_tf.models.release import registration as registration
from routing_tf.models.release.build import attention_layer as attention_layer
from routing_tf.models.release.build import image_model as image_model
from routing_tf.models.release.build import language_model as language_model
from routing_tf.models.release.build import seq2seq_model as seq2seq_model
from routing_tf.models.release.variable_names import (
    assign_variables as assign_variables,
)
from routing_tf.models.release.variable_names import read_variables as read_variables
from routing_tf.models.release.variable_names import (
    variables_by_name as variables_by_name,
)

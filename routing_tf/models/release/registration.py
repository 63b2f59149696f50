"""Gives the parts of the release to the models, which do not know it."""

from routing_tf.models import presets
from routing_tf.models.release import checkpoints
from routing_tf.models.release import conversion
from routing_tf.models.release import heads

presets.register_release(
    presets.Bridge(
        hyperparameters_of=conversion.hyperparameters_from_release,
        class_at=heads.class_at,
        cluster_strided_settings=heads.CLUSTER_STRIDED_SETTINGS,
        load_checkpoint=checkpoints.load,
    )
)

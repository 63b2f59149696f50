"""Training: the loop, its step and its optimizer, evaluation, and the folder of a run.

Data order and dropout depend only on the seed and the step, so a stopped run continues
exactly as if it had not been stopped.
"""

from routing_tf.models.build import build_model as build_model
from routing_tf.training.log import centroid_occupancy as centroid_occupancy
from routing_tf.training.log import spread as spread
from routing_tf.training.optimizer import add_weight_decay as add_weight_decay
from routing_tf.training.optimizer import compile_for_training as compile_for_training
from routing_tf.training.optimizer import make_optimizer as make_optimizer
from routing_tf.training.optimizer import make_schedule as make_schedule
from routing_tf.training.trainer import Trainer as Trainer

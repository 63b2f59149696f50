"""Optimizers and schedules that `keras.optimizers` lacks."""

from routing_tf.optimizers.adafactor import Adafactor
from routing_tf.optimizers.adamw import AdamW
from routing_tf.optimizers.muon import Muon
from routing_tf.optimizers.schedules import FactorSchedule
from routing_tf.optimizers.schedules import NoamSchedule

__all__ = ["Adafactor", "AdamW", "FactorSchedule", "Muon", "NoamSchedule"]

"""Analyses of trained models: figures and pictures."""

from routing_tf.analysis.causality import find_leaks as find_leaks
from routing_tf.analysis.decoding import compare_decoding as compare_decoding
from routing_tf.analysis.decoding import compare_scopes as compare_scopes
from routing_tf.analysis.heads import compare_heads as compare_heads
from routing_tf.analysis.heads import (
    jensen_shannon_divergence as jensen_shannon_divergence,
)
from routing_tf.analysis.heads import kl_divergence as kl_divergence
from routing_tf.analysis.probe import Probe as Probe

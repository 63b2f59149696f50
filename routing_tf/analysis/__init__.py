"""What trained models do: figures and pictures."""

from routing_tf.analysis.divergence import (
    jensen_shannon_divergence as jensen_shannon_divergence,
)
from routing_tf.analysis.divergence import kl_divergence as kl_divergence

"""Sparse attention for models that are trained already."""

from routing_tf.retrofit.conversion import restore as restore
from routing_tf.retrofit.conversion import sparsify as sparsify
from routing_tf.retrofit.distillation import distill as distill
from routing_tf.retrofit.report import LayerReport as LayerReport
from routing_tf.retrofit.report import Report as Report
from routing_tf.retrofit.rotary import FrequencyRotary as FrequencyRotary

"""Attention inside a window or a cluster: the softmax, kernels, relative positions."""

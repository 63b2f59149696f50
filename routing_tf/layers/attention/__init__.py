"""Attention layers: projections, head groups side by side, steps with a cache."""

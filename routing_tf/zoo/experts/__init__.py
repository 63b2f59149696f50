"""Layers of which each token uses a part: experts, units, and learned memories."""

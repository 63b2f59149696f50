"""Layers that look up learned values."""

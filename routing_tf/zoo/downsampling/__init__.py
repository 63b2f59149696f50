"""Layers that make a few tokens of many."""

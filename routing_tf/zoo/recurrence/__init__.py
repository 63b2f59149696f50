"""Transformers whose segments read what earlier segments left."""

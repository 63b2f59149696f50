"""Blocks of a model, feed-forward layers and embeddings."""

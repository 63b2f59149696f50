"""Texts, pictures and endless streams from models, for people."""

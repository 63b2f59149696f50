"""The splits of data, by name."""

SPLITS = ("train", "validation", "test")

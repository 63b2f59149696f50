"""The commands: their flags, and what they say; the work is done elsewhere."""

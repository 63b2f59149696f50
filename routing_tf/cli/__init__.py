"""The commands: their flags and messages; other packages do the work."""

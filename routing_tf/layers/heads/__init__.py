"""Head groups: one file for each pattern."""

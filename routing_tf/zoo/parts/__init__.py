"""Parts of several patterns of the zoo, and the description of a pattern for models."""

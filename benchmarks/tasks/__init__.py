"""The field's own tests, as published: a file for each family, and one runner."""

"""Feed-forward networks that consist of experts."""

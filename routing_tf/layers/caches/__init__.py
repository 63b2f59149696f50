"""What heads remember of earlier tokens between calls."""

"""What some kinds of heads are made of, beside the layers that all share."""

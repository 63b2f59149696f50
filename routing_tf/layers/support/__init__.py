"""What all rooms use: axes, masks, lengths, checks, and what is private in Keras."""

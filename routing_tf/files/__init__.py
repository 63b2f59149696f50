"""Reading what strangers wrote; writing whole or not at all."""

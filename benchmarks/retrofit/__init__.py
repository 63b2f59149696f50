"""What `retrofit.sparsify` is worth on a trained language model, SmolLM2-135M."""

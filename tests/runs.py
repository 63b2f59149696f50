"""What tests of runs share: settings of a tiny model, and what a run has logged."""

import json

HPARAMS = (
    "num_layers=1,hidden_dim=16,intermediate_dim=16,num_local_heads=1,"
    "attention_window=8,local_block_length=8,max_sequence_length=32,batch_tokens=128,"
    "local_relative_positions=false,routed_relative_positions=false,warmup_steps=2"
)


def metrics(model_dir, key="step"):
    """Returns the entries that a run has logged, those with a key."""
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if key in entry]

"""What tests of runs share: settings of tiny models, and what a run has logged."""

import json

from routing_tf.cli import train
from tests import command_line

HPARAMS = (
    "num_layers=1,hidden_dim=16,intermediate_dim=16,num_local_heads=1,"
    "attention_window=8,local_block_length=8,max_sequence_length=32,batch_tokens=128,"
    "local_relative_positions=false,routed_relative_positions=false,warmup_steps=2"
)
IMAGE_HPARAMS = (
    "num_layers=1,hidden_dim=16,intermediate_dim=16,num_local_heads=1,"
    "image_height=4,image_width=4,num_classes=2,max_sequence_length=16,"
    "local_block_length=8,attention_window=6,num_clusters=3,batch_tokens=64"
)


def trained(folder, *arguments):
    """Trains in this process; returns the folder of the run."""
    options = command_line.parse(train, f"--model_dir={folder}", *arguments)
    assert train.run(options) == 0
    return folder


def metrics(model_dir, key="step"):
    """Returns the entries that a run has logged, those with a key."""
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if key in entry]

"""What tests of runs share: settings of tiny models, and what a run has logged."""

import json

from routing_tf import models
from routing_tf import training
from routing_tf.training import run_folder

HPARAMS = (
    "num_layers=1,hidden_dim=16,intermediate_dim=16,num_local_heads=1,"
    "attention_window=8,local_block_length=8,max_sequence_length=32,batch_tokens=128,"
    "local_relative_positions=false,routed_relative_positions=false,warmup_steps=2"
)
PAIRS_HPARAMS = (  # behind others
    "num_encoder_layers=1,num_clusters=2,attention_window=6,local_block_length=4,"
    "max_input_length=16,max_sequence_length=12"
)
IMAGE_HPARAMS = (
    "num_layers=1,hidden_dim=16,intermediate_dim=16,num_local_heads=1,"
    "image_height=4,image_width=4,num_classes=2,max_sequence_length=16,"
    "local_block_length=8,attention_window=6,num_clusters=3,batch_tokens=64"
)


def settings(changes, preset="byte_tiny"):
    """Returns the hyperparameters of a preset with changes as `--hparams` has them."""
    changes = models.hyperparameters.parse_overrides(changes)
    return models.preset_hyperparameters(preset).replace(**changes)


def saved(folder, problem, hyperparameters, step=0, **fields):
    """Writes the folder of a run with random weights, and returns it."""
    config, problem = run_folder.configure(problem, hyperparameters, **fields)
    lm = training.build_model(config.hyperparameters, problem)
    run_folder.save_run(config, lm, folder, step)
    return folder


def metrics(model_dir, key="step"):
    """Returns the entries that a run has logged, those with a key."""
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if key in entry]

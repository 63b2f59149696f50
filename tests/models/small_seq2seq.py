"""Small language models with an encoder, and their inputs."""

import numpy as np

from routing_tf import models
from tests.models import small_models

INPUT_LENGTH, LENGTH = 40, small_models.LENGTH
SETTINGS = {"num_encoder_layers": 1, "num_layers": 1, "max_input_length": INPUT_LENGTH}
LOCAL = {"num_routed_heads": 0, "num_local_heads": 4}


def hyperparameters(**changes):
    return small_models.hyperparameters(**{**SETTINGS, **changes})


def language_model(seed=0, preprocessor=None, **changes):
    """Returns a small language model with the same values on every backend."""
    backbone = models.RoutingTransformerEncoderDecoder(hyperparameters(**changes))
    lm = models.RoutingTransformerSeq2SeqLM(backbone, preprocessor=preprocessor)
    small_models.randomize(lm, seed)
    return lm


def inputs(input_lengths=(40, 33), lengths=(24, 20), buffers=(40, 24), seed=0):
    """Returns random ids for a call; rows are real up to their lengths.

    As in `small_models.inputs` no id comes twice in a row.
    """
    x = {}
    for name, real, buffer, own_seed in (
        ("encoder", input_lengths, buffers[0], 2 * seed),
        ("decoder", lengths, buffers[1], 2 * seed + 1),
    ):
        ids = [
            small_models.inputs((0,) * len(real), 20, seed=own_seed + 100 * part)
            for part in range(2)
        ]
        ids = np.concatenate([part["token_ids"] for part in ids], axis=1)
        ids[:, 20:] = ids[:, 20:] % small_models.VOCABULARY_SIZE
        x[f"{name}_token_ids"] = ids[:, :buffer]
        x[f"{name}_padding_mask"] = np.arange(buffer)[None] < np.array(real)[:, None]
    return x


def embeddings(input_lengths=(40, 33), lengths=(24, 20), seed=0):
    """Returns random vectors for the encoder, zero after their lengths, and ids."""
    x = inputs(input_lengths, lengths, seed=seed)
    mask = x.pop("encoder_padding_mask")
    shape = (*x.pop("encoder_token_ids").shape, 16)
    vectors = np.random.default_rng(seed).normal(size=shape).astype("float32")
    return {**x, "encoder_embeddings": vectors * mask[..., None]}


def change(x, name, where, seed=7):
    """Returns inputs with other ids at the places where a mask is True."""
    ids = x[name]
    other = np.random.default_rng(seed).integers(1, 15, size=ids.shape) + ids
    return {**x, name: np.where(where, other % 30 + 1, ids).astype("int32")}

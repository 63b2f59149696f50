"""Models made of hyperparameters alone, or for a problem."""

import keras

from routing_tf import models

# Precision of a run, and the dtype policy of its model.
POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


def make_model(hyperparameters, preprocessor=None, precision="float32"):
    """Makes the model of hyperparameters.

    Args:
        hyperparameters: `Hyperparameters`.
        preprocessor: what turns text into inputs; None (the default) for models of ids.
        precision: see `RunConfig`.

    Returns:
        A `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
        `RoutingImageTransformer`.
    """
    backbone = make_backbone(hyperparameters, POLICIES[precision])
    if hyperparameters.kind == "image":
        return backbone
    cls = models.RoutingTransformerCausalLM
    if hyperparameters.kind == "seq2seq":
        cls = models.RoutingTransformerSeq2SeqLM
    return cls(backbone, preprocessor=preprocessor)


def make_backbone(hyperparameters, dtype=None):
    """Makes a model without what turns its output into logits, or an image model."""
    classes = {
        "text": models.RoutingTransformer,
        "seq2seq": models.RoutingTransformerEncoderDecoder,
        "image": models.RoutingImageTransformer,
    }
    return classes[hyperparameters.kind](hyperparameters, dtype=dtype)


def build_model(hyperparameters, problem, seed=0, precision="float32"):
    """Builds a language model or an image model with random weights for a problem.

    Args:
        hyperparameters: `Hyperparameters`.
        problem: the problem, whose tokenizer the model generates text with.
        seed: seed of the weights; it becomes Keras's global seed.
        precision: type of computations, `"float32"` (the default), `"bfloat16"` or
            `"float16"`; weights and centroids are float32.

    Returns:
        A `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
        `RoutingImageTransformer`.

    Raises:
        ValueError: if the encoder takes no ids, which is what problems have.
    """
    if hyperparameters.encoder_inputs != "tokens":
        raise ValueError(
            "`encoder_inputs` must be 'tokens' to train on a problem. Received: "
            f"encoder_inputs={hyperparameters.encoder_inputs!r}"
        )
    keras.utils.set_random_seed(seed)
    preprocessor = make_preprocessor(hyperparameters, problem)
    return make_model(hyperparameters, preprocessor, precision)


def make_preprocessor(hyperparameters, problem):
    """Makes what turns text into a model's inputs; None where there is no text."""
    if problem.tokenizer is None or hyperparameters.kind == "image":
        return None
    if hyperparameters.kind == "seq2seq":
        return models.RoutingTransformerSeq2SeqLMPreprocessor(
            problem.tokenizer,
            encoder_sequence_length=problem.input_length,
            decoder_sequence_length=problem.sequence_length,
        )
    return models.RoutingTransformerCausalLMPreprocessor(
        problem.tokenizer, sequence_length=problem.sequence_length
    )

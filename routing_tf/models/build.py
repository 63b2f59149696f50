"""Models built from hyperparameters, or for a problem."""

import keras

from routing_tf import models

# Precision of a run, and the dtype policy of its model.
POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
CLASSES = (
    models.RoutingTransformerCausalLM,
    models.RoutingTransformerSeq2SeqLM,
    models.RoutingImageTransformer,
)


def model_class(kind):
    """Returns the class of the models of a kind, see `Hyperparameters.kind`."""
    return next(cls for cls in CLASSES if cls.kind == kind)


def model_class_on(backbone):
    """Returns the class of the models on a backbone by name, or the first class."""
    own = (cls for cls in CLASSES if backbone_class(cls).__name__ == backbone)
    return next(own, CLASSES[0])


def backbone_class(cls):
    """Returns the class of the backbone of a model; an image model is its own."""
    return getattr(cls, "backbone_cls", cls)


def make_model(hyperparameters, preprocessor=None, precision="float32"):
    """Makes the model of hyperparameters; without a `preprocessor` it takes ids."""
    backbone = make_backbone(hyperparameters, POLICIES[precision])
    if hyperparameters.kind == "image":
        return backbone
    return model_class(hyperparameters.kind)(backbone, preprocessor=preprocessor)


def make_backbone(hyperparameters, dtype=None):
    """Makes the backbone of a text model, or an image model."""
    cls = backbone_class(model_class(hyperparameters.kind))
    return cls(hyperparameters, dtype=dtype)


def build_model(hyperparameters, problem, seed=0, precision="float32"):
    """Builds a model with random weights for a problem.

    The model generates text with the problem's tokenizer. `seed` becomes Keras's global
    seed. `precision` is the dtype of computations, one of `POLICIES`; weights and
    centroids are float32.
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
    """Makes the preprocessor of a text model; None for image models."""
    if problem.tokenizer is None or hyperparameters.kind == "image":
        return None
    lengths = {"sequence_length": problem.sequence_length}
    if hyperparameters.kind == "seq2seq":
        lengths = {
            "encoder_sequence_length": problem.input_length,
            "decoder_sequence_length": problem.sequence_length,
        }
    cls = model_class(hyperparameters.kind).preprocessor_cls
    return cls(problem.tokenizer, **lengths)

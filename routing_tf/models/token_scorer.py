"""Negative log probabilities of targets, on text and image models alike."""

import keras
import numpy as np


class TokenScorer:
    """Negative log probabilities of targets, in nats, under a language model.

    It shares the weights of the language model but is compiled on its own, once, and
    leaves alone what the language model is compiled with.

    Args:
        lm: the language model, or an image model.

    Attributes:
        hyperparameters: those of the model.
        model: the model itself.
    """

    def __init__(self, lm):
        self.model = lm
        self.hyperparameters = lm.hyperparameters
        targets = keras.Input(lm.output.shape[1:-1], dtype="int32", name="targets")
        nats = keras.losses.sparse_categorical_crossentropy(
            targets, keras.ops.cast(lm.output, "float32"), from_logits=True
        )
        self._scorer = keras.Model({**lm.input, "targets": targets}, nats)
        self._scorer.compile(optimizer=None, jit_compile=lm.jit_compile)

    def score(self, inputs, targets):
        """Scores one batch.

        Args:
            inputs: dict of `token_ids` and `padding_mask`, `[batch, length]`; or of
                what an image model takes.
            targets: `<int>[batch, length]`, or images.

        Returns:
            NumPy array `<float32>` of the shape of `targets`.
        """
        inputs = {name: inputs[name] for name in self.model.input}
        return self._scorer.predict_on_batch({**inputs, "targets": targets})

    def places(self, shape):
        """Returns the place of each token in the order in which the model sees them.

        Args:
            shape: shape of one example of the targets.

        Returns:
            NumPy array of that shape.
        """
        if self.hyperparameters.kind == "image":
            return self.model.places()
        return np.arange(*shape)

    def prefixes(self, inputs, places, positions):
        """Returns inputs that hold nothing of the tokens at positions and behind.

        Args:
            inputs: dict as for `score`.
            places: as `places` returns them.
            positions: `<int>[batch]`, one place for each example.

        Returns:
            Dict as for `score`.
        """
        positions = positions.reshape(-1, *[1] * places.ndim)
        mask = inputs["padding_mask"] & (places <= positions)
        prefixes = {**inputs, "padding_mask": mask}
        if self.hyperparameters.kind == "image":  # which shifts its images by itself
            prefixes["images"] = inputs["images"] * (places < positions)
        else:
            prefixes["token_ids"] = inputs["token_ids"] * mask
        return prefixes

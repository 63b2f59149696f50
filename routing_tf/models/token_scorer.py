"""Negative log probabilities of targets, on models of all kinds alike."""

import keras
from keras import ops

from routing_tf.models.compiled import compiled


class TokenScorer:
    """Negative log probabilities of targets, in nats, under a language model.

    It shares the weights of the language model but is compiled on its own, once, and
    leaves alone what the language model is compiled with.

    Args:
        lm: the language model, with an encoder or without, or an image model.
        routing_scope: `"full"` or `"prefix"`, see `RoutedHeads`; None (the default)
            for that of the hyperparameters.
        engine: where the model lives, see `routing_tf.training.engines.make`; None
            (the default) for one device.

    Attributes:
        hyperparameters: those of the model.
        model: the model itself.
    """

    def __init__(self, lm, routing_scope=None, engine=None):
        self.model = lm
        self.hyperparameters = lm.hyperparameters
        self.routing_scope = routing_scope or self.hyperparameters.routing_scope
        if engine is not None and engine.num_devices > 1:
            self._score = engine.compile_scorer(lm, self._nats)
            return
        self._score = compiled(lm, self._nats)

    def _nats(self, batch):
        inputs = {name: batch[name] for name in self.model.input}
        logits = self.model(inputs, training=False, routing_scope=self.routing_scope)
        return keras.losses.sparse_categorical_crossentropy(
            batch["targets"], ops.cast(logits, "float32"), from_logits=True
        )

    def score(self, inputs, targets):
        """Scores one batch.

        Args:
            inputs: dict of `token_ids` and `padding_mask`, `[batch, length]`; or of
                what a model with an encoder or an image model takes.
            targets: `<int>[batch, length]`, or images.

        Returns:
            NumPy array `<float32>` of the shape of `targets`.
        """
        batch = {name: inputs[name] for name in self.model.input}
        return ops.convert_to_numpy(self._score({**batch, "targets": targets}))

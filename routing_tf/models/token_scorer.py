"""Negative log probabilities of targets, for models of all kinds."""

import keras
from keras import ops

from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.support.validation import check_choice
from routing_tf.models.compiled import compiled_once
from routing_tf.models.preprocessing import inputs_of


class TokenScorer:
    """Negative log probabilities of targets, in nats, under a model of any kind.

    It shares the weights of the model, is compiled separately for each shape, and does
    not change how the model is compiled. `routing_scope` is that of the hyperparameters
    if it is None. `engine` says where the model is, see
    `routing_tf.training.engines.make`; None for one device.
    """

    def __init__(self, lm, routing_scope=None, engine=None):
        self.model = lm
        self.hyperparameters = lm.hyperparameters
        self.routing_scope = routing_scope or self.hyperparameters.routing_scope
        self._score = None
        if engine is not None and engine.num_devices > 1:
            self._score = engine.compile_scorer(lm, self._nats)

    @property
    def vocabulary_size(self):
        return self.hyperparameters.vocabulary_size

    def _nats(self, batch):
        inputs = inputs_of(self.model, batch)
        logits = self.model(inputs, training=False, routing_scope=self.routing_scope)
        return keras.losses.sparse_categorical_crossentropy(
            batch["targets"], ops.cast(logits, "float32"), from_logits=True
        )

    def score(self, inputs, targets):
        """Scores one batch; returns a NumPy array `<float32>` of the targets' shape.

        Inputs and targets are `[batch, length]`, or those of an image model.
        """
        batch = inputs_of(self.model, inputs)
        key = (self.routing_scope, *batch, *targets.shape)
        score = self._score or compiled_once(self.model, self._nats, key)
        return ops.convert_to_numpy(score({**batch, "targets": targets}))


def scope_of(hyperparameters, routing_scope=None):
    """Returns a known routing scope; that of the hyperparameters if None is given."""
    if routing_scope is None:
        routing_scope = hyperparameters.routing_scope
    check_choice("routing_scope", routing_scope, ROUTING_SCOPES)
    return routing_scope


def scope_to_score(hyperparameters, routing_scope=None):
    """Returns the result of `scope_of`, if its likelihoods are possible.

    Refuses `"prefix"` for a model that sees later tokens by a flaw of the release.
    """
    routing_scope = scope_of(hyperparameters, routing_scope)
    leak = hyperparameters.sees_later_tokens(routing_scope)
    if routing_scope == "prefix" and leak:
        raise ValueError(
            "The scope 'prefix' needs a model in which no output depends on later "
            "tokens. "
            f'Received: routing_scope="prefix" for a model with {leak}='
            f'{getattr(hyperparameters, leak)!r}. Use "full"'
        )
    return routing_scope

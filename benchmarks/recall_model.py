"""The models of `benchmarks.recall`: trained, scored, and their clusters looked at."""

import statistics
import time

import keras
import numpy as np
import tqdm
from keras import ops

from benchmarks import pattern_heads
from benchmarks import recall_data
from benchmarks.report import say
from routing_tf import layers
from routing_tf.analysis.probe import clustered_groups
from routing_tf.analysis.probe import recorded
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.models.compiled import compiled

LOCAL_BLOCK = 16
WARM_UP_STEPS, COOL_DOWN = 50, 0.2  # the latter is a share of all steps
EVALUATED, DIAGNOSED, AT_ONCE = 1000, 256, 50  # sequences


class TiedLogits(keras.layers.Layer):
    """Products of hidden states with the vectors of a `TokenEmbedding`."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, hidden):
        return ops.matmul(hidden, ops.transpose(self.embedding.embeddings))

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.embedding.vocabulary_size)


class GatedConvolution(keras.layers.Layer):
    """Zoology's `BaseConv` with its norm and residual: a first layer of recall models.

    Computes `x + u + conv(u) * dense(u)` of the normalized input `u`; the convolution
    reads a token and the two before it, each feature for itself.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization()
        self.convolution = keras.layers.DepthwiseConv1D(3)

    def build(self, shape):
        self.gate = keras.layers.Dense(shape[-1])
        for layer in (self.norm, self.convolution, self.gate):
            layer.build(shape)

    def call(self, x):
        u = self.norm(x)
        before = ops.pad(u, [[0, 0], [2, 0], [0, 0]])
        return x + u + self.convolution(before) * self.gate(u)

    def compute_output_shape(self, shape):
        return shape


def scopes(pattern):
    """Returns the routing scopes in which a pattern is scored."""
    return ("full", "prefix") if pattern == "expert choice" else ("full",)


def head_groups(settings):
    """Returns the head groups of the pattern."""
    s = settings
    budget = pattern_heads.Budget(s.num_heads, s.length, s.window, s.num_clusters)
    options = {"key_shift": s.key_shift, **s.options}
    if s.exploring_queries:
        options["exploring_queries"] = s.exploring_queries
    return pattern_heads.head_groups(s.pattern, budget, **options)


def parts(settings):
    """Makes the layers of a model.

    Returns:
        List of layers before the blocks, list of blocks, and list of layers from the
        hidden states to the logits.
    """
    s = settings
    embedding = layers.TokenEmbedding(s.vocabulary, s.width)
    local = layers.LocalHeads(
        1,
        block_shape=(LOCAL_BLOCK,),
        max_relative_position=2 * LOCAL_BLOCK,
        relative_key_initializer=keras.initializers.RandomNormal(stddev=2.0),
    )
    blocks = [
        layers.TransformerBlock(
            layers.MixedAttention(groups, key_dim=s.key_dim), None, norm_position="pre"
        )
        for groups in ([local], head_groups(s))
    ]
    after = [keras.layers.LayerNormalization(), TiedLogits(embedding)]
    return [embedding], blocks, after


def make_optimizer(settings):
    """Makes the optimizer: Adam with three learning rates.

    A decay from the start ends learning before full attention has found out how to
    recall; without any, the end of a run is a matter of luck.
    """
    s = settings
    rate = s.learning_rate
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [WARM_UP_STEPS, round((1 - COOL_DOWN) * s.steps)], [rate / 3, rate, rate / 10]
    )
    return keras.optimizers.Adam(schedule, beta_2=0.98, global_clipnorm=1.0)


class Network:
    """A model with random weights, and what is asked of it.

    Args:
        settings: `Settings`.

    Attributes:
        model: Keras model from tokens and labelled positions to the logits there.
    """

    def __init__(self, settings):
        keras.utils.clear_session()
        keras.utils.set_random_seed(settings.seed)
        self.settings = settings
        tokens = keras.Input((settings.length,), dtype="int32")
        positions = keras.Input((settings.pairs,), dtype="int32")
        before, (first, self._last), after = parts(settings)
        hidden = tokens
        for layer in [*before, first]:
            hidden = layer(hidden)
        self._before_last = keras.Model(tokens, hidden)
        hidden = self._last(hidden)
        hidden = ops.take_along_axis(hidden, positions[..., None], axis=1)
        for layer in after:
            hidden = layer(hidden)
        self.model = keras.Model([tokens, positions], hidden)
        declare_call_argument(self.model, "routing_scope")
        self.model.compile(
            make_optimizer(settings),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            # On a CPU XLA saves TensorFlow less than it takes; JAX would compute each
            # operation by itself.
            jit_compile=keras.backend.backend() == "jax",
        )
        self._scorers = {}

    def train_on(self, examples):
        """Takes a training step; returns loss and accuracy since they were reset."""
        tokens, positions, labels, _ = examples
        return self.model.train_on_batch([tokens, positions], labels, return_dict=True)

    def accuracy(self, examples, scope="full"):
        """Returns the share of the labels that are thought the likeliest tokens."""
        return float((self.answers(examples, scope) == examples.labels).mean())

    def answers(self, examples, scope="full"):
        """Returns the likeliest tokens at the labelled positions, `<int>[B, P]`."""
        if scope not in self._scorers:
            self._scorers[scope] = compiled(
                self.model,
                lambda *inputs: self.model(list(inputs), routing_scope=scope),
            )
        found = []
        for start in range(0, len(examples.tokens), AT_ONCE):
            inputs = [x[start : start + AT_ONCE] for x in examples[:2]]
            logits = ops.convert_to_numpy(self._scorers[scope](*inputs))
            found.append(logits.argmax(axis=-1))
        return np.concatenate(found)

    def diagnosis(self, examples):
        """Returns `routing_figures` of examples, for tokens that choose clusters."""
        (group,) = clustered_groups(self._last)
        with recorded([group], "scores") as calls:
            self._last(self._before_last(examples.tokens))
        ((_, scores),) = calls
        number = getattr(group, "clusters_per_query", 1)
        read = np.argsort(-np.asarray(scores[0]), axis=-1, kind="stable")[..., :number]
        keys = np.argmax(scores[-1], axis=-1)
        # Of multipole heads it leaves out matches that are near.
        window, shift = group.attention_window, self.settings.key_shift
        return recall_data.routing_figures(
            examples, read, keys, window, shift, scores[0].shape[-1]
        )


def train(settings, eval_every, diagnose=False):
    """Trains and scores a model.

    Args:
        settings: `Settings`.
        eval_every: number of steps between evaluations.
        diagnose: whether evaluations tell what routing makes of the sequences. Defaults
            to False.

    Returns:
        Dict of what a record keeps: `accuracy` by routing scope, `curve`, a list of
        pairs of step and accuracy, `seconds_per_step` and, if wanted, `diagnosis`, a
        list of pairs of step and figures.
    """
    network = Network(settings)
    held_out = settings.examples(EVALUATED, recall_data.EVALUATION_SEED)
    looked_at = held_out.rows(slice(DIAGNOSED))
    curve, diagnosis, seconds = [], [], []
    bar = tqdm.trange(settings.steps, desc=settings.name, disable=None, leave=False)
    for step in bar:
        examples = settings.examples(settings.batch_size, settings.seed, step)
        started = time.perf_counter()
        logs = network.train_on(examples)
        seconds.append(time.perf_counter() - started)
        bar.set_postfix({k: f"{v:.3f}" for k, v in logs.items()}, refresh=False)
        if (step + 1) % eval_every and step + 1 < settings.steps:
            continue
        network.model.reset_metrics()
        curve.append([step + 1, network.accuracy(held_out)])
        if diagnose:
            figures = network.diagnosis(looked_at)
            diagnosis.append([step + 1, figures])
            words = recall_data.words(figures)
            say(f"step {step + 1}: accuracy {curve[-1][1]:.3f}, {words}")
    found = {
        "accuracy": {
            scope: network.accuracy(held_out, scope)
            for scope in scopes(settings.pattern)
        },
        "seconds_per_step": round(statistics.median(seconds), 4),
        "curve": curve,
    }
    return {**found, "diagnosis": diagnosis} if diagnose else found

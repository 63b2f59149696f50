"""The rows of `benchmarks.patterns`: each pattern of the package at an equal budget."""

import dataclasses
import math

import keras
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf import zoo
from routing_tf.models import patterns
from routing_tf.zoo import PATTERNS

NUM_HEADS, KEY_DIM, WIDTH = 8, 64, 512
# Patterns of the package itself, by the names of the other benchmarks.
ROUTED = ("expert choice", "token choice", "expert threshold")
OWN = ("full", "local", "random", "hashed", *ROUTED)
BALANCE_RATE = 0.01
NOT_CAUSAL = tuple(name for name, p in PATTERNS.items() if not p.of_decoders)
OF_TWO_HEADS = ("bigbird",)
# Those of images have no place in a text.
OF_TEXT = tuple(
    name for name, p in PATTERNS.items() if p.of_decoders and not p.of_images
)
ROWS = (*OWN, *OF_TEXT, *NOT_CAUSAL)
# Their matrices of logits have the size of length squared.
QUADRATIC = ("full", "synthesizer", "random_synthesizer")


@dataclasses.dataclass(frozen=True)
class Budget:
    """What the heads of all rows have in common.

    Args:
        num_heads: number of heads.
        length: number of tokens.
        window: number of keys that a query sees; None for `"full"`.
        num_clusters: number of clusters of each head; None where there are none.
    """

    num_heads: int
    length: int
    window: int | None
    num_clusters: int | None


def head_groups(row, budget, **options):
    """Returns the list of head groups of a row.

    Args:
        row: one of `ROWS`, or a pattern that is registered.
        budget: `Budget`.
        **options: further arguments of the groups.

    Raises:
        ValueError: if a group refuses an option.
    """
    b = budget
    if own := patterns.find(row):
        sizes = patterns.Sizes(b.window, b.length, b.num_clusters)
        made = own.heads(b.num_heads, **own.settings(sizes) | options)
        return made if isinstance(made, list) else [made]
    if row == "local":
        # The own block and the one before it are the window.
        block = max(1, b.window // 2)
        return [layers.LocalHeads(b.num_heads, block_shape=(block,), **options)]
    clustered = {"num_clusters": b.num_clusters, "attention_window": b.window}
    hashed = {"num_buckets": b.num_clusters, "attention_window": b.window}
    cls, settings = {
        "full": (layers.FullHeads, {}),
        "random": (layers.RandomHeads, clustered),
        # With one round the same as `HashedHeads`.
        "hashed": (zoo.ReformerHeads, hashed),
        **{
            name: (layers.RoutedHeads, {**clustered, "routing": name.replace(" ", "_")})
            for name in ROUTED[:2]
        },
        "expert threshold": (zoo.ThresholdHeads, clustered),
    }[row]
    return [cls(b.num_heads, **settings, **options)]


def key_shift_of(row):
    """Returns 1 if a row may have shifted keys, else 0."""
    if row in NOT_CAUSAL:
        return 0
    try:
        head_groups(row, Budget(2, 64, 32, 2), key_shift=1)
    except ValueError:
        return 0
    return 1


def attention(row, length, window):
    """Returns the layer of a row for inputs `<float>[1, length, WIDTH]`."""
    clusters = max(2, length // window)
    budget = Budget(NUM_HEADS, length, min(window, length), clusters)
    options = {"balance_rate": BALANCE_RATE} if row in ROUTED else {}
    groups = head_groups(row, budget, key_shift=key_shift_of(row), **options)
    return layers.MixedAttention(groups, key_dim=KEY_DIM)


def leak(row, length=96, window=16):
    """Returns how far outputs move at most if later tokens change; None without a mask.

    Expert choice is asked in the scope `"full"`, in which it is trained.
    """
    if row in NOT_CAUSAL:
        return None
    keras.utils.set_random_seed(0)
    layer = attention(row, length, window)
    x = np.random.default_rng(0).normal(size=(1, length, WIDTH)).astype("float32")
    start = length // 2
    other = x.copy()
    other[:, start:] = -2 * other[:, start:]
    found = [
        ops.convert_to_numpy(layer(each, use_causal_mask=True))[:, :start]
        for each in (x, other)
    ]
    return float(np.abs(found[0] - found[1]).max())


def state_bytes(row, length, window):
    """Returns the size of a cache for so many tokens; None without a causal mask."""
    if row in NOT_CAUSAL:
        return None
    layer = attention(row, length, window)
    layer.build((1, length, WIDTH))
    cache = layer.make_cache(1, length)
    return sum(
        math.prod(tensor.shape) * ops.convert_to_numpy(tensor).itemsize
        for tensor in keras.tree.flatten(cache)
    )


def forward_and_backward(row, length, window):
    """Returns a function that computes output and gradients of a row once.

    As a TensorFlow graph, under a causal mask where the pattern has a causal form.
    """
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layer = attention(row, length, window)
    generator = np.random.default_rng(0)
    x, weights = (
        tf.constant(generator.normal(size=(1, length, WIDTH)).astype("float32"))
        for _ in range(2)
    )
    causal = row not in NOT_CAUSAL
    layer.build(x.shape)

    @tf.function(autograph=False)
    def both(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, use_causal_mask=causal, training=True)
            loss = tf.reduce_sum(output * weights) + sum(layer.losses)
        variables = [variable.value for variable in layer.trainable_variables]
        return tape.gradient(loss, [x, *variables])

    def run():
        both(x, weights)
        tf.test.experimental.sync_devices()

    return run

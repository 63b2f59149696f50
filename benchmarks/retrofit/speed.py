"""Times SmolLM2-135M with full attention, and with multipole heads.

    python -m benchmarks.retrofit.speed

Prints milliseconds of one step with a cache that is full of tokens, and the cache's
size; and with `--prefill`, seconds of one call on all tokens.
"""

import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

from benchmarks import machine
from benchmarks import record
from benchmarks.retrofit import contenders
from benchmarks.retrofit import smollm2
from routing_tf.retrofit import generation

NUM_STEPS, CHUNK = 15, 1024


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_list("lengths", ["2048", "8192"], "Tokens of context.", **define)
    flags.DEFINE_integer("keys", 260, "Keys that a query reads.", **define)
    flags.DEFINE_bool("prefill", False, "Whether to time a whole call.", **define)


def main(argv):
    """Times both models, and prints a table."""
    del argv
    options = flags.FLAGS
    lengths = [int(length) for length in options.lengths]
    lm = smollm2.load()
    rows = [["full attention", *(cell(lm, x, options) for x in lengths)]]
    texts = np.random.default_rng(0).integers(0, 49152, (1, 128)).astype("int32")
    random = contenders.CONTENDERS["multipole with random centroids"]
    random.put_into(lm, options.keys, texts)
    rows.append(["multipole", *(cell(lm, x, options) for x in lengths)])
    print("\n".join(record.table(["", *(f"{x:,} tokens" for x in lengths)], rows)))
    print(machine.describe())


def cell(lm, length, options):
    """Returns what a table says of a model with so many tokens."""
    ids = np.random.default_rng(1).integers(0, 49152, (1, length)).astype("int32")
    if options.prefill:
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        seconds = timed(tf.function(lm.backbone), [inputs], 2)
        return f"{seconds:.1f} s"
    is_full = not hasattr(lm, "restored_class") or lm.restored_class is None
    step, cache = (full if is_full else multipole)(lm, ids)
    number = sum(
        np.prod(x.shape) * tf.as_dtype(x.dtype).size for x in keras.tree.flatten(cache)
    )
    index = tf.constant(length - 1)
    seconds = timed(step, [ids[:, -1:], cache, index], NUM_STEPS)
    return f"{1000 * seconds:.0f} ms, {number / 1e6:.1f} MB"


def full(lm, ids):
    """Returns a step, and a cache of random keys and values."""
    backbone = lm.backbone
    heads, layers = backbone.num_key_value_heads, backbone.num_layers
    dim = backbone.hidden_dim // backbone.num_query_heads
    cache = tf.random.normal((1, layers, 2, ids.shape[1], heads, dim))
    return tf.function(lm.call_with_cache), cache


def multipole(lm, ids):
    """Returns a step, and a cache of all tokens but the last."""
    decoder, length = generation.Decoder(lm), ids.shape[1]
    call = tf.function(decoder.call_with_cache)
    caches = decoder.make_caches(1, length)
    for first in range(0, length, CHUNK):
        mask = np.arange(first, first + CHUNK)[None] < length - 1
        own = tf.constant(ids[:, first : first + CHUNK])
        caches = call(own, caches, tf.constant(first), tf.constant(mask))[2]
    return tf.function(decoder.call_with_cache), caches


def timed(function, arguments, number):
    """Returns the median seconds of a call, after the first."""
    function(*arguments)
    seconds = []
    for _ in range(number):
        start = time.perf_counter()
        keras.tree.flatten(function(*arguments))[0].numpy()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    define_flags()
    app.run(main)

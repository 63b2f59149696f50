"""Times SmolLM2-135M with full attention, and with multipole heads.

    python -m benchmarks.retrofit.speed
    python -m benchmarks.retrofit.speed --what=prefill --lengths=8192

Prints the processor time of one step with a cache that is full of tokens, and the size
of the cache; or that of one call on all tokens. One core computes, so that other work
on the machine does not count. What is timed goes into a file: a second call goes on
where the first was stopped, and `--print_only` prints what is there.
"""

import time

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

from benchmarks import machine
from benchmarks import record
from benchmarks.retrofit import contenders
from routing_tf.retrofit import generation

FULL, SPARSE = "full attention", "multipole with 128 clusters"
#: Steps that are timed. The heads flush pairs in one of 64.
NUM_STEPS = {FULL: 16, SPARSE: 64}
VOCABULARY_SIZE = 49152


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    define = {"flag_values": values}
    flags.DEFINE_enum("what", "step", ["step", "prefill"], "What to time.", **define)
    flags.DEFINE_list("lengths", ["2048", "8192"], "Tokens of context.", **define)
    flags.DEFINE_integer("keys", 260, "Keys that a query reads.", **define)
    flags.DEFINE_string(
        "results", "benchmarks/retrofit/speed.json", "File of the figures.", **define
    )
    flags.DEFINE_bool("print_only", False, "Whether to run nothing.", **define)


def main(argv):
    """Times what the record does not have, and prints it."""
    del argv
    options = flags.FLAGS
    runs = record.Record(options.results)
    if not options.print_only:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        for name in NUM_STEPS:
            add_missing(runs, name, options)
    print("\n".join(table(runs, options)))


def settings_of(name, length, options):
    """Returns what identifies a run."""
    keys = options.keys if name == SPARSE else 0
    return {"heads": name, "what": options.what, "length": length, "keys": keys}


def add_missing(runs, name, options):
    """Times one model, and writes each figure into the record at once."""
    from benchmarks.retrofit import smollm2

    lengths = [
        length
        for length in map(int, options.lengths)
        if not runs.find(settings_of(name, length, options))
    ]
    if not lengths:
        return
    lm = smollm2.load()
    if name == SPARSE:
        heads = contenders.CONTENDERS[name].heads
        random = contenders.Contender(heads, centroids="random")
        random.put_into(lm, options.keys, ids_of(128))
    for length in lengths:
        time_it = prefill if options.what == "prefill" else steps
        found = time_it(lm, name, length)
        runs.add(settings_of(name, length, options), {**found, **machine.describe()})
        print(name, length, found, flush=True)


def ids_of(length):
    """Returns random token ids, `<int32>[1, length]`."""
    drawn = np.random.default_rng(length).integers(VOCABULARY_SIZE, size=(1, length))
    return drawn.astype("int32")


def prefill(lm, name, length):
    """Returns the seconds of one call of the model on all tokens."""
    ids = tf.constant(ids_of(length))
    inputs = {"token_ids": ids, "padding_mask": tf.ones_like(ids)}
    call = tf.function(lm.backbone)
    call.get_concrete_function(inputs)
    return {"seconds": timed(lambda _: call(inputs), 1)}


def steps(lm, name, length):
    """Returns the mean seconds of the last steps up to a length, and the cache's size.

    Each step gets the cache that the one before it returned.
    """
    number = NUM_STEPS[name]
    decoder, cache = lm, None
    if name == FULL:
        cache = random_cache(lm, length)
    else:
        decoder = generation.Decoder(lm)
        cache = filled_caches(lm, decoder, length - number - 1)
    call = tf.function(decoder.call_with_cache)
    size = sum(
        int(np.prod(x.shape)) * tf.as_dtype(x.dtype).size
        for x in keras.tree.flatten(cache)
    )
    ids, state = ids_of(1), [cache]

    def step(place):
        logits, _, state[0] = call(ids, state[0], tf.constant(length - number + place))
        return logits

    step(-1)
    return {"seconds": timed(step, number), "cache_bytes": size}


def random_cache(lm, length):
    """Returns a cache of keras_hub with random keys and values."""
    backbone = lm.backbone
    heads, layers = backbone.num_key_value_heads, backbone.num_layers
    dim = backbone.hidden_dim // backbone.num_query_heads
    return tf.random.normal((1, layers, 2, length, heads, dim))


def filled_caches(lm, decoder, length):
    """Returns caches of random tokens: each layer gets a copy of that of the first."""
    slot = lm.backbone.transformer_layers[0].slot
    tokens = tf.random.normal((1, length, lm.backbone.hidden_dim))
    empty, *others = decoder.make_caches(1, length)
    _, filled = slot.group.start(empty, slot.inputs(tokens))
    copies = [keras.tree.map_structure(tf.identity, filled) for _ in others]
    return [filled, *copies]


def timed(function, number):
    """Returns the mean processor time of calls, in seconds."""
    start = time.process_time()
    for place in range(number):
        keras.tree.flatten(function(place))[0].numpy()
    return (time.process_time() - start) / number


def table(runs, options):
    """Returns the lines of a table, with a row for each model."""
    lengths = [int(length) for length in options.lengths]
    rows = []
    for name in NUM_STEPS:
        found = [runs.find(settings_of(name, x, options)) for x in lengths]
        rows.append([name, *map(_cell, found)])
    words = "one step" if options.what == "step" else "all tokens at once"
    return record.table([words, *(f"{x:,} tokens" for x in lengths)], rows)


def _cell(run):
    if run is None:
        return "-"
    if "cache_bytes" not in run:
        return f"{run['seconds']:.0f} s"
    return f"{1000 * run['seconds']:.0f} ms, {run['cache_bytes'] / 1e6:.0f} MB"


if __name__ == "__main__":
    define_flags()
    app.run(main)

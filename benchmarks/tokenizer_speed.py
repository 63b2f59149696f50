"""Measures how many MB of text the subword tokenizer encodes and decodes a second.

python benchmarks/tokenizer_speed.py --vocabulary=vocab.subwords

The texts are generated: words with frequencies as in natural text (Zipf's law), and
between them spaces, punctuation and newlines. The time is that of one core.
"""

import sys
import time

import numpy as np
import tensorflow as tf
from absl import app
from absl import flags

from routing_tf.tokenizers import SubwordTokenizer

SEPARATORS = (" ", ", ", ". ", "\n", "-", '," ')
FREQUENCIES = (0.8, 0.06, 0.05, 0.05, 0.02, 0.02)


def known_words(tokenizer):
    """Words that are one token, the most frequent first, as vocabularies are sorted."""
    tokens = [token.removesuffix("_") for token in tokenizer.get_vocabulary()]
    return [token for token in tokens if token.isalpha()]


def invented_words(generator, count=50_000):
    """Words of random letters, as a text in another language would have them."""
    lengths = generator.integers(1, 11, count)
    letters = generator.choice(list("etaoinshrdlucmfw"), (count, 11))
    return ["".join(row[:length]) for row, length in zip(letters, lengths)]


def chinese_words(generator, count=50_000):
    """Words of characters of which a vocabulary lacks many."""
    points = generator.integers(0x4E00, 0x9FA5, (count, 2))
    return ["".join(map(chr, row)) for row in points]


def generate_texts(generator, words, megabytes, size):
    """Draws texts of `size` characters that have some megabytes together."""
    weights = 1 / np.arange(1, len(words) + 1)
    mean = np.average([len(word.encode()) + 1.2 for word in words], weights=weights)
    drawn = generator.choice(
        words, int(megabytes * 1e6 / mean), p=weights / sum(weights)
    )
    separators = generator.choice(SEPARATORS, len(drawn), p=FREQUENCIES)
    text = "".join(map("".join, zip(drawn, separators)))
    return [text[start : start + size] for start in range(0, len(text), size)]


def seconds_of(function, argument, runs=3):
    """Seconds of the fastest of some runs, after one that traces."""
    function(argument)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        function(argument)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure(tokenizer, texts):
    """Measures one kind of text.

    Args:
        tokenizer: a `SubwordTokenizer`.
        texts: list of texts.

    Returns:
        A line that tells the speeds.

    Raises:
        ValueError: if the decoded texts are not the texts.
    """
    encode = tf.function(tokenizer.tokenize)
    decode = tf.function(tokenizer.detokenize)
    texts = tf.constant(texts)
    ids = encode(texts)
    if not bool(tf.reduce_all(decode(ids) == texts)):
        raise ValueError("The decoded texts must be the texts. Received: others")
    megabytes = int(tf.reduce_sum(tf.strings.length(texts))) / 1e6
    return (
        f"{megabytes:.2f} MB in {len(texts)} texts, "
        f"{megabytes * 1e6 / len(ids.flat_values):.2f} bytes a token, "
        f"encoded at {megabytes / seconds_of(encode, texts):.1f} MB/s, "
        f"decoded at {megabytes / seconds_of(decode, ids):.1f} MB/s"
    )


def define_flags(values=flags.FLAGS):
    """Defines the flags of the command in `values`, an `absl.flags.FlagValues`."""
    flags.DEFINE_string(
        "vocabulary",
        None,
        "Vocabulary file in the release's format. By default one of 8,192 tokens is "
        "built from invented words.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "megabytes", 1.0, "Size of all texts of a kind.", 0.01, flag_values=values
    )
    flags.DEFINE_integer(
        "text_size", 5_000, "Characters in each text.", 1, flag_values=values
    )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(
            f"Settings are given as --name=value. Received: {argv[1:]}"
        )
    options = flags.FLAGS
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    generator = np.random.default_rng(0)
    invented = invented_words(generator)
    sizes = options.megabytes, options.text_size
    try:
        vocabulary = options.vocabulary or SubwordTokenizer.build_vocabulary(
            generate_texts(generator, invented, *sizes), 8192
        )
        start = time.perf_counter()
        tokenizer = SubwordTokenizer(vocabulary)
        seconds = time.perf_counter() - start
        print(f"{tokenizer.vocabulary_size()} tokens, set in {seconds:.2f} s")
        for name, words in (
            ("words of the vocabulary", known_words(tokenizer)),
            ("invented words", invented),
            ("Chinese characters", chinese_words(generator)),
        ):
            texts = generate_texts(generator, words, *sizes)
            print(f"{name}: {measure(tokenizer, texts)}", flush=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)

"""Small problems for tests: a missing split, another metric, pairs, images."""

import math
import os
import signal

import numpy as np
import tensorflow as tf

from routing_tf import problems
from routing_tf.problems import image
from routing_tf.problems.windows import read_rows
from routing_tf.tokenizers import ByteTokenizer

NUM_PAIRS = {"train": 40, "validation": 6, "test": 5}
SIZES = {"train": 6000, "validation": 1000, "test": 300}


def letters(split, size):
    """Returns ids of random letters, other ones for each split."""
    generator = np.random.default_rng(SIZES[split])
    return generator.integers(97, 123, size, "uint16") + 2


@problems.register("test_words")
class Words(problems.Problem):
    """Random letters as words of five; splits in `missing` cannot be loaded."""

    metric_name = "perplexity per word"
    default_hparams_set = "byte_tiny"
    vocabulary_size = 258
    tokenizer = ByteTokenizer()
    missing = ()

    def load_split(self, split):
        if split in self.missing:
            raise ValueError(f"The files of {split!r} are missing")
        return letters(split, SIZES[split])

    def metric(self, nats_per_token, split):
        self.tokens(split)  # of which the number of words would be taken
        return math.exp(5 * nats_per_token)


@problems.register("test_copy")
class Copy(problems.Problem):
    """Random letters to copy; the vocabulary is known when the data is there."""

    kind = "seq2seq"
    metric_name = "perplexity per token"
    default_hparams_set = "byte_tiny"

    def __init__(self, input_length=None, **options):
        super().__init__(**options)
        self.input_length = int(input_length)

    @classmethod
    def options_for(cls, hyperparameters):
        return {
            "sequence_length": hyperparameters.max_sequence_length,
            "input_length": hyperparameters.max_input_length,
        }

    def check_hyperparameters(self, hyperparameters):
        if hyperparameters.kind != self.kind:
            raise ValueError(f"{self.name} needs a model with an encoder")

    def load_split(self, split):
        self.vocabulary_size, self.tokenizer = 258, ByteTokenizer()
        lengths = 3 + np.arange(NUM_PAIRS[split]) % 6
        ids = letters(split, lengths.sum())
        windows = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)
        return problems.Tokens(ids, windows)

    def pair(self, split, index):
        start, length = self.tokens(split).windows[index]
        ids = np.append(self.ids(split)[start : start + length], 1)
        return ids, ids

    def metric(self, nats_per_token, split):
        return math.exp(nats_per_token)

    def read(self, split, starts, lengths):
        def rows(row_length):
            is_real = lengths > 0  # rows that fill up a batch have no end id
            ids = read_rows(self.ids(split), starts, lengths, row_length)
            mask = tf.sequence_mask(lengths + 1, row_length) & is_real[:, None]
            return tf.where(mask & (ids == 0), 1, ids), mask

        source, source_mask = rows(self.input_length)
        target, target_mask = rows(self.sequence_length)
        inputs = {
            "encoder_token_ids": source,
            "encoder_padding_mask": source_mask,
            "decoder_token_ids": tf.pad(target[:, :-1], [[0, 0], [1, 0]]),
            "decoder_padding_mask": target_mask,
        }
        return inputs, target, tf.cast(target_mask, tf.float32)


@problems.register("test_checkers")
class Checkers(image.ImageProblem):
    """Tiny images of noise."""

    image_shape, vocabulary_size, num_classes = (4, 4, 1), 5, 2
    default_hparams_set = "digits_small"

    def load(self):
        generator = np.random.default_rng(0)
        split = generator.integers(0, 5, (6, 4, 4, 1)), np.arange(6, dtype="int32") % 2
        return {"train": split, "validation": split, "test": split}


def press(number):
    """Sends a signal to this process."""
    os.kill(os.getpid(), number)


def interrupted(dataset, split, *arguments):
    """A dataset; while the third batch of training is read, Ctrl-C is pressed."""

    class Interrupted:
        def as_numpy_iterator(self):
            for index, batch in enumerate(dataset.as_numpy_iterator()):
                if index == 2:
                    press(signal.SIGINT)
                yield batch

    return Interrupted() if split == "train" else dataset

"""The windows of a split, their order, and how they are read."""

import dataclasses

import numpy as np
import tensorflow as tf

from routing_tf.problems.arguments import integer_at_least

IDS_AT_ONCE = 1 << 22
MAX_BLOCKS = 64


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The token ids of a split, and how they are cut into windows.

    Args:
        ids: NumPy array `[num_tokens]`, of any integer type; it may be on disk
            (`numpy.memmap`).
        windows: NumPy array `<int64>[num_windows, 2]`, start and length of
            each window; windows may overlap. Defaults to `None`: consecutive windows.
        num_words: integer, the number of words of the original text, for perplexities
            per word. Defaults to `None`, unknown.
    """

    ids: np.ndarray
    windows: np.ndarray | None = None
    num_words: int | None = None


def extent(ids):
    """Returns the least and the greatest of some ids, as integers.

    For more than 268 million ids, evenly spaced blocks stand for all.
    """
    starts = np.arange(0, len(ids), IDS_AT_ONCE)
    count = min(len(starts), MAX_BLOCKS)
    starts = starts[np.arange(count) * len(starts) // max(1, count)]
    blocks = [ids[start : start + IDS_AT_ONCE] for start in starts]
    least = min((int(block.min()) for block in blocks), default=0)
    return least, max((int(block.max()) for block in blocks), default=0)


class Windows:
    """The windows of a split: their starts and lengths, in ids.

    `given` `<int64>[num_windows, 2]` are starts and lengths from the data itself;
    `None` for consecutive windows of `length` ids. `min_training_length` is that of
    `Problem`.
    """

    def __init__(self, num_ids, length, given=None, min_training_length=None):
        self.num_ids = num_ids
        self.length = length
        self.given = given
        self.min_training_length = min_training_length

    def number(self, training):
        """Returns the number of windows, in evaluation or an epoch of training."""
        if self.given is not None:
            return len(self.given)
        remainder = 0 if training else self.length - 1
        return (self.num_ids + remainder) // self.length

    def of_epoch(self, seed, epoch):
        """The windows of one epoch of training, in the order of that epoch.

        The ids are a ring: windows follow each other from a random place, and one of
        them may continue from the end at the beginning. Windows from the data itself do
        not change. Takes int64 scalars; returns starts and lengths, two tensors
        `<int64>[number(training=True)]`.
        """
        seed = tf.stack([seed, epoch])
        order = tf.random.experimental.stateless_shuffle(
            tf.range(self.number(training=True), dtype=tf.int64), seed, alg="philox"
        )
        if self.given is not None:
            # Outside of the graph, which would contain millions of them as a constant.
            with tf.init_scope(), tf.device("cpu"):
                given = tf.convert_to_tensor(self.given)
            starts, lengths = tf.unstack(tf.gather(given, order), axis=1)
        else:
            offset = tf.random.stateless_uniform(
                (), seed, 0, self.num_ids, dtype=tf.int64, alg="philox"
            )
            lengths = tf.fill(tf.shape(order), np.int64(self.length))
            starts = (offset + order * self.length) % self.num_ids
        if self.min_training_length is not None:
            share = tf.random.stateless_uniform(
                tf.shape(order), seed + 1, dtype=tf.float64, alg="philox"
            )
            shortest = tf.minimum(lengths, self.min_training_length)
            choices = tf.cast(lengths - shortest + 1, tf.float64)
            lengths = shortest + tf.cast(share * choices, tf.int64)
        return starts, lengths

    def in_order(self):
        """Returns starts and lengths of all windows in order, two NumPy arrays."""
        if self.given is not None:
            return self.given[:, 0], self.given[:, 1]
        starts = np.arange(self.number(training=False), dtype="int64") * self.length
        return starts, np.minimum(self.length, self.num_ids - starts)

    def dataset(
        self, training, batch_size, seed, num_done, repeat=None, num_examples=None
    ):
        """A dataset of pairs (start, length), without the first `num_done`.

        In evaluation, windows of length 0 pad the last batch. Other arguments are as
        for `Problem.dataset`.
        """
        if not training:
            windows = self._evaluation(batch_size, num_examples)
            return (windows.repeat() if repeat else windows).skip(num_done)
        if num_examples is not None:
            raise ValueError(
                "`num_examples` must be None for the training split; to shorten "
                "training use dataset(...).take(steps). Received: "
                f"num_examples={num_examples}"
            )
        return self._training(batch_size, seed, num_done, repeat)

    def _training(self, batch_size, seed, num_done, repeat):
        """Epoch after epoch."""
        seed = tf.constant(integer_at_least(0, "seed", seed), tf.int64)
        number = self.number(training=True)
        first_epoch, num_done = divmod(num_done, number)
        if repeat or repeat is None:
            epochs = tf.data.Dataset.counter(first_epoch)
            size = tf.data.INFINITE_CARDINALITY
        else:
            epochs = tf.data.Dataset.range(first_epoch, max(1, first_epoch))
            size = max(0, number - num_done) if first_epoch == 0 else 0
            if number < batch_size:
                raise ValueError(
                    "`batch_size` must not exceed the number of training windows "
                    f"if `repeat` is False. Received: batch_size={batch_size} with "
                    f"{number} windows of {self.length} ids"
                )

        @tf.autograph.experimental.do_not_convert  # which takes longer than all else
        def windows_of(epoch):
            starts, lengths = self.of_epoch(seed, epoch)
            # Sliced instead of skipped, because an epoch may have millions of windows.
            done = tf.where(epoch == first_epoch, np.int64(num_done), np.int64(0))
            return tf.data.Dataset.from_tensor_slices((starts[done:], lengths[done:]))

        # Keras asks for the length of a dataset, which a flat_map does not know.
        return epochs.flat_map(windows_of).apply(
            tf.data.experimental.assert_cardinality(size)
        )

    def _evaluation(self, batch_size, num_examples):
        """All windows in order, padded with windows of length 0."""
        starts, lengths = self.in_order()
        if num_examples is not None:
            num_examples = integer_at_least(1, "num_examples", num_examples)
            count = min(num_examples, len(starts))
            chosen = np.arange(count) * len(starts) // count
            starts, lengths = starts[chosen], lengths[chosen]
        filling = (0, -len(starts) % batch_size)
        return tf.data.Dataset.from_tensor_slices(
            (np.pad(starts, filling), np.pad(lengths, filling))
        )


def read_windows(ids, starts, lengths, sequence_length):
    """Returns a batch of windows of ids, a ring, as `Problem.dataset` describes it.

    `starts` and `lengths` are `<int64>[batch]`; the rest of each row is padding.
    """
    targets = read_rows(ids, starts, lengths, sequence_length)
    mask = tf.sequence_mask(lengths, sequence_length)
    inputs = {"token_ids": shifted(targets), "padding_mask": mask}
    return inputs, targets, tf.cast(mask, tf.float32)


def segment_ids_of(targets, mask, end_id):
    """Returns the segment of each input: texts count from 1, and 0 is padding.

    The input before a text, the `end_id` of the previous one, belongs to it.
    """
    ends = tf.cast(targets == end_id, tf.int32)
    number = 1 + tf.cumsum(ends, axis=1, exclusive=True)
    return tf.where(mask, number, 0)


def shifted(targets):
    """Returns a batch of targets, with inputs shifted right after a leading 0."""
    return tf.pad(targets[:, :-1], [[0, 0], [1, 0]])


def read_rows(ids, starts, lengths, row_length):
    """Cuts rows out of ids, a ring that may be larger than the memory.

    `starts` and `lengths` are `<int64>[batch]`; the result `<int32>[batch, row_length]`
    has 0 after each row's ids.
    """

    def cut(starts, lengths):
        rows = np.zeros((len(starts), row_length), "int32")
        for row, start, length in zip(rows, starts % len(ids), lengths):
            until_end = min(length, len(ids) - start)
            row[:until_end] = ids[start : start + until_end]
            row[until_end:length] = ids[: length - until_end]
        return rows

    # A memory-mapped array is read with NumPy inside tf.data.
    rows = tf.numpy_function(cut, [starts, lengths], tf.int32, stateful=False)
    return tf.ensure_shape(rows, (starts.shape[0], row_length))

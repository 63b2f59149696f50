"""The common part of all problems: splits of token ids, as batches of windows."""

import math
import zlib

import numpy as np
import tensorflow as tf

from routing_tf.files.names import SPLITS
from routing_tf.problems.arguments import check_lengths
from routing_tf.problems.arguments import check_split
from routing_tf.problems.arguments import check_worker
from routing_tf.problems.arguments import integer_at_least
from routing_tf.problems.arguments import limit_of
from routing_tf.problems.arguments import shortest_window
from routing_tf.problems.windows import Tokens
from routing_tf.problems.windows import Windows
from routing_tf.problems.windows import extent
from routing_tf.problems.windows import read_windows

BLOCK_LENGTH = 1 << 16
MOST_BLOCKS = 512


class Problem:
    """A data set with a tokenizer, served as batches for a language model.

    Your own problem returns the data of a split from `load_split`: the ids of a
    `Problem`, the texts of a `TextProblem`, the pairs of texts of a `Seq2SeqProblem`,
    or the images and labels of an `ImageProblem`. `load` returns that of all splits, if
    they are read together. The class cuts the data into windows and batches them.

    Each epoch of training starts at another offset and visits the windows in another
    order. Both depend only on the seed and the epoch, so `start_step` continues
    anywhere, and there is no iterator state to save.

    Args:
        data_dir: string, the folder with the data, for problems that need one.
        sequence_length: integer or a string of digits, ids per window. Defaults
            to the class's `default_sequence_length`.
        train_split: string, the split to train on: "train" (the default),
            "validation" or "test".
        eval_split: string, the split that is scored during training. Defaults to
            "validation".
        min_training_length: integer or a string of digits: each training window is cut
            to a random number of ids, at least this number, and padded. A model that
            has seen sequences of all lengths does not depend on full ones. Defaults to
            `None`: windows are not cut.

    Attributes:
        name: string, the name it is registered under.
        kind: string, the kind of model that it needs: "text", "seq2seq" or "image".
        metric_name: string, what `metric` returns.
        vocabulary_size: integer, the number of different ids.
        tokenizer: the tokenizer between text and ids; `None` if there is none.
        sequence_length: integer, ids per window.
        default_hparams_set: string, the preset that `train` uses if none is named.
        given_options: dictionary of the options passed to `problems.get`.
        storage: string, the folder in `data_dir` for prepared data; `None` if there is
            nothing to prepare.
        has_own_files: boolean, whether the data consists of files that the user names.
        segment_ids: boolean, whether windows pack several documents or pairs.
        places_are: string, the unit of the starts and lengths of windows, for people.
        lengths: dictionary from the problem's own lengths to the hyperparameters that
            must not be smaller.

    Raises:
        ValueError: if an argument is out of range.

    Example:
    ```python
    import numpy as np
    from routing_tf import problems


    class Countdown(problems.Problem):
        vocabulary_size = 10

        def load_split(self, split):
            return np.tile(np.arange(9, -1, -1, dtype="uint16"), 50)


    problem = Countdown(sequence_length=20)
    inputs, targets, weights = next(iter(problem.dataset("train", batch_size=4)))
    inputs["token_ids"].shape  # (4, 20)
    ```
    """

    name = None
    kind = "text"
    metric_name = "bits per byte"
    default_sequence_length = 2048
    default_hparams_set = "python_small"
    vocabulary_size = None
    tokenizer = None
    storage = None
    has_own_files = False
    segment_ids = False
    places_are = "ids"
    lengths = {"sequence_length": "max_sequence_length"}

    def __init__(
        self,
        data_dir=None,
        sequence_length=None,
        train_split="train",
        eval_split="validation",
        min_training_length=None,
    ):
        self.data_dir = data_dir
        if sequence_length is None:
            sequence_length = self.default_sequence_length
        self.sequence_length = integer_at_least(1, "sequence_length", sequence_length)
        check_split(train_split, "train_split")
        check_split(eval_split, "eval_split")
        self.train_split = train_split
        self.eval_split = eval_split
        self.min_training_length = shortest_window(
            min_training_length, self.sequence_length, self.kind
        )
        self.given_options = {}
        self._loaded = None
        self._splits = {}

    @classmethod
    def options_for(cls, hyperparameters):
        """Returns a dict of the arguments that follow from hyperparameters."""
        h, lengths = hyperparameters, cls.lengths.items()
        return {name: limit_of(h, largest)[0] for name, largest in lengths}

    def load_split(self, split):
        """Returns the data of one split; subclasses implement this or `load`.

        For texts, it is `Tokens` or a NumPy array `<int>[num_tokens]`.
        """
        if self._loaded is None:
            self._loaded = self.load()
        return self._loaded[split]

    def load(self):
        """Reads the data of all splits together.

        Returns:
            A dictionary from split to data as returned by `load_split`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define load_split(split), which returns the "
            f"data of one of the splits {SPLITS}, or load(), which returns that of all "
            "splits."
        )

    def load_tokens(self, split):
        """Returns the `Tokens` of the result of `load_split`."""
        data = self.load_split(split)
        if isinstance(data, Tokens):
            return data
        ids, limit = np.asanyarray(data), self.vocabulary_size or 1 << 31
        is_flat = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
        least, greatest = extent(ids) if is_flat else (0, 0)
        if not is_flat or least < 0 or greatest >= limit:
            raise ValueError(
                f"The ids of {self.name} must be integers of 0 to {limit - 1}, as its "
                "`vocabulary_size` says, in an array [num_tokens]. Received: "
                f"<{ids.dtype}>{list(ids.shape)}"
                f"{f', from {least} to {greatest},' if is_flat else ''} for the split "
                f"{split!r}"
            )
        return Tokens(ids)

    def prepare(self, *splits):
        """Loads splits, each once, by default those to train on and to evaluate.

        Raises a `ValueError` if data is missing or shorter than a training window.
        """
        for split in self._of_use(splits):
            self.tokens(split)
            self._check_windows(split, training=split == self.train_split)

    def _check_windows(self, split, training):
        """Raises a `ValueError` if a split has no window."""
        if not self.num_windows(split, training):
            if not self.num_tokens(split):
                raise ValueError(
                    f"The split {split!r} of {self.name} must have data. Received: "
                    "none. Use more data, or name files for this split alone"
                )
            rule = "must not be longer than the split to train on"
            raise ValueError(
                f"`sequence_length` {rule if training else 'must give a window'}. "
                f"Received: sequence_length={self.sequence_length} for the split "
                f"{split!r} of {self.num_tokens(split)} ids. Use a shorter "
                "sequence_length or more data."
            )

    def tokens(self, split):
        """Returns the `Tokens` of a split, which is loaded once."""
        check_split(split)
        if split not in self._splits:
            self._splits[split] = self.load_tokens(split)
        return self._splits[split]

    def ids(self, split):
        """Returns all ids of a split, a NumPy array `[num_tokens]`."""
        return self.tokens(split).ids

    def num_tokens(self, split):
        """Returns the number of ids in a split."""
        return len(self.ids(split))

    def arrays(self, split):
        """Returns the NumPy arrays that are the data of a split."""
        fields = vars(self.tokens(split)).values()
        return [value for value in fields if isinstance(value, np.ndarray)]

    def checksum(self, split):
        """Returns an integer that changes if the data of a split changes."""
        return checksum(self.arrays(split))

    def windows(self, split):
        """Returns the `Windows` of a split."""
        tokens = self.tokens(split)
        return Windows(
            len(tokens.ids),
            self.sequence_length,
            tokens.windows,
            self.min_training_length,
        )

    def num_windows(self, split, training=None):
        """Returns the number of windows in a split, or in a training epoch.

        `training` decides which, by default True for `train_split`.
        """
        training = split == self.train_split if training is None else training
        return self.windows(split).number(training)

    def metric(self, nats_per_token, split):
        """Returns the metric that `metric_name` names, by default bits per token."""
        return nats_per_token / math.log(2)

    def fit_hyperparameters(self, hyperparameters):
        """Returns hyperparameters with the settings that follow from the data."""
        return hyperparameters

    def check_hyperparameters(self, hyperparameters):
        """Raises a `ValueError` if a model of these hyperparameters does not fit."""
        if hyperparameters.kind != "text":
            raise ValueError(
                f"The problem {self.name!r} needs a model of texts without an encoder. "
                f"Received: hyperparameters of kind {hyperparameters.kind!r}"
            )
        check_lengths(self, hyperparameters)

    def describe(self, *splits):
        """Returns a line for a log that describes the data and its size."""
        sizes = (f"{each} {self.describe_split(each)}" for each in self._of_use(splits))
        return f"{self.name}: {', '.join(sizes)}; windows of {self.sequence_length:,}"

    def describe_split(self, split):
        """Returns a few words for `describe` about the size of a split."""
        return f"{self.num_tokens(split):,} ids"

    def _of_use(self, splits):
        """The splits of a call: the named ones, or the two of the run."""
        return dict.fromkeys(splits or (self.train_split, self.eval_split))

    def baseline(self, split):
        """Returns a line for a log with the score that a model should beat; or None."""
        return None

    def evaluation_windows(self, split):
        """Returns starts and lengths of a split's windows in order, int64 arrays."""
        return self.windows(split).in_order()

    def dataset(
        self,
        split,
        batch_size,
        seed=0,
        start_step=0,
        repeat=None,
        num_examples=None,
        training=None,
        num_workers=1,
        worker=0,
    ):
        """Returns batches of a split, all of the same static shape.

        Training batches are endless, in an order that depends only on `seed` and the
        step. Evaluation goes through the split once, in order; rows that pad the last
        batch have weight 0 and a mask of all False.

        Args:
            split: string, "train", "validation" or "test".
            batch_size: integer, number of windows per batch of each worker.
            seed: non-negative integer, of order and offsets in training. Defaults to 0.
            start_step: integer, the batch to start with. Defaults to 0.
            repeat: boolean, whether to repeat endlessly. Defaults to `None`: only
                training repeats. One epoch drops the windows that do not fill a batch.
            num_examples: integer, number of windows in evaluation, evenly spaced over
                the split. Defaults to `None`, all.
            training: boolean, whether to serve training windows. Defaults to `None`:
                only for `train_split`.
            num_workers: integer, number of workers that share the work. Joined, their
                batches of a step are the batch of one worker with the sum of their
                `batch_size`. Defaults to 1.
            worker: integer, number of this worker, counted from 0.

        Returns:
            A `tf.data.Dataset` of `(inputs, targets, weights)`. `inputs` has
            "token_ids", `<int32>[batch, length]`, the targets shifted right by one with
            a leading 0, and "padding_mask", `<bool>[batch, length]`. `targets` is
            `<int32>[batch, length]`; `weights` is `<float32>[batch, length]`, 1 where
            there is a target.

        Example:
        ```python
        from routing_tf import problems

        problem = problems.get("python_source", sequence_length=128)
        resumed = problem.dataset("train", batch_size=2, start_step=1000)
        inputs, targets, weights = next(iter(resumed))
        ```
        """
        check_split(split)
        batch_size = integer_at_least(1, "batch_size", batch_size)
        start_step = integer_at_least(0, "start_step", start_step)
        worker = check_worker(worker, num_workers)
        together = batch_size * int(num_workers)
        training = split == self.train_split if training is None else training
        self._check_windows(split, training)
        windows = self.windows(split).dataset(
            training, together, seed, start_step * together, repeat, num_examples
        )
        own = slice(worker * batch_size, (worker + 1) * batch_size)

        @tf.autograph.experimental.do_not_convert  # which takes longer than all else
        def read(starts, lengths):
            return self.read(split, starts[own], lengths[own])

        windows = windows.batch(together, drop_remainder=True)
        return windows.map(read, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def describe_batch(self, batch_size, seed, step):
        """Returns a line for people: the place of a training batch in the data.

        Args:
            batch_size: integer, number of windows per batch of all workers.
            seed: non-negative integer, as in `dataset`.
            step: integer, number of the batch, counted from 0.
        """
        split, num_done = self.train_split, step * batch_size
        windows = self.windows(split).dataset(True, batch_size, seed, num_done)
        starts, lengths = next(windows.batch(batch_size).as_numpy_iterator())
        epoch, position = divmod(num_done, self.num_windows(split, True))
        ends = (starts + lengths - 1) % self.windows(split).num_ids
        places = ", ".join(
            str(start) if start == end else f"{start} to {end}"
            for start, end in zip(starts[:4], ends)
        )
        more = f" and {batch_size - 4} more" if batch_size > 4 else ""
        return (
            f"batch {step} of {split} with seed {seed} (epoch {epoch + 1}, from window "
            f"{position} of its order): {self.places_are} {places}{more}"
        )

    def read(self, split, starts, lengths):
        """Reads a batch by `read_windows`; it is traced without AutoGraph."""
        return read_windows(self.ids(split), starts, lengths, self.sequence_length)


def perplexity(nats):
    """Returns the exponential; infinity if it is too large for a float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def checksum(arrays):
    """Returns the CRC-32 of arrays of integers, whatever their data types.

    Of an array that is too long to read completely each time, evenly spaced blocks
    count.
    """
    value = 0
    for array in arrays:
        array = array.reshape(-1)
        total = -(-len(array) // BLOCK_LENGTH)
        number = min(total, MOST_BLOCKS)
        for index in range(number):
            start = index * total // number * BLOCK_LENGTH
            block = array[start : start + BLOCK_LENGTH]
            value = zlib.crc32(np.ascontiguousarray(block, "<i8"), value)
    return value

"""What every problem has: splits of token ids, cut into batches of windows."""

import operator

import numpy as np
import tensorflow as tf

SPLITS = ("train", "validation", "test")


class Problem:
    """A data set with a tokenizer, served as batches for a language model.

    A subclass says in `load` what the token ids of each split are; this class
    cuts them into windows and batches them. A problem that cuts its windows by a
    rule of its own also overrides `num_windows`, `training_windows` and
    `evaluation_windows`.

    Each epoch of training starts at another offset and visits the windows in
    another order. Both depend on the seed and the epoch alone: `start_step`
    continues anywhere, and there is no iterator state to save.

    Args:
        data_dir: string, the folder with the data, for problems that need one.
        sequence_length: integer or a string of digits, ids per window. Defaults
            to the class's `default_sequence_length`.

    Attributes:
        name: string, the name it is registered under.
        metric_name: string, what `log2` of the perplexity per id stands for.
        vocabulary_size: integer, the number of different ids.
        tokenizer: the tokenizer between text and ids; `None` if there is none.
        sequence_length: integer, ids per window.
        default_hparams_set: string, the hyperparameters that `train` takes if none
            are named.

    Raises:
        ValueError: if `sequence_length` is not a positive integer.

    Example:
    ```python
    import numpy as np
    from routing_tf import problems


    class Countdown(problems.Problem):
        vocabulary_size = 10

        def load(self):
            ids = np.tile(np.arange(9, -1, -1, dtype="uint16"), 50)
            return {"train": ids, "validation": ids, "test": ids}


    problem = Countdown(sequence_length=20)
    inputs, targets, weights = next(iter(problem.dataset("train", batch_size=4)))
    inputs["token_ids"].shape  # (4, 20)
    ```
    """

    name = None
    metric_name = "bits per byte"
    default_sequence_length = 2048
    default_hparams_set = "python_small"
    vocabulary_size = None
    tokenizer = None

    def __init__(self, data_dir=None, sequence_length=None):
        self.data_dir = data_dir
        if sequence_length is None:
            sequence_length = self.default_sequence_length
        self.sequence_length = integer_at_least(1, "sequence_length", sequence_length)
        self._ids = None

    def load(self):
        """Reads the data; to be written by subclasses.

        Returns:
            A dictionary from split ("train", "validation", "test") to a NumPy
            array of ids, shape `(num_tokens,)`, of any integer type.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define load(), which returns the ids of "
            f"the splits {SPLITS}."
        )

    def prepare(self):
        """Loads the data, once; further calls do nothing.

        Raises:
            ValueError: if the data is missing, or a split is shorter than a
                window.
        """
        if self._ids is not None:
            return
        ids = self.load()
        if min(len(ids[split]) for split in SPLITS) < self.sequence_length:
            sizes = ", ".join(f"{split} {len(ids[split])}" for split in SPLITS)
            raise ValueError(
                "`sequence_length` must not be longer than a split of the data. "
                f"Received: sequence_length={self.sequence_length} for splits of so "
                f"many ids: {sizes}. Use a shorter sequence_length or more data."
            )
        # On the host: a corpus has no business in an accelerator's memory.
        with tf.device("cpu"):
            self._ids = {split: tf.convert_to_tensor(ids[split]) for split in SPLITS}

    def ids(self, split):
        """Returns all ids of a split, a NumPy array of shape `(num_tokens,)`."""
        check_split(split)
        self.prepare()
        return np.asarray(self._ids[split])

    def num_tokens(self, split):
        """Returns the number of ids in a split."""
        return len(self.ids(split))

    def num_windows(self, split):
        """Returns the number of windows in a split, or in a training epoch.

        The last window of an evaluation split may be shorter than the others; in
        training the ids that do not fill a window are left out for this epoch.
        """
        remainder = 0 if split == "train" else self.sequence_length - 1
        return (self.num_tokens(split) + remainder) // self.sequence_length

    def check_hyperparameters(self, hyperparameters):
        """Raises a `ValueError` if a model of these hyperparameters does not fit.

        Args:
            hyperparameters: `Hyperparameters`.

        Raises:
            ValueError: if the model is none of texts, or its sequences are shorter
                than a window.
        """
        if hyperparameters.kind != "text":
            raise ValueError(
                f"The problem {self.name!r} needs a model of texts without an encoder. "
                f"Received: hyperparameters of kind {hyperparameters.kind!r}"
            )
        if self.sequence_length > hyperparameters.max_sequence_length:
            raise ValueError(
                "`sequence_length` of the problem must not exceed the model's "
                f"`max_sequence_length`. Received: {self.sequence_length} and "
                f"{hyperparameters.max_sequence_length}. Leave sequence_length out, or "
                "pass the hyperparameter max_sequence_length"
            )

    def describe(self):
        """Returns a line for a log: what the data is and how much of it."""
        sizes = ", ".join(f"{split} {self.num_tokens(split):,}" for split in SPLITS)
        return f"{self.name}: ids: {sizes}; windows of {self.sequence_length:,}"

    def baseline(self, split):
        """Returns a line for a log: what a model of a split has to beat; or None.

        Args:
            split: string, the split to score.
        """
        return None

    def training_windows(self, seed, epoch):
        """The windows of one epoch of training, in the order of that epoch.

        The training data is a ring: the windows follow each other from a random
        place on, and one of them may run over the end into the beginning.

        Args:
            seed: int64 tensor of shape `()`.
            epoch: int64 tensor of shape `()`, counted from 0.

        Returns:
            Starts and lengths in ids, two int64 tensors of shape
            `(num_windows("train"),)`.
        """
        seed = tf.stack([seed, epoch])
        length = tf.constant(self.sequence_length, tf.int64)
        numbers = tf.random.experimental.stateless_shuffle(
            tf.range(self.num_windows("train"), dtype=tf.int64), seed, alg="philox"
        )
        offset = tf.random.stateless_uniform(
            (), seed, 0, self.num_tokens("train"), dtype=tf.int64, alg="philox"
        )
        return offset + numbers * length, tf.fill(tf.shape(numbers), length)

    def evaluation_windows(self, split):
        """The windows of a split in their fixed order: every id exactly once.

        Args:
            split: string, "validation" or "test".

        Returns:
            Starts and lengths in ids, two NumPy int64 arrays of shape
            `(num_windows(split),)`.
        """
        starts = np.arange(self.num_windows(split), dtype="int64")
        starts *= self.sequence_length
        lengths = np.minimum(self.sequence_length, self.num_tokens(split) - starts)
        return starts, lengths

    def dataset(
        self, split, batch_size, seed=0, start_step=0, repeat=None, num_examples=None
    ):
        """Batches of a split, all of the same static shape.

        Training goes on for ever, in an order given by `seed` and the step alone.
        Evaluation goes through the split once, in order; rows that fill up the last
        batch have weight 0 and a mask of all False.

        Args:
            split: string, "train", "validation" or "test".
            batch_size: integer, windows per batch.
            seed: non-negative integer, decides order and offsets in training;
                evaluation does not depend on it. Defaults to 0.
            start_step: integer, the batch to start with, as if the batches before
                it had been taken and thrown away. Defaults to 0.
            repeat: boolean, whether to go on for ever. Defaults to `None`: True
                for "train", False otherwise. One epoch of training drops the
                windows that do not fill a batch.
            num_examples: integer, for "validation" and "test": use so many
                windows, evenly spaced over the split, or all if there are fewer.
                Defaults to `None`, all.

        Returns:
            A `tf.data.Dataset` of `(inputs, targets, weights)`. `inputs` has
            "token_ids", int32 `(batch, length)`, the targets shifted right by one
            behind a leading 0, and "padding_mask", bool `(batch, length)`, True
            where there is a target. `targets` is int32 `(batch, length)`;
            `weights` is float32 `(batch, length)`, 1 where there is a target.

        Raises:
            ValueError: if an argument is out of range or the data is missing.

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
        self.prepare()
        if split == "train":
            check_no_training_subset(num_examples)
            windows = self._all_training_windows(batch_size, seed, start_step, repeat)
        else:
            windows = self._some_evaluation_windows(split, batch_size, num_examples)
            windows = windows.repeat() if repeat else windows
            windows = windows.skip(start_step * batch_size)

        def read(starts, lengths):
            return self.read(split, starts, lengths)

        windows = windows.batch(batch_size, drop_remainder=True)
        return windows.map(read, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def read(self, split, starts, lengths):
        """Reads the windows of one batch; see `read_windows`.

        Args:
            split: string, "train", "validation" or "test".
            starts: int64 tensor of shape `(batch,)`, the first id of each window.
            lengths: int64 tensor of shape `(batch,)`, how many ids each window has.

        Returns:
            `(inputs, targets, weights)` as described in `dataset`.
        """
        return read_windows(self._ids[split], starts, lengths, self.sequence_length)

    def _all_training_windows(self, batch_size, seed, start_step, repeat):
        """A dataset of pairs (start, length), from a step of training on."""
        seed = tf.constant(integer_at_least(0, "seed", seed), tf.int64)
        num_windows = self.num_windows("train")
        if repeat or repeat is None:
            epoch, done = divmod(start_step * batch_size, num_windows)
            epochs = tf.data.Dataset.counter(epoch)
            size = tf.data.INFINITE_CARDINALITY
        else:
            epochs, done = tf.data.Dataset.range(1), start_step * batch_size
            size = num_windows
            if num_windows < batch_size:
                raise ValueError(
                    "`batch_size` must not exceed the number of training windows "
                    f"if `repeat` is False. Received: batch_size={batch_size} with "
                    f"{num_windows} windows of {self.sequence_length} ids"
                )

        def windows_of(epoch):
            windows = self.training_windows(seed, epoch)
            return tf.data.Dataset.from_tensor_slices(windows)

        windows = epochs.flat_map(windows_of)
        # Keras asks how long a dataset is, and a flat_map cannot tell.
        return windows.apply(tf.data.experimental.assert_cardinality(size)).skip(done)

    def _some_evaluation_windows(self, split, batch_size, num_examples):
        """A dataset of pairs (start, length), filled up with windows of length 0."""
        starts, lengths = self.evaluation_windows(split)
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
    """Cuts a batch of windows out of a sequence of ids.

    Args:
        ids: integer tensor of shape `(num_tokens,)`, read as a ring.
        starts: int64 tensor of shape `(batch,)`, the first id of each window.
        lengths: int64 tensor of shape `(batch,)`, at most `sequence_length`: how
            many ids each window has; the rest of its row is padding.
        sequence_length: integer, the length of a row.

    Returns:
        `(inputs, targets, weights)` as described in `Problem.dataset`.
    """
    places = tf.range(sequence_length, dtype=tf.int64)
    mask = places < lengths[:, tf.newaxis]
    indices = (starts[:, tf.newaxis] + places) % tf.size(ids, tf.int64)
    targets = tf.where(mask, tf.cast(tf.gather(ids, indices), tf.int32), 0)
    token_ids = tf.pad(targets[:, :-1], [[0, 0], [1, 0]])
    inputs = {"token_ids": token_ids, "padding_mask": mask}
    return inputs, targets, tf.cast(mask, tf.float32)


def check_split(split):
    """Raises a `ValueError` if there is no such split."""
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {SPLITS}. Received: split={split!r}")


def check_no_training_subset(num_examples):
    """Raises a `ValueError` if training is to use some of the windows only."""
    if num_examples is not None:
        raise ValueError(
            "`num_examples` must be None for the training split; to shorten training "
            f"use dataset(...).take(steps). Received: num_examples={num_examples}"
        )


def integer_at_least(minimum, name, value):
    """Returns an integer argument as an `int`, also if it came as a string.

    Args:
        minimum: integer, the smallest value allowed.
        name: string, the argument's name, for the message.
        value: the argument as received.

    Returns:
        An `int`.

    Raises:
        ValueError: if it is no integer or smaller than `minimum`.
    """
    kind = "positive" if minimum == 1 else "non-negative"
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number < minimum:
        raise ValueError(f"`{name}` must be a {kind} integer. Received: {name}={value}")
    return number

"""Pairs of texts: a source for the encoder, a target for the decoder."""

import dataclasses
import functools
import itertools
import pathlib

import numpy as np
import tensorflow as tf

from routing_tf.layers.support.validation import check_choice
from routing_tf.problems import sources
from routing_tf.problems.arguments import boolean
from routing_tf.problems.arguments import check_lengths
from routing_tf.problems.arguments import integer_at_least
from routing_tf.problems.prepared import PreparedProblem
from routing_tf.problems.problem import perplexity
from routing_tf.problems.windows import Tokens
from routing_tf.problems.windows import Windows
from routing_tf.problems.windows import shifted
from routing_tf.tokenizers import ByteTokenizer
from routing_tf.tokenizers import SubwordTokenizer
from routing_tf.tokenizers.base_tokenizer import END_ID

# Number of pairs that are turned into ids together, which is faster.
PAIRS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Pairs(Tokens):
    """The pairs of a split; `ids` are those of the targets, one after the other.

    `target_ends` and `input_ends` `<int64>[num_pairs]` are the places in `ids` and
    `input_ids` after the end id of each text. `kept` `<int64>[num_kept]` are the pairs
    that are served, `None` for all; `num_too_long` is the number of pairs that are
    longer than a window.
    """

    target_ends: np.ndarray = None
    input_ids: np.ndarray = None
    input_ends: np.ndarray = None
    kept: np.ndarray | None = None
    num_too_long: int = 0

    def __len__(self):
        return len(self.target_ends if self.kept is None else self.kept)

    @property
    def sides(self):
        """Ids and ends of the sources, and ids and ends of the targets."""
        return (self.input_ids, self.input_ends), (self.ids, self.target_ends)

    def places(self, numbers):
        """Returns starts and ends of the texts of served pairs, for each side.

        From `<int64>[batch]` to pairs of arrays `<int64>[batch]`.
        """
        if self.kept is not None:
            numbers = self.kept[numbers]
        return [
            (np.where(numbers > 0, ends[numbers - 1], 0), ends[numbers])
            for _, ends in self.sides
        ]

    def packed(self, row_lengths):
        """Packs served pairs, in order, into as few rows as the order allows.

        `row_lengths` are those of sources and of targets; longer texts are cut to them.
        Returns `<int64>[num_rows, 2]`, the first pair of each row and their number.
        """
        limits = []
        for (starts, ends), length in zip(
            self.places(np.arange(len(self))), row_lengths
        ):
            sizes = np.minimum(ends - starts, length)
            sums = np.cumsum(sizes)
            limits.append(np.searchsorted(sums, sums - sizes + length, side="right"))
        # By the first pair of a row: the first pair of the next one.
        following, firsts = np.minimum(*limits).tolist(), [0]
        while firsts[-1] < len(self):
            firsts.append(following[firsts[-1]])
        return np.stack([np.array(firsts[:-1], "int64"), np.diff(firsts)], axis=1)

    def rows(self, firsts, counts, row_lengths):
        """Returns ids and segments of rows of pairs, first of sources, then of targets.

        A row has `counts` pairs from its first one on. Its segments count from 1, and
        padding has the id and the segment 0. Returns four arrays
        `<int32>[batch, length]`.
        """
        places = [self.places(np.arange(a, a + n)) for a, n in zip(firsts, counts)]
        found = []
        for side, (ids, _) in enumerate(self.sides):
            rows = np.zeros((2, len(places), row_lengths[side]), "int32")
            for row, place in enumerate(places):
                end = 0
                for segment, (start, stop) in enumerate(zip(*place[side]), 1):
                    text = ids[start : min(stop, start + row_lengths[side])]
                    here = slice(end, end + len(text))
                    rows[0, row, here], rows[1, row, here] = text, segment
                    end += len(text)
            found += [*rows]
        return found


class Seq2SeqProblem(PreparedProblem):
    """Pairs of texts for a model with an encoder; a window is one pair or more.

    Your own problem returns an iterable of pairs of strings, source and target, from
    `load_split`. A prepared problem returns source and target of an example from
    `pair_of`. The end id follows both. Pairs that are too long are cut, as in the
    release, and the end of a cut target is not scored. In training, pairs come in a
    different order in each epoch; otherwise they come in the order of the data.

    Batches are `(inputs, targets, weights)`: `inputs` has "encoder_token_ids" and
    "encoder_padding_mask" `[batch, input_length]`, "decoder_token_ids", the targets
    shifted right by one with a leading 0, and "decoder_padding_mask"
    `[batch, sequence_length]`. With `segment_ids`, a window has as many pairs, one
    after the other, as fit into both lengths; each target is shifted after a 0 of its
    own, and `inputs` also has "encoder_segment_ids" and "decoder_segment_ids".

    Args:
        input_length: integer or a string of digits, number of ids of a source,
            including its end id. Defaults to the class's `default_input_length`.
        vocabulary: string, "subwords" for `vocab.NAME.32768.subwords` in `data_dir`,
            which is learned from the training sources and targets, "bytes" for bytes,
            or the path of a subword vocabulary. Defaults to the class's
            `default_vocabulary`.
        too_long: string, "cut" (the default) or "drop", what happens to longer pairs.
        segment_ids: boolean, or "true" or "false", whether windows pack several pairs,
            with ids that separate them: no token of a model sees another pair. Defaults
            to False, one pair.
        **options: arguments of `Problem`. `sequence_length` is that of targets.

    Attributes:
        input_length: integer, ids of a source.

    Raises:
        ValueError: if an argument is out of range.

    Example:
    ```python
    from routing_tf import problems


    class Doubles(problems.Seq2SeqProblem):
        default_vocabulary = "bytes"

        def load_split(self, split):
            return [(str(number), str(2 * number)) for number in range(100)]


    problem = Doubles(sequence_length=8, input_length=8)
    source, target = problem.pair("train", 21)
    problem.tokenizer.detokenize(target)  # "42"
    ```

    Reference: `Text2TextProblem` of tensor2tensor.
    """

    kind = "seq2seq"
    metric_name = "perplexity per token"
    places_are = "pairs"
    lengths = {**PreparedProblem.lengths, "input_length": "max_input_length"}
    default_sequence_length = 512
    default_input_length = 512
    default_vocabulary = "subwords"
    default_hparams_set = "translate_local_cluster512"
    id_arrays = ("inputs", "targets")

    def __init__(
        self,
        input_length=None,
        vocabulary=None,
        too_long="cut",
        segment_ids=False,
        **options,
    ):
        super().__init__(**options)
        if input_length is None:
            input_length = self.default_input_length
        self.input_length = integer_at_least(1, "input_length", input_length)
        self.vocabulary = vocabulary or self.default_vocabulary
        check_choice("too_long", too_long, ("cut", "drop"))
        self.too_long = too_long
        self.segment_ids = boolean("segment_ids", segment_ids)

    def pair_of(self, example):
        """Returns the source and the target of an example, two strings."""
        return example

    def pairs(self, split, start=0):
        """Yields sources and targets of a split, without the first `start`."""
        return map(self.pair_of, self.examples(split, start))

    @property
    def vocabulary_path(self):
        """Path of the vocabulary, a `pathlib.Path`, if tokens are subwords."""
        if self.vocabulary == "subwords":
            size = sources.VOCABULARY_SIZE
            return self.data_path / f"vocab.{self.name}.{size}.subwords"
        return pathlib.Path(self.vocabulary)

    @functools.cached_property
    def tokenizer(self):
        if self.vocabulary == "bytes":
            return ByteTokenizer()
        if self.vocabulary == "subwords" and not self.vocabulary_path.exists():
            self._make_vocabulary()
        return SubwordTokenizer(str(self.vocabulary_path))

    @property
    def needs_train_split(self):
        """Whether a vocabulary must be learned from the split to train on."""
        path = self.vocabulary_path
        is_there = path.exists() or sources.given_vocabulary(path, self.raw_dir)
        return self.vocabulary == "subwords" and not is_there

    def _make_vocabulary(self):
        if not sources.given_vocabulary(self.vocabulary_path, self.raw_dir):
            self.check_prepared(self.train_split)
        sources.make_vocabulary(
            self.vocabulary_path, self.raw_dir, self.texts_of_vocabulary
        )

    def texts_of_vocabulary(self):
        """Yields training texts, evenly spread over all of them."""

        def texts():
            return itertools.chain.from_iterable(self.pairs(self.train_split))

        size = sum(map(len, texts()))
        share = min(1.0, sources.VOCABULARY_BYTES / max(1, size))
        seen = taken = 0
        for text in texts():
            seen += len(text)
            if taken + len(text) <= share * seen:
                taken += len(text)
                yield text

    @property
    def options_without_effect(self):
        return super().options_without_effect | {"segment_ids"}

    @property
    def variant(self):
        if self.vocabulary == "bytes":
            return "bytes"
        return f"subwords-{sources.digest(self.tokenizer)}"

    def dtypes(self):
        ids, ends = self.ids_dtype(), "int64"
        return {"inputs": ids, "input_ends": ends, "targets": ids, "target_ends": ends}

    def encoded(self, pairs):
        """Yields 1, the number of pairs in it, and the ids of each pair of strings.

        Ids are NumPy arrays without end ids.
        """
        while batch := list(itertools.islice(pairs, PAIRS_AT_ONCE)):
            for source, target in zip(*map(self.tokenizer.encode_batch, zip(*batch))):
                yield 1, source, target

    def parts(self, split, state):
        # One written pair may come from several examples.
        number, input_end, target_end = state or (0, 0, 0)
        for used, source, target in self.encoded(self.pairs(split, number)):
            number += used
            input_end += len(source) + 1
            target_end += len(target) + 1
            arrays = {
                "inputs": np.append(source, END_ID),
                "input_ends": [input_end],
                "targets": np.append(target, END_ID),
                "target_ends": [target_end],
            }
            yield arrays, [number, input_end, target_end]

    def tokens_of(self, split, arrays):
        fits = np.ones(len(arrays["target_ends"]), bool)
        for texts, name, length in (
            ("inputs", "input_ends", self.input_length),
            ("targets", "target_ends", self.sequence_length),
        ):
            sizes = np.diff(arrays[name], prepend=0)
            self._check_sizes(split, sizes, arrays[texts])
            fits &= sizes <= length
        return Pairs(
            ids=arrays["targets"],
            target_ends=arrays["target_ends"],
            input_ids=arrays["inputs"],
            input_ends=arrays["input_ends"],
            kept=np.flatnonzero(fits) if self.too_long == "drop" else None,
            num_too_long=len(fits) - int(np.count_nonzero(fits)),
        )

    def _check_sizes(self, split, sizes, ids):
        """Raises a `ValueError` unless the texts of an array have all of its ids."""
        if np.any(sizes < 0) or sizes.sum() != len(ids):
            raise ValueError(
                "The prepared data must be complete. Received: texts of "
                f"{sizes.sum():,} ids in all in {str(self.folder(split))!r}, which has "
                f"{len(ids):,}. "
                f"Remove that folder and prepare it again with `{self.command}`"
            )

    def _check_windows(self, split, training):
        pairs = self.tokens(split)
        if not len(pairs):
            raise ValueError(
                f"The split {split!r} of {self.name} must have pairs that fit. "
                f"Received: {len(pairs.target_ends)} pairs, of which "
                f"{pairs.num_too_long} are too long for "
                f"input_length={self.input_length}, "
                f"sequence_length={self.sequence_length}. Use more data, larger "
                "lengths, or files of its own for the split"
            )

    def windows(self, split):
        """Returns the `Windows` of a split: numbers of pairs that are served."""
        pairs = self.tokens(split)
        if self.segment_ids:
            given = pairs.packed(self.row_lengths)
        else:
            numbers = np.arange(len(pairs))
            given = np.stack([numbers, np.ones_like(numbers)], axis=1)
        return Windows(len(pairs), self.sequence_length, given)

    @property
    def row_lengths(self):
        """The numbers of ids of a row of sources, and of a row of targets."""
        return self.input_length, self.sequence_length

    def pair(self, split, index):
        """Returns one pair, whole.

        Args:
            split: string, "train", "validation" or "test".
            index: integer, the number of a served pair.

        Returns:
            The ids of the source and of the target, two NumPy arrays, each with the end
            id.
        """
        pairs = self.tokens(split)
        if not 0 <= index < len(pairs):
            raise ValueError(
                f"`index` must be at least 0 and less than {len(pairs)}, the number of "
                f"pairs of the split {split!r}. Received: index={index}"
            )
        places = pairs.places(np.array([index]))
        return tuple(
            np.array(ids[int(start[0]) : int(end[0])])
            for (ids, _), (start, end) in zip(pairs.sides, places)
        )

    def read(self, split, starts, lengths):
        # A window starts at the number of its first pair; its length is the number of
        # its pairs, 0 for none.
        def rows(firsts, counts):
            return self.tokens(split).rows(firsts, counts, self.row_lengths)

        # Arrays on disk are not tensors.
        dtypes = [tf.int32] * 4
        found = tf.numpy_function(rows, [starts, lengths], dtypes, stateful=False)
        source, source_segments, target, target_segments = (
            tf.ensure_shape(x, (starts.shape[0], length))
            for x, length in zip(found, np.repeat(self.row_lengths, 2))
        )
        target_mask = target_segments > 0
        is_first = target_segments > shifted(target_segments)
        inputs = {
            "encoder_token_ids": source,
            "encoder_padding_mask": source_segments > 0,
            "decoder_token_ids": tf.where(is_first, 0, shifted(target)),
            "decoder_padding_mask": target_mask,
        }
        if self.segment_ids:
            inputs["encoder_segment_ids"] = source_segments
            inputs["decoder_segment_ids"] = target_segments
        return inputs, target, tf.cast(target_mask, tf.float32)

    def metric(self, nats_per_token, split):
        return perplexity(nats_per_token)

    def check_hyperparameters(self, hyperparameters):
        h = hyperparameters
        if h.kind != "seq2seq" or h.encoder_inputs != "tokens":
            raise ValueError(
                f"The problem {self.name!r} needs a model with an encoder of tokens, "
                f"such as {self.default_hparams_set}. Received: hyperparameters of "
                f"kind {h.kind!r} with encoder_inputs={h.encoder_inputs!r}"
            )
        check_lengths(self, h)

    def describe(self, *splits):
        sizes = ", ".join(
            f"{split} {self.describe_split(split)}" for split in self._of_use(splits)
        )
        return (
            f"{self.name}: {sizes}; sources of up to {self.input_length:,} ids, "
            f"targets of up to {self.sequence_length:,}"
        )

    def describe_split(self, split):
        pairs = self.tokens(split)
        number, done = len(pairs), "cut"
        if self.too_long == "drop":
            number, done = len(pairs.target_ends), "dropped"
        text = f"{number:,} pairs ({pairs.num_too_long:,} of them too long: {done})"
        if self.segment_ids:
            text += f" in {self.num_windows(split):,} rows"
        return text

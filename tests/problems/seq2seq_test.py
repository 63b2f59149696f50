"""Tests of problems of pairs of texts."""

import math

import numpy as np
import pytest

from routing_tf import models
from routing_tf import problems
from routing_tf.files.names import SPLITS
from routing_tf.problems import array_store
from routing_tf.problems import seq2seq
from routing_tf.tokenizers import SubwordTokenizer
from tests.problems.prepared import write_vocabulary

SIZES = {"train": 23, "validation": 5, "test": 4}
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class Numbers(problems.Seq2SeqProblem):
    """Source n are the words of the digits of n, its target is n in digits."""

    storage, name, default_vocabulary = "numbers", "numbers", "bytes"

    def load_split(self, split):
        return range(SIZES[split])

    def pair_of(self, number):
        return " ".join(WORDS[int(digit)] for digit in str(number)), str(number)


def decoded(ids):
    """The text of ids of bytes, without end ids."""
    return bytes((ids - 2).astype("uint8")).decode()


def numbers(dataset):
    """The targets of each batch as numbers; -1 for rows that fill up the last."""
    found = []
    for inputs, targets, weights in dataset.as_numpy_iterator():
        np.testing.assert_array_equal(inputs["decoder_padding_mask"], weights == 1)
        np.testing.assert_array_equal(inputs["decoder_token_ids"][:, 0], 0)
        np.testing.assert_array_equal(
            inputs["decoder_token_ids"][:, 1:], targets[:, :-1]
        )
        np.testing.assert_array_equal(targets > 0, weights == 1)
        row = []
        for source, mask, target in zip(
            inputs["encoder_token_ids"], inputs["encoder_padding_mask"], targets
        ):
            np.testing.assert_array_equal(source > 0, mask)
            if not mask.any():
                assert not target.any()
                row.append(-1)
                continue
            number = int(decoded(target[target > 1]))
            text = " ".join(WORDS[int(digit)] for digit in str(number))
            assert decoded(source[source > 1]) == text
            assert source[mask][-1] == target[target > 0][-1] == 1
            row.append(number)
        found.append(row)
    return found


class TestBatches:
    def test_shapes(self):
        problem = Numbers(input_length="20", sequence_length="9")
        inputs, targets, weights = problem.dataset("train", batch_size=3).element_spec
        for side, length in (("encoder", 20), ("decoder", 9)):
            assert inputs[f"{side}_token_ids"].shape == (3, length)
            assert inputs[f"{side}_token_ids"].dtype == "int32"
            assert inputs[f"{side}_padding_mask"].shape == (3, length)
            assert inputs[f"{side}_padding_mask"].dtype == "bool"
        assert targets.shape == weights.shape == (3, 9)
        assert targets.dtype == "int32" and weights.dtype == "float32"

    def test_held_out_pairs_come_once_and_in_order(self):
        batches = numbers(Numbers().dataset("validation", batch_size=3))
        assert batches == [[0, 1, 2], [3, 4, -1]]

    def test_epochs_hold_each_pair_once_in_another_order(self):
        first, second = numbers(Numbers().dataset("train", batch_size=23).take(2))
        assert sorted(first) == sorted(second) == list(range(23))
        assert first != second != sorted(second)
        other = numbers(Numbers().dataset("train", 23, seed=1).take(1))[0]
        assert other != first


def test_packed_pairs():
    """Each pair comes once and in order, in rows that the next one would overfill."""
    problem = Numbers(input_length=20, sequence_length=6, segment_ids="true")
    rows = list(problem.dataset("train", 1, training=False).as_numpy_iterator())
    number = 0
    for inputs, targets, weights in rows:
        sides = {"encoder": inputs["encoder_token_ids"][0], "decoder": targets[0]}
        segments = {side: inputs[f"{side}_segment_ids"][0] for side in sides}
        for segment in range(1, segments["encoder"].max() + 1):
            pair = dict(zip(sides, problem.pair("train", number)))
            for side, ids in sides.items():
                here = ids[segments[side] == segment]
                np.testing.assert_array_equal(here, pair[side])
            here = inputs["decoder_token_ids"][0][segments["decoder"] == segment]
            np.testing.assert_array_equal(here, [0, *pair["decoder"][:-1]])
            number += 1
        for side, ids in sides.items():
            mask = inputs[f"{side}_padding_mask"][0]
            np.testing.assert_array_equal(segments[side] > 0, mask)
            np.testing.assert_array_equal(ids > 0, mask)
        np.testing.assert_array_equal(weights[0], mask)
        if number < SIZES["train"]:
            source, target = problem.pair("train", number)
            sizes = [np.count_nonzero(ids) for ids in sides.values()]
            assert sizes[0] + len(source) > 20 or sizes[1] + len(target) > 6
    assert number == SIZES["train"] > 2 * len(rows)
    assert problem.num_windows("train") == len(rows)
    assert problem.describe_split("train").endswith(f"cut) in {len(rows)} rows")


class TestLongPairs:
    """Numbers of two digits have three ids with the end; "one one" has eight."""

    def test_they_are_cut(self):
        problem = Numbers(input_length=8, sequence_length=2)
        assert problem.num_windows("train") == 23
        assert problem.describe_split("train") == "23 pairs (13 of them too long: cut)"
        dataset = problem.dataset("train", 23, training=False)
        inputs, targets, weights = next(dataset.as_numpy_iterator())
        assert decoded(targets[12]) == "12" and weights[12].tolist() == [1, 1]
        assert targets[7].tolist() == [ord("7") + 2, 1]
        sources = inputs["encoder_token_ids"]
        assert decoded(sources[13]) == "one thre"
        assert inputs["encoder_padding_mask"][13].all()
        assert sources[11].tolist()[-2:] == [ord("e") + 2, 1]
        # A whole pair is whole.
        source, target = problem.pair("train", 13)
        assert decoded(source[:-1]) == "one three"
        assert decoded(target[:-1]) == "13"
        assert source[-1] == target[-1] == 1

    def test_they_are_dropped(self):
        problem = Numbers(input_length=8, sequence_length=3, too_long="drop")
        # Of two digits, with words of three letters at most: 10 has "zero".
        fitting = [*range(10), 11, 12, 16, 21, 22]
        fitting = [n for n in fitting if len(problem.pair_of(n)[0]) < 8]
        assert problem.num_windows("train") == len(fitting)
        batches = numbers(problem.dataset("train", len(fitting), training=False))
        assert batches == [fitting]
        epoch = numbers(problem.dataset("train", len(fitting)).take(1))[0]
        assert sorted(epoch) == fitting
        text = f"23 pairs ({23 - len(fitting)} of them too long: dropped)"
        assert text in problem.describe()
        assert decoded(problem.pair("train", 10)[1][:-1]) == "11"

    def test_nothing_is_left(self):
        problem = Numbers(input_length=2, sequence_length=2, too_long="drop")
        with pytest.raises(ValueError, match="'train'.* 23 .*input_length=2"):
            problem.prepare()


class TestArrays:
    def test_what_is_written_is_read(self, tmp_path):
        options = {"data_dir": str(tmp_path), "input_length": 16, "sequence_length": 4}
        lines = list(Numbers(**options).generate())
        assert lines[0] == "train: 23 pairs (0 of them too long: cut)"
        problem = Numbers(**options)
        arrays = problem.read_split("train")
        assert all(isinstance(array, np.memmap) for array in arrays.values())
        assert arrays["targets"].dtype == "uint16"
        assert arrays["target_ends"][:11].tolist() == [*range(2, 22, 2), 23]
        for split in SPLITS:
            one, other = (
                numbers(p.dataset(split, 3, training=False))
                for p in (problem, Numbers(input_length=16, sequence_length=4))
            )
            assert one == other

    def test_stopped_work_goes_on(self, tmp_path, monkeypatch):
        monkeypatch.setattr(array_store, "SECONDS_BETWEEN_CHECKPOINTS", 0)
        problem = Numbers(data_dir=str(tmp_path))
        began_at = []

        def stopped(self, split, start, end=9):
            began_at.append(start)
            yield from range(start, end)
            if end == 9:
                raise KeyboardInterrupt

        monkeypatch.setattr(seq2seq, "PAIRS_AT_ONCE", 2)
        with monkeypatch.context() as patch:
            patch.setattr(Numbers, "examples", stopped)
            with pytest.raises(KeyboardInterrupt):
                problem.write_split("train")
        with monkeypatch.context() as patch:
            patch.setattr(
                Numbers, "examples", lambda *args: stopped(*args, end=SIZES["train"])
            )
            problem.write_split("train")
        assert began_at == [0, 8]
        problem = Numbers(data_dir=str(tmp_path))
        batches = numbers(problem.dataset("train", 23, training=False))
        assert batches == [list(range(23))]

    def test_more_ids_than_sixteen_bits_hold(self, monkeypatch):
        monkeypatch.setattr(Numbers, "vocabulary_size", (1 << 16) + 1)
        assert Numbers().dtypes()["inputs"] == "int32"


class TestVocabulary:
    def test_it_is_learned(self, tmp_path):
        problem = Numbers(data_dir=str(tmp_path), vocabulary="subwords")
        list(problem.generate())
        tokenizer = SubwordTokenizer(str(tmp_path / "vocab.numbers.32768.subwords"))
        assert problem.vocabulary_size == tokenizer.vocabulary_size()
        # Words that come often are one token each, in sources and targets.
        assert len(tokenizer.tokenize("two one")) == 2
        source, target = problem.pair("train", 21)
        assert tokenizer.detokenize(source) == "two one"
        assert tokenizer.detokenize(target) == "21"

    def test_it_is_learned_without_generate(self, tmp_path):
        Numbers(data_dir=str(tmp_path / "new"), vocabulary="subwords").prepare()
        assert (tmp_path / "new" / "vocab.numbers.32768.subwords").exists()

    def test_it_is_among_the_raw_files(self, data, raw):
        tokens = write_vocabulary(raw / "vocab.numbers.32768.subwords", WORDS)
        problem = Numbers(data_dir=str(data), vocabulary="subwords")
        list(problem.generate(str(raw)))
        assert problem.tokenizer.get_vocabulary() == tokens

    def test_a_file(self, tmp_path):
        tokens = write_vocabulary(tmp_path / "words", WORDS)
        problem = Numbers(vocabulary=str(tmp_path / "words"))
        assert problem.tokenizer.get_vocabulary() == tokens
        assert problem.tokenizer.detokenize(problem.pair("test", 3)[0]) == "three"
        with pytest.raises(ValueError, match="`vocabulary`.*vocabulary='nowhere'"):
            Numbers(vocabulary="nowhere").prepare()

    def test_arrays_are_those_of_the_vocabulary(self, tmp_path):
        folders = set()
        for text in ("zero", "one"):
            write_vocabulary(tmp_path / "words", [text])
            options = {"vocabulary": str(tmp_path / "words")}
            problem = Numbers(data_dir=str(tmp_path), **options)
            folders.add(problem.folder("train"))
        folders.add(Numbers(data_dir=str(tmp_path)).folder("train"))
        assert len(folders) == 3

    def test_a_part_of_the_texts_is_enough(self, monkeypatch):
        problem = Numbers()
        everything = list(problem.texts_of_vocabulary())
        assert everything == [t for n in range(23) for t in problem.pair_of(n)]
        size = sum(map(len, everything))
        monkeypatch.setattr("routing_tf.problems.sources.VOCABULARY_BYTES", size // 3)
        part = list(problem.texts_of_vocabulary())
        assert size // 4 < sum(map(len, part)) <= size // 3
        # They are from the whole of the texts.
        places = [everything.index(text) for text in part]
        assert places == sorted(places) and places[0] < 8 and places[-1] > 38


def test_metric():
    problem = Numbers()
    assert problem.metric_name == "perplexity per token"
    assert problem.metric(math.log(12), "test") == pytest.approx(12)
    assert problem.metric(1e6, "test") == math.inf


def test_pairs_that_are_not_there():
    with pytest.raises(ValueError, match="`index`.*index=4"):
        Numbers().pair("test", 4)


class TestHyperparameters:
    settings = models.preset_hyperparameters("translate_local_cluster512")

    def test_options_for(self):
        settings = self.settings.replace(max_input_length=99, max_sequence_length=33)
        options = problems.Seq2SeqProblem.options_for(settings)
        assert options == {"input_length": 99, "sequence_length": 33}
        Numbers(**options).check_hyperparameters(settings)

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"num_encoder_layers": 0}, "'numbers'.*'text'.*encoder_inputs='tokens'"),
            ({"encoder_inputs": "embeddings"}, "encoder_inputs='embeddings'"),
            ({"max_input_length": 100}, "`max_input_length`.*512.*100"),
            ({"max_sequence_length": 99}, "`max_sequence_length`.*512.*99"),
        ],
    )
    def test_refuses(self, changes, message):
        with pytest.raises(ValueError, match=message):
            Numbers().check_hyperparameters(self.settings.replace(**changes))

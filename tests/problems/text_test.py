import itertools
import os
import pathlib
import sysconfig

import numpy as np
import pytest
import tensorflow as tf

from routing_tf import problems
from routing_tf.files import named_files
from routing_tf.problems import sources
from tests.problems import prepared

LENGTH = 16


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, "uint8").tobytes()


def ids_of(*texts):
    return [id for text in texts for id in [*(byte + 2 for byte in text), 1]]


def collect(dataset):
    """Inputs, targets and weights of all batches, joined along the batch axis."""
    inputs, targets, weights = zip(*dataset.as_numpy_iterator())
    inputs = {key: np.concatenate([i[key] for i in inputs]) for key in inputs[0]}
    return inputs, np.concatenate(targets), np.concatenate(weights)


def text_files(folder, content, **options):
    """The problem of one file."""
    options = {"sequence_length": LENGTH, **options}
    return problems.get("text_files", files=write(folder, "data", content), **options)


@pytest.fixture
def problem(tmp_path):
    return text_files(tmp_path, random_bytes(2000))


class TestBatches:
    @pytest.mark.parametrize("split", ["train", "validation"])
    def test_shapes(self, problem, split):
        inputs, targets, weights = problem.dataset(split, batch_size=3).element_spec
        assert list(inputs) == ["token_ids", "padding_mask"]
        for spec in (inputs["token_ids"], inputs["padding_mask"], targets, weights):
            assert spec.shape == (3, LENGTH)
        assert inputs["token_ids"].dtype == targets.dtype == "int32"
        assert inputs["padding_mask"].dtype == "bool"
        assert weights.dtype == "float32"

    @pytest.mark.parametrize("split", ["train", "validation", "test"])
    def test_inputs_are_the_targets_shifted_right_by_one(self, problem, split):
        batches = problem.dataset(split, batch_size=3).take(10)
        inputs, targets, weights = collect(batches)
        assert not inputs["token_ids"][:, 0].any()
        np.testing.assert_array_equal(inputs["token_ids"][:, 1:], targets[:, :-1])
        np.testing.assert_array_equal(inputs["padding_mask"], weights == 1)

    def test_a_reader_finds_the_windows_of_a_batch_in_the_data(self, problem):
        ids = problem.ids("train")
        _, targets, _ = collect(problem.dataset("train", 1, seed=0).take(112))
        for step in range(0, 112, 28):
            line = problem.describe_batch(1, 0, step)
            start, end = map(int, line.split("ids ")[1].split(" to "))
            assert (targets[step, 0], targets[step, -1]) == (ids[start], ids[end])

    def test_id_0_inside_of_the_data_is_not_padding(self, tmp_path):
        class Zeros(problems.Problem):
            def load(self):
                return dict.fromkeys(("train", "validation", "test"), np.zeros(40, int))

        for split in ("train", "test"):
            dataset = Zeros(sequence_length=10).dataset(split, 4, repeat=False)
            inputs, _, weights = collect(dataset)
            assert inputs["padding_mask"].all()
            assert weights.sum() == 40


class TestTraining:
    def test_an_epoch_has_every_id_once_but_for_the_remainder(self, problem):
        ids = problem.ids("train")
        num_windows = problem.num_windows("train")
        assert num_windows == len(ids) // LENGTH
        ring = np.concatenate([ids, ids])
        views = np.lib.stride_tricks.sliding_window_view(ring, LENGTH)
        epochs = []
        batches = problem.dataset("train", batch_size=num_windows, seed=3).take(3)
        for _, targets, weights in batches.as_numpy_iterator():
            assert weights.all()
            starts = [(views == window).all(axis=1).argmax() for window in targets]
            places = np.concatenate([start + np.arange(LENGTH) for start in starts])
            assert len(set(places % len(ids))) == num_windows * LENGTH
            epochs.append(starts)
        assert len({min(starts) % LENGTH for starts in epochs}) > 1
        assert len({tuple(np.argsort(starts)) for starts in epochs}) == 3

    def test_the_seed_decides_the_order(self, problem):
        def targets(seed):
            return collect(problem.dataset("train", 4, seed=seed).take(3))[1]

        np.testing.assert_array_equal(targets(5), targets(5))
        assert (targets(5) != targets(6)).any()

    def test_repeat(self, problem):
        once = problem.dataset("train", batch_size=3, repeat=False)
        assert len(list(once)) == 112 // 3
        assert len(list(problem.dataset("train", 3, repeat=False, start_step=30))) == 7
        assert once.cardinality() == 112 // 3
        endless = problem.dataset("train", batch_size=3)
        assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
        first_epoch = endless.take(112 // 3)
        np.testing.assert_array_equal(collect(once)[1], collect(first_epoch)[1])

    def test_a_batch_may_be_larger_than_an_epoch(self, problem):
        (batch,) = problem.dataset("train", batch_size=300).take(1)
        assert batch[1].shape == (300, LENGTH)


class TestEvaluation:
    @pytest.mark.parametrize("batch_size", [1, 3, 4, 50])
    def test_every_id_counts_exactly_once_and_in_order(self, problem, batch_size):
        for split in ("validation", "test"):
            dataset = problem.dataset(split, batch_size)
            _, targets, weights = collect(dataset)
            assert weights.sum() == problem.num_tokens(split) == 101
            np.testing.assert_array_equal(targets[weights == 1], problem.ids(split))
            assert not targets[weights == 0].any()
            assert len(targets) % batch_size == 0
            assert len(targets) - problem.num_windows(split) < batch_size
            assert int(dataset.cardinality()) == len(targets) // batch_size

    def test_num_examples_takes_evenly_spaced_windows(self, problem):
        every = collect(problem.dataset("test", batch_size=1))[1]
        assert len(every) == 7
        some = collect(problem.dataset("test", batch_size=1, num_examples=3))[1]
        np.testing.assert_array_equal(some, every[[0, 2, 4]])
        more = collect(problem.dataset("test", batch_size=1, num_examples="99"))[1]
        np.testing.assert_array_equal(more, every)

    def test_start_step_and_repeat(self, problem):
        every = collect(problem.dataset("test", batch_size=2))[1]
        rest = collect(problem.dataset("test", batch_size=2, start_step=2))[1]
        np.testing.assert_array_equal(rest, every[4:])
        again = problem.dataset("test", batch_size=2, repeat=True).take(8)
        np.testing.assert_array_equal(collect(again)[1], np.concatenate([every] * 2))


class TestResume:
    """A run that goes on at a step sees what it would have seen."""

    @pytest.mark.parametrize(
        "num_workers, options, packing",
        [
            pytest.param(1, {}, "stream", marks=pytest.mark.thorough),
            (2, {"min_training_length": "5"}, "release"),
        ],
    )
    def test_across_epochs(self, tmp_path, num_workers, options, packing):
        content = b"\n".join(random_bytes(n % 13) for n in range(150))

        def batches(worker, start_step, steps):
            # A problem of its own, as another process would have.
            problem = text_files(tmp_path, content, packing=packing, **options)
            given = {"seed": 4, "num_workers": num_workers, "worker": worker}
            dataset = problem.dataset("train", 3, start_step=start_step, **given)
            return collect(dataset.take(steps))

        problem = text_files(tmp_path, content, packing=packing)
        steps_of_epoch = problem.num_windows("train") / (3 * num_workers)
        steps = int(3.5 * steps_of_epoch)
        assert steps_of_epoch > 5
        for worker in range(num_workers):
            inputs, targets, weights = batches(worker, 0, steps)
            # Before, at and behind the end of an epoch, which cuts a batch.
            for start in (1, int(steps_of_epoch), int(2 * steps_of_epoch) + 1):
                resumed = batches(worker, start, steps - start)
                expected = (
                    {key: value[3 * start :] for key, value in inputs.items()},
                    targets[3 * start :],
                    weights[3 * start :],
                )
                tf.nest.map_structure(np.testing.assert_array_equal, resumed, expected)

    @pytest.mark.parametrize("split, num_workers", [("train", 2), ("test", 3)])
    def test_workers_share_the_batches_of_one(self, problem, split, num_workers):
        num_rows = 2 * num_workers
        steps = 12
        if split == "test":
            steps = -(-problem.num_windows(split) // num_rows)
        whole = problem.dataset(split, batch_size=num_rows, seed=1)
        options = {"batch_size": 2, "seed": 1, "num_workers": str(num_workers)}
        parts = [
            problem.dataset(split, **options, worker=worker)
            for worker in range(num_workers)
        ]
        _, *whole = collect(whole if split == "test" else whole.take(steps))
        parts = [collect(part.take(steps))[1:] for part in parts]
        for expected, *rows in zip(whole, *parts):
            assert len(expected) == steps * num_rows
            rows = [each.reshape(steps, 2, LENGTH) for each in rows]
            joined = np.concatenate(rows, axis=1).reshape(-1, LENGTH)
            np.testing.assert_array_equal(joined, expected)


def test_lengths_of_truncated_windows(tmp_path):
    problem = text_files(tmp_path, random_bytes(20_000), min_training_length=4)
    inputs, targets, weights = collect(problem.dataset("train", 8, seed=2).take(99))
    lengths = weights.sum(axis=1)
    assert set(lengths) == set(range(4, LENGTH + 1))
    counts = np.unique(lengths, return_counts=True)[1]
    assert counts.min() > 0.6 * counts.mean()
    expected = np.arange(LENGTH) < lengths[:, None]
    np.testing.assert_array_equal(inputs["padding_mask"], expected)
    assert not targets[~expected].any()
    # Held-out windows are whole.
    weights = collect(problem.dataset("test", 1))[2]
    assert weights.sum() == problem.num_tokens("test")


def test_trains_on_any_split(tmp_path):
    splits = {"train_split": "validation", "eval_split": "test"}
    problem = text_files(tmp_path, random_bytes(2000), **splits)
    endless = problem.dataset("validation", batch_size=2)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    once = problem.dataset("validation", batch_size=2, training=False)
    _, targets, weights = collect(once)
    np.testing.assert_array_equal(targets[weights == 1], problem.ids("validation"))
    assert "train" not in problem.describe()
    of_train = collect(problem.dataset("train", batch_size=2))[2]
    assert of_train.sum() == problem.num_tokens("train")


def test_lines_fill_windows_that_the_end_id_closes(tmp_path):
    files = [
        write(tmp_path, "a", b"  abc \n\ndefgh\n"),
        write(tmp_path, "b", b"ij\nklmnopqrstu\nv"),
    ]
    other = [write(tmp_path, name, b"x" * 40) for name in "cd"]
    problem = problems.TextFiles(
        *other, test_files=files, packing="release", sequence_length=9
    )
    # "v" fits behind no line of nine or more; such a line is given in pieces.
    ids = [ids_of(t) for t in (b"abcdefgh", b"ij", b"klmnopqrstu", b"v")]
    expected = [ids[0], ids[1], ids[2][:9], ids[2][9:], ids[3]]
    assert prepared.rows_of(problem, "test") == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"split": "valid"}, "`split`.*split='valid'"),
        ({"batch_size": 0}, "`batch_size`.*batch_size=0"),
        ({"start_step": -1}, "`start_step`.*start_step=-1"),
        ({"seed": None}, "`seed`.*seed=None"),
        ({"num_examples": 3}, "`num_examples`.*num_examples=3"),
        ({"split": "test", "num_examples": 0}, "`num_examples`.*num_examples=0"),
        ({"batch_size": 113, "repeat": False}, "`batch_size`.*batch_size=113"),
        ({"num_workers": 2, "worker": 2}, "`worker`.*worker=2"),
    ],
)
def test_refused_datasets(problem, arguments, message):
    with pytest.raises(ValueError, match=message):
        problem.dataset(**{"split": "train", "batch_size": 2, **arguments})


class TestTextFiles:
    def test_few_files_are_cut_byte_by_byte(self, tmp_path):
        first, second = random_bytes(1000, seed=1), random_bytes(640, seed=2)
        files = [write(tmp_path, "b", first), write(tmp_path, "a", second)]
        problem = problems.TextFiles(files, sequence_length=LENGTH)
        expected = {
            "train": ids_of(first[:900], second[:576]),
            "validation": ids_of(first[900:950], second[576:608]),
            "test": ids_of(first[950:], second[608:]),
        }
        for split, ids in expected.items():
            assert problem.ids(split).tolist() == ids
            assert problem.num_tokens(split) == len(ids)
        assert problem.describe("train", "test") == (
            "text_files: train 1,476 bytes of 2 files, test 82 bytes of 2 files; "
            "windows of 16"
        )
        assert "validation 82 bytes of 2 files; w" in problem.describe()

    def test_many_files_are_split_by_file(self, tmp_path):
        contents = {f"{i:03}": b"%03d." % i * 10 for i in range(200)}
        splits = {}
        for folder in ("here", "somewhere/else"):
            for name, content in contents.items():
                write(tmp_path / folder, name, content)
            problem = problems.TextFiles(data_dir=str(tmp_path / folder))
            problem.sequence_length = 32
            splits[folder] = {
                split: bytes(problem.ids(split).astype("uint8") - 2).split(b"\xff")[:-1]
                for split in ("train", "validation", "test")
            }
        assert splits["here"] == splits["somewhere/else"]
        found = list(itertools.chain(*splits["here"].values()))
        assert sorted(found) == sorted(contents.values())
        assert 160 < len(splits["here"]["train"]) < 196
        train = splits["here"]["train"]
        assert train == sorted(train)

    @pytest.mark.parametrize(
        "files, names",
        [
            ("c.txt, d/*.txt", "c.txt d/a.txt d/b.txt"),
            (["d/b.txt", "d/*.txt"], "d/b.txt d/a.txt"),
            ("d/**/*.txt", "d/a.txt d/b.txt d/e/f.txt"),
            ("d/**", "d/a.txt d/b.txt d/e/f.txt d/skip.md"),
            ("x[1]", "x[1]"),
            (None, ""),
            ("", ""),
            # Folders of any depth.
            ("**", "a/b/x a/x c.txt d/a.txt d/b.txt d/e/f.txt d/skip.md x x1 x[1]"),
            ("**/x", "a/b/x a/x x"),
            ("a/**/**/x", "a/b/x a/x"),
            ("**/b/**", "a/b/x"),
            ("*/**/[x]", "a/b/x a/x"),
            ("**/link/b/x", "link/b/x"),
        ],
    )
    def test_patterns(self, tmp_path, monkeypatch, files, names):
        monkeypatch.chdir(tmp_path)
        paths = "c.txt d/a.txt d/b.txt d/e/f.txt d/skip.md x[1] x1 x a/x a/b/x .hid/x"
        for name in paths.split():
            write(tmp_path, name, name.encode())
        (tmp_path / "link").symlink_to("a")
        expected = [str(tmp_path / name) for name in names.split()]
        assert named_files.find_files("files", files) == expected
        if isinstance(files, str) and files and "," not in files:
            assert named_files.find_files("files", f"{tmp_path}/{files}") == expected

    def test_names_with_commas(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        names = ["we,ird.txt", 'a"b, c', "plain", 'x"y']
        for name in names:
            write(tmp_path, name, b"x" * 400)
        joined = named_files.join_paths(names)
        assert joined == '"we,ird.txt","a""b, c",plain,"x""y"'
        found = named_files.find_files("files", f" {joined}, ")
        assert found == [str(tmp_path / name) for name in names]
        assert named_files.split_paths('x"y, plain') == ['x"y', "plain"]
        with pytest.raises(ValueError, match="Received: '\"we,ird.txt'"):
            named_files.find_files("files", '"we,ird.txt')
        for files in (5, [5]):
            with pytest.raises(ValueError, match=r"`files`.*files=\[?5"):
                named_files.find_files("files", files)

    def test_named_held_out_files(self, tmp_path):
        contents = [random_bytes(400, seed) for seed in range(3)]
        names = [write(tmp_path, str(i), content) for i, content in enumerate(contents)]
        options = {"data_dir": str(tmp_path), "sequence_length": LENGTH}
        problem = problems.TextFiles(
            validation_files=names[1], test_files=[names[2]], **options
        )
        for split, content in zip(("train", "validation", "test"), contents):
            assert problem.ids(split).tolist() == ids_of(content)
        problem = problems.TextFiles(test_files=names[2], **options)
        kept = [content[:380] for content in contents[:2]]
        held = [content[380:] for content in contents[:2]]
        assert problem.ids("train").tolist() == ids_of(*kept)
        assert problem.ids("validation").tolist() == ids_of(*held)
        assert problem.ids("test").tolist() == ids_of(contents[2])

    def test_empty_files_add_nothing(self, tmp_path):
        write(tmp_path, "a", b"")
        write(tmp_path, "b", b"x" * 400)
        problem = problems.TextFiles(data_dir=str(tmp_path), sequence_length=LENGTH)
        assert problem.num_tokens("train") == 361

    def test_prepare_reads_once(self, problem):
        problem.prepare()
        ids = problem.ids("train")
        pathlib.Path(problem.files).unlink()
        problem.prepare()
        np.testing.assert_array_equal(problem.ids("train"), ids)

    def test_no_match(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        for files in ("*.text", ["folder"]):
            with pytest.raises(
                ValueError, match=r"`files`.*Received: '(\*\.text|folder)'"
            ) as error:
                problems.TextFiles(files).prepare()
            name = files if isinstance(files, str) else files[0]
            assert str(tmp_path) in str(error.value)
            assert repr(name) in str(error.value)
        with pytest.raises(ValueError, match=r"`data_dir`.*Received: 'folder/\*\*'"):
            problems.TextFiles(data_dir="folder").prepare()

    def test_pipes_and_devices_are_refused(self, tmp_path):
        write(tmp_path, "a", b"x" * 400)
        os.mkfifo(tmp_path / "pipe")
        for files in (str(tmp_path / "*"), [tmp_path / "pipe"], "/dev/zero"):
            with pytest.raises(ValueError, match="'/(.*/pipe|dev/zero)'"):
                problems.TextFiles(files, sequence_length=LENGTH).prepare()

    def test_unreadable_file(self, tmp_path):
        write(tmp_path, "a", b"x" * 400)
        (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="/broken'"):
            problems.TextFiles(data_dir=str(tmp_path)).prepare()

    def test_a_file_of_several_names_is_read_once(self, tmp_path):
        """Links to files and folders, loops of them, and hard links."""
        books = tmp_path / "books"
        books.mkdir()
        for n in range(40):
            write(books, f"{n}.txt", f"text number {n} ".encode() * 50)
        plain = problems.TextFiles(f"{tmp_path}/**", sequence_length=LENGTH)
        expected = plain.source.places
        (tmp_path / "a_link").symlink_to("books")
        (books / "loop").symlink_to("..")
        for n in range(40):
            (books / f"{n}.a").symlink_to(f"{n}.txt")
            os.link(books / f"{n}.txt", books / f"{n}.txt~")
        for options in ({"files": f"{tmp_path}/**"}, {"data_dir": str(tmp_path)}):
            problem = problems.TextFiles(**options, sequence_length=LENGTH)
            assert problem.source.places == expected
        names = ["a_link/1.a", "books/loop/books/2.txt~"]
        problem = problems.TextFiles(
            f"{tmp_path}/**",
            validation_files=[tmp_path / names[0]],
            test_files=[tmp_path / names[1]],
            sequence_length=LENGTH,
        )
        places = problem.source.places
        assert [p for p, _, _ in places["validation"]] == [str(tmp_path / names[0])]
        train = {os.path.basename(path) for path, _, _ in places["train"]}
        assert train == {f"{n}.txt" for n in range(40) if n not in (1, 2)}
        with pytest.raises(ValueError, match=r"`validation_files`.*books/1\.txt"):
            files = books / "3.txt", books / "1.txt", tmp_path / names[0]
            problems.TextFiles(*files).prepare()

    @pytest.mark.parametrize(
        "message, size, length",
        [
            ("`files`.*files='.*data_dir=None", 0, LENGTH),
            ("`sequence_length`.*sequence_length=362.*'train'.*361", 400, 362),
            ("'validation' .*text_files.*Received: none", 10, 5),
        ],
    )
    def test_too_little_text(self, message, size, length, tmp_path):
        with pytest.raises(ValueError, match=message):
            text_files(tmp_path, b"x" * size, sequence_length=length).prepare()


class Poems(problems.TextProblem):
    """Texts that are prepared from a source of one's own."""

    storage, name = "poems", "poems"
    poems = {"train": ["one fish", "two fish"], "validation": ["red"], "test": [b""]}

    def make_source(self, raw_dir):
        return problems.Source(self.poems.get)


@pytest.mark.parametrize(
    "ids, received",
    [
        (np.linspace(0, 9, 50), r"<float64>\[50\]"),
        (np.zeros((50, 1), int), r"<int64>\[50, 1\]"),
        (np.arange(50) % 12 - 2, r"<int64>\[50\], .*-2 .* 9, "),
        (np.full(50, 2**40), "1099511627776"),
    ],
)
def test_ids_that_are_none_are_refused(ids, received):
    class Own(problems.Problem):
        vocabulary_size = 10

        def load_split(self, split):
            return ids

    with pytest.raises(ValueError, match=f"`vocabulary_size`.*{received}"):
        Own(sequence_length=8).prepare()


def test_one_text_is_no_list_of_texts():
    class Own(problems.TextProblem):
        def load_split(self, split):
            return "hello world " * 9

    with pytest.raises(ValueError, match="`load_split`.*'train'"):
        Own(sequence_length=8).prepare()


def test_a_source_of_ones_own(tmp_path):
    options = {"data_dir": str(tmp_path), "sequence_length": 4}
    in_memory = {split: Poems(**options).ids(split) for split in Poems.poems}
    assert in_memory["train"].tolist() == ids_of(b"one fish", b"two fish")
    assert list(Poems(**options).generate())[0] == "train: 18 ids"
    for split, expected in in_memory.items():
        ids = Poems(**options).ids(split)
        assert isinstance(ids, np.memmap)
        assert ids.dtype == expected.dtype and ids.tolist() == expected.tolist()
    assert list(Poems(**options).generate())[0] == "train: there already, 18 ids"


class TestPythonSource:
    @pytest.fixture
    def library(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        return tmp_path

    def test_holds_the_library_split_by_file(self):
        problem = problems.get("python_source")
        texts = problem.load()
        sizes = {split: sum(map(len, texts[split])) for split in texts}
        assert sum(sizes.values()) > 5_000_000
        assert sizes["train"] > 0.8 * sum(sizes.values())
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        name = "argparse.py"
        assert (library / name).read_bytes() in texts[sources.split_of_file(name)]
        for split, parts in texts.items():
            assert problem.num_tokens(split) == sum(len(x) + 1 for x in parts if x)

    def test_what_is_left_out(self, library):
        wanted = {f"{i:03}.py": b"# %03d\n" % i * 10 for i in range(100)}
        wanted["package/module.py"] = b"\xff\xfe not UTF-8 "
        for name, content in wanted.items():
            write(library, name, content)
        for folder in ("site-packages", "dist-packages", "test", "a/tests", "b/test"):
            write(library, f"{folder}/module.py", b"not wanted" * 10)
        write(library, "notes.txt", b"not wanted" * 10)
        (library / "broken.py").symlink_to(library / "nowhere")
        texts = problems.PythonSource(sequence_length=LENGTH).load()
        assert sorted(itertools.chain(*texts.values())) == sorted(wanted.values())
        for split, found in texts.items():
            here = [n for n in sorted(wanted) if sources.split_of_file(n) == split]
            assert found == [wanted[name] for name in here]

    def test_too_small(self, library):
        write(library, "only.py", b"x" * 100)
        with pytest.raises(ValueError, match="'python_source'.*2048.*'text_files'"):
            problems.get("python_source").prepare()

    def test_the_hash_is_the_same_everywhere(self):
        names = [f"folder/{i}.py" for i in range(1000)]
        splits = [sources.split_of_file(name) for name in names]
        assert 30 < splits.count("validation") < 70
        assert 30 < splits.count("test") < 70
        held_out = {"held_out": ["validation"]}
        without_test = [sources.split_of_file(name, **held_out) for name in names]
        assert without_test == [s.replace("test", "train") for s in splits]
        assert sources.split_of_file("abc.py") == "train"


def test_no_split_of_many_files_is_empty(tmp_path):
    """By their names alone, none of the first 33 would come to the validation split."""
    paths = [tmp_path / f"chapter_{i}.md" for i in range(1, 61)]
    for path in paths:
        path.write_bytes(b"a" * 100)
    trained = set()
    for number in range(20, 61):
        found = sources.share_out(paths[:number], ["validation", "test"])
        assert sum(map(len, found.values())) == number
        assert found["validation"] and found["test"]
        # What was trained on once is never held out.
        assert trained.isdisjoint(found["validation"] + found["test"])
        trained |= set(found["train"])
        alone = [sources.split_of_file(path.name) for path in paths[:number]]
        assert ("validation" in alone) == (number > 33)


def test_names_of_files_may_be_any_bytes(tmp_path):
    (tmp_path / "b\udce9").touch()
    assert sources.fingerprint(tmp_path.iterdir())


def test_ids_of_subwords_and_end_ids(tmp_path):
    path, line = tmp_path / "vocab.subwords", "one fish; blue\n"
    prepared.write_vocabulary(path, ["one fish two fish; blue"])
    problem = text_files(tmp_path, line.encode() * 20, vocabulary=str(path))
    assert problem.metric_name == "bits per subword"
    assert problem.vocabulary_size == problem.tokenizer.vocabulary_size()
    ids = problem.tokenizer.tokenize(line * 18).numpy().tolist()
    assert problem.ids("train").tolist() == [*ids, 1]
    assert f"train {len(ids) + 1} subwords" in problem.describe()

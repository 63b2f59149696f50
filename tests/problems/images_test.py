"""Tests of problems of prepared images and of one's own images."""

import gzip
import os
import re
import shutil
import struct

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.image_classification import cifar
from tensorflow_datasets.image_classification import mnist

from routing_tf import models
from routing_tf import problems
from routing_tf.cli import flag_kinds
from routing_tf.files.names import SPLITS
from routing_tf.problems import array_store
from routing_tf.problems.datasets import image_folder
from routing_tf.problems.datasets import small_images as images
from tests.problems.prepared import get
from tests.problems.prepared import trust
from tests.problems.prepared import write_tar

SOURCES = {"train": "train[:-4]", "validation": "train[-4:]", "test": "test"}


def numbered(number, shape):
    """Image n has n at its first value; the rest tells rows from columns."""
    image = np.arange(np.prod(shape)).reshape(shape) * 7 % 251
    image[0, 0, 0] = number
    return image.astype("uint8")


def write_mnist(raw):
    for prefix, number in (("train", 20), ("t10k", 6)):
        pixels = np.stack([numbered(n, (28, 28, 1)) for n in range(number)])
        header = struct.pack(">iiii", 2051, number, 28, 28)
        with gzip.open(raw / f"{prefix}-images-idx3-ubyte.gz", "wb") as file:
            file.write(header + pixels.tobytes())
        with gzip.open(raw / f"{prefix}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">ii", 2049, number))
            file.write(bytes(n % 10 for n in range(number)))


@pytest.fixture
def small_mnist(raw, monkeypatch):
    write_mnist(raw)
    trust(monkeypatch, mnist.MNIST, raw)
    monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", 20)
    monkeypatch.setattr(mnist, "_TEST_EXAMPLES", 6)
    monkeypatch.setattr(images.Mnist, "sources", SOURCES)


def write_cifar10(raw):
    classes = "".join(f"class{n}\n" for n in range(10))
    files = {"batches.meta.txt": classes.encode()}
    names = ["test_batch.bin"] + [f"data_batch_{n}.bin" for n in range(1, 6)]
    for first, name in enumerate(names):
        files[name] = b""
        for number in range(first * 4, first * 4 + 4):
            planes = numbered(number, (32, 32, 3)).transpose(2, 0, 1)
            files[name] += bytes([number % 10]) + planes.tobytes()
    files = {f"cifar-10-batches-bin/{name}": files[name] for name in files}
    write_tar(raw / "cifar-10-binary.tar.gz", files)


def write_imagenet64(raw):
    for split, number in (("train", 7), ("valid", 3)):
        files = {f"{split}_64x64": None}
        for n in range(number):
            png = tf.io.encode_png(numbered(n, (64, 64, 3))).numpy()
            files[f"{split}_64x64/{n:07}.png"] = png
        write_tar(raw / f"{split}_64x64.tar", files, mode="w")


def check_images(problem, split, numbers):
    """The images of a split are these, in any order; labels are those of numbers."""
    found = problem.images(split)
    order = found[:, 0, 0, 0].tolist()
    assert sorted(order) == sorted(numbers)
    for number, image, label in zip(order, found, problem.labels(split)):
        np.testing.assert_array_equal(image, numbered(number, problem.image_shape))
        assert label == number % problem.num_classes
    return order


class TestMnist:
    def test_splits(self, small_mnist, tmp_path, raw):
        lines = list(get("mnist", tmp_path).generate(str(raw)))
        assert lines == ["train: 16 images", "validation: 4 images", "test: 6 images"]
        problem = get("mnist", tmp_path)
        check_images(problem, "test", range(6))
        train = problem.images("train")[:, 0, 0, 0].tolist()
        validation = problem.images("validation")[:, 0, 0, 0].tolist()
        assert sorted(train + validation) == list(range(20))
        check_images(problem, "train", train)
        assert "train 16, validation 4; 28 x 28 x 1" in problem.describe()
        assert "to beat:" in problem.baseline("validation")

    def test_the_last_five_thousand_are_held_out(self):
        sources = images.Mnist.sources
        assert sources["train"] == "train[:-5000]"
        assert sources["validation"] == "train[-5000:]"
        assert images.Cifar10.sources == sources

    def test_arrays_are_read_in_place(self, small_mnist, tmp_path, raw):
        problem = get("mnist", tmp_path, raw)
        ids = problem.ids("train")
        while ids.base is not None and not isinstance(ids, np.memmap):
            ids = ids.base
        assert isinstance(ids, np.memmap)
        assert problem.ids("train").dtype == "uint8"

    def test_data_that_tfds_has_prepared_is_enough(self, small_mnist, tmp_path, raw):
        config = tfds.download.DownloadConfig(manual_dir=raw)
        builder = tfds.builder("mnist", data_dir=tmp_path / "data")
        builder.download_and_prepare(download_config=config)
        check_images(get("mnist", tmp_path), "test", range(6))


def test_cifar10(tmp_path, raw, monkeypatch):
    write_cifar10(raw)
    trust(monkeypatch, cifar.Cifar10, raw)
    monkeypatch.setattr(images.Cifar10, "sources", SOURCES)
    problem = get("cifar10", tmp_path, raw)
    check_images(problem, "test", range(4))
    numbers = [problem.images(s)[:, 0, 0, 0].tolist() for s in SPLITS[:2]]
    assert [len(part) for part in numbers] == [16, 4]
    assert sorted(sum(numbers, [])) == list(range(4, 24))
    check_images(problem, "train", numbers[0])


def test_imagenet64(tmp_path, raw, monkeypatch):
    write_imagenet64(raw)
    trust(monkeypatch, tfds.builder_cls("downsampled_imagenet"), raw)
    problem = get("imagenet64", tmp_path, raw)
    for split, number in (("train", 7), ("validation", 3), ("test", 3)):
        assert problem.images(split).shape == (number, 64, 64, 3)
        assert sorted(problem.images(split)[:, 0, 0, 0]) == list(range(number))
        assert not problem.labels(split).any()
    # The images for testing are not written twice.
    assert problem.folder("test") == problem.folder("validation")


def test_an_image_of_another_size(tmp_path, raw, monkeypatch):
    write_imagenet64(raw)
    trust(monkeypatch, tfds.builder_cls("downsampled_imagenet"), raw)
    monkeypatch.setattr(images.Imagenet64, "image_shape", (64, 32, 3))
    with pytest.raises(ValueError, match=r"\(64, 32, 3\).*\(64, 64, 3\)"):
        get("imagenet64", tmp_path, raw)
    assert not list((tmp_path / "data").rglob("*.npy"))


def test_histogram_of_few_of_many_images(tmp_path, monkeypatch, small_mnist, raw):
    monkeypatch.setattr(problems.image, "HISTOGRAM_VALUES", 5 * 28 * 28)
    assert "of 5 of the training images" in get("mnist", tmp_path, raw).baseline("test")


def write(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = tf.io.encode_png if path.suffix == ".png" else tf.io.encode_jpeg
    path.write_bytes(encode(image).numpy())


@pytest.fixture
def folder(tmp_path):
    """Two classes, of 4 x 6 images whose first value is their number."""
    number = 0
    for split, sizes in (("train", (5, 4)), ("validation", (2, 1)), ("test", (0, 2))):
        for name, size in zip(("cat", "ant"), sizes):
            for n in range(size):
                path = tmp_path / "own" / split / name / f"{n}.png"
                write(path, numbered(number, (4, 6, 3)))
                number += 1
    return tmp_path / "own"


def own(folder, **options):
    """The problem of one's own images."""
    return problems.get("image_folder", folder=str(folder), **options)


def arrays_of(folder, **options):
    """The same of images, or arrays of them, in a folder of data."""
    return problems.get("image_folder", data_dir=str(folder), **options)


def firsts(problem, split):
    return problem.images(split)[:, 0, 0, 0].tolist()


class TestImageFolder:
    def test_folders_of_splits_and_classes(self, folder):
        problem = own(folder)
        assert problem.image_shape == (4, 6, 3) and problem.num_classes == 2
        # Ants come before cats.
        assert firsts(problem, "train") == [5, 6, 7, 8, 0, 1, 2, 3, 4]
        assert problem.labels("train").tolist() == [0] * 4 + [1] * 5
        assert firsts(problem, "test") == [12, 13]
        check = numbered(11, (4, 6, 3))
        np.testing.assert_array_equal(problem.images("validation")[0], check)
        batch = next(iter(problem.dataset("train", batch_size=2)))
        assert batch[1].shape == (2, 4, 6, 3)

    def test_it_does_not_matter_where_it_is(self, folder, monkeypatch):
        monkeypatch.chdir(folder.parent)
        for options in ({"folder": "own"}, {"data_dir": "own"}):
            assert firsts(problems.get("image_folder", **options), "test") == [12, 13]

    def test_images_without_classes(self, tmp_path):
        for n in range(3):
            for split in SPLITS:
                write(tmp_path / split / f"{n}.png", numbered(n, (2, 2, 1)))
        problem = arrays_of(tmp_path)
        assert problem.num_classes == 1 and problem.image_shape == (2, 2, 1)
        assert firsts(problem, "train") == [0, 1, 2]
        assert problem.labels("train").tolist() == [0, 0, 0]

    def test_images_without_splits_are_shared_out(self, tmp_path):
        for n in range(120):
            write(tmp_path / "ab"[n % 2] / f"{n:03}.png", numbered(n, (2, 2, 1)))
        problem = own(tmp_path)
        parts = {split: firsts(problem, split) for split in SPLITS}
        assert sorted(sum(parts.values(), [])) == list(range(120))
        assert all(2 <= len(parts[split]) <= 15 for split in ("validation", "test"))
        for split in SPLITS:
            labels = [number % 2 for number in parts[split]]
            assert problem.labels(split).tolist() == labels
        # Further images leave the others where they are.
        write(tmp_path / "a" / "more.png", numbered(200, (2, 2, 1)))
        problem = own(tmp_path)
        for split in SPLITS:
            assert set(parts[split]) <= set(firsts(problem, split))

    def test_an_image_of_several_names_is_read_once(self, folder, tmp_path):
        expected = own(folder).source.paths
        (folder / "train" / "cat" / "loop").symlink_to("../..")
        (folder / "train" / "a_link").symlink_to("cat")
        (folder / "train" / "cat" / "0_link.png").symlink_to("1.png")
        os.link(folder / "test" / "ant" / "1.png", folder / "test" / "ant" / "2.png")
        problem = own(folder)
        assert problem.num_classes == 2 and problem.source.paths == expected
        # What is held out is not trained on, whatever it is called there.
        held_out = folder / "validation" / "cat" / "1.png"
        os.link(held_out, folder / "train" / "cat" / "9.png")
        problem = own(folder)
        assert problem.source.paths == expected
        (folder / "test" / "cat").mkdir(exist_ok=True)
        (folder / "test" / "cat" / "1.png").symlink_to(held_out)
        with pytest.raises(ValueError, match=r"/validation' .*/test' .*cat/1\.png"):
            own(folder)

    def test_folders_behind_links_are_found(self, folder, tmp_path):
        os.rename(folder / "train" / "cat", tmp_path / "elsewhere")
        (folder / "train" / "cat").symlink_to(tmp_path / "elsewhere")
        assert firsts(own(folder), "train") == [5, 6, 7, 8, 0, 1, 2, 3, 4]

    def test_channels(self, folder):
        write(folder / "train" / "ant" / "0.png", numbered(99, (4, 6, 1)))
        problem = own(folder)
        assert problem.image_shape == (4, 6, 1)
        with pytest.raises(
            ValueError, match=r"train/ant/1\.png' .* 3.*--problem_option=channels=3"
        ):
            problem.prepare()
        problem = own(folder, channels="3")
        assert problem.images("train")[0, 0, 0].tolist() == [99, 99, 99]
        problem = own(folder, channels=1)
        assert problem.images("train").shape == (9, 4, 6, 1)

    def test_transparency_is_left_out(self, tmp_path):
        for split in SPLITS:
            for depth, name in ((4, "rgb"), (2, "gray")):
                pixels = np.full((3, 3, depth), 50, "uint8")
                write(tmp_path / name / split / "a.png", pixels)
        for name, channels in (("rgb", 3), ("gray", 1)):
            problem = own(tmp_path / name)
            assert problem.image_shape == (3, 3, channels)
            assert (problem.images("train") == 50).all()

    def test_another_size(self, folder):
        write(folder / "train" / "cat" / "3.png", numbered(0, (5, 6, 3)))
        with pytest.raises(
            ValueError, match=r"cat/3\.png' .* 5 x 6.*--problem_option=resize=true"
        ):
            own(folder).prepare()
        assert own(folder, resize="true").images("train").shape == (9, 4, 6, 3)

    def test_resize(self, tmp_path):
        # Ten columns at the left and right are cut, then each 10 x 10 is one.
        image = np.zeros((20, 50, 1), "uint8")
        image[:, :15] = 200
        image[:10, 15:25] = 40
        image[10:, 15:25] = 41
        image[10:, 25:35] = np.arange(10)[:, None] + 100
        for split in SPLITS:
            write(tmp_path / split / "a.png", image)
        problem = own(tmp_path, height="2", width="2", resize=True)
        assert problem.images("test")[0, ..., 0].tolist() == [[40, 0], [41, 104]]

    def test_a_picture_that_would_take_the_memory(self, tmp_path, monkeypatch):
        write(tmp_path / "a.jpg", np.zeros((3, 5, 1), "uint8"))
        monkeypatch.setattr(image_folder, "MAX_PIXELS", 14)
        with pytest.raises(ValueError, match=r"a\.jpg' .* 14 .*3 x 5 \("):
            image_folder.read_image(tmp_path / "a.jpg")

    def test_arrays_that_earlier_versions_made_of_bmp_files_are_others(self, folder):
        (folder / "train" / "cat" / "2.png").rename(folder / "train" / "cat" / "2.BMP")
        assert own(folder).identity("train")["palettes"]
        assert "palettes" not in own(folder).identity("test")

    def test_a_damaged_file(self, folder):
        path = folder / "train" / "cat" / "2.png"
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(ValueError, match=r"cat/2\.png'"):
            own(folder).prepare()

    def test_files_of_other_kinds(self, folder, caplog):
        for name in ("cat/a.tiff", "ant/b.heic", "ant/.hidden"):
            (folder / "train" / name).write_text("other")
        problem = own(folder)
        (record,) = caplog.records
        expected = f"train: 2 of other kinds than PNG, .* as {folder}/train/ant/b.he"
        assert re.search(expected, record.getMessage())
        assert set(problem.source.paths["train"].values()) == {"ant", "cat"}

    def test_images_beside_classes(self, folder):
        write(folder / "train" / "lost.png", numbered(0, (4, 6, 3)))
        with pytest.raises(ValueError, match=r"\['ant', 'cat'\].*lost.png"):
            own(folder)

    def test_a_split_without_images(self, folder):
        shutil.rmtree(folder / "test")
        problem = own(folder)
        problem.prepare()
        with pytest.raises(ValueError, match="'test' .*image_folder.*'test': 0"):
            problem.prepare("test")

    def test_only_images_to_score(self, folder):
        shutil.rmtree(folder / "train")
        problem = own(folder)
        assert len(problem.images("test")) == 2
        assert problem.baseline("test") is None

    def test_no_images(self, tmp_path):
        problem = own(tmp_path)
        settings = models.preset_hyperparameters("cifar10_local_cluster")
        for use in (
            problem.prepare,
            lambda: problem.check_hyperparameters(settings),
            lambda: problem.fit_hyperparameters(settings),
            lambda: list(problem.generate()),
        ):
            with pytest.raises(ValueError, match="`folder`.*Received: '/"):
                use()

    def test_another_length(self, folder):
        with pytest.raises(ValueError, match="72. Received: sequence_length=71"):
            own(folder, sequence_length=71)

    def test_hyperparameters_that_fit(self, folder):
        problem = own(folder)
        name = problems.default_hparams_set("image_folder")
        settings = models.preset_hyperparameters(name)
        with pytest.raises(ValueError) as error:
            problem.check_hyperparameters(settings)
        text = str(error.value).rpartition(" ")[2]
        assert "image_height=4" in text
        fitting = settings.replace(**models.hyperparameters.parse_overrides(text))
        problem.check_hyperparameters(fitting)
        assert fitting == problem.fit_hyperparameters(settings)

    def test_the_size_of_large_images_must_be_named(self, folder, monkeypatch):
        monkeypatch.setattr(image_folder, "MAX_DEFAULT_LENGTH", 71)
        settings = models.preset_hyperparameters("images_small")
        problem = own(folder)
        with pytest.raises(ValueError, match="`height`.*`width`.* 4 x 6 x 3, 72") as e:
            problem.fit_hyperparameters(settings)
        # The flags that the message names are those that help.
        words = str(e.value).replace(",", "").split()
        flags = [w.removeprefix("--problem_option=") for w in words if "--" in w]
        options = flag_kinds.parse_problem_options(flags)
        assert options == {"resize": "true", "height": "32", "width": "32"}
        problem = own(folder, **options)
        fitting = problem.fit_hyperparameters(settings)
        assert fitting.max_sequence_length == 32 * 32 * 3
        assert problem.images("test").shape == (2, 32, 32, 3)
        problem = own(folder, height=4, width=6)
        fitting = problem.fit_hyperparameters(settings)
        # A run that was begun goes on.
        problem = own(folder)
        assert problem.fit_hyperparameters(fitting) is not None


class TestArraysOfOwnImages:
    def test_they_are_enough(self, folder, tmp_path):
        data = tmp_path / "data"
        lines = list(arrays_of(data).generate(str(folder)))
        assert lines == ["train: 9 images", "validation: 3 images", "test: 2 images"]
        shutil.rmtree(folder)
        problem = arrays_of(data)
        assert problem.image_shape == (4, 6, 3) and problem.num_classes == 2
        assert firsts(problem, "train") == [5, 6, 7, 8, 0, 1, 2, 3, 4]
        assert problem.labels("test").tolist() == [0, 0]
        arrays = array_store.read(problem.folder("train"))
        assert isinstance(arrays["images"], np.memmap)
        lines = list(arrays_of(data).generate())
        assert lines[0] == "train: there already, 9 images"
        with pytest.raises(ValueError, match=r"\(4, 6, 3\).*Received: \(5, None"):
            arrays_of(data, height=5)

    def test_changed_images_are_read_and_prepared_again(self, folder):
        list(arrays_of(folder).generate())
        write(folder / "test" / "ant" / "0.png", numbered(77, (4, 6, 3)))
        assert firsts(arrays_of(folder), "test") == [77, 13]
        lines = list(arrays_of(folder).generate())
        assert lines[0].startswith("train: there already")
        assert lines[2] == "test: 2 images"
        array = array_store.read(arrays_of(folder).folder("test"))
        assert array["images"][:, 0, 0, 0].tolist() == [77, 13]

    def test_too_many_for_the_memory(self, folder, monkeypatch):
        monkeypatch.setattr(image_folder, "MAX_BYTES_IN_MEMORY", 3 * 72)
        problem = arrays_of(folder)
        problem.prepare("test")
        with pytest.raises(ValueError, match=" 216 .*--problem=image_folder"):
            problem.prepare("train")
        list(problem.generate())
        assert len(problem.images("train")) == 9

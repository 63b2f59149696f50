import json
import os
import signal

import pytest

from routing_tf.files.atomic import fill_folder
from routing_tf.files.atomic import is_empty
from routing_tf.files.atomic import open_output
from routing_tf.generation import display
from routing_tf.generation.texts import TextSample
from routing_tf.tokenizers import ByteTokenizer


class Writer:
    """Stands for a `Continuation`: texts are done in an order, then something happens.

    Args:
        order: numbers of the texts, each of two letters; of the last only the first.
        happens: function that is called in the middle of the last text.
    """

    def __init__(self, order, happens=lambda: None):
        self.order, self.happens = order, happens

    def run(self, samples, speed):
        for number in self.order:
            sample = samples[number]
            yield sample, sample.add(2 + ord("a") + number)
            if number == self.order[-1]:
                self.happens()
            yield sample, sample.add(2 + ord("z"))
            yield sample, sample.end()
            yield sample, None


@pytest.fixture
def path(tmp_path):
    """The file of an earlier command."""
    path = tmp_path / "texts.jsonl"
    path.write_text("earlier\n")
    return path


@pytest.fixture
def signals_of_a_shell():
    """Signals as a terminal has them, also where `nohup` or `&` has them ignored."""
    handlers = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, handlers[number]) for number in handlers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def write(continuation, path, num_samples=4):
    samples = [TextSample(ByteTokenizer(), "", number) for number in range(num_samples)]
    display.write_texts(continuation, samples, num_samples, path)


def texts(path):
    lines = path.read_text().splitlines()
    return [json.loads(line)["continuation"] for line in lines]


def test_texts_are_written_in_order_as_they_are_done(path):
    partial = path.with_name("texts.jsonl.partial")
    seen = []

    def look():
        seen.extend([texts(partial), path.read_text()])

    write(Writer([1, 0, 3, 2], look), path)
    assert seen == [["az", "bz"], "earlier\n"]
    assert texts(path) == ["az", "bz", "cz", "dz"]
    assert not partial.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_lost_by_a_signal(number, path, signals_of_a_shell, capsys):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        write(Writer([2, 0, 1], lambda: os.kill(os.getpid(), number)), path)
    assert signal.getsignal(number) == before
    assert path.read_text() == "earlier\n"
    partial = path.with_name("texts.jsonl.partial")
    assert texts(partial) == ["az", "b", "cz"]
    assert f"not complete; the partial file is {partial}\n" in capsys.readouterr().err


def test_what_nohup_ignores_stays_ignored(path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        write(Writer([0], lambda: os.kill(os.getpid(), signal.SIGHUP)), path, 1)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert texts(path) == ["az"]


def test_an_error_before_the_first_text_leaves_nothing(path):
    with pytest.raises(ValueError, match="too_soon"), open_output(path):
        raise ValueError("too_soon")
    assert [each.name for each in path.parent.iterdir()] == ["texts.jsonl"]


def test_links_and_pipes_are_written_themselves(path):
    link, pipe = path.with_name("link"), path.with_name("pipe")
    link.symlink_to(path)
    with open_output(link) as file:
        file.write("later\n")
    assert link.is_symlink() and path.read_text() == "later\n"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open_output(pipe) as file:
        file.write("through\n")
    assert os.read(reader, 100) == b"through\n"
    os.close(reader)


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_files_of_a_folder_are_replaced_when_the_new_one_is_complete(tmp_path):
    for content in ("first", "second"):
        with fill_folder(tmp_path / "new" / "folder") as folder:
            (folder / "part").mkdir()
            (folder / "part" / "file").write_text(content)
            (folder / "file").write_text(content)
        (tmp_path / "new" / "folder" / "part" / "own").touch()
    expected = ["file", "part", "part/file", "part/own"]
    assert tree(tmp_path / "new" / "folder") == expected
    with pytest.raises(OSError), fill_folder(tmp_path / "new" / "folder") as folder:
        (folder / "file").touch()
        raise OSError("full")
    assert tree(tmp_path / "new" / "folder") == expected
    for name in ("file", "part/file"):
        assert (tmp_path / "new" / "folder" / name).read_text() == "second"


def test_what_a_killed_command_has_left_is_no_content(tmp_path):
    (tmp_path / ".partial" / "part").mkdir(parents=True)
    assert is_empty(tmp_path)
    with fill_folder(tmp_path) as folder:
        (folder / "file").touch()
    assert tree(tmp_path) == ["file"]
    assert not is_empty(tmp_path)
    with pytest.raises(OSError), fill_folder(tmp_path / "folder"):
        raise OSError("full")
    assert not (tmp_path / "folder").exists()


def test_what_a_killed_command_left_is_kept(path, capsys):
    partial = path.with_name("texts.jsonl.partial")
    for number in (1, 2):
        partial.write_text(f"killed {number}\n")
        with open_output(path) as file:
            file.write("new\n")
        kept = path.with_name(f"texts.jsonl.partial.{number}")
        assert kept.read_text() == f"killed {number}\n"
        assert str(kept) in capsys.readouterr().err
    assert path.read_text() == "new\n" and not partial.exists()

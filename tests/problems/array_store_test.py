import os
import threading
import time

import numpy as np
import pytest

from routing_tf.problems import array_store

DTYPES = {"ids": "uint16", "windows": ("int64", (2,))}


class Stopped(Exception):
    """As if the process had been killed."""


def parts(number=10, stop=None, seen=None):
    """Three ids and a window at each step, from a state on."""

    def make(state):
        for step in range(state or 0, number):
            if step == stop:
                raise Stopped
            if seen is not None:
                seen.append(step)
            ids = np.arange(3 * step, 3 * step + 3)
            yield {"ids": ids, "windows": [(3 * step, 3)]}, step + 1

    return make


def write_and_stop(folder, step, identity=()):
    with pytest.raises(Stopped):
        array_store.write(folder, DTYPES, dict(identity), parts(stop=step))


@pytest.fixture(autouse=True)
def checkpoints_at_each_step(monkeypatch):
    monkeypatch.setattr(array_store, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)


def check(folder, number=10):
    arrays = array_store.read(folder)
    assert arrays["ids"].dtype == "uint16"
    assert isinstance(arrays["ids"], np.memmap)
    np.testing.assert_array_equal(arrays["ids"], np.arange(3 * number))
    expected = [(3 * step, 3) for step in range(number)]
    np.testing.assert_array_equal(arrays["windows"], expected)
    assert sorted(os.listdir(folder)) == ["ids.npy", "info.json", "windows.npy"]


def test_write_and_read(tmp_path):
    folder = tmp_path / "deep" / "store"
    assert not array_store.is_complete(folder)
    array_store.write(folder, DTYPES, {"files": ["a"]}, parts())
    assert array_store.is_complete(folder)
    check(folder)
    assert os.listdir(folder.parent) == ["store"]


@pytest.mark.parametrize("stop", [0, 1, 9])
def test_goes_on_where_it_was_stopped(tmp_path, stop):
    folder, seen = tmp_path / "store", []
    write_and_stop(folder, stop)
    assert not array_store.is_complete(folder)
    array_store.write(folder, DTYPES, {}, parts(seen=seen))
    assert seen == list(range(stop, 10))
    check(folder)


def test_what_came_behind_the_last_checkpoint_is_made_again(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    write_and_stop(folder, 4)
    monkeypatch.setattr(array_store, "SECONDS_BETWEEN_CHECKPOINTS", 1e9)
    write_and_stop(folder, 8)
    seen = []
    array_store.write(folder, DTYPES, {}, parts(seen=seen))
    assert seen[0] == 4
    check(folder)


DAMAGED_PROGRESS = ("{", "[]", "5", '{"identity": {}, "lengths": 5}')


@pytest.mark.parametrize("damage", ["identity", "file", *DAMAGED_PROGRESS])
def test_begins_anew_if_it_cannot_go_on(tmp_path, damage):
    folder, seen = tmp_path / "store", []
    write_and_stop(folder, 5, {"files": ["a"]})
    partial = tmp_path / "store.incomplete"
    if damage == "file":
        os.truncate(partial / "ids.npy", 130)
    if damage in DAMAGED_PROGRESS:
        (partial / "progress.json").write_text(damage)
    identity = {"files": ["b" if damage == "identity" else "a"]}
    array_store.write(folder, DTYPES, identity, parts(seen=seen))
    assert seen == list(range(10))
    check(folder)


def test_bad_input_leaves_nothing_behind(tmp_path):
    def damaged(state):
        yield {"ids": [1, 2, 3]}, 1
        raise ValueError("books/7.txt is not UTF-8")

    with pytest.raises(ValueError, match=r"books/7\.txt"):
        array_store.write(tmp_path / "store", DTYPES, {}, damaged)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_what_is_there(tmp_path):
    def full(state):
        for arrays, following in parts(stop=4)(state):
            if following == 3:
                raise OSError(28, "No space left on device")
            yield arrays, following

    with pytest.raises(ValueError, match=r"full_disk.*Errno 28\]"):
        array_store.write(tmp_path / "store", DTYPES, {}, full)
    seen = []
    array_store.write(tmp_path / "store", DTYPES, {}, parts(seen=seen))
    assert seen[0] == 2
    check(tmp_path / "store")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"/file'.*Errno 17\]"):
        array_store.write(tmp_path / "file" / "store", DTYPES, {}, parts())


def test_a_second_process_takes_what_the_first_has_made(tmp_path):
    seen = []
    thread = threading.Thread(
        target=array_store.write,
        args=(tmp_path / "store", DTYPES, {}, parts(seen=seen)),
    )

    def slow(state):
        for number, part in enumerate(parts()(state)):
            if number == 1:
                thread.start()
                time.sleep(0.2)
            yield part

    array_store.write(tmp_path / "store", DTYPES, {}, slow)
    thread.join()
    assert seen == []
    check(tmp_path / "store")


def test_values_that_do_not_fit_are_refused(tmp_path):
    def large(state):
        yield {"ids": [70_000]}, 1

    with pytest.raises(ValueError, match="`ids`.*uint16.*70000"):
        array_store.write(tmp_path / "store", DTYPES, {}, large)


def test_empty_arrays(tmp_path):
    array_store.write(tmp_path / "store", DTYPES, {}, parts(number=0))
    arrays = array_store.read(tmp_path / "store")
    assert arrays["ids"].shape == (0,)
    assert arrays["windows"].shape == (0, 2)


@pytest.fixture
def store(tmp_path):
    array_store.write(tmp_path / "store", DTYPES, {}, parts())
    return tmp_path / "store"


@pytest.mark.parametrize(
    "array, message",
    [
        (None, r"store'.*`python -m routing_tf\.datagen`"),
        (np.zeros(5, "uint16"), r"store'.*`python -m routing_tf\.datagen`"),
        (np.zeros(30), r"ids\.npy.*float64.*uint16"),
        (np.zeros((30, 2), "uint16"), r"ids\.npy.*'<u2'"),
    ],
    ids=["missing", "shorter", "of another type", "of another shape"],
)
def test_other_arrays_are_noticed(store, array, message):
    (store / "ids.npy").unlink()
    if array is not None:
        np.save(store / "ids.npy", array)
    with pytest.raises(ValueError, match=message):
        array_store.read(store, DTYPES)


INFO = ("{}", "null", "[]", "5", '{"lengths": 5, "identity": {}}')


@pytest.mark.parametrize("content", [*INFO, '{"lengths": {"ids": 30}}'])
def test_info_of_wrong_types(store, content):
    (store / "info.json").write_text(content)
    for use in (array_store.read, array_store.identity_of):
        with pytest.raises(ValueError, match=r"`python -m routing_tf\.datagen`"):
            use(store)


def test_any_damaged_header_is_noticed_or_harmless(store):
    content = (store / "ids.npy").read_bytes()
    refused = 0
    for place in range(0, 128):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        (store / "ids.npy").write_bytes(damaged)
        try:
            ids = array_store.read(store, DTYPES)["ids"]
            np.testing.assert_array_equal(ids, np.arange(30))
        except ValueError as error:
            assert "must be complete" in str(error)
            refused += 1
    assert refused > 50

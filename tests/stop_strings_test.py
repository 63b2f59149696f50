import numpy as np
import pytest

from routing_tf.generation.texts import StopStrings


def cut(text, strings):
    """The text up to the string that is complete first, known as a whole."""
    found = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
    return text[: min(found)[1]] if found else text


def test_a_text_in_pieces_ends_where_the_whole_one_does():
    draw = np.random.default_rng(0)
    for _ in range(500):
        text = "".join(draw.choice(list("ab"), size=12))
        strings = ["".join(draw.choice(list("ab"), size=draw.integers(1, 6)))]
        strings += [["abba"], []][draw.integers(2)]
        stop, shown, place = StopStrings(strings), "", 0
        while place < len(text) and not stop.is_found:
            size = draw.integers(0, 4)
            shown += stop.add(text[place : place + size])
            place += size
            # Never more than what the whole text shows, nor less than is certain.
            assert cut(text, strings).startswith(shown)
            assert len(shown) > min(place, len(text)) - 6 or stop.is_found
        assert stop.is_found == any(string in text for string in strings)
        assert shown + stop.end() == cut(text, strings)


def test_nothing_is_held_back_without_a_reason():
    stop = StopStrings(["\n\n"])
    assert [stop.add(text) for text in ("a", "b\n", "c")] == ["a", "b", "\nc"]
    stop = StopStrings()
    assert stop.add("abc") == "abc" and not stop.is_found


def test_empty_strings():
    with pytest.raises(ValueError, match=r"Received: \['a', ''\]"):
        StopStrings(["a", ""])

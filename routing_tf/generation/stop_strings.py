"""Texts that end before one of some strings."""


class StopStrings:
    r"""Passes a text on, piece by piece, up to one of some strings.

    It ends before the string that is complete first. What may be the beginning of one
    is held back until it is clear.

    Args:
        strings: the strings, none of them empty; with none, all is passed on.

    Attributes:
        is_found: whether one of them was found, so that nothing more is passed on.

    Example:

    ```python
    from routing_tf.generation.stop_strings import StopStrings

    stop = StopStrings(["\n\n"])
    shown = [stop.add(text) for text in ("one\n", "two\n", "\nthree")]
    assert shown == ["one", "\ntwo", ""] and stop.is_found
    ```
    """

    def __init__(self, strings=()):
        if not all(strings):
            raise ValueError(
                f"Stop strings must not be empty. Received: {list(strings)}"
            )
        self._strings = tuple(strings)
        self._held = ""
        self.is_found = False

    def add(self, text):
        """Takes the next piece; returns what is passed on of it and those before."""
        if self.is_found:
            return ""
        text = self._held + text
        found = [string for string in self._strings if string in text]
        self.is_found = bool(found)
        if found:
            self._held = ""
            # The string that is complete first, so that pieces do not matter.
            return text[: min((text.find(s) + len(s), text.find(s)) for s in found)[1]]
        end = len(text) - self._length_of_beginning(text)
        self._held = text[end:]
        return text[:end]

    def end(self):
        """Returns what was held back, as nothing follows any more."""
        held, self._held = self._held, ""
        return held

    def _length_of_beginning(self, text):
        """The length of the longest end of a text with which a string begins."""
        longest = max(map(len, self._strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0

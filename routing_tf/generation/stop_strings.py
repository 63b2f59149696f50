"""Texts that end before one of several strings."""


class StopStrings:
    r"""Passes a text on, piece by piece, up to one of several strings.

    It ends before the string that is complete first. A possible beginning of a string
    is held back until that is clear.

    Args:
        strings: the strings, none of them empty; without any, everything is passed on.

    Attributes:
        is_found: whether one of them was found, after which nothing is passed on.

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
        """Takes the next piece; returns the text that can be passed on."""
        if self.is_found:
            return ""
        text = self._held + text
        found = [string for string in self._strings if string in text]
        self.is_found = bool(found)
        if found:
            self._held = ""
            # The string that is complete first, so that the division into pieces has no
            # effect.
            return text[: min((text.find(s) + len(s), text.find(s)) for s in found)[1]]
        end = len(text) - self._length_of_beginning(text)
        self._held = text[end:]
        return text[:end]

    def end(self):
        """Returns the text that was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _length_of_beginning(self, text):
        """The length of the longest end of a text with which a string begins."""
        longest = max(map(len, self._strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0

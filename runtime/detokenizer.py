"""From token ids to text as it comes: no broken characters, nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no whole character yet

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes tokens one by one; the pieces put together equal `whole_text` of all tokens.

    A piece waits while its end is an incomplete character, and is decoded together with the piece before it, since a
    token's text may depend on its left neighbour.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text was given
        self._given = ""  # their text

    def add(self, token_id: int) -> str:
        """The text that this token completes, "" when it ends in the middle of a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(BROKEN) or len(text) <= len(self._given):
            return ""
        piece = text[len(self._given) :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._given = self._decode(self._window)
        return piece

    def finish(self) -> str:
        """What was waiting, without the beginning of a character that never came."""
        text = whole_text(self._decode, self._window)[len(self._given) :] if self._window else ""
        self._window, self._read, self._given = [], 0, ""
        return text


def whole_text(decode: Decode, token_ids: Sequence[int]) -> str:
    """The text of tokens whose last may have been cut off within a character, which is left out."""
    return decode(token_ids).rstrip(BROKEN)


class StopStrings:
    """Cuts a text at the first stop string that completes, however the text is cut into pieces.

    Text that may still become a stop string is held back, so what was given is never taken back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is safe to show; `found` is set once a stop string completes, and nothing follows."""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end - len(self.found)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

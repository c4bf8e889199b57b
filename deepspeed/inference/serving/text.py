"""From tokens to text, piece by piece: no half characters, and nothing beyond a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_PATIENCE = 32  # tokens without the end of a character are no beginning of one


class TextStream:
    """The text of tokens that come one by one.

    Args:
        decode: from tokens to text.
        stops: texts that end the result, and are not part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []  # those that may still change the text that follows
        self._known = 0  # of them, so many are in the text already
        self._held = ""  # text that may be the beginning of a stop
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        new = self._new_text()
        pending = len(self._tokens) - self._known
        # Part of a character: the rest comes with the next.
        if new.endswith(_INCOMPLETE) and pending < _PATIENCE:
            return ""
        # The last token's text can depend on the one before it (spaces): one is kept for that.
        self._tokens, self._known = self._tokens[self._known :], len(self._tokens) - self._known
        return self._certain(new)

    def piece(self, token: int) -> str:
        """The text of one token alone."""
        return self._decode([token])

    def finish(self) -> str:
        """The rest."""
        if self.stopped:
            return ""
        text = self._certain(self._new_text())
        rest, self._held = self._held, ""
        return text + ("" if self.stopped else rest)

    def _new_text(self) -> str:
        before = self._decode(self._tokens[: self._known])
        return self._decode(self._tokens)[len(before) :]

    def _certain(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The longest end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

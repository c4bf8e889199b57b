"""Incremental detokenization: no partial characters, and nothing past a stop text."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

_INCOMPLETE = "\ufffd"
_PATIENCE = 32  # after this many tokens, give up waiting for the rest of a character


class TextStream:
    """The text of tokens that arrive one by one.

    Args:
        decode: tokens to text.
        stops: texts that end the result, and are not part of it.
        specials: tokens that ``decode`` omits, and their texts, which a stop may contain.
        include_stop: include the stop text in the result.
        shown: those of ``specials`` that are part of the result nevertheless.
        before: tokens that the text continues. Without them it starts with its first token, as a new text does.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        *,
        specials: Mapping[int, str] | None = None,
        before: Sequence[int] = (),
        include_stop: bool = False,
        shown: Container[int] = (),
    ) -> None:
        self._decode = decode
        self._include_stop = include_stop
        self._shown = shown
        self._specials = specials or {}
        names = self._specials.values()
        # Stops that contain a special token are searched for in text with special tokens, the others in the result.
        self._marked = [stop for stop in stops if any(name in stop for name in names)]
        self._stops = [stop for stop in stops if stop and stop not in self._marked]
        # Tokens whose text may still affect the text that follows.
        self._tokens = [token for token in before if token not in self._specials]
        self._known = len(self._tokens)  # how many of them are output already
        self._held: list[tuple[str, bool]] = []  # possible start of a stop: (character, is it shown)
        self.stopped = False

    def add(self, token: int) -> str:
        """Append ``token``; return the text that is now final."""
        if self.stopped:
            return ""
        if token in self._shown:
            before = self._new_text()
            self._tokens = self._tokens[self._known :] or self._tokens
            self._known = len(self._tokens)
            return self._certain(before + self._specials[token])
        if token in self._specials:  # not a context: at the start of a text, many tokens lose their space
            return self._certain(self._specials[token], shown=False) if self._marked else ""
        self._tokens.append(token)
        new = self._new_text()
        pending = len(self._tokens) - self._known
        # An incomplete character, which later tokens complete; or no text, and so no context.
        if (not new or new.endswith(_INCOMPLETE)) and pending < _PATIENCE:
            return ""
        # The text of a token can depend on the one before it (spaces): keep the last as context.
        self._tokens, self._known = self._tokens[self._known :], pending
        return self._certain(new)

    def texts_of(self, tokens: Sequence[int], before: Sequence[int] | None = None) -> list[str]:
        """Return the text of each of ``tokens`` as the next one after ``before``; None: after what was added."""
        known = self._tokens[: self._known] if before is None else list(before)
        start = len(self._decode(known))
        return [self._decode([*known, token])[start:] for token in tokens]

    def finish(self) -> str:
        """Return the remaining text."""
        if self.stopped:
            return ""
        text = self._certain(self._new_text())
        rest, self._held = self._held, []
        return text + _shown(rest)

    def _new_text(self) -> str:
        before = self._decode(self._tokens[: self._known])
        return self._decode(self._tokens)[len(before) :]

    def _certain(self, new: str, *, shown: bool = True) -> str:
        held = self._held + [(character, shown) for character in new]
        end = after = begin = len(held)  # start and end of the first stop; start of a possible stop
        visible = [at for at, (_, seen) in enumerate(held) if seen]
        for stops, places in ((self._stops, visible), (self._marked, range(len(held)))):
            text = "".join(held[at][0] for at in places) if stops else ""
            for stop in stops:
                found, begun = text.find(stop), overlap(text, stop)
                if found >= 0 and places[found] < end:
                    end, after = places[found], places[found + len(stop) - 1] + 1
                if begun:
                    begin = min(begin, places[len(text) - begun])
        self.stopped = end < len(held)
        if self.stopped:
            self._held = []
            return _shown(held[: after if self._include_stop else end])
        self._held = held[begin:]
        return _shown(held[:begin])


def _shown(characters: Sequence[tuple[str, bool]]) -> str:
    return "".join(character for character, shown in characters if shown)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

"""From tokens to text, piece by piece: no half characters, and nothing beyond a stop text."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

_INCOMPLETE = "\ufffd"
_PATIENCE = 32  # tokens without the end of a character are no beginning of one


class TextStream:
    """The text of tokens that come one by one.

    Args:
        decode: from tokens to text.
        stops: texts that end the result, and are not part of it.
        specials: the tokens that ``decode`` leaves out, and their texts, which a stop may contain.
        include_stop: whether the text that ended the result is part of it.
        shown: which of ``specials`` are part of the result nevertheless.
        before: tokens that the text continues. Without them it begins as that of its first token does.
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
        # Stops with a special token in them are looked for where special tokens are seen, the others in the result.
        self._marked = [stop for stop in stops if any(name in stop for name in names)]
        self._stops = [stop for stop in stops if stop and stop not in self._marked]
        # Tokens that may still change the text that follows.
        self._tokens = [token for token in before if token not in self._specials]
        self._known = len(self._tokens)  # so many of them are in the text already
        self._held: list[tuple[str, bool]] = []  # characters that may begin a stop; whether they are shown
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.stopped:
            return ""
        if token in self._shown:
            before = self._new_text()
            self._tokens = self._tokens[self._known :] or self._tokens
            self._known = len(self._tokens)
            return self._certain(before + self._specials[token])
        if token in self._specials:  # no context: at the beginning of a text, many tokens lose their space
            return self._certain(self._specials[token], shown=False) if self._marked else ""
        self._tokens.append(token)
        new = self._new_text()
        pending = len(self._tokens) - self._known
        # Part of a character, the rest of which comes with the next; or no text, and so no context.
        if (not new or new.endswith(_INCOMPLETE)) and pending < _PATIENCE:
            return ""
        # The last token's text can depend on the one before it (spaces): one is kept for that.
        self._tokens, self._known = self._tokens[self._known :], pending
        return self._certain(new)

    def texts_of(self, tokens: Sequence[int], before: Sequence[int] | None = None) -> list[str]:
        """Return the text of each of ``tokens``, were it the next behind ``before``; None: behind what was added."""
        known = self._tokens[: self._known] if before is None else list(before)
        start = len(self._decode(known))
        return [self._decode([*known, token])[start:] for token in tokens]

    def finish(self) -> str:
        """The rest."""
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
        end = after = begin = len(held)  # of the first stop, and behind it; of what may become one
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
    """The longest end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

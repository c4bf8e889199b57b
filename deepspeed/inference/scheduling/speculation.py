"""Speculative decoding without a draft model: tokens that followed the same words before are proposed to follow them
again, and the forward that computes the next token computes them too. Pure.

The model's own choice decides: a proposed token is kept where exactly it is chosen, greedily or by a draw, after the
tokens before it. For a proposal without probabilities of its own that is the rejection sampling of Y. Leviathan et
al.: Fast inference from transformers via speculative decoding, 2023: a draw from p accepts token x with the
probability p(x), and what is drawn instead follows p without x. So requests get the tokens that they would get anyway,
those with a seed too. Finding proposals in the text itself: A. Saxena: Prompt lookup decoding, 2023.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deepspeed.inference.scheduling.requests import Request

_FIELDS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_USUAL_LENGTH = 5


@dataclass(frozen=True, slots=True)
class NGrams:
    """``count`` tokens are proposed: those after the last place at which the sequence has its last ``longest`` tokens
    before, or as many of them as possible, down to ``shortest``.

    ValueError: a value is out of its range.
    """

    count: int
    longest: int = _USUAL_LENGTH
    shortest: int = _USUAL_LENGTH

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"num_speculative_tokens={self.count}: at least 1 is expected")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"prompt_lookup_min={self.shortest}, prompt_lookup_max={self.longest}: 1 <= min <= max is expected"
            )

    @classmethod
    def of(cls, text: str) -> NGrams:
        """Read what vLLM's ``--speculative-config`` takes for the method "ngram". ValueError: it is not that."""
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is no JSON: {error}") from None
        if not isinstance(given, dict) or given.get("method") != "ngram":
            raise ValueError(
                f'{text}: an object with "method": "ngram" is expected, the only method there is'
            )
        wrong = [name for name in given if name not in _FIELDS]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not one of {', '.join(_FIELDS)}")
        numbers: list[Any] = [given.get(name) for name in _FIELDS[1:]]
        count, longest, shortest = numbers
        if longest is None:
            longest = _USUAL_LENGTH if shortest is None else shortest
        shortest = longest if shortest is None else shortest
        if not all(type(each) is int for each in (count, longest, shortest)):
            raise ValueError(
                f"{text}: num_speculative_tokens is missing, or one of the numbers is no integer"
            )
        return cls(count, longest, shortest)

    def propose(self, request: Request, most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow those of ``request``; none where nothing repeats."""
        tokens = request.tokens
        # As a text, which is searched a hundred times faster than a list.
        request.searched += "".join(map(chr, tokens[len(request.searched) :]))
        text = request.searched
        for length in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            at = text.rfind(text[-length:], 0, -1)
            if at >= 0:
                period = len(text) - length - at
                found = tokens[-period:]  # goes on for ever if the text ends as it began to repeat
                return [found[index % period] for index in range(min(self.count, most))]
        return []

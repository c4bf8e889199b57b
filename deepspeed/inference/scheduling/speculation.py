"""Speculative decoding: cheap guesses of the next tokens, verified by the forward that computes the next token.
Pure; `generation/draft.py` has the draft model.

The model's own choice decides: a draft token is accepted exactly where the model, greedily or by a draw, chooses it
after the tokens before it. For proposals without probabilities this is the rejection sampling of Y. Leviathan et al.:
Fast inference from transformers via speculative decoding, 2023: a draw from p accepts token x with probability p(x),
and a rejected draw follows p without x. So requests get the same tokens as without speculation, including those with a
seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed.inference.scheduling.requests import Request

METHODS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("model",),
}
"""Config fields per method, in addition to the common ones."""

_USUAL_LENGTH = 5


class Proposer(Protocol):
    """Proposes draft tokens. Ranks of one model, given the same requests, must get the same proposals."""

    @property
    def token_bytes(self) -> int:
        """Return the bytes kept per token of the model's cache."""
        ...

    def start(self, vocab_size: int, tokens: int) -> None:
        """Prepare for a model of ``vocab_size`` whose cache holds ``tokens``. ValueError: unsuitable for the model."""
        ...

    def propose(self, rooms: Sequence[tuple[Request, int]], total: int) -> list[list[int]]:
        """Return draft tokens per request: at most the number paired with it, and at most ``total`` in all."""
        ...

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended or was preempted."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of ``--speculative-config``, with vLLM's names. ``model``: folder of the draft model.

    ValueError: a value is out of range.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int = _USUAL_LENGTH
    prompt_lookup_min: int = _USUAL_LENGTH

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={self.num_speculative_tokens}: expected at least 1")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max}: "
                "expected 1 <= min <= max"
            )

    @classmethod
    def of(cls, text: str) -> SpeculativeConfig:
        """Parse a JSON object; "model" alone implies the method "draft_model". ValueError: invalid."""
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{text}: expected an object")
        method = given.get("method", "draft_model" if "model" in given else None)
        if method not in METHODS:
            raise ValueError(f'{text}: "method" is {method!r}; expected one of {", ".join(METHODS)}')
        fields = ("method", "num_speculative_tokens", *METHODS[method])
        wrong = [name for name in given if name not in fields]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not one of {', '.join(fields)}")
        if method == "draft_model" and not (isinstance(given.get("model"), str) and given["model"]):
            raise ValueError(f'{text}: "model" must be the folder of a draft model')
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        settings.setdefault("prompt_lookup_max", settings.get("prompt_lookup_min", _USUAL_LENGTH))
        settings.setdefault("prompt_lookup_min", settings["prompt_lookup_max"])
        numbers = [settings.get("num_speculative_tokens"), *(settings[name] for name in METHODS["ngram"])]
        if not all(type(each) is int for each in numbers):
            raise ValueError(f"{text}: num_speculative_tokens is missing, or a number is not an integer")
        return cls(**{**settings, "method": method})


class NgramProposer:
    """Proposes up to ``count`` tokens: those that followed the latest earlier occurrence of the sequence's last
    ``longest`` tokens, or of as many as match, down to ``shortest`` (A. Saxena: Prompt lookup decoding, 2023)."""

    token_bytes = 0

    def __init__(self, count: int, longest: int = _USUAL_LENGTH, shortest: int = _USUAL_LENGTH) -> None:
        SpeculativeConfig("ngram", count, None, longest, shortest)  # validates the values
        self.count, self.longest, self.shortest = count, longest, shortest
        self._texts: dict[
            Request, str
        ] = {}  # tokens as characters, searched a hundred times faster than a list

    def start(self, vocab_size: int, tokens: int) -> None:
        """No-op: prompt lookup works for any model."""

    def propose(self, rooms: Sequence[tuple[Request, int]], total: int) -> list[list[int]]:
        """See ``Proposer``; empty without a repetition."""
        made = []
        for request, room in rooms:
            made.append(self._following(request, min(self.count, room, total)))
            total -= len(made[-1])
        return made

    def forget(self, request: Request) -> None:
        """See ``Proposer``."""
        self._texts.pop(request, None)

    def _following(self, request: Request, most: int) -> list[int]:
        tokens, text = request.tokens, self._texts.get(request, "")
        text += "".join(map(chr, tokens[len(text) :]))
        self._texts[request] = text
        for length in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            at = text.rfind(text[-length:], 0, -1)
            if at >= 0:
                period = len(text) - length - at
                found = tokens[-period:]  # cycles if the match overlaps the end of the text
                return [found[index % period] for index in range(most)]
        return []

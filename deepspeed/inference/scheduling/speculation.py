"""Speculative decoding: cheap guesses of the next tokens, which the forward that computes the next token verifies.
Pure; `generation/draft.py` has the guesses of a draft model.

The model's own choice decides: a proposed token is accepted where exactly it is chosen, greedily or by a draw, after
the tokens before it. For proposals without probabilities of their own this is the rejection sampling of Y. Leviathan et
al.: Fast inference from transformers via speculative decoding, 2023: a draw from p accepts token x with the
probability p(x), and what is drawn instead follows p without x. So requests get the tokens that they would get anyway,
those with a seed too.
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
"""Fields of a config by its method, beside those of every config."""

_USUAL_LENGTH = 5


class Proposer(Protocol):
    """Guesses tokens. The ranks of one model, with the same requests, get the same guesses."""

    @property
    def token_bytes(self) -> int:
        """Return the bytes that it keeps of each token in the model's cache."""
        ...

    def start(self, vocab_size: int, tokens: int) -> None:
        """Serve a model of ``vocab_size`` whose cache holds ``tokens``. ValueError: it cannot for this model."""
        ...

    def propose(self, rooms: Sequence[tuple[Request, int]], total: int) -> list[list[int]]:
        """Return the tokens that may follow those of each request: up to the number beside it, ``total`` in all."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended or was preempted."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of ``--speculative-config``, by vLLM's names. ``model``: the folder of the draft model.

    ValueError: a value is out of its range.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int = _USUAL_LENGTH
    prompt_lookup_min: int = _USUAL_LENGTH

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={self.num_speculative_tokens}: at least 1 is expected")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max}: "
                "1 <= min <= max is expected"
            )

    @classmethod
    def of(cls, text: str) -> SpeculativeConfig:
        """Read a JSON object; "model" alone stands for the method "draft_model". ValueError: it is not such."""
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{text}: an object is expected")
        method = given.get("method", "draft_model" if "model" in given else None)
        if method not in METHODS:
            raise ValueError(f'{text}: "method" is {method!r}; one of {", ".join(METHODS)} is expected')
        fields = ("method", "num_speculative_tokens", *METHODS[method])
        wrong = [name for name in given if name not in fields]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not one of {', '.join(fields)}")
        if method == "draft_model" and not (isinstance(given.get("model"), str) and given["model"]):
            raise ValueError(f'{text}: "model" names no folder of a draft model')
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        settings.setdefault("prompt_lookup_max", settings.get("prompt_lookup_min", _USUAL_LENGTH))
        settings.setdefault("prompt_lookup_min", settings["prompt_lookup_max"])
        numbers = [settings.get("num_speculative_tokens"), *(settings[name] for name in METHODS["ngram"])]
        if not all(type(each) is int for each in numbers):
            raise ValueError(
                f"{text}: num_speculative_tokens is missing, or one of the numbers is no integer"
            )
        return cls(**{**settings, "method": method})


class NgramProposer:
    """Proposes ``count`` tokens: those after the last place at which the sequence has its last ``longest`` tokens
    before, or as many of them as possible, down to ``shortest`` (A. Saxena: Prompt lookup decoding, 2023)."""

    token_bytes = 0

    def __init__(self, count: int, longest: int = _USUAL_LENGTH, shortest: int = _USUAL_LENGTH) -> None:
        SpeculativeConfig("ngram", count, None, longest, shortest)  # checks them
        self.count, self.longest, self.shortest = count, longest, shortest
        self._texts: dict[
            Request, str
        ] = {}  # tokens as characters, searched a hundred times faster than a list

    def start(self, vocab_size: int, tokens: int) -> None:
        """Texts that repeat are found whatever the model."""

    def propose(self, rooms: Sequence[tuple[Request, int]], total: int) -> list[list[int]]:
        """See ``Proposer``; none where nothing repeats."""
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
                found = tokens[-period:]  # goes on for ever if the text ends as it began to repeat
                return [found[index % period] for index in range(most)]
        return []

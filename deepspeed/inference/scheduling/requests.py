"""Requests to the engine, their sampling parameters and their progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from deepspeed.inference.cache.blocks import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. The names and meanings are those of Transformers' generation.

    Args:
        max_new_tokens: at most so many.
        min_new_tokens: none of ``stop_token_ids`` before so many.
        temperature: 0: the most probable token; else (1e-6 to 1e6) logits are divided by it and the token is drawn.
        top_k: only the so many most probable; 0: all.
        top_p: only the most probable that together have this probability.
        min_p: only those with at least this part of the highest probability.
        repetition_penalty: logits of tokens seen before are divided (negative ones multiplied) by it; 1e-3 to 1e3.
        stop_token_ids: tokens that end the sequence; the token is part of the result.
        seed: of this request's draws, which depend on nothing else: not on what is computed beside it.
        logprobs: also return the logarithm of each token's probability, before all of the above.

    Raises:
        ValueError: a value is out of its range.
    """

    max_new_tokens: int = 20
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens"),
            "temperature": (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6, "0, or 1e-6 to 1e6"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (1e-3 <= self.repetition_penalty <= 1e3, "1e-3 to 1e3"),
        }
        for name, (holds, allowed) in ranges.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: {allowed}")

    @property
    def is_plain(self) -> bool:
        """The most probable token, unchanged."""
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.min_new_tokens

    @property
    def draws_from_all(self) -> bool:
        """A draw from the model's distribution at a temperature: no token is excluded or changed."""
        whole = self.top_k == 0 and self.top_p == 1 and self.min_p == 0
        return whole and self.temperature > 0 and self.repetition_penalty == 1 and not self.min_new_tokens


class State(Enum):
    """WAITING: has no blocks, as it is new or had to give them up. RUNNING: has blocks. FINISHED: has none and will
    get no further tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what has been generated after it.

    ``tokens``: both. ``computed``: of so many, keys and values are in the cache. ``reason``, once finished: "stop" (one
    of the stop tokens), "length" or "cancelled".
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    shared: int = 0  # tokens whose keys and values were found in the cache, in the last admission
    preemptions: int = 0
    state: State = State.WAITING
    reason: str | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError(f"request {self.id} has an empty prompt")
        self.tokens = [int(token) for token in self.prompt]

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens that are known but not computed: 1 while it generates."""
        return len(self.tokens) - self.computed

    @property
    def limit(self) -> int:
        """Tokens of the longest result."""
        return len(self.prompt) + self.params.max_new_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """``count`` tokens of a request from position ``start``, which one forward computes. ``is_last``: they reach the
    end of what is known, so that a token follows."""

    request: Request
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == len(self.request.tokens)

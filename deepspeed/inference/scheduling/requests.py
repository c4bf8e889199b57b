"""Requests to the engine, their sampling parameters and their progress."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from deepspeed.inference.cache.blocks import BlockTable

POOLINGS = ("last", "mean", "cls")


class NotFiniteError(RuntimeError):
    """A model computes NaN or infinity for a request, so there is no answer."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Grammar of an answer. ``kind``: "json_schema", "json_object", "regex", "choice" (a JSON list of texts) or
    "grammar" (Lark); ``text``: the schema, expression, list or grammar. ``reasoning``: start and end marker of optional
    free text before the constrained part; start marker "": the reasoning has already begun."""

    kind: str
    text: str = ""
    reasoning: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the model's unprocessed logits, and the most likely tokens at its position as
    (token, log-probability), most likely first."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Names and meanings follow Transformers' generation, and OpenAI's API for what
    that lacks.

    Args:
        max_new_tokens: most new tokens; 0: compute the prompt only.
        min_new_tokens: no ``stop_token_ids`` before this many new tokens.
        temperature: 0: greedy; else (1e-6 to 1e6) logits are divided by it and the token is drawn.
        top_k: draw from this many most likely tokens; 0: all.
        top_p: draw from the most likely tokens whose probabilities add up to this.
        min_p: draw from tokens with at least this fraction of the highest probability.
        repetition_penalty: logits of tokens seen before are divided (negative ones multiplied) by it; 1e-3 to 1e3.
        presence_penalty: subtracted from the logits of tokens in the answer; -2 to 2.
        frequency_penalty: subtracted from the logits of tokens in the answer, once per occurrence; -2 to 2.
        logit_bias: (token, value) pairs, added to the logits.
        allowed_token_ids: only these; None: all.
        bad_words: token sequences that must not occur in the answer.
        constraint: the grammar of the answer.
        stop_token_ids: tokens that end the sequence; the token is part of the result.
        seed: of this request's draws, which depend on nothing else, in particular not on the rest of the batch.
        logprobs: also return each token's log-probability, before all of the above.
        top_logprobs: with ``logprobs``, also those of this many most likely tokens.
        prompt_logprobs: also return those of the prompt's tokens. The prompt is then computed, not taken from the
            cache.
        pooling: return one vector instead of tokens: the last hidden state of the prompt's "last" token, of its first
            ("cls"), or the "mean" of all. Needs ``max_new_tokens=0``.
        adapter: LoRA adapter to run the model with (`inference/model/low_rank.py`).
        priority: under the scheduler's policy "priority", lower values are served first.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 20
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    pooling: str | None = None
    adapter: Any = None
    priority: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 0, "at least 0"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens"),
            "temperature": (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6, "0, or 1e-6 to 1e6"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (1e-3 <= self.repetition_penalty <= 1e3, "1e-3 to 1e3"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "logit_bias": (all(math.isfinite(value) for _, value in self.logit_bias), "finite values"),
            "allowed_token_ids": (self.allowed_token_ids != (), "at least one token"),
            "bad_words": (all(self.bad_words), "no empty string"),
            "top_logprobs": (self.top_logprobs >= 0, "at least 0"),
            "pooling": (self.pooling in (None, *POOLINGS), f"one of {', '.join(POOLINGS)}, or None"),
        }
        for name, (holds, allowed) in ranges.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: {allowed}")
        if self.pooling is not None and (self.max_new_tokens or self.prompt_logprobs):
            raise ValueError(f"pooling={self.pooling!r} needs max_new_tokens=0 and no prompt_logprobs")

    @property
    def is_plain(self) -> bool:
        """True: greedy decoding of the model's own logits."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def has_penalties(self) -> bool:
        """True: logits depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """True: logits are changed other than by the sampling filters."""
        excludes = self.bad_words or self.min_new_tokens or self.has_masks
        return bool(self.has_penalties or self.logit_bias or excludes)

    @property
    def has_masks(self) -> bool:
        """True: only some tokens are allowed."""
        return self.allowed_token_ids is not None or self.constraint is not None

    @property
    def tokens(self) -> Iterator[int]:
        """All token ids that the parameters mention."""
        yield from (token for token, _ in self.logit_bias)
        yield from self.allowed_token_ids or ()
        yield from (token for word in self.bad_words for token in word)


class State(Enum):
    """WAITING: has no blocks, being new or preempted. RUNNING: has blocks. FINISHED: has no blocks and gets no further
    tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the tokens generated after it.

    ``tokens``: prompt and answer. ``computed``: how many of these have cached keys and values. ``logprobs``: of new
    tokens; ``prompt_logprobs``: of the prompt's except the first, which nothing predicts; both if asked for.
    ``pooled``: the fp32 vector for ``params.pooling``; until finished, a running sum of hidden states. ``reason``, once
    finished: "stop" (a stop token, or a whole grammar), "length", "failed" (logits are not finite) or "cancelled".
    """

    id: int
    prompt: Sequence[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooled: Any = None
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    shared: int = 0  # tokens found in the prefix cache at the last admission
    preemptions: int = 0
    rejected_drafts: int = 0  # consecutive proposals without an accepted token
    draft_backoff: int = 0  # forwards to skip before the next proposal
    state: State = State.WAITING
    reason: str | None = None
    cut: str | None = None  # the reason for which the sampler gives it no more tokens

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError(f"request {self.id} has an empty prompt")
        self.tokens = [int(token) for token in self.prompt]
        self.table.adapter = 0 if self.params.adapter is None else self.params.adapter.number

    @property
    def computes_prompt(self) -> bool:
        """Return whether logits or hidden states of the whole prompt are needed, so that it must not come from the
        prefix cache."""
        if self.params.pooling in ("mean", "cls"):
            return True
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens known but not yet computed: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def limit(self) -> int:
        """Length of the longest possible result, in tokens."""
        return len(self.prompt) + self.params.max_new_tokens


@dataclass(slots=True, eq=False)
class Chunk:
    """``count`` tokens of a request from position ``start``, computed by one forward. ``is_last``: they reach the last
    known token, so the forward yields a next token. ``proposed``: draft tokens computed after them, of which
    ``accepted`` have become tokens of the request."""

    request: Request
    start: int
    count: int
    proposed: Sequence[int] = ()
    accepted: int = 0

    @property
    def is_last(self) -> bool:
        return self.start + self.count + self.accepted == len(self.request.tokens)

    @property
    def size(self) -> int:
        """Number of tokens that the forward computes."""
        return self.count + len(self.proposed)

    def accept(self, token: int) -> bool:
        """Keep ``token``, sampled by the model, if it equals the draft token and does not end the request. Return
        whether it was kept: then the logits after it are valid too."""
        request, expected = self.request, self.proposed[self.accepted : self.accepted + 1]
        if list(expected) != [token] or token in request.params.stop_token_ids:
            return False
        request.tokens.append(token)
        self.accepted += 1
        return True

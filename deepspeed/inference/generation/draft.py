"""Speculative decoding with a draft model: a small model of the same vocabulary generates tokens greedily, and the
served model verifies them in the forward that computes its next token anyway.

The draft model has its own paged cache, with as many tokens as the served model's. A proposal first computes the tokens
that a request gained since its last proposal, whose keys and values replace those of rejected guesses, then one token
of every request per forward. Guesses never change an answer (`scheduling/speculation.py`), so a request that gets no
block, or whose prompt the draft model is still computing, simply gets no proposal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from deepspeed.inference.cache.blocks import BlockManager, BlockPool, BlockTable
from deepspeed.inference.cache.pages import PagePiece
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.scheduling.requests import Request
from deepspeed.ops.host_graph import largest_of


@dataclass(slots=True)
class _DraftSequence:
    """A request in the draft model's cache. ``computed``: tokens whose keys and values are cached: first up to
    ``known`` tokens of the request, then those of ``guesses``."""

    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    known: int = 0
    guesses: list[int] = field(default_factory=list)

    def keep_accepted(self, tokens: Sequence[int]) -> None:
        """Roll back the cached guesses that differ from ``tokens`` of the request."""
        pairs = list(zip(self.guesses, tokens[self.known :], strict=False))
        wrong = next((at for at, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        self.computed = min(self.computed, self.known + wrong, len(tokens) - 1)
        self.known, self.guesses = len(tokens), []

    def piece(self, tokens: Sequence[int]) -> PagePiece:
        """Return the piece that computes ``tokens`` next."""
        start = self.computed
        self.computed += len(tokens)
        return PagePiece(tokens, start, self.table.blocks, self.table.span)


class DraftModel:
    """Proposes the most likely tokens of a small causal language model.

    Args:
        module: the draft model, in evaluation mode; under tensor parallelism, split as the served model is.
        count: most tokens proposed per request.
        token_budget: prompt tokens per forward, which bounds how long decoding requests wait.

    Raises:
        LayoutError: the draft model cannot be run over a paged cache.
    """

    blocks: BlockManager
    """The blocks of the draft model's cache, after ``start``."""

    def __init__(self, module: nn.Module, count: int, *, token_budget: int = 512) -> None:
        if count < 1 or token_budget < 1:
            raise ValueError(f"count={count}, token_budget={token_budget}: expected at least 1")
        self.runner = ModelRunner(module)
        self.count = count
        self.token_budget = token_budget
        self.forwards = 0
        self._sequences: dict[Request, _DraftSequence] = {}

    @property
    def token_bytes(self) -> int:
        """See ``Proposer``."""
        return -(-self.runner.block_bytes // self.runner.block_size)

    def start(self, vocab_size: int, tokens: int) -> None:
        """See ``Proposer``. ValueError: the vocabulary sizes differ."""
        own = self.runner.info
        if own.vocab_size != vocab_size:
            raise ValueError(
                f"the draft model {own.name} has {own.vocab_size} tokens in its vocabulary, but the model "
                f"has {vocab_size}: speculation needs a draft model with the same vocabulary"
            )
        blocks, size = -(-tokens // self.runner.block_size), self.runner.block_size
        self.runner.allocate(blocks)
        self._sequences.clear()
        self.blocks = BlockManager(BlockPool(blocks), size, span=self.runner.rotations.span)

    def forget(self, request: Request) -> None:
        """Release the blocks of ``request``; full ones stay in the prefix cache until reallocated."""
        own = self._sequences.pop(request, None)
        if own is not None:
            self.blocks.release(own.table)

    def propose(self, rooms: Sequence[tuple[Request, int]], total: int) -> list[list[int]]:
        """See ``Proposer``. If ``total`` is too small for all, every request gets a first guess before any a second."""
        wanted: dict[Request, int] = {}
        for request, room in rooms:
            count = self._reserve(request, min(room, self.count)) if len(wanted) < total else 0
            if count > 0:
                wanted[request] = count
        going = self._catch_up(list(wanted))
        total -= len(going)
        for step in range(1, self.count):
            going = [request for request in going if wanted[request] > step][:total]
            if not going:
                break
            self._guess({request: self._sequences[request].guesses[-1:] for request in going}, True)
            total -= len(going)
        return [list(self._sequences[each].guesses) if each in wanted else [] for each, _ in rooms]

    def _reserve(self, request: Request, room: int) -> int:
        """Reserve blocks for the tokens of ``request`` and up to ``room`` guesses; return how many of these fit."""
        blocks, known = self.blocks, len(request.tokens)
        own = self._sequences.get(request)
        if own is not None and blocks.span(known) != own.table.span:  # its rotary embedding has changed
            self.forget(request)
            own = None
        if own is None:
            own = self._sequences[request] = _DraftSequence(known=known)
            own.computed = blocks.match_prefix(own.table, request.tokens)
        own.keep_accepted(request.tokens)
        # The last guess is never computed, so it needs no slot.
        room = min(room, blocks.room(own.table) - known + 1)
        if self.runner.info.max_length is not None:
            room = min(room, self.runner.info.max_length - known + 1)
        if room > 0:
            blocks.reserve(own.table, known + room - 1)
        return room

    def _catch_up(self, requests: Sequence[Request]) -> list[Request]:
        """Compute the missing tokens, up to ``token_budget`` in total; return the requests that got a first guess."""
        left, ready, parts = self.token_budget, [], {}
        for request in requests:
            own = self._sequences[request]
            part = request.tokens[own.computed : own.computed + left]
            if part:
                parts[request] = part
                left -= len(part)
        if parts:
            self._guess(parts)
        for request in parts:
            own = self._sequences[request]
            self.blocks.publish(own.table, request.tokens, own.computed)
            if own.computed == own.known:
                ready.append(request)
            else:
                own.guesses.clear()
        return ready

    def _guess(self, parts: Mapping[Request, list[int]], unchanged: bool = False) -> None:
        """Compute ``parts``, the next tokens of each request, and append the greedy guess that follows."""
        pieces = [self._sequences[request].piece(tokens) for request, tokens in parts.items()]
        guessed = largest_of(self.runner.forward(pieces, unchanged))
        self.forwards += 1
        for request, token in zip(parts, guessed, strict=True):
            self._sequences[request].guesses.append(token)

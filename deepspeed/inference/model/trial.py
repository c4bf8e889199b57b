"""Trying a layout: two short sequences in pieces, compared with the plain model.

The first sequence comes in two chunks, the second beside them, then each gets one token more, as in generation. Blocks
hold two tokens and do not lie in order. Where rotations depend on the length of a sequence, the first one is tried on
both sides of each such length, beside the second one, which stays short. Sliding windows are tried with fewer tokens
than the sequences have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.facts import ModelFacts
from deepspeed.inference.model.rotations import Rotations

BLOCK_SIZE = 2
_BLOCKS = (5, 1, 6, 3), (0, 4, 2)
_LENGTHS = 8, 5
_STEPS = (((0, 0, 4),), ((1, 0, 4), (0, 4, 7)), ((0, 7, 8), (1, 4, 5)))
"""(sequence, from, to) of the pieces of each forward."""


WINDOW = 3
"""Tokens of sliding windows while they are tried."""

Forward = Callable[[Sequence[PagePiece], PagedCache], Tensor]
"""Logits [wanted tokens of all pieces, vocabulary]."""


class Layout(Protocol):
    """Layout of the tokens of many sequences in one forward."""

    @property
    def name(self) -> str: ...
    @property
    def max_fused_tokens(self) -> int:
        """Return the tokens of the longest forward that is one call; 0: there are no such calls."""
        ...

    def learn(self, pieces: Sequence[PagePiece], block_size: int) -> dict[int, LayerShape]: ...
    def forward(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor: ...
    def hidden(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor: ...
    def release(self) -> None: ...


@contextlib.contextmanager
def narrow_windows(module: nn.Module) -> Iterator[bool]:
    """Give ``WINDOW`` tokens to the sliding windows that ``module`` finds in its configs and modules; whether there are
    any. The plain model has the same windows then: what a trial compares stays comparable."""
    owners: dict[int, Any] = {
        id(each): each for part in module.modules() for each in (part, getattr(part, "config", None))
    }
    before = {
        key: owner.sliding_window
        for key, owner in owners.items()
        if isinstance(getattr(owner, "sliding_window", None), int) and owner.sliding_window > WINDOW
    }
    try:
        for key in before:
            owners[key].sliding_window = WINDOW
        yield bool(before)
    finally:
        for key, window in before.items():
            owners[key].sliding_window = window


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest error of logits relative to their norm that passes; in 16 bits, tokens may go to other
    experts."""
    return 2e-4 if dtype.itemsize >= 4 else 0.1


def probe_tokens(facts: ModelFacts) -> list[list[int]]:
    return [
        [(3 + 11 * sequence + 37 * at) % facts.vocab_size for at in range(length)]
        for sequence, length in enumerate(_LENGTHS)
    ]


def learning_pieces(facts: ModelFacts) -> list[PagePiece]:
    """For ``Layout.learn``."""
    pairs = zip(probe_tokens(facts), _BLOCKS, strict=True)
    return [PagePiece(tokens[: 2 * BLOCK_SIZE], 0, blocks) for tokens, blocks in pairs]


def plain_logits(module: nn.Module, facts: ModelFacts, rotations: Rotations, span: int = 0) -> list[Tensor]:
    """[tokens, vocabulary] of each sequence, from the model alone; the first one is of ``span``."""
    made = []
    for tokens, own in zip(probe_tokens(facts), (span, 0), strict=True):
        with torch.inference_mode(), rotations.of_span(own):
            ids = torch.tensor([tokens], device=facts.device)
            made.append(module(input_ids=ids, use_cache=False).logits[0].clone())
    return made


def why_no_states(hidden: Forward, shapes: Mapping[int, LayerShape], facts: ModelFacts) -> str | None:
    """Return why a layout does not give the last hidden states of the first sequence by its method ``hidden``; None: it
    does."""
    tokens = probe_tokens(facts)[0]
    piece = PagePiece(tokens, 0, _BLOCKS[0], wanted=len(tokens))
    try:
        found: Any = hidden([piece], PagedCache(shapes, sum(map(len, _BLOCKS)), BLOCK_SIZE))
    except Exception as problem:  # whatever a model raises whose base is not what it seems
        return f"{type(problem).__name__}: {problem}"
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(tokens):
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        return f"its base gives {shape} for {len(tokens)} tokens"
    return None


def error_of(
    forward: Forward,
    shapes: Mapping[int, LayerShape],
    facts: ModelFacts,
    expected: Sequence[Tensor],
    span: int = 0,
) -> float:
    """The largest error of any row of logits, relative to the row's norm; inf if one is not finite. ``span``: of the
    first sequence."""
    cache = PagedCache(shapes, sum(map(len, _BLOCKS)), BLOCK_SIZE)
    tokens, worst = probe_tokens(facts), 0.0
    for step in _STEPS:
        pieces = [
            PagePiece(tokens[which][start:stop], start, _BLOCKS[which], 0 if which else span)
            for which, start, stop in step
        ]
        for row, (which, _, stop) in zip(forward(pieces, cache), step, strict=True):
            wanted = expected[which][stop - 1].float()
            error = float((row.float() - wanted).norm() / wanted.norm().clamp_min(1e-30))
            worst = max(worst, error) if error < float("inf") else float("inf")
    return worst

"""The model runner: logits for pieces of any sequences, from an unchanged model over a paged KV cache."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece, block_bytes
from deepspeed.inference.model.fused import FusedLayout
from deepspeed.inference.model.info import LayoutError, ModelInfo
from deepspeed.inference.model.launched import LaunchedLayout
from deepspeed.inference.model.packed import PackedLayout
from deepspeed.inference.model.padded import PaddedLayout
from deepspeed.inference.model.rotations import Rotations
from deepspeed.ops.huge_pages import collapse, weights_of

_ON_HOST = (FusedLayout, PackedLayout, PaddedLayout)
_ON_DEVICE = (LaunchedLayout, PackedLayout, PaddedLayout)

# A trial of a layout: two short sequences in pieces, compared with the plain model.
#
# The first sequence comes in two chunks, the second beside them, then each gets one token more, as in generation.
# Blocks hold two tokens and do not lie in order. Where rotations depend on the length of a sequence, the first
# one is tried on both sides of each such length, beside the second one, which stays short. Sliding windows are
# tried with fewer tokens than the sequences have.

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
        """Return the maximum tokens of a forward that is one call; 0: there are no such calls."""
        ...

    def learn(self, pieces: Sequence[PagePiece], block_size: int) -> dict[int, LayerShape]: ...
    def forward(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor: ...
    def hidden(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor: ...
    def release(self) -> None: ...


class ModelRunner:
    """Runs ``module`` unchanged. There is no list of supported models: each layout is tried, and the first one whose
    logits equal those of the plain model is used. A model whose attention differs from what its code suggests is thus
    refused, rather than generating wrong text.

    Args:
        module: a causal language model of Transformers in evaluation mode.
        block_size: tokens per block of the cache.
        layouts: layouts to try, in this order; None: those of the module's device.

    Raises:
        LayoutError: no layout reproduces the plain model's logits; the message has the reasons.
    """

    def __init__(
        self, module: nn.Module, block_size: int = 16, layouts: Sequence[Callable[..., Layout]] | None = None
    ) -> None:
        self.module = module
        self.info = ModelInfo.of(module)
        self.rotations = Rotations(module, self.info.config)
        self.block_size = block_size
        on_host = self.info.device.type == "cpu"
        self.layout, self.shapes = self._choose(layouts or (_ON_HOST if on_host else _ON_DEVICE))
        hidden = partial(self._forward, self.layout.hidden)
        self.hidden_states_error = hidden_states_error(hidden, self.shapes, self.info)
        """Reason why ``hidden`` cannot be called; None: it can."""
        self.layout.release()
        collapse(weights_of(module))
        self._cache: PagedCache | None = None

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block of the cache, over all layers of this rank."""
        return block_bytes(self.shapes, self.block_size)

    @property
    def max_fused_tokens(self) -> int | None:
        """Return the maximum tokens of a forward that one program of kernels computes, each with the same bits as
        alone; None: the layout has no such programs."""
        return self.layout.max_fused_tokens or None

    @property
    def cache(self) -> PagedCache:
        assert self._cache is not None, "call allocate() first"
        return self._cache

    def allocate(self, num_blocks: int) -> None:
        """Allocate the cache, and drop the previous one."""
        self._cache = None
        self._cache = PagedCache(self.shapes, num_blocks, self.block_size)

    def release(self) -> None:
        """Free the cache until the next ``allocate``."""
        self._cache = None
        self.layout.release()

    def forward(self, pieces: Sequence[PagePiece], unchanged: bool = False) -> Tensor:
        """Return the logits [tokens, vocabulary] after the last ``wanted`` tokens of each piece, in their order, and
        store keys and values of all tokens in the cache. ``unchanged``: the module has not been modified since the last
        forward, which saves a check."""
        return self._forward(self.layout.forward, pieces, self.cache, unchanged)

    def hidden(self, pieces: Sequence[PagePiece], unchanged: bool = False) -> Tensor:
        """Return the last hidden states [tokens, size] of the last ``wanted`` tokens of each piece; see ``forward``."""
        return self._forward(self.layout.hidden, pieces, self.cache, unchanged)

    def _forward(
        self,
        compute: Callable[..., Tensor],
        pieces: Sequence[PagePiece],
        cache: PagedCache,
        unchanged: bool = False,
    ) -> Tensor:
        """Run a forward of the layout, by its method ``compute``, per span."""
        if not self.rotations.lengths:
            return compute(pieces, cache, unchanged)
        by_span: dict[int, list[int]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            by_span[piece.span].append(index)
        rows: dict[int, Tensor] = {}
        for span, indices in by_span.items():
            some = [pieces[index] for index in indices]
            with self.rotations.of_span(span):
                found = compute(some, cache, unchanged)
            rows.update(zip(indices, found.split([piece.wanted for piece in some]), strict=True))
        return torch.cat([rows[index] for index in range(len(pieces))])

    def _choose(self, layouts: Sequence[Callable[..., Layout]]) -> tuple[Layout, dict[int, LayerShape]]:
        expected = self._plain_logits()
        with narrow_windows(self.module) as has_windows:
            in_windows = self._plain_logits() if has_windows else []
        reasons = []
        for kind in layouts:
            layout = kind(self.module, self.info)
            try:
                shapes, error = self._tried(layout, expected)
                if has_windows:
                    with narrow_windows(self.module):
                        error = max(error, self._tried(kind(self.module, self.info), in_windows)[1])
            except Exception as problem:  # a model may raise anything for an unexpected mask or cache
                reasons.append(f"{layout.name}: {type(problem).__name__}: {problem}")
                continue
            if error <= tolerance(expected[0][0].dtype):
                return layout, shapes
            reasons.append(
                f"{layout.name}: logits differ from the plain model's by {error:.1e} of their norm"
            )
        raise LayoutError(
            f"{self.info.name} cannot be run over a paged cache ({'; '.join(reasons)}): use its own generate()"
        )

    def _plain_logits(self) -> list[list[Tensor]]:
        """Compute the logits of the trial sequences, per span."""
        spans = range(len(self.rotations.lengths) + 1)
        return [plain_logits(self.module, self.info, self.rotations, span) for span in spans]

    def _tried(
        self, layout: Layout, expected: Sequence[Sequence[Tensor]]
    ) -> tuple[dict[int, LayerShape], float]:
        """Return the shapes that ``layout`` learns, and its largest error."""
        shapes = layout.learn(learning_pieces(self.info), BLOCK_SIZE)
        forward = partial(self._forward, layout.forward)
        errors = [error_of(forward, shapes, self.info, each, span) for span, each in enumerate(expected)]
        return shapes, max(errors)


# Trying a layout --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def narrow_windows(module: nn.Module) -> Iterator[bool]:
    """Set the sliding windows found in the configs and modules of ``module`` to ``WINDOW`` tokens; yields whether there
    are any. The plain model gets the same windows, so results stay comparable."""
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
    """Return the tolerated error of logits, relative to their norm; in 16 bits, tokens may be routed to other
    experts."""
    return 2e-4 if dtype.itemsize >= 4 else 0.1


def probe_tokens(info: ModelInfo) -> list[list[int]]:
    return [
        [(3 + 11 * sequence + 37 * at) % info.vocab_size for at in range(length)]
        for sequence, length in enumerate(_LENGTHS)
    ]


def learning_pieces(info: ModelInfo) -> list[PagePiece]:
    """Return pieces for ``Layout.learn``."""
    pairs = zip(probe_tokens(info), _BLOCKS, strict=True)
    return [PagePiece(tokens[: 2 * BLOCK_SIZE], 0, blocks) for tokens, blocks in pairs]


def plain_logits(module: nn.Module, info: ModelInfo, rotations: Rotations, span: int = 0) -> list[Tensor]:
    """Return logits [tokens, vocabulary] of each sequence from the plain model; the first one is of ``span``."""
    made = []
    for tokens, own in zip(probe_tokens(info), (span, 0), strict=True):
        with torch.inference_mode(), rotations.of_span(own):
            ids = torch.tensor([tokens], device=info.device)
            made.append(module(input_ids=ids, use_cache=False).logits[0].clone())
    return made


def hidden_states_error(hidden: Forward, shapes: Mapping[int, LayerShape], info: ModelInfo) -> str | None:
    """Return why the method ``hidden`` of a layout does not return the last hidden states of the first sequence; None:
    it does."""
    tokens = probe_tokens(info)[0]
    piece = PagePiece(tokens, 0, _BLOCKS[0], wanted=len(tokens))
    try:
        found: Any = hidden([piece], PagedCache(shapes, sum(map(len, _BLOCKS)), BLOCK_SIZE))
    except Exception as problem:  # a model may raise anything if its base model is unusual
        return f"{type(problem).__name__}: {problem}"
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(tokens):
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        return f"its base gives {shape} for {len(tokens)} tokens"
    return None


def error_of(
    forward: Forward,
    shapes: Mapping[int, LayerShape],
    info: ModelInfo,
    expected: Sequence[Tensor],
    span: int = 0,
) -> float:
    """Return the largest error of any row of logits, relative to the row's norm; inf if one is not finite. ``span``: of
    the first sequence."""
    cache = PagedCache(shapes, sum(map(len, _BLOCKS)), BLOCK_SIZE)
    tokens, worst = probe_tokens(info), 0.0
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

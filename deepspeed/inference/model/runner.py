"""The model runner: logits of any pieces of any sequences, from an unchanged model over a paged cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece, block_bytes
from deepspeed.inference.model.facts import LayoutError, ModelFacts
from deepspeed.inference.model.fused import FusedLayout
from deepspeed.inference.model.launched import LaunchedLayout
from deepspeed.inference.model.packed import PackedLayout
from deepspeed.inference.model.padded import PaddedLayout
from deepspeed.inference.model.rotations import Rotations
from deepspeed.inference.model.trial import (
    BLOCK_SIZE,
    Layout,
    error_of,
    learning_pieces,
    narrow_windows,
    plain_logits,
    tolerance,
    why_no_states,
)
from deepspeed.ops.huge_pages import collapse, weights_of

_ON_HOST = (FusedLayout, PackedLayout, PaddedLayout)
_ON_DEVICE = (LaunchedLayout, PackedLayout, PaddedLayout)


class ModelRunner:
    """Runs ``module`` as it is. No list of models decides how, but trying: the first layout whose logits are those of
    the plain model is used. So a model whose attention is not what its code seems to say is refused, and never gives
    wrong text.

    Args:
        module: a causal language model of Transformers in evaluation mode.
        block_size: tokens of a block of the cache.
        layouts: that are tried, in this order; None: those of the module's device.

    Raises:
        LayoutError: no layout gives the plain model's logits; the reasons are told.
    """

    def __init__(
        self, module: nn.Module, block_size: int = 16, layouts: Sequence[Callable[..., Layout]] | None = None
    ) -> None:
        self.module = module
        self.facts = ModelFacts.of(module)
        self.rotations = Rotations(module, self.facts.config)
        self.block_size = block_size
        on_host = self.facts.device.type == "cpu"
        self.layout, self.shapes = self._choose(layouts or (_ON_HOST if on_host else _ON_DEVICE))
        hidden = partial(self._forward, self.layout.hidden)
        self.no_states = why_no_states(hidden, self.shapes, self.facts)
        """Why ``hidden`` cannot be called; None: it can."""
        self.layout.release()
        collapse(weights_of(module))
        self._cache: PagedCache | None = None

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block of the cache, over all layers of this rank."""
        return block_bytes(self.shapes, self.block_size)

    @property
    def max_fused_tokens(self) -> int | None:
        """Return the tokens of the longest forward that one program of kernels computes, each with the bits that it has
        alone; None: the layout has no such programs."""
        return self.layout.max_fused_tokens or None

    @property
    def cache(self) -> PagedCache:
        assert self._cache is not None, "allocate() comes first"
        return self._cache

    def allocate(self, num_blocks: int) -> None:
        """The cache; one that was there is gone."""
        self._cache = None
        self._cache = PagedCache(self.shapes, num_blocks, self.block_size)

    def release(self) -> None:
        """The cache is gone until ``allocate``."""
        self._cache = None
        self.layout.release()

    def forward(self, pieces: Sequence[PagePiece], unchanged: bool = False) -> Tensor:
        """Return logits [tokens, vocabulary] after the ``wanted`` last tokens of each piece, in their order; keys and
        values of all tokens are in the cache then. ``unchanged``: nobody has touched the module since the last
        forward, which spares looking."""
        return self._forward(self.layout.forward, pieces, self.cache, unchanged)

    def hidden(self, pieces: Sequence[PagePiece], unchanged: bool = False) -> Tensor:
        """Return the last hidden states [tokens, size] of the ``wanted`` last tokens of each piece; see ``forward``."""
        return self._forward(self.layout.hidden, pieces, self.cache, unchanged)

    def _forward(
        self,
        compute: Callable[..., Tensor],
        pieces: Sequence[PagePiece],
        cache: PagedCache,
        unchanged: bool = False,
    ) -> Tensor:
        """One forward of the layout, by its method ``compute``, for each span."""
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
            layout = kind(self.module, self.facts)
            try:
                shapes, error = self._tried(layout, expected)
                if has_windows:
                    with narrow_windows(self.module):
                        error = max(error, self._tried(kind(self.module, self.facts), in_windows)[1])
            except (
                Exception
            ) as problem:  # whatever a model raises that meets a mask or cache it does not expect
                reasons.append(f"{layout.name}: {type(problem).__name__}: {problem}")
                continue
            if error <= tolerance(expected[0][0].dtype):
                return layout, shapes
            reasons.append(
                f"{layout.name}: logits differ from the plain model's by {error:.1e} of their norm"
            )
        raise LayoutError(
            f"{self.facts.name} cannot be run over a paged cache ({'; '.join(reasons)}): use its own generate()"
        )

    def _plain_logits(self) -> list[list[Tensor]]:
        """Compute the logits of the trial's sequences, for each span."""
        spans = range(len(self.rotations.lengths) + 1)
        return [plain_logits(self.module, self.facts, self.rotations, span) for span in spans]

    def _tried(
        self, layout: Layout, expected: Sequence[Sequence[Tensor]]
    ) -> tuple[dict[int, LayerShape], float]:
        """Return what ``layout`` learns, and its largest error."""
        shapes = layout.learn(learning_pieces(self.facts), BLOCK_SIZE)
        forward = partial(self._forward, layout.forward)
        errors = [error_of(forward, shapes, self.facts, each, span) for span, each in enumerate(expected)]
        return shapes, max(errors)

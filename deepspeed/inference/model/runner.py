"""The model runner: logits of any pieces of any sequences, from an unchanged model over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape, PagedCache, Piece, block_bytes
from deepspeed.inference.model.facts import LayoutError, ModelFacts
from deepspeed.inference.model.fused import FusedLayout
from deepspeed.inference.model.launched import LaunchedLayout
from deepspeed.inference.model.packed import PackedLayout
from deepspeed.inference.model.padded import PaddedLayout
from deepspeed.inference.model.probing import (
    BLOCK_SIZE,
    Layout,
    error_of,
    learning_pieces,
    plain_logits,
    tolerance,
)
from deepspeed.ops.large_pages import collapse, weights_of

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
        self.block_size = block_size
        on_host = self.facts.device.type == "cpu"
        self.layout, self.shapes = self._choose(layouts or (_ON_HOST if on_host else _ON_DEVICE))
        collapse(weights_of(module))
        self._cache: PagedCache | None = None

    @property
    def block_bytes(self) -> int:
        """Of one block of the cache, over all layers of this rank."""
        return block_bytes(self.shapes, self.block_size)

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

    def forward(self, pieces: Sequence[Piece], unchanged: bool = False) -> Tensor:
        """Logits [pieces, vocabulary] after the last token of each; keys and values of all tokens are in the cache
        then. ``unchanged``: nobody has touched the module since the last forward, which spares looking."""
        return self.layout.forward(pieces, self.cache, unchanged)

    def _choose(self, layouts: Sequence[Callable[..., Layout]]) -> tuple[Layout, dict[int, LayerShape]]:
        expected = plain_logits(self.module, self.facts)
        reasons = []
        for kind in layouts:
            layout = kind(self.module, self.facts)
            try:
                shapes = layout.learn(learning_pieces(self.facts), BLOCK_SIZE)
                error = error_of(layout, shapes, self.facts, expected)
            except (
                Exception
            ) as problem:  # whatever a model raises that meets a mask or cache it does not expect
                reasons.append(f"{layout.name}: {type(problem).__name__}: {problem}")
                continue
            if error <= tolerance(expected[0].dtype):
                return layout, shapes
            reasons.append(
                f"{layout.name}: logits differ from the plain model's by {error:.1e} of their norm"
            )
        raise LayoutError(
            f"{self.facts.name} cannot be run over a paged cache ({'; '.join(reasons)}): use its own generate()"
        )

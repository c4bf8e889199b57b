"""The loss of a whole sequence, from what a function gives for its tiles.

A mean over tokens is not made of the tiles' means: tiles count different numbers of tokens, by the ``ignore_index`` and
class weights that the function passes, and in 16 bits each tile's mean is rounded (in bf16 by 0.4 %) before they are
summed. Where a tile's result *is* a cross-entropy, the losses of its tokens are kept instead, and reduced together by
the function that reduces them without tiles: the loss has the bits of the plain call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SIGNATURES = {each: inspect.signature(each) for each in (functional.cross_entropy, functional.nll_loss)}


class TileLosses(TorchFunctionMode):
    """Losses of the tiles of one call, whose function runs inside of this and returns one reduced by ``reduction``
    ("mean" or "sum").

    ``weights``, ``starts``: of each computed tile, what its loss counts if no tile's is known token by token, and where
    it begins.
    """

    def __init__(self, reduction: str, weights: Sequence[float], starts: Sequence[int]) -> None:
        self.reduction, self.weights, self.starts = reduction, weights, list(starts)
        self.of_tokens: torch.dtype | None = None
        self.of_tiles: torch.dtype | None = None
        self.weighted = False
        self._last: tuple[Tensor, Tensor] | None = None

    def of_tile(self, result: Tensor, leading: torch.Size) -> Tensor:
        """Return the losses of a tile's tokens and how much each counts, [2, *leading], fp32 or wider; 0 for what has
        no loss. A ``result`` that is not just a cross-entropy is in the first token's place, and counts nothing.
        """
        (loss, tokens), self._last = self._last or (None, result), None
        if result.dim():
            raise ValueError(
                f"results of tiles are reduced to one number, but a tile's result has shape {tuple(result.shape)}: "
                "reduce it in the function, or join the results with output_reduction=None"
            )
        if result is loss and tokens[0].numel() <= leading.numel():
            self.of_tokens = result.dtype
        else:
            self.of_tiles = torch.promote_types(result.dtype, self.of_tiles or result.dtype)
            tokens = functional.pad(result.view(1, 1), (0, 0, 0, 1))
        places = functional.pad(tokens, (0, leading.numel() - tokens.shape[1]))
        return places.to(_wide(result.dtype)).view(2, *leading)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compiling = torch.compiler.is_compiling()
        given = None if compiling or func not in SIGNATURES else loss_arguments(func, args, kwargs or {})
        if given is None or given["reduction"] != self.reduction:
            return func(*args, **(kwargs or {}))
        target = given["target"]
        losses = func(**{**given, "reduction": "none"})
        counts = (target != given["ignore_index"]).to(losses.dtype)
        if given["weight"] is not None:
            self.weighted = True
            counts = counts * given["weight"][target.where(counts != 0, 0)]
        tokens = torch.stack([losses.flatten(), counts.flatten()])
        loss = reduced(tokens, self.reduction, weighted=self.weighted)
        self._last = loss, tokens
        return loss

    def of_sequence(self, joined: Tensor) -> Tensor:
        """The loss of all tiles. ``joined``: what ``of_tile`` gave, joined along the last dim."""
        if self.of_tokens is not None:
            return reduced(joined.flatten(1).to(self.of_tokens), self.reduction, weighted=self.weighted)
        # A loss of 16 bits is rounded once, after the sum. What the tiles' own results lack cannot be regained.
        losses = joined[0].reshape(-1, joined.shape[-1])[0, self.starts]
        return (losses * losses.new_tensor(self.weights)).sum().to(self.of_tiles)


def loss_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """All arguments of a call of torch's cross-entropy by name, or None: with probabilities, or as torch 0.4 had it."""
    bound = SIGNATURES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    old = given["size_average"] is not None or given["reduce"] is not None
    return None if old or given["target"].is_floating_point() else given


def reduced(tokens: Tensor, reduction: str, *, weighted: bool = False) -> Tensor:
    """The loss of ``tokens`` [2, n], their losses and how much each counts: 1 or 0 unless they are ``weighted``.

    By torch's own sum, so that it has the same bits; in fp32 where a 16-bit sum overflows and its mean does not.
    """
    losses, counts = tokens
    divisor = counts.sum(dtype=_wide(tokens.dtype)) if reduction == "mean" else 1
    total = losses.sum(dtype=_wide(tokens.dtype)) / divisor
    if weighted:
        return total.to(tokens.dtype)
    target = torch.where(counts == 0, -100, 0)
    plain = functional.nll_loss(-losses[:, None], target, reduction=reduction)
    return torch.where(plain.isfinite(), plain, total.to(tokens.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

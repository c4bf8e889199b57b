"""The loss of a whole sequence from its tiles.

The mean over tokens cannot be computed from the tiles' means: tiles count different numbers of tokens, because of
``ignore_index`` and class weights, and in 16 bits each tile's mean is rounded (in bf16 by 0.4 %) before summation. If a
tile's result *is* a cross-entropy, its per-token losses are kept instead, and reduced together by the function that
reduces them without tiles: the loss is bit-identical to the plain call.
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
    """Captures the losses of the tiles of one call, whose function runs inside this mode and returns a loss reduced by
    ``reduction`` ("mean" or "sum").

    ``weights``, ``starts``: weight of each computed tile, used if no per-token losses are known, and its start.
    """

    def __init__(self, reduction: str, weights: Sequence[float], starts: Sequence[int]) -> None:
        self.reduction, self.weights, self.starts = reduction, weights, list(starts)
        self.of_tokens: torch.dtype | None = None
        self.of_tiles: torch.dtype | None = None
        self.weighted = False
        self._last: tuple[Tensor, Tensor] | None = None

    def of_tile(self, result: Tensor, leading: torch.Size) -> Tensor:
        """Return a tile's per-token losses and their weights, [2, *leading], fp32 or wider; 0 where there is no loss. A
        ``result`` that is not just a cross-entropy takes the first token's place, with weight 0.
        """
        (loss, tokens), self._last = self._last or (None, result), None
        if result.dim():
            raise ValueError(
                f"results of tiles are reduced to a scalar, but a tile returned shape {tuple(result.shape)}: reduce "
                "it in the function, or concatenate the results with output_reduction=None"
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
        """Return the loss of all tiles. ``joined``: results of ``of_tile``, concatenated along the last dim."""
        if self.of_tokens is not None:
            return reduced(joined.flatten(1).to(self.of_tokens), self.reduction, weighted=self.weighted)
        # Round to 16 bits once, after the sum. Precision that the tiles' results have already lost stays lost.
        losses = joined[0].reshape(-1, joined.shape[-1])[0, self.starts]
        return (losses * losses.new_tensor(self.weights)).sum().to(self.of_tiles)


def loss_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Return all arguments of a call of torch's cross-entropy by name; None for probability targets or the arguments of
    torch 0.4."""
    bound = SIGNATURES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    old = given["size_average"] is not None or given["reduce"] is not None
    return None if old or given["target"].is_floating_point() else given


def reduced(tokens: Tensor, reduction: str, *, weighted: bool = False) -> Tensor:
    """Reduce ``tokens`` [2, n]: losses and their weights, which are 1 or 0 unless ``weighted``.

    Uses torch's own reduction, for bit-identical results; in fp32 if a 16-bit sum overflows but its mean does not.
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

"""Fuse low-rank adapters into the weights that they adapt, while a model generates (E. J. Hu et al.: LoRA, 2021)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_METHODS = (("fuse_lora_weight", "unfuse_lora_weight"), ("merge", "unmerge"))
"""(fuse, unfuse) methods of DeepSpeed-Chat's LoRA layers, and of PEFT's."""

_PARTS = ("lora_right_weight", "lora_left_weight", "lora_scaling", "fuse_lora")
"""Attributes of similar layers without these methods. With ``fuse_lora`` set, forward uses the weight alone."""


class FusedAdapters:
    """The adapted layers of ``module``. A fused layer costs one product instead of three. Copies of the original
    weights are kept while fused, so unfusing restores them bit for bit."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            (layer, methods) for layer in module.modules() if (methods := _methods(layer)) is not None
        ]
        self._kept: list[tuple[Tensor, Tensor, Callable[[], Any]]] = []
        self.fused = False

    def __len__(self) -> int:
        return len(self._layers)

    def whole(self) -> bool:
        """Return whether this rank holds all of the adapters and of the weights they adapt, not only its shards."""
        return all(
            param.numel() == getattr(param, "ds_numel", param.numel())
            for layer, _ in self._layers
            for param in layer.parameters()
        )

    @torch.no_grad()
    def fuse(self) -> None:
        """Merge the adapters into the weights; no-op if already fused."""
        if self.fused:
            return
        for layer, (fuse, unfuse) in self._layers:
            if getattr(layer, "merged", False) or getattr(layer, "fuse_lora", False):
                continue  # its owner has fused it, and relies on that
            weight = _weight(layer)
            self._kept.append((weight, weight.detach().clone(), unfuse))
            fuse()
        self.fused = True

    @torch.no_grad()
    def unfuse(self) -> None:
        """Restore the original weights; no-op if not fused."""
        if not self.fused:
            return
        # The last first: of a weight that layers share, only the first copy is without any adapter.
        for weight, before, unfuse in reversed(self._kept):
            unfuse()
            weight.copy_(before)
        self._kept.clear()
        self.fused = False

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Fuse the adapters within the block, then restore the previous state. Requires whole weights."""
        before = self.fused
        self.fuse()
        try:
            yield
        finally:
            if not before:
                self.unfuse()


def _methods(layer: nn.Module) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    if _weight(layer) is None:
        return None
    for names in _METHODS:
        found = [getattr(layer, name, None) for name in names]
        if all(callable(each) for each in found):
            return found[0], found[1]  # type: ignore[return-value]
    if all(hasattr(layer, name) for name in _PARTS):
        return partial(_fuse_parts, layer), partial(_unfuse_parts, layer)
    return None


def _fuse_parts(layer: Any) -> None:
    layer.weight += layer.lora_scaling * (layer.lora_right_weight @ layer.lora_left_weight).t()
    layer.fuse_lora = True


def _unfuse_parts(layer: Any) -> None:
    """Clear the flag; ``FusedAdapters`` restores the weight."""
    layer.fuse_lora = False


def _weight(layer: Any) -> Any:
    """Return the weight matrix that ``layer`` adapts, or None."""
    base = getattr(layer, "base_layer", layer)
    return getattr(base, "weight", None)

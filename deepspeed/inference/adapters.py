"""Low-rank adapters inside the weights that they adapt, while a model generates (E. J. Hu et al.: LoRA, 2021)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_METHODS = (("fuse_lora_weight", "unfuse_lora_weight"), ("merge", "unmerge"))
"""Of the layers of DeepSpeed-Chat, and of PEFT's."""

_PARTS = ("lora_right_weight", "lora_left_weight", "lora_scaling", "fuse_lora")
"""Of layers like DeepSpeed-Chat's that have no such methods. With ``fuse_lora`` a forward uses the weight alone."""


class FusedAdapters:
    """The adapted layers of ``module``. Fused, a layer costs one product instead of three. Unfusing gives the weights
    back bit for bit: copies of them are kept meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            (layer, methods) for layer in module.modules() if (methods := _methods(layer)) is not None
        ]
        self._kept: list[tuple[Tensor, Tensor]] = []
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
        """Nothing happens if they are."""
        if self.fused:
            return
        for layer, (fuse, _) in self._layers:
            weight = _weight(layer)
            self._kept.append((weight, weight.detach().clone()))
            fuse()
        self.fused = True

    @torch.no_grad()
    def unfuse(self) -> None:
        """Nothing happens if they are not fused."""
        if not self.fused:
            return
        for (_, (_, unfuse)), (weight, before) in zip(self._layers, self._kept, strict=True):
            unfuse()
            weight.copy_(before)
        self._kept.clear()
        self.fused = False

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """A block in which they are fused, for weights that are whole; as before behind it."""
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
    """Its weight is put back by ``FusedAdapters``."""
    layer.fuse_lora = False


def _weight(layer: Any) -> Any:
    """The matrix that a layer adapts."""
    base = getattr(layer, "base_layer", layer)
    return getattr(base, "weight", None)

"""Module arguments of which each rank uses a part, such as its heads' position slopes (ALiBi)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.plan import ArgumentChange


class OwnPart:
    """Forward pre-hook (with kwargs) that replaces one argument by this rank's part."""

    def __init__(self, change: ArgumentChange, rank: int, position: int | None) -> None:
        self.change, self.rank, self.position = change, rank, position

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, position = self.change.name, self.position
        if isinstance(kwargs.get(name), Tensor):
            kwargs = {**kwargs, name: self._part(kwargs[name])}
        elif position is not None and position < len(args) and isinstance(args[position], Tensor):
            args = (*args[:position], self._part(args[position]), *args[position + 1 :])
        return args, kwargs

    def _part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part. ValueError: the size is no multiple of ``cut.size``."""
        cut = self.change.cut
        if tensor.shape[cut.dim] % cut.size:
            raise ValueError(
                f"{self.change.module}: the argument {self.change.name} of shape {tuple(tensor.shape)} is "
                f"not a multiple of {cut.size} in dim {cut.dim}"
            )
        several = tensor.unflatten(cut.dim, (-1, cut.size))
        return Cut(cut.dim + 1, cut.size, cut.parts).take(several, self.rank).flatten(cut.dim, cut.dim + 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnPart:
        return self


def change_argument(module: nn.Module, change: ArgumentChange, rank: int) -> None:
    """Make the forward of ``module`` see only the part of ``rank``."""
    names = list(inspect.signature(module.forward).parameters)
    position = names.index(change.name) if change.name in names else None
    module.register_forward_pre_hook(OwnPart(change, rank, position), with_kwargs=True)

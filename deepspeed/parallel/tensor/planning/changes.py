"""Changes of modules around split layers: attributes with a value per rank, and arguments of which each rank uses a
part, such as its heads' position slopes (ALiBi)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.plan import ArgumentChange, AttributeChange, TensorParallelPlan


def apply_changes(module: nn.Module, plan: TensorParallelPlan, rank: int) -> None:
    """Set the attributes in ``plan`` to the values of ``rank``, and make forwards see only the rank's part of the
    arguments in it."""
    for change in plan.attributes:
        _change_attribute(module.get_submodule(change.module), change, rank)
    for argument in plan.arguments:
        owner = module.get_submodule(argument.module)
        names = list(inspect.signature(owner.forward).parameters)
        position = names.index(argument.name) if argument.name in names else None
        owner.register_forward_pre_hook(_OwnPart(argument, rank, position), with_kwargs=True)


def _change_attribute(module: nn.Module, change: AttributeChange, rank: int) -> None:
    name, value = change.name, change.values[rank]
    if not change.in_config:
        setattr(module, name, value)
        return
    config: Any = module.config
    if isinstance(config, _LocalConfig):
        config.own[name] = value
    else:
        vars(module)["config"] = _LocalConfig(config, {name: value})


class _LocalConfig:
    """A module's view of the model's config, with ``own`` overriding some values."""

    def __init__(self, config: Any, own: dict[str, int]) -> None:
        vars(self).update(config=config, own=own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("config", "own"):
            raise AttributeError(name)
        return self.own[name] if name in self.own else getattr(self.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.config, name, value)


class _OwnPart:
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

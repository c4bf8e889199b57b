"""Snapshot of a module's structure: to see what a transform changed, and to undo it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.base.sharded import full_numel, full_shape

_PARTS = ("_parameters", "_buffers", "_modules")
_IGNORED = frozenset({*_PARTS, "training"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """``places``: path -> the module there now, where none or another one stood before, or one whose own tensors,
    attributes or children's names changed; ``gone``: modules that are nowhere any more; ``frozen``: parameters that
    were trainable before."""

    places: dict[str, nn.Module]
    gone: list[nn.Module]
    added: list[nn.Parameter]
    removed: dict[str, nn.Parameter]
    frozen: list[nn.Parameter]


class Structure:
    """The modules, parameters and buffers that a module has. Refers to them, and copies no values."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.held = {id(each): each for each in self.modules.values()}
        self.classes = {key: type(each) for key, each in self.held.items()}
        self.attributes = {key: dict(vars(each)) for key, each in self.held.items()}
        self.tables = [
            (table, dict(table))
            for each in self.held.values()
            for table in vars(each).values()
            if isinstance(table, dict)
        ]
        self.params = dict(module.named_parameters())
        self.trainable = {id(param): param.requires_grad for param in self.params.values()}
        self.kinds = {id(param): _kind(param) for param in self.params.values()}
        self.own = {key: _own(each) for key, each in self.held.items()}
        self.weights = {
            name: tuple(full_shape(tensor))
            for name, tensor in module.state_dict(keep_vars=True).items()
            if torch.is_tensor(tensor)
        }
        """Shapes of the state dict."""

    def changes_to(self, now: Structure) -> Changes:
        """Return the changes between this structure and ``now``, one of the same module."""
        places = {
            path: each
            for path, each in now.modules.items()
            if self.modules.get(path) is not each or self.own[id(each)] != now.own[id(each)]
        }
        for path, each in self.modules.items():  # those that changed and stand elsewhere now
            if id(each) in now.held and self.own[id(each)] != now.own[id(each)]:
                places.setdefault(path, each)
        old, new = self.params.values(), now.params.values()
        staying = {id(param) for param in new}
        return Changes(
            places=places,
            gone=[each for key, each in self.held.items() if key not in now.held],
            added=[param for param in new if id(param) not in self.trainable],
            removed={name: param for name, param in self.params.items() if id(param) not in staying},
            frozen=[p for p in old if id(p) in staying and self.trainable[id(p)] and not p.requires_grad],
        )

    def restore(self) -> list[str]:
        """Put every module, its class, and every tensor, attribute and flag back. Returns the names of parameters that
        another shape or dtype was given in place: their values are lost."""
        for key, attributes in self.attributes.items():
            if type(self.held[key]) is not self.classes[key]:
                self.held[key].__class__ = self.classes[key]
            own = vars(self.held[key])
            own.clear()
            own.update(attributes)
        for table, content in self.tables:
            table.clear()
            table.update(content)
        for param in self.params.values():
            param.requires_grad_(self.trainable[id(param)])
        return [name for name, param in self.params.items() if _kind(param) != self.kinds[id(param)]]


def _own(module: nn.Module) -> tuple[Any, ...]:
    """Return a comparable key of what a module has apart from the content of its children."""
    tensors = [
        (name, id(tensor), _kind(tensor) if tensor is not None else None)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
    ]
    attributes = {name: id(value) for name, value in vars(module).items() if name not in _IGNORED}
    return tensors, sorted(module._modules), attributes


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return full_shape(tensor), tensor.dtype


def count(params: list[nn.Parameter]) -> str:
    """Such as "2 parameters (1,024 elements)"."""
    elements = sum(map(full_numel, params))
    return f"{len(params)} parameter{'s' if len(params) != 1 else ''} ({elements:,} elements)"

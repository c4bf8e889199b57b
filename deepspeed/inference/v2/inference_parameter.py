"""A tensor with others that belong to it, such as the scales of its integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_aux_attrs"


class InferenceParameter(Tensor):
    """Made by ``initialize``; the others are its attributes, by the names that were given, and move with it."""

    @staticmethod
    def __new__(cls, tensor: Tensor, *args: Any, **kwargs: Any) -> InferenceParameter:
        made = tensor.detach().as_subclass(cls)
        _give(made, getattr(tensor, _ATTRIBUTE, {}))
        return made

    @classmethod
    def initialize(cls, core_param: Tensor, **kwargs: Tensor) -> InferenceParameter:
        """``core_param`` with ``kwargs`` as its attributes."""
        made = cls(core_param)
        _give(made, kwargs)
        return made

    @classmethod
    def initialize_raw(cls, **kwargs: Tensor) -> InferenceParameter:
        """Attributes alone, of an empty tensor."""
        return cls.initialize(torch.empty(0), **kwargs)

    @property
    def aux_attrs(self) -> dict[str, Tensor]:
        """What belongs to it, by name."""
        return getattr(self, _ATTRIBUTE, {})

    def to(self, *args: Any, **kwargs: Any) -> InferenceParameter:
        """Itself and what belongs to it, on another device or in another dtype (integers keep theirs)."""
        others = {name: _moved(value, *args, **kwargs) for name, value in self.aux_attrs.items()}
        return type(self).initialize(_moved(self.as_subclass(Tensor), *args, **kwargs), **others)


def _give(param: InferenceParameter, others: dict[str, Tensor]) -> None:
    setattr(param, _ATTRIBUTE, dict(others))
    for name, value in others.items():
        setattr(param, name, value)


def _moved(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    wanted = value.to(*args, **kwargs)
    return wanted if value.is_floating_point() else value.to(wanted.device)

"""The weights of one layer, filled from the tensors of a checkpoint.

A subclass names its weights as annotations with subclasses of ``ParameterBase``, and says in ``PARAM_MAPPING`` which
tensor goes where: ``{"mlp.up.weight": "mlp_1.up", "experts.*.w1": "moe.first"}``; a star is the index of a list. One
tensor may have several targets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.inference.v2.inference_parameter import InferenceParameter
from deepspeed.inference.v2.model_implementations.parameter_base import (
    ParameterBase,
    ParametrizedList,
    annotated,
)

__all__ = ["LayerContainer"]

_MAPPING = "PARAM_MAPPING"


class LayerContainer:
    """Args:
    model: knows how weights are cut and transformed, and how long lists are.
    """

    PARAM_MAPPING: ClassVar[Mapping[str, str | Sequence[str]]]
    _kinds: ClassVar[dict[str, type[ParameterBase]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._kinds = annotated(cls, (ParameterBase,))
        merged: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            merged.update(vars(base).get(_MAPPING, {}))
        if merged:
            cls.PARAM_MAPPING = merged
            _check(cls.__name__, merged, cls._kinds)

    def __init__(self, model: Any) -> None:
        self.inference_model = model
        self._finalized_params = 0
        for name, kind in self._kinds.items():
            setattr(self, name, kind(model, self))

    @property
    def n_params(self) -> int:
        """How many weights there are."""
        return len(self._kinds)

    @property
    def annotation_attrs(self) -> list[str]:
        """Their names."""
        return list(self._kinds)

    @property
    def mapping_params(self) -> Mapping[str, str | Sequence[str]]:
        return getattr(type(self), _MAPPING, {})

    @property
    def is_populated(self) -> bool:
        """Whether every weight is there, wherever it is."""
        return self._is_complete(None)

    @property
    def is_initialized(self) -> bool:
        """Whether every weight is there. RuntimeError: one of them is not on the device."""
        return self._is_complete(torch.device(get_accelerator().current_device_name()))

    def _is_complete(self, device: torch.device | None) -> bool:
        if self._finalized_params != self.n_params:
            return False
        for name in self._kinds:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, InferenceParameter):
                raise ValueError(
                    f"{name} is a {type(value).__name__}: finalize() has to give an InferenceParameter or None"
                )
            if device is not None and value.device != device:
                raise RuntimeError(f"{name} is on {value.device}, not on {device}")
        return True

    def finalization_callback(self, param: ParameterBase, finalized_param: Any) -> None:
        """``finalized_param`` takes the place of ``param``."""
        self._finalized_params += 1
        for name in self._kinds:
            if getattr(self, name) is param:
                setattr(self, name, finalized_param)

    def direct_injection(self, name: str, tensor: InferenceParameter | None) -> None:
        """A finished weight, or None that there is none. ValueError: there is none of this name."""
        if name not in self._kinds:
            raise ValueError(f"{name!r} is no weight of {type(self).__name__}: {', '.join(self._kinds)}")
        setattr(self, name, tensor)
        self._finalized_params += 1

    def set_dependency(self, dep_name: str, dep_value: Tensor) -> None:
        """A tensor of the checkpoint, by its name in the layer. ValueError: it has no place, or more than one."""
        if dep_name in self.mapping_params:
            for target in _listed(self.mapping_params[dep_name]):
                setattr(*self._place(target), dep_value)
            return
        matches = [
            (found.group(1), targets)
            for source, targets in self.mapping_params.items()
            if "*" in source and (found := re.fullmatch(_pattern(source), dep_name))
        ]
        if len(matches) != 1:
            what = "no place" if not matches else "several places"
            raise ValueError(f"{dep_name!r} has {what} in {type(self).__name__}.{_MAPPING}")
        index, targets = matches[0]
        for target in _listed(targets):
            param, attribute = self._place(target)
            if isinstance(getattr(param, attribute), ParametrizedList):
                getattr(param, attribute)[int(index)] = dep_value
            else:
                setattr(param, attribute, dep_value)

    def _place(self, target: str) -> tuple[Any, str]:
        name, _, attribute = target.partition(".")
        return getattr(self, name), attribute


def _pattern(source: str) -> str:
    """With one group, the first star."""
    parts = [re.escape(part) for part in source.split("*")]
    return parts[0] + "(.*)" + ".*".join(parts[1:])


def _listed(targets: str | Sequence[str]) -> Sequence[str]:
    return [targets] if isinstance(targets, str) else targets


def _check(
    owner: str, mapping: Mapping[str, str | Sequence[str]], kinds: Mapping[str, type[ParameterBase]]
) -> None:
    """ValueError: a target does not exist, has two sources or none, or a source does not fit its targets."""
    sources = {name: annotated(kind, (Tensor, ParametrizedList)) for name, kind in kinds.items()}
    left = {f"{name}.{source}" for name, own in sources.items() for source in own}
    for source, targets in mapping.items():
        lists: set[bool] = set()
        for target in _listed(targets):
            name, _, attribute = target.partition(".")
            if name not in sources or attribute not in sources[name]:
                known = ", ".join(sources[name]) if name in sources else ", ".join(sources)
                raise ValueError(f"{owner}.{_MAPPING}: {target!r} does not exist; there are {known}")
            if target not in left:
                raise ValueError(f"{owner}.{_MAPPING}: {target!r} has two sources, {source!r} is the second")
            left.remove(target)
            lists.add(issubclass(sources[name][attribute], ParametrizedList))
        if lists == {True, False}:
            raise ValueError(f"{owner}.{_MAPPING}: {source!r} goes to lists and to single tensors")
        if lists == {True} and source.count("*") != 1:
            raise ValueError(f"{owner}.{_MAPPING}: {source!r} goes to a list and needs one star, its index")
    if left:
        raise ValueError(f"{owner}.{_MAPPING}: nothing goes to {', '.join(sorted(left))}")

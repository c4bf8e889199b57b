"""A weight of a layer that is put together from several tensors of a checkpoint.

A subclass names them as annotations, ``torch.Tensor`` for one, ``ParamList("count")`` for as many as the model's
attribute ``count`` says, and puts them together in ``finalize``, which is called when the last one has been assigned.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

__all__ = ["ParamList", "ParameterBase", "ParametrizedList", "annotated"]


class Container(Protocol):
    """Who is told about the finished weight."""

    def finalization_callback(self, param: ParameterBase, finalized_param: Any) -> None: ...


class ParametrizedList:
    """Tensors of a list; each is assigned once. ``count_attr``: the attribute of the model that says how many."""

    count_attr: ClassVar[str] = ""

    def __init__(self, param: ParameterBase, n_params: int) -> None:
        self.n_params = n_params
        self.set_params = 0
        self.param = weakref.ref(param)
        self._params: list[Tensor | None] = [None] * n_params

    def __getitem__(self, index: int) -> Any:
        return self._params[index]

    def __setitem__(self, index: int, value: Tensor) -> None:
        if self._params[index] is not None:
            raise ValueError(f"number {index} of a list of {self.n_params} tensors is assigned twice")
        self._params[index] = value
        self.set_params += 1
        owner = self.param()
        if self.set_params == self.n_params and owner is not None:
            owner.complete_component()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._params)

    def __len__(self) -> int:
        return self.n_params


def ParamList(attr: str) -> type[ParametrizedList]:
    """A list as long as the model's attribute ``attr`` says."""
    return type("ParametrizedListInstance", (ParametrizedList,), {"count_attr": attr})


class _Source:
    """One tensor, or list, of a weight."""

    def __init__(self, name: str, is_list: bool) -> None:
        self.name = name
        self.is_list = is_list

    def __get__(self, param: ParameterBase | None, owner: type) -> Any:
        return self if param is None else vars(param)["_sources"][self.name]

    def __set__(self, param: ParameterBase, value: Any) -> None:
        if self.is_list:
            raise ValueError(f"{self.name} is a list: assign its elements")
        vars(param)["_sources"][self.name] = value
        param.dtype = value.dtype
        param.complete_component()


class ParameterBase:
    """Args:
    model: knows how weights are cut and transformed.
    parent_container: the layer, which is told when the weight is there.
    """

    n_dependencies: ClassVar[int] = 0
    dtype: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = annotated(cls, (Tensor, ParametrizedList))
        for name, kind in own.items():
            setattr(cls, name, _Source(name, issubclass(kind, ParametrizedList)))
        cls.n_dependencies = len(own)

    def __init__(self, model: Any, parent_container: Container) -> None:
        self.inference_model: Any = model
        self.completed_components = 0
        self.parent_container = weakref.ref(parent_container)
        self.dest_param = None
        sources: dict[str, Any] = {}
        for name, kind in annotated(type(self), (Tensor, ParametrizedList)).items():
            if issubclass(kind, ParametrizedList):
                if not hasattr(model, kind.count_attr):
                    raise ValueError(
                        f"{type(self).__name__}.{name}: the model has no attribute {kind.count_attr!r}, which says how "
                        "many there are"
                    )
                sources[name] = kind(self, getattr(model, kind.count_attr))
            else:
                sources[name] = None
        vars(self)["_sources"] = sources

    def finalize(self) -> Any:
        """The finished weight."""
        raise NotImplementedError(f"{type(self).__name__}.finalize")

    def complete_component(self) -> None:
        """One more tensor, or list, is there."""
        self.completed_components += 1
        container = self.parent_container()
        if self.completed_components == self.n_dependencies and container is not None:
            container.finalization_callback(self, self.finalize())


def annotated(owner: type, kinds: tuple[type, ...]) -> dict[str, type]:
    """Annotations of a class and its bases, as far as they are of one of these kinds, by name."""
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        found.update(_own_annotations(base))
    read = {name: _read(owner, value) for name, value in found.items()}
    return {name: kind for name, kind in read.items() if isinstance(kind, type) and issubclass(kind, kinds)}


def _own_annotations(owner: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        return dict(annotationlib.get_annotations(owner, format=annotationlib.Format.FORWARDREF))
    return dict(vars(owner).get("__annotations__", {}))


def _read(owner: type, value: Any) -> Any:
    """What an annotation stands for that is text, as with ``from __future__ import annotations``; None: unknown."""
    if not isinstance(value, str):
        return value
    module = sys.modules.get(owner.__module__)
    try:
        return eval(value, {"torch": torch, **vars(module)} if module else {"torch": torch})
    except Exception:
        return None

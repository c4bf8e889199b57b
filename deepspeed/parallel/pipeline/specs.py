"""Deferred construction of pipeline layers: layers of other stages are never allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.base.logging import logger


class LayerSpec:
    """A layer to be built later as ``typename(*module_args, **module_kwargs)``.

    RuntimeError: ``typename`` is no subclass of nn.Module.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec needs a subclass of torch.nn.Module, not {typename!r}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer; ``log``: log that."""
        if log:
            logger.info(f"building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares the weights ``tied_weight_attr`` (a dotted name or a list of them) with all layers of the
    same ``key``, also on other stages. ``forward_fn(module, inputs)`` replaces its forward."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = ["weight"],  # noqa: B006 - the documented default, never written to
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        names = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        self.tied_weight_attr = names


Layer = nn.Module | LayerSpec | Callable[[Any], Any]


def type_name(layer: Layer) -> str:
    """Return the class or function name, which ``type:regex`` matches."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)


def trained_numel(layer: Layer) -> int:
    """Count the elements with ``requires_grad``. A spec is built on the meta device, which allocates nothing and draws
    no random numbers; if that fails, it is built for real and dropped."""
    if isinstance(layer, LayerSpec):
        layer = shape_of(layer)
    if not isinstance(layer, nn.Module):
        return 0
    return sum(param.numel() for param in layer.parameters() if param.requires_grad)


def shape_of(spec: LayerSpec) -> nn.Module:
    """Build the layer on the meta device if possible, else for real; the RNG state is preserved."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return spec.build()
        except (
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ):  # its constructor reads values, or names a device
            return spec.build()

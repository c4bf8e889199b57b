"""What a module must satisfy before an engine can be built around it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.base.sharded import is_zero_param

_SHOWN = 3


def require_module(given: object) -> None:
    """Raise TypeError if it is not a module."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(given).__name__}")


def check_module(module: nn.Module) -> None:
    """Refuse parameters that cannot be trained here, by name and with advice for each kind.

    Raises:
        ValueError: lazy, without data, complex or sparse parameters.
        NotImplementedError: parameters that are already distributed over ranks.
    """
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters():
        kind = None if is_zero_param(param) else _problem(param)
        if kind is not None:
            found.setdefault(kind, []).append(name)
    if not found:
        return
    problems = [f"{_listing(names)} {_WHY[kind]}" for kind, names in found.items()]
    refusal = NotImplementedError if set(found) == {"dtensor"} else ValueError
    raise refusal("; ".join(problems))


_WHY = {
    "lazy": "have no shape yet: run one forward of the model before initialize",
    "meta": "are on the meta device and have no data: build the model under deepspeed.zero.Init, or give them data "
    "with module.to_empty() and load weights",
    "dtensor": "are DTensors: build the engine with deepspeed.initialize, which takes tensor-parallel ones",
    "complex": "are complex: keep them as real tensors (torch.view_as_real) and make them complex in forward",
    "sparse": "are sparse: call .to_dense() on them (gradients of nn.Embedding(sparse=True) are supported)",
}


def _problem(param: nn.Parameter) -> str | None:
    if is_lazy(param):
        return "lazy"
    # By name: importing the class takes longer than everything else here.
    if any(kind.__qualname__ == "DTensor" for kind in type(param).__mro__):
        return "dtensor"
    if param.is_meta:
        return "meta"
    if param.requires_grad and param.is_complex():
        return "complex"
    if param.requires_grad and param.layout is not torch.strided:
        return "sparse"
    return None


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"parameters {', '.join(names[:_SHOWN])}{more}"


def lay_out_contiguously(module: nn.Module) -> None:
    """Give trainable parameters that are views (transposed, expanded, channels last) their own contiguous memory:
    buckets hold elements in index order."""
    with torch.no_grad():
        for param in module.parameters():
            if param.requires_grad and not is_zero_param(param) and not param.is_contiguous():
                param.data = param.data.contiguous()

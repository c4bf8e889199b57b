"""Small documented helpers of compression: submodules by dotted name, and `Conv1D` of GPT-2 as `nn.Linear`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["convert_conv1d_to_linear", "recursive_getattr", "recursive_setattr"]

M = TypeVar("M", bound=nn.Module)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a dotted path, `"layers.0.attention.query"`: numbers index containers."""
    found = model
    for name in module_name.split("."):
        found = _child(found, name)
    return found


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Replace the attribute at a dotted path."""
    parent, _, name = module_name.rpartition(".")
    owner = recursive_getattr(model, parent) if parent else model
    if isinstance(owner, list):
        owner[int(name)] = module
    elif isinstance(owner, dict):
        owner[name] = module
    else:
        setattr(owner, name, module)


def _child(owner: Any, name: str) -> Any:
    if isinstance(owner, (list, tuple)):
        return owner[int(name)]
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def convert_conv1d_to_linear(model: M, convert_type: type[nn.Module]) -> M:
    """Replace every submodule of class `convert_type` by an `nn.Linear` that computes the same.

    `convert_type` is `transformers.pytorch_utils.Conv1D` or a class like it: its weight has the shape (in, out), so
    the Linear gets the transpose. Works in place; a wrapper's `.module` is converted too. Returns `model`.
    """
    for name, module in list(model.named_modules()):
        if name and isinstance(module, convert_type):
            recursive_setattr(model, name, _linear_from(module))
    return model


def _linear_from(conv: Any) -> nn.Linear:
    inputs, outputs = conv.weight.shape
    # made on `meta`: nothing is initialized, the random state stays as it is
    linear = nn.Linear(inputs, outputs, bias=conv.bias is not None, device="meta")
    linear.weight = nn.Parameter(conv.weight.detach().t().contiguous(), conv.weight.requires_grad)
    if isinstance(conv.bias, torch.Tensor):
        linear.bias = nn.Parameter(conv.bias.detach(), conv.bias.requires_grad)
    return linear.train(conv.training)

"""A meta module given memory and random numbers: the same on all ranks, without communication."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deepspeed.base.module_utils import without_hooks
from deepspeed.parallel.tensor.planning.plan import Example

_PERIOD = 1_048_573
"""Prime: random numbers are repeated, but no two rows or heads of a weight get the same ones."""
_MAX_FP32 = 2**31
"""Elements of weights up to which they are in fp32, and beyond in bf16."""


def stand_in(example: Example, device: torch.device) -> nn.Module:
    """A copy of the example's module on ``device`` in evaluation mode, with weights as of training, tied as they are.
    Buffers have their values where the module had any."""
    module, numbers = example.module, _numbers(device)
    few = sum(param.numel() for param in module.parameters()) <= _MAX_FP32
    memo: dict[int, Any] = {}
    for param in module.parameters():
        values = _random(param.shape, numbers, torch.float32 if few else torch.bfloat16)
        memo[id(param)] = nn.Parameter(values, requires_grad=False)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        known = example.buffers.get(name)
        memo[id(buffer)] = _unknown(buffer, device) if known is None else known.detach().to(device, copy=True)
    made = copy.deepcopy(module, memo).eval()
    without_hooks(made)  # the user's: they are not for it
    return made


def example_values(example: Example, device: torch.device) -> dict[str, Any]:
    """Return the example's inputs, nests of tensors too, with values: random tokens of the vocabulary, random numbers
    elsewhere."""
    table = getattr(example.module, "get_input_embeddings", lambda: None)()
    tables = [table] if isinstance(table, nn.Embedding) else []
    tables = tables or [each for each in example.module.modules() if isinstance(each, nn.Embedding)]
    tokens = min((each.num_embeddings for each in tables), default=2)
    source = torch.Generator().manual_seed(0)

    def filled(meta: Any) -> Any:
        return _value(meta, tokens, source).to(device) if isinstance(meta, Tensor) else meta

    return tree_map(filled, dict(example.inputs))


def _value(meta: Tensor, tokens: int, source: torch.Generator) -> Tensor:
    if meta.is_floating_point():
        return torch.randn(meta.shape, generator=source)
    if meta.dtype is torch.bool:
        return torch.ones(meta.shape, dtype=torch.bool)
    return torch.randint(tokens, meta.shape, generator=source).to(meta.dtype)


def _numbers(device: torch.device) -> Tensor:
    """Normally distributed, fp32 [_PERIOD]"""
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(device)


def _random(shape: torch.Size, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Around 1 for norms and biases, otherwise so that a product keeps the size of its inputs."""
    made = torch.empty(shape, dtype=dtype, device=numbers.device)
    flat = made.view(-1)
    for start in range(0, flat.numel(), _PERIOD):
        piece = flat[start : start + _PERIOD]
        piece.copy_(numbers[: piece.numel()])
    if len(shape) < 2:
        return made.mul_(0.3).add_(1.0)
    inputs = shape[-1] if len(shape) < 4 else shape[1:].numel()
    return made.mul_(inputs**-0.5)


def _unknown(buffer: Tensor, device: torch.device) -> Tensor:
    """Values with which most forwards run: masks that hide nothing, first places, frequencies of 1."""
    fill = torch.zeros if not buffer.is_floating_point() and buffer.dtype is not torch.bool else torch.ones
    return fill(buffer.shape, dtype=buffer.dtype, device=device)

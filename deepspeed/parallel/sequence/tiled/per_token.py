"""Test of whether a module treats every token independently, by running it on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed.base.sharded import full_shape

TOKENS = 7919  # a prime, so that no other dimension has this length

PRODUCTS = frozenset({"mm", "addmm", "linear", "bmm"})
VIEWS = frozenset(
    "view _unsafe_view reshape t transpose detach alias clone _to_copy split split_with_sizes chunk slice contiguous "
    "unsqueeze squeeze expand native_dropout bernoulli_ select".split()
)


class NotPerToken(ValueError):
    """A tile of the result depends on other tokens, or nobody can say; the message says on what."""


class _TokenWatch(TorchDispatchMode):
    """Lets through what works on each token alone, and tensors whose last dimension but one is the tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.pointwise not in func.tags and name not in PRODUCTS | VIEWS:
            raise NotPerToken(f"it uses {name}")
        if name in PRODUCTS and sum(TOKENS in tensor.shape for tensor in _tensors(args)) > 1:
            raise NotPerToken("it multiplies tokens with tokens")
        for tensor in _tensors(result):
            if TOKENS in tensor.shape and tensor.shape[-2:-1] != (TOKENS,):
                raise NotPerToken(f"{name} moves tokens to another dimension")
            if TOKENS not in tensor.shape and any(TOKENS in each.shape for each in _tensors(args)):
                raise NotPerToken(f"{name} takes some tokens apart from others")
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def check_per_token(module: nn.Module, hidden: int) -> None:
    """NotPerToken: ``module`` on [1, tokens, hidden] does not give [1, tokens, ...] token by token."""
    tensors = {
        name: torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    dtype = next(iter(tensors.values())).dtype
    try:
        x = torch.empty(1, TOKENS, hidden, dtype=dtype, device="meta")
        with torch.no_grad(), _TokenWatch():
            result = torch.func.functional_call(module, tensors, (x,))
    except NotPerToken:
        raise
    except Exception as error:
        raise NotPerToken(f"its forward on hidden states alone fails: {error}") from error
    if not isinstance(result, Tensor):
        raise NotPerToken(f"it returns {type(result).__name__}, not one tensor")
    if result.shape[:2] != (1, TOKENS):
        raise NotPerToken(f"it returns shape {tuple(result.shape)} for tokens [1, {TOKENS}]")

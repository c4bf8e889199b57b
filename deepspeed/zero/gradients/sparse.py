"""Detection of parameters whose gradient has few rows: ``sparse_gradients`` communicates only these (``RowSum``), and
some optimizers take only these."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer, SparseAdam


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Weights of the embeddings in ``module`` that are used by nothing else (a tied head has a dense gradient)."""
    return set(_embeddings(module))


def stepped_by_rows(module: nn.Module, optimizer: Optimizer) -> set[nn.Parameter]:
    """Weights of embeddings with ``sparse=True`` whose gradients ``optimizer`` gets as torch's sparse tensors, as it
    would without an engine. Of torch's own optimizers only SparseAdam needs them; most of the others refuse them, or
    do the same with dense ones."""
    cls = type(optimizer)
    if cls is not SparseAdam and cls.__module__.startswith(("torch.optim", "deepspeed.")):
        return set()
    return {param for param, owners in _embeddings(module).items() if all(owner.sparse for owner in owners)}


def _embeddings(module: nn.Module) -> dict[nn.Parameter, list[Any]]:
    """By weight, the embeddings that have it, of weights that nothing else has."""
    owners: dict[nn.Parameter, list[Any]] = {}
    for owner in module.modules():
        for param in owner.parameters(recurse=False):
            owners.setdefault(param, []).append(owner)
    return {
        param: found
        for param, found in owners.items()
        if all(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in found)
    }

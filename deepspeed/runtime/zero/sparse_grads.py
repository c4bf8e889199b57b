"""``sparse_gradients``: which parameters have a gradient of which only rows are communicated (``RowSum``)."""

from __future__ import annotations

from torch import nn


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Weights of the embeddings in ``module`` that are used by nothing else (a tied head has a dense gradient)."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for owner in module.modules():
        for param in owner.parameters(recurse=False):
            owners.setdefault(param, []).append(owner)
    return {
        p for p, found in owners.items() if all(isinstance(o, (nn.Embedding, nn.EmbeddingBag)) for o in found)
    }

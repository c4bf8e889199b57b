"""Norms and tables around given weights, for scripts that build a model of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["EmbeddingLayer", "Normalize", "OPTEmbedding", "RMSNormalize"]


def _given(value: Tensor, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(value.detach() if dtype is None else value.detach().to(dtype), requires_grad=False)


class Normalize(nn.Module):
    """LayerNorm over the last dim, with ``weight`` and ``bias``, or of width ``dim``."""

    def __init__(
        self,
        dim: int | None = None,
        dtype: torch.dtype = torch.float,
        eps: float = 1e-5,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        if weight is None and dim is None:
            raise ValueError("Normalize needs dim, or weight and bias")
        self.eps = eps
        self.weight = _given(weight if weight is not None else torch.ones(dim or 0, dtype=dtype))
        self.bias = _given(bias if bias is not None else torch.zeros_like(self.weight))

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNormalize(nn.Module):
    """Root-mean-square norm over the last dim: in fp32, multiplied by ``weight`` in the input's dtype."""

    def __init__(
        self,
        dim: int | None = None,
        dtype: torch.dtype = torch.float,
        eps: float = 1e-5,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        if weight is None and dim is None:
            raise ValueError("RMSNormalize needs dim or weight")
        self.eps = eps
        self.weight = _given(weight if weight is not None else torch.ones(dim or 0, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(hidden_states.dtype) * self.weight.to(hidden_states.dtype)


class EmbeddingLayer(nn.Module):
    """A table with ``weight``, or zeros of ``weight_shape``. ``bias`` is not read."""

    def __init__(
        self,
        weight_shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        if weight is None and weight_shape is None:
            raise ValueError("EmbeddingLayer needs weight_shape or weight")
        self.weight = _given(weight if weight is not None else torch.zeros(weight_shape or (), dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight)


class OPTEmbedding(EmbeddingLayer):
    """OPT's table of positions, which begins at 2; masked tokens have position 1."""

    def __init__(
        self,
        weight_shape: tuple[int, ...] | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__(weight_shape, weight=weight, bias=bias)
        self.offset = 2

    def forward(  # type: ignore[override]
        self, attention_mask: Tensor, past_key_values_length: int = 0, position_ids: int | Tensor = 0
    ) -> Tensor:
        mask = attention_mask.long()
        positions = (mask.cumsum(1) * mask - 1)[:, past_key_values_length:]
        return super().forward(positions + self.offset)

"""The gated activation of many language models."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, with gradients. The gate's activation is computed in fp32."""
    if gate.shape != up.shape:
        raise ValueError(f"gate [{tuple(gate.shape)}] and up [{tuple(up.shape)}] have to have the same shape")
    return (silu(gate.float()) * up.float()).to(gate.dtype)

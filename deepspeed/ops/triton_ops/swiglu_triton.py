"""SwiGLU, the gated activation of many language models, on a GPU as one Triton kernel."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from deepspeed.ops import gpu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``, with gradients. The activation of the gate is computed in fp32."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        given = f"gate {gate.dtype} {tuple(gate.shape)}, up {up.dtype} {tuple(up.shape)}"
        raise ValueError(f"gate and up must have the same shape and dtype, not {given}")
    if gate.numel() and gpu.usable(gate, up):
        from deepspeed.ops.gpu import gates  # imports Triton

        if gates.supports(gate, up):
            return gates.Swiglu.apply(gate, up)
    return (silu(gate.float()) * up.float()).to(gate.dtype)

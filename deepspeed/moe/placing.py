"""Finds the mixture-of-experts layers of a module, and tells them which ranks share their experts."""

from __future__ import annotations

from torch import nn

from deepspeed.comm.mesh import ProcessMesh
from deepspeed.moe.layer import MoE


def place_experts(module: nn.Module, mesh: ProcessMesh) -> list[int]:
    """Spread the experts of every layer over the ranks of ``mesh``. Returns how many experts each has. Collective."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    for layer in layers:
        layer.spread_over(mesh)
    return [layer.num_experts for layer in layers]

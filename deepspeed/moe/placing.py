"""Finds the mixture-of-experts layers of a module, tells them which ranks share their experts, and writes the
documented file of each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from deepspeed.comm.mesh import ProcessMesh
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.moe.stacked import is_spread


def place_experts(module: nn.Module, mesh: ProcessMesh) -> list[int]:
    """Spread the experts of every layer over the ranks of ``mesh``. Returns how many experts each has. Collective."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    for layer in layers:
        layer.spread_over(mesh)
    return [layer.num_experts for layer in layers]


def watched_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose ``watch`` is told where tokens go, in order."""
    for each in module.modules():
        if isinstance(each, MOELayer) or is_spread(each):
            yield each


def write_experts(
    module: nn.Module,
    mesh: ProcessMesh,
    write: Callable[[dict[str, Any], str], None],
    trained_only: bool = False,
) -> None:
    """``write(state dict, file name)`` for each expert of which this rank is the first holder. A file holds the weights
    of one expert of one layer under their names in the whole model. They must not be sharded."""
    layers = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, MoE)]
    for number, (path, layer) in enumerate(layers):
        if mesh.sharing_experts(layer.ep_size, same=True)[0] != mesh.global_rank:
            continue
        experts: Any = layer.deepspeed_moe.experts
        start = f"{path}." if path else ""
        for name, expert in experts.deepspeed_experts.named_children():
            prefix = f"{start}deepspeed_moe.experts.deepspeed_experts.{name}."
            frozen = {prefix + each for each, param in expert.named_parameters() if not param.requires_grad}
            left_out = frozen if trained_only else ()
            state = {
                key: value for key, value in expert.state_dict(prefix=prefix).items() if key not in left_out
            }
            write(state, f"layer_{number}_expert_{name}_mp_rank_{mesh.rank('tp'):02d}_model_states.pt")

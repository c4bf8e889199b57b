"""Finds a module's mixture-of-experts layers and stacked experts ([experts, ..] in one weight, as in Transformers;
``transform.py`` spreads them over ranks), assigns the ranks that share their experts, and writes the documented file of
each expert."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import nn

from deepspeed.base.sharded import full_shape
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.zero.placements import STACKED

if TYPE_CHECKING:
    from deepspeed.comm.collectives import Communicator
    from deepspeed.parallel.expert.layer import MoE
    from deepspeed.parallel.expert.sharded_moe import MOELayer

_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed")
"""Attributes by which experts of Transformers describe their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRanks:
    """The ranks that share the ``total`` experts of a layer, the ``group_name`` of its parameters, and whether the
    Triton grouped GEMM may be used."""

    ranks: Communicator
    total: int
    group_name: str
    triton: bool = True


def stacked_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold stacked experts, with their paths."""
    for path, each in module.named_modules():
        if all(hasattr(each, flag) for flag in _FLAGS) and "down_proj" in each._parameters:
            yield path, each


def mark_stacks(model: nn.Module) -> None:
    """Mark the parameters of a model that stack the weights of all experts."""
    for _, module in stacked_experts(model):
        for param in module.parameters(recurse=False):
            if full_shape(param)[0] == int(module.num_experts):  # type: ignore[arg-type]
                setattr(param, STACKED, True)


def place_experts(module: nn.Module, mesh: ProcessMesh) -> list[int]:
    """Spread the experts of every layer over the ranks of ``mesh``, and number the layers. Returns the number of
    experts of each. Custom layers that define ``set_deepspeed_parallelism`` get it called. Collective."""
    layers = {path: layer for path, layer in module.named_modules() if is_plain_moe(layer)}
    for number, layer in zip(numbers_in_model(list(layers), mesh), layers.values(), strict=True):
        layer.number = number
        layer.spread_over(mesh)
    for each in module.modules():
        # Looked up on the class: some wrappers forward missing attributes to a module that this loop visits as well.
        if hasattr(type(each), "set_deepspeed_parallelism") and not is_plain_moe(each):
            each.set_deepspeed_parallelism(mesh.data_before_experts)  # type: ignore[operator]
    return [layer.num_experts for layer in module.modules() if _is_moe(layer)]


def is_plain_moe(layer: nn.Module) -> TypeGuard[MoE]:
    """Return whether ``layer`` is an ``MoE`` with our experts, not a subclass with its own experts and dispatch."""
    return _is_moe(layer) and "deepspeed_moe" in layer._modules


def _is_moe(layer: nn.Module) -> TypeGuard[MoE]:
    """Return whether ``layer`` is an ``MoE``. No such layer exists before its module is imported, so the check does not
    import it: dense models would pay for that."""
    known = sys.modules.get("deepspeed.parallel.expert.layer")
    return known is not None and isinstance(layer, known.MoE)


def _is_gated(layer: nn.Module) -> TypeGuard[MOELayer]:
    known = sys.modules.get("deepspeed.parallel.expert.sharded_moe")
    return known is not None and isinstance(layer, known.MOELayer)


def routing_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that report routing to their ``watch``, with their paths, in order."""
    for path, each in module.named_modules():
        if _is_gated(each) or isinstance(getattr(each, "_ds_spread", None), ExpertRanks):
            yield path, each


def numbers_in_model(paths: Sequence[str], mesh: ProcessMesh) -> list[int]:
    """Return the index of each of this stage's layers among the layers of all pipeline stages.

    A ``PipelineModule`` names layers by their position in the whole model, which stages need not hold in order. If
    stages reuse the same names, layers of earlier stages come first. Collective over the stages.
    """
    if mesh.size("pp") == 1:
        return list(range(len(paths)))
    stages: list[Any] = [None] * mesh.size("pp")
    dist.all_gather_object(stages, list(paths), group=mesh.group("pp"))
    named = sorted({path for stage in stages for path in stage}, key=_by_number)
    if len(named) < sum(map(len, stages)):
        first = sum(map(len, stages[: mesh.rank("pp")]))
        return list(range(first, first + len(paths)))
    return [named.index(path) for path in paths]


def _by_number(path: str) -> list[tuple[int, str]]:
    """Return a natural sort key: layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", path)]


def write_experts(
    module: nn.Module,
    mesh: ProcessMesh,
    write: Callable[[dict[str, Any], str], None],
    trained_only: bool = False,
) -> None:
    """Call ``write(state dict, file name)`` for each expert of which this rank is the first holder. A file holds the
    weights of one expert of one layer under their names in the whole model. Sharded weights are gathered: collective;
    an error is raised only after all experts, so that no rank is left waiting."""
    from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

    failed: Exception | None = None
    for path, layer in module.named_modules():
        if not is_plain_moe(layer):
            continue
        first = mesh.sharing_experts(layer.ep_size, same=True)[0] == mesh.global_rank
        experts: Any = layer.deepspeed_moe.experts
        start = f"{path}." if path else ""
        for name, expert in experts.deepspeed_experts.named_children():
            file = f"layer_{layer.number}_expert_{name}_mp_rank_{mesh.rank('tp'):02d}_model_states.pt"
            with GatheredParameters(list(expert.parameters())):
                if not first or failed is not None:
                    continue
                try:
                    prefix = f"{start}deepspeed_moe.experts.deepspeed_experts.{name}."
                    write(_state_of(expert, prefix, trained_only), file)
                except Exception as error:  # the other holders wait for the next expert
                    failed = error
    if failed is not None:
        raise failed


def _state_of(expert: nn.Module, prefix: str, trained_only: bool) -> dict[str, Any]:
    frozen = {prefix + name for name, param in expert.named_parameters() if not param.requires_grad}
    left_out = frozen if trained_only else ()
    return {key: value for key, value in expert.state_dict(prefix=prefix).items() if key not in left_out}

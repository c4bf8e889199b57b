"""Finds the mixture-of-experts layers of a module and stacked experts ([experts, ..] in one weight, as Transformers
has them; ``spreading.py`` puts them on several ranks), tells them which ranks share their experts, and writes the
documented file of each expert."""

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
"""What the experts of Transformers say about their weights."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRanks:
    """The ranks that share the ``total`` experts of a layer, the name of its kind of weights, and whether their
    products may be computed by the kernel of GPUs."""

    ranks: Communicator
    total: int
    group_name: str
    triton: bool = True


def stacked_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that hold stacked experts, by path."""
    for path, each in module.named_modules():
        if all(hasattr(each, flag) for flag in _FLAGS) and "down_proj" in each._parameters:
            yield path, each


def mark_stacks(model: nn.Module) -> None:
    """Mark the parameters of a model that are stacks of the experts' weights."""
    for _, module in stacked_experts(model):
        for param in module.parameters(recurse=False):
            if full_shape(param)[0] == int(module.num_experts):  # type: ignore[arg-type]
                setattr(param, STACKED, True)


def is_spread(module: nn.Module) -> bool:
    """Return whether the module's tokens go to experts on other ranks."""
    return isinstance(getattr(module, "_ds_spread", None), ExpertRanks)


def place_experts(module: nn.Module, mesh: ProcessMesh) -> list[int]:
    """Spread the experts of every layer over the ranks of ``mesh``, and number the layers. Returns how many experts
    each has. Layers of a script's own that want to know their ranks are asked to find them. Collective."""
    layers = {path: layer for path, layer in module.named_modules() if is_ours(layer)}
    for number, layer in zip(numbers_in_model(list(layers), mesh), layers.values(), strict=True):
        layer.number = number
        layer.spread_over(mesh)
    for each in module.modules():
        # Asked of the class: some wrappers forward what they do not have to a module that is passed here as well.
        if hasattr(type(each), "set_deepspeed_parallelism") and not is_ours(each):
            each.set_deepspeed_parallelism(mesh.data_before_experts)  # type: ignore[operator]
    return [layer.num_experts for layer in module.modules() if _is_moe(layer)]


def is_ours(layer: nn.Module) -> TypeGuard[MoE]:
    """Not a layer that only inherits from ``MoE`` and has experts, and a way to them, of its own."""
    return _is_moe(layer) and "deepspeed_moe" in layer._modules


def _is_moe(layer: nn.Module) -> TypeGuard[MoE]:
    """Such a layer exists only where its class has been imported; other models do not wait for that import."""
    known = sys.modules.get("deepspeed.parallel.expert.layer")
    return known is not None and isinstance(layer, known.MoE)


def _is_gated(layer: nn.Module) -> TypeGuard[MOELayer]:
    known = sys.modules.get("deepspeed.parallel.expert.sharded_moe")
    return known is not None and isinstance(layer, known.MOELayer)


def watched_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose ``watch`` is told where tokens go, by path, in order."""
    for path, each in module.named_modules():
        if _is_gated(each) or is_spread(each):
            yield path, each


def numbers_in_model(paths: Sequence[str], mesh: ProcessMesh) -> list[int]:
    """Return the number of each of these layers among those of all pipeline stages; each rank knows only its own
    layers.

    A ``PipelineModule`` names layers by their place in the whole model, which stages need not hold in order. Where
    stages give their layers the same names, those of earlier stages come first. Collective over the stages.
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
    """Layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", path)]


def write_experts(
    module: nn.Module,
    mesh: ProcessMesh,
    write: Callable[[dict[str, Any], str], None],
    trained_only: bool = False,
) -> None:
    """``write(state dict, file name)`` for each expert of which this rank is the first holder. A file holds the weights
    of one expert of one layer under their names in the whole model. Sharded ones are gathered: collective; an error is
    raised when all have been passed."""
    from deepspeed.zero.gathering.gathered import GatheredParameters

    failed: Exception | None = None
    for path, layer in module.named_modules():
        if not is_ours(layer):
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

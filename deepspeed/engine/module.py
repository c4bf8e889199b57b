"""The module of an engine: checks, and placement on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.base.accelerator import get_accelerator, take_device_of_rank
from deepspeed.base.sharded import is_dtensor, is_zero_param, list_params
from deepspeed.config.plan import Plan
from deepspeed.parallel.expert.placement import mark_stacks, place_experts, routing_layers
from deepspeed.zero.placements import find_placements
from deepspeed.zero.precision import cast_module
from deepspeed.zero.replica_groups import ReplicaGroups

if TYPE_CHECKING:
    from deepspeed.comm.mesh import ProcessMesh


def require_module(given: object) -> None:
    """Raise TypeError if ``given`` is not a module."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(given).__name__}")


def check_module(module: nn.Module) -> None:
    """Refuse parameters that cannot be trained, by name and with advice for each kind.

    Raises:
        ValueError: lazy, without data, complex or sparse parameters.
        NotImplementedError: parameters that are already distributed over ranks.
    """
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters():
        kind = None if is_zero_param(param) else _problem(param)
        if kind is not None:
            found.setdefault(kind, []).append(name)
    if not found:
        return
    problems = [f"{list_params(names)} {_WHY[kind]}" for kind, names in found.items()]
    refusal = NotImplementedError if set(found) == {"dtensor"} else ValueError
    raise refusal("; ".join(problems))


_WHY = {
    "lazy": "have no shape yet: run one forward of the model before initialize",
    "meta": "are on the meta device and have no data: build the model under deepspeed.zero.Init, or allocate "
    "them with module.to_empty() and load weights",
    "dtensor": "are DTensors: build the engine with deepspeed.initialize, which supports tensor-parallel ones",
    "complex": "are complex: keep them as real tensors (torch.view_as_real) and make them complex in forward",
    "sparse": "are sparse: call .to_dense() on them (gradients of nn.Embedding(sparse=True) are supported)",
}


def _problem(param: nn.Parameter) -> str | None:
    if is_lazy(param):
        return "lazy"
    if is_dtensor(param):
        return "dtensor"
    if param.is_meta:
        return "meta"
    if param.requires_grad and param.is_complex():
        return "complex"
    if param.requires_grad and param.layout is not torch.strided:
        return "sparse"
    return None


def lay_out_contiguously(module: nn.Module) -> None:
    """Give trainable parameters that are views (transposed, expanded, channels last) their own contiguous memory:
    buckets hold elements in index order."""
    with torch.no_grad():
        for param in module.parameters():
            if param.requires_grad and not is_zero_param(param) and not param.is_contiguous():
                param.data = param.data.contiguous()


# Placement on this rank ---------------------------------------------------------------------------------------------


def choose_device(model: nn.Module, local_rank: int, *, keep: bool) -> torch.device:
    """Return the device to train on, and make it current; ``keep``: return the device of ``model`` instead."""
    if keep:
        first = next(model.parameters(), None)
        return first.device if first is not None else torch.device("cpu")
    return torch.device(get_accelerator().device_name(take_device_of_rank(local_rank)))


def prepare_module(
    model: nn.Module, plan: Plan, mesh: ProcessMesh, device: torch.device | None
) -> tuple[list[int], bool]:
    """Move ``model`` to ``device`` (None: keep), cast it to the plan's dtypes, and keep only this rank's experts.

    Returns the number of experts of each mixture-of-experts layer, in module order, and whether there is any such
    layer, including those whose experts another library places.
    """
    if device is not None:
        model.to(device)
    cast_module(model, plan.precision)
    lay_out_contiguously(model)
    num_experts = place_experts(model, mesh)
    mark_stacks(model)
    return num_experts, bool(num_experts) or any(True for _ in routing_layers(model))


def find_replica_groups(
    model: nn.Module, plan: Plan, mesh: ProcessMesh, mics_shard_size: int
) -> ReplicaGroups:
    """Find the replica group of each parameter, and record the placements."""
    replica_groups = ReplicaGroups(mesh, mics_shard_size, plan.packing.group).find(model.parameters())
    find_placements(model.parameters(), mesh, replica_groups)
    return replica_groups

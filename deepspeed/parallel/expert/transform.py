"""Expert parallelism for Transformers models from the config alone: section ``expert_parallel``.

Since release 5 the experts of such a model are one module with stacked weights [experts, ..], called with the tokens
and the router's choices. Router, shared experts and losses are unchanged: each rank keeps a run of the experts, and
the experts' forward dispatches the tokens.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.base.sharded import full_shape
from deepspeed.base.tracing import untraced
from deepspeed.checkpoint.placement import EXPERTS, interval, place
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.parallel import AutoEPConfig
from deepspeed.parallel.expert.dispatch import TokenOrder, route_to_experts
from deepspeed.parallel.expert.grouped import grouped_linear
from deepspeed.parallel.expert.placement import ExpertRanks, stacked_experts

KEY = "expert_parallel.autoep_size"


class Context(Protocol):
    """The part of ``TransformContext`` used here; inference has its own implementation."""

    mesh: ProcessMesh

    def whole(self, *tensors: Tensor) -> AbstractContextManager[Any]: ...
    def replace_param(self, old: nn.Parameter, *new: nn.Parameter) -> None: ...
    def report(self, text: str) -> None: ...


class ExpertParallelism:
    """Spreads the experts of every layer over ``autoep_size`` ranks."""

    name = "expert_parallel"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def __init__(self, config: AutoEPConfig) -> None:
        self.config = config

    def apply(self, module: nn.Module, context: Context) -> None:
        """Spread the experts. DeepSpeedConfigError: no stacked experts, or a size that does not divide their number."""
        size, mesh = int(self.config.autoep_size), context.mesh
        layers = _layers_to_spread(module, size, mesh)
        try:
            sharing = mesh.sharing_experts(size)
        except ValueError as error:
            raise DeepSpeedConfigError(f"{KEY}: {error}") from error
        ranks, number = mesh.among(sharing), sharing.index(mesh.global_rank)
        mesh.expert_sizes.add(size)
        for _, experts in layers:
            total = int(experts.num_experts)  # type: ignore[arg-type]
            _keep_own(experts, size, number, context)
            triton = not self.config.disable_triton_grouped_mm
            experts._ds_spread = ExpertRanks(ranks, total, f"ep_size_{size}", triton)  # type: ignore[assignment]
            experts.watch = None  # type: ignore[assignment]
            experts.forward = types.MethodType(_forward, experts)
        context.report(
            f"experts of {len(layers)} layers, each spread over {size} rank{'s' if size > 1 else ''}"
        )


def spread_meta(module: nn.Module, size: int) -> int:
    """Keep only the first rank's experts of ``size`` in a module on the meta device, for memory planning. Returns the
    number of layers with experts. DeepSpeedConfigError as in ``ExpertParallelism``."""
    layers = _layers_to_spread(module, size)
    for _, experts in layers:
        _keep_own(experts, size, 0)
    return len(layers)


def _layers_to_spread(
    module: nn.Module, size: int, mesh: ProcessMesh | None = None
) -> list[tuple[str, nn.Module]]:
    """Return the layers with stacked experts by path; a pipeline stage may have none. Collective over stages."""
    layers = list(stacked_experts(module))
    stages = [bool(layers)] * (mesh.size("pp") if mesh is not None else 1)
    if mesh is not None and len(stages) > 1:
        dist.all_gather_object(stages, bool(layers), group=mesh.group("pp"))
    if not any(stages):
        raise DeepSpeedConfigError(
            f"expert_parallel.enabled: {type(module).__name__} has no experts with stacked weights as in Transformers "
            "5; remove the section, or build its layers with deepspeed.parallel.expert.layer.MoE"
        )
    for path, experts in layers:
        total = int(experts.num_experts)  # type: ignore[arg-type]
        if total % size:
            fitting = [n for n in range(1, total + 1) if total % n == 0]
            raise DeepSpeedConfigError(
                f"{KEY}={size} does not divide the {total} experts of {path}: use one of {fitting}"
            )
    return layers


def _keep_own(experts: nn.Module, size: int, number: int, context: Context | None = None) -> None:
    """Keep only this rank's experts of every stacked weight."""
    total = int(experts.num_experts)  # type: ignore[arg-type]
    local = total // size
    for name, old in list(experts.named_parameters(recurse=False)):
        if full_shape(old)[0] != total:
            continue
        with context.whole(old) if context is not None else nullcontext(), torch.no_grad():
            own = old[number * local : (number + 1) * local].detach().clone()
        new = nn.Parameter(own, requires_grad=old.requires_grad)
        new.allreduce = False  # type: ignore[attr-defined]
        new.group_name = f"ep_size_{size}"  # type: ignore[attr-defined]
        if size > 1:
            place(new, interval(own.shape, 0, [local] * size, number, axis=EXPERTS))
        setattr(experts, name, new)
        if context is not None:
            context.replace_param(old, new)
    experts.num_experts = local  # type: ignore[assignment]


@untraced
def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the sum of the chosen experts' outputs times ``top_k_weights`` [tokens, k]: [tokens, hidden]. Choices of
    ``num_experts`` or more are ignored."""
    spread: ExpertRanks = self._ds_spread
    chosen = top_k_index.clamp(max=spread.total)
    orders: list[TokenOrder] = []

    def order_of(part: slice) -> TokenOrder:
        orders.append(TokenOrder.sort(chosen[part], spread.total))
        return orders[-1]

    compute = functools.partial(_compute, self)
    result = route_to_experts(hidden_states, top_k_weights, order_of, spread.ranks, compute, self.watch)
    if self.watch is not None:
        self.watch.routed(sum(order.counts for order in orders), chosen < spread.total, self.training)
    return result


def _compute(experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """Apply the local experts to ``rows``, of which each expert has a run of ``counts``."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    activate: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    outputs = _mapped(experts, "down_proj", activate(_mapped(experts, first, rows, counts)), counts)
    return experts.post_expert_norm(outputs) if getattr(experts, "has_post_expert_norm", False) else outputs


def _mapped(experts: Any, name: str, rows: Tensor, counts: list[int]) -> Tensor:
    weight = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    weight = weight if experts.is_transposed else weight.transpose(1, 2)
    return grouped_linear(rows, weight, counts, bias, triton=experts._ds_spread.triton)

"""Split a model's layers over ranks; checks and random numbers of a parallel generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import log_dist
from deepspeed.comm.collectives import Communicator, communicator
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.parallel import AutoEPConfig, TPTrainingConfig
from deepspeed.parallel.expert.transform import ExpertParallelism
from deepspeed.parallel.tensor.apply import OnSwap, apply_plan
from deepspeed.parallel.tensor.planning.plan import PlanError
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.parallel.tensor.planning.rules import rules_of
from deepspeed.parallel.tensor.trial import try_split


def tensor_parallel_group(size: int, group: Any = None, mpu: Any = None) -> Communicator:
    """Return the group of ``size`` consecutive ranks, or ``group``, or the group of a model-parallel unit.

    DeepSpeedConfigError: the given group has another size, or the world size is no multiple of ``size``.
    """
    dist.init_distributed()
    given = mpu.get_model_parallel_group() if group is None and mpu is not None else group
    if given is None:
        world = dist.get_world_size()
        if world % size:
            raise DeepSpeedConfigError(
                f"tensor_parallel.tp_size={size} with {world} ranks: start a multiple of {size} ranks "
                "(deepspeed --num_gpus)"
            )
        return ProcessMesh.build(tp=size).communicator("tp")
    found = communicator(given)
    if found.size != size:
        raise DeepSpeedConfigError(
            f"tensor_parallel.tp_size={size}, but the given group has {found.size} ranks"
        )
    return found


def split_over(
    module: nn.Module,
    group: Communicator,
    grain: int = 1,
    *,
    summed: tuple[str, ...] = (),
    on_swap: OnSwap = lambda *_: None,
) -> None:
    """Split the layers over ``group`` by the model's graph. ``on_swap`` is called with each replaced parameter and its
    replacement. Collective.

    Args:
        summed: layers whose outputs are summed over the ranks, for a model whose graph cannot be traced; the other
            linear layers of their blocks are split by outputs.

    DeepSpeedConfigError: the graph cannot be traced, and ``summed`` is empty.
    """
    try:
        try:
            plan = plan_module(module, group.size, grain=grain)
        except PlanError:
            if not summed:
                raise
            rules = rules_of(module, TPTrainingConfig(injection_policy_tuple=summed))
            plan = plan_module(module, group.size, rules=rules, grain=grain)
        tried = try_split(plan, group)
        apply_plan(module, plan, group, on_swap)
    except PlanError as error:
        raise DeepSpeedConfigError(
            f"tensor_parallel.tp_size={group.size}: {type(module).__name__} cannot be split: {error}"
        ) from error
    log_dist(f"inference: {plan.describe()}; {tried}", ranks=[0])


class _OnlyExperts:
    """Stand-in for the training engine that ``ExpertParallelism.apply`` expects."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh = mesh

    def whole(self, *tensors: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replace_param(self, old: nn.Parameter, *new: nn.Parameter) -> None:
        """No-op: there is no optimizer that refers to parameters."""

    def report(self, text: str) -> None:
        log_dist(f"inference: {text}", ranks=[0])


def spread_experts(module: nn.Module, size: int, group: Any = None) -> Communicator:
    """Spread each layer's experts over ``size`` consecutive ranks; return their group. Collective.

    DeepSpeedConfigError: the model has no experts, or ``size`` does not divide their number or the world size, or
    differs from the size of ``group``.
    """
    dist.init_distributed()
    if group is not None and communicator(group).size != size:
        raise DeepSpeedConfigError(
            f"moe.ep_size={size}, but the given group has {communicator(group).size} ranks"
        )
    mesh = ProcessMesh.build()
    try:
        ExpertParallelism(AutoEPConfig(enabled=True, autoep_size=size)).apply(module, _OnlyExperts(mesh))
    except DeepSpeedConfigError as error:
        raise DeepSpeedConfigError(f"init_inference: moe.ep_size={size}: {error}") from error
    return mesh.among(mesh.sharing_experts(size))


@contextlib.contextmanager
def same_random_numbers(group: Communicator | None) -> Iterator[None]:
    """Make the ranks of ``group`` draw the same random numbers within the block; each rank's own state is restored
    after it. Collective; no-op without a group."""
    if group is None:
        yield
        return
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    seed = torch.randint(2**31, (1,)).to(device)
    group.broadcast(seed, src=0).wait()
    with torch.random.fork_rng([] if device.type == "cpu" else [accelerator.current_device()]):
        torch.manual_seed(int(seed))
        yield


def check_length(inputs: tuple[Any, ...], kwargs: dict[str, Any], longest: int, kept: int = 0) -> None:
    """Check the prompt length of a call of ``generate``. RuntimeError: more than ``longest`` tokens, less the ``kept``
    ones for the answer."""
    given = kwargs.get("input_ids", inputs[0] if inputs else None)
    if isinstance(given, torch.Tensor) and given.dim() == 2 and given.shape[1] > longest - kept:
        less = f" less min_out_tokens={kept}" if kept else ""
        raise RuntimeError(
            f"a prompt of {given.shape[1]} tokens is longer than max_out_tokens={longest}{less}: raise it in the config"
        )

"""Requests to the planner (a model, a config, a number of ranks, the available memory), and their answers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from deepspeed.base.logging import logger
from deepspeed.base.memory import GIB
from deepspeed.config.deepspeed_config import DeepSpeedConfig
from deepspeed.config.plan import Plan, make_plan
from deepspeed.ops.update import traits_of
from deepspeed.optim.elementwise import check_partitioning
from deepspeed.planning.activations import (
    TransformerShape,
    activation_bytes,
    budgeted_bytes,
    layer_inputs_bytes,
    tiles_of,
)
from deepspeed.planning.ledger import STEADY, Ledger, MemoryKind, MemoryPhase, MemoryPlace
from deepspeed.planning.machine import Capacity, free_disk
from deepspeed.planning.model_split import ModelSplit
from deepspeed.planning.optimizer_states import ADAM, OptimizerProfile, profile_optimizer
from deepspeed.planning.planned_model import PlannedModel, planned_model_of
from deepspeed.planning.planner import PlanSetting, plan_memory
from deepspeed.zero.optimizer_registry import build_optimizer, set_optimizer_flags
from deepspeed.zero.replica_groups import expert_parallel_size

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_NO_MEMORY = ("gradient_clipping", "optimizer.params", "scheduler")
"""Keys whose values do not affect memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A run to plan. ``config``: as written. ``optimizer``: the client's, if it already exists; else the config's is
    built on ``trained`` (parameters and group dicts; default: all that require a gradient; may be on the meta
    device)."""

    module: nn.Module
    config: Mapping[str, Any]
    ranks: int
    """Ranks that share the model states."""
    ranks_per_sequence: int = 1
    """Sequence-parallel degree: how many of them work on the same samples."""
    nodes: int = 1
    device_type: str = "cuda"
    optimizer: torch.optim.Optimizer | None = None
    trained: Sequence[Any] | None = None
    zero_init: bool = False
    shape: TransformerShape | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    checkpointing: bool = False
    capacity: Capacity = field(default_factory=Capacity)
    split: ModelSplit = ModelSplit()
    """A rank's part of the model (default: all); ``ranks`` share the states of that part."""
    follow_disk: bool = False
    """Whether ``capacity.disk`` is the free space of the config's swap folders."""

    @property
    def all_ranks(self) -> int:
        """World size, including ranks with other parts of the model."""
        return self.ranks * self.split.ways

    @property
    def ranks_per_node(self) -> int:
        return -(-self.all_ranks // self.nodes)

    def neighbours(self, place: MemoryPlace) -> int:
        """Return the number of ranks that share the memory at that place."""
        return 1 if place is MemoryPlace.DEVICE else self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    request: PlanRequest
    plan: Plan
    config: DeepSpeedConfig
    setting: PlanSetting
    ledger: Ledger

    @property
    def capacity(self) -> Capacity:
        known = self.request.capacity
        if not self.request.follow_disk:
            return known
        return Capacity(known.device, known.host, free_disk(self.plan.swap_folders))

    def need(self, place: MemoryPlace) -> tuple[int, MemoryPhase]:
        """Return the peak bytes that the ranks sharing a memory need together, and the phase of the peak."""
        nbytes, phase = self.ledger.peak(place)
        return nbytes * self.request.neighbours(place), phase

    def lacking(self) -> dict[MemoryPlace, int]:
        """Return the missing bytes of each place that lacks memory."""
        found = {place: self.need(place)[0] - (self.capacity.of(place) or 0) for place in MemoryPlace}
        return {p: n for p, n in found.items() if n > 0 and self.capacity.of(p) is not None}


def config_of(request: PlanRequest) -> DeepSpeedConfig:
    """Return the parsed config. Raises DeepSpeedConfigError as ``initialize`` would."""
    with _quiet():
        readers = request.ranks // request.ranks_per_sequence
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: readers)
        return DeepSpeedConfig(with_batch(request.config, request.micro_batch), mpu=mpu)


def answer(request: PlanRequest) -> PlanAnswer:
    """Plan the request. Raises DeepSpeedConfigError as ``initialize`` would."""
    config = config_of(request)
    plan = make_plan(config)
    optimizer, groups, note = _optimizer(request, config, plan)
    model = request.split.local_model(planned_model_of(request.module, plan, groups), request.module)
    setting = PlanSetting(
        model=model,
        plan=plan,
        zero=config.zero_config,
        optimizer=optimizer,
        ranks=request.ranks,
        micro_batches=config.gradient_accumulation_steps,
        device_type=request.device_type,
        zero_init=request.zero_init and plan.zero.shard_params,
        shared_memory=config.schema.comm.shared_memory and not request.nodes == request.all_ranks > 1,
    )
    ledger = plan_memory(setting)
    ledger.notes += note + _experts(model, request.ranks)
    auto = [key for key in _auto_keys(request.config) if not key.startswith((*BATCH, *_NO_MEMORY))]
    if auto:
        ledger.notes.append(
            f'"auto" is counted as the default of {", ".join(auto)}; --set key=value fills it in'
        )
    _activations(ledger, request, setting, config)
    compiled = config.compile_config
    if compiled.deepcompile and compiled.offload_opt_states and setting.has_device_memory:
        _states_between_updates(ledger)
    return PlanAnswer(request=request, plan=plan, config=config, setting=setting, ledger=ledger)


def _states_between_updates(ledger: Ledger) -> None:
    """Move masters and state to the host during forward and backward (``compile.offload_opt_states``); the host keeps
    their memory during the update."""
    forward, backward, update = STEADY
    for kind in (MemoryKind.MASTERS, MemoryKind.STATE):
        ledger.add(STEADY, MemoryPlace.HOST, kind, ledger.entries[update, MemoryPlace.DEVICE, kind])
        for phase in (forward, backward):
            ledger.entries[phase, MemoryPlace.DEVICE, kind] = 0


def _experts(model: PlannedModel, ranks: int) -> list[str]:
    sizes = {expert_parallel_size(spec.replica_group, ranks) for spec in model.specs} - {1}
    over = ", ".join(str(size) for size in sorted(sizes))
    return [f"counting the experts of one rank, of {over} that share them"] if sizes else []


def _auto_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that are "auto", left to a client."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _auto_keys(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + str(key)


def with_batch(config: Mapping[str, Any], micro_batch: int | None) -> dict[str, Any]:
    """Return the config with the requested micro-batch size, and without "auto" batch sizes."""
    result = copy.deepcopy(dict(config))
    for key in BATCH:
        if result.get(key) == "auto":
            del result[key]
    if micro_batch is not None:
        result["train_micro_batch_size_per_gpu"] = micro_batch
        if "gradient_accumulation_steps" in result:
            result.pop("train_batch_size", None)
    if not any(key in result for key in BATCH[:2]):
        result["train_micro_batch_size_per_gpu"] = 1
    return result


def _optimizer(
    request: PlanRequest, config: DeepSpeedConfig, plan: Plan
) -> tuple[OptimizerProfile, list[dict[str, Any]] | None, list[str]]:
    made = request.optimizer
    given = list(request.module.parameters()) if request.trained is None else request.trained
    groups = [dict(entry) if isinstance(entry, dict) else entry for entry in given]
    trainable = [entry for entry in groups if isinstance(entry, dict) or entry.requires_grad]
    if made is None and config.optimizer_name is not None and trainable:
        set_optimizer_flags(config, request.module)
        on_host = plan.state_offload is not None
        made = build_optimizer(config.optimizer_name, config.optimizer_params, trainable, on_host=on_host)
    if made is None and request.trained is not None and not trainable:
        return ADAM, [], ["no optimizer given: counting weights only"]
    if made is None:
        return ADAM, None, ["the config names no optimizer: assuming Adam with two fp32 moments"]
    check_partitioning(made, plan)
    notes = []
    if traits_of(made).whole_matrices:
        notes.append("matrices that Muon gathers during the update are not counted")
    return profile_optimizer(made, plan.precision.master), made.param_groups, notes


def _activations(ledger: Ledger, request: PlanRequest, setting: PlanSetting, config: DeepSpeedConfig) -> None:
    if request.shape is None or request.sequence is None:
        ledger.notes.append(
            "activations are not counted: this needs a Hugging Face model and --sequence"
            if request.shape is None
            else "activations are not counted: pass --sequence"
        )
        return
    tokens = -(-request.sequence // request.ranks_per_sequence)
    limit = config.activation_checkpointing_config.memory_budget
    batch = config.train_micro_batch_size_per_gpu
    if limit is not None and _counted(ledger, request.module, setting, limit, batch, tokens):
        return
    dtype = setting.plan.precision.products or torch.float32
    shape = request.split.local_shape(request.shape)
    checkpointing = request.checkpointing and limit is None
    mlp_tiles, loss_tiles = tiles_of(shape, tokens, config.schema.tiled_compute)
    nbytes = activation_bytes(
        shape,
        micro_batch=batch,
        sequence=tokens,
        ranks_per_sequence=request.ranks_per_sequence,
        itemsize=dtype.itemsize,
        checkpointing=checkpointing,
        float8=config.schema.fp8.enabled,
        mlp_tiles=mlp_tiles,
        loss_tiles=loss_tiles,
    )
    if checkpointing and config.activation_checkpointing_config.cpu_checkpointing:
        moved = layer_inputs_bytes(shape, batch * tokens, dtype.itemsize)
        nbytes -= moved
        ledger.add(STEADY[:2], MemoryPlace.HOST, MemoryKind.ACTIVATIONS, moved)
    if limit is not None:
        whole, nbytes = nbytes, budgeted_bytes(nbytes, limit)
        ledger.notes.append(
            f"activation_checkpointing.memory_budget: {nbytes / GIB:.3f} GiB of {whole / GIB:.3f} GiB of "
            "activations (estimated); the first forward chooses and logs what to again"
        )
    ledger.add(STEADY[:2], setting.near, MemoryKind.ACTIVATIONS, nbytes)


def _counted(
    ledger: Ledger, module: nn.Module, setting: PlanSetting, limit: float, batch: int, tokens: int
) -> bool:
    """Count the activations that blocks keep within the budget, for ``tokens`` tokens per sequence, by a forward on
    fake tensors; return False if it cannot run there."""
    from deepspeed.planning.counted_activations import CannotCount, choose_recomputation
    from deepspeed.transforms.recompute.budget import report

    try:
        with _quiet():
            choice = choose_recomputation(module, limit, batch, tokens, setting.plan.precision)
    except CannotCount as problem:
        ledger.notes.append(
            f"the memory budget is not counted, as the forward does not run on fake tensors: {problem}"
        )
        return False
    ledger.add(STEADY[:2], setting.near, MemoryKind.COUNTED_ACTIVATIONS, choice.peak)
    ledger.notes.append(report(choice))
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about a config: a run issues them once, not for every variant that is planned."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before

"""Members of engines, optimizers, parameters and modules that clients read or call, each on a live engine.

The other half of the list in `test_surface.py`. Needs none of the clients.
"""

from __future__ import annotations

import functools
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from tests.clients.test_surface import found
from tests.pool import distributed


class Live:
    """One-rank engines of both kinds that clients meet, made when asked for."""

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    }

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def make(self, stage: int) -> Any:
        torch.manual_seed(0)
        zero = {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 40,  # elements: the layers come and go
        }
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        data = torch.utils.data.TensorDataset(torch.ones(4, 4))
        return deepspeed.initialize(
            model=model, training_data=data, config={**self.config, "zero_optimization": zero}
        )[0]

    @functools.cached_property
    def engine(self) -> Any:
        return self.make(2)

    @functools.cached_property
    def sharded(self) -> Any:
        return self.make(3)

    @property
    def param(self) -> Any:
        return self.sharded.module[0].weight

    def backward(self, engine: Any) -> Any:
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        return loss


def raises(error: type[Exception], action: Callable[[], Any]) -> bool:
    with pytest.raises(error):
        action()
    return True


def steps(live: Live) -> bool:
    before = live.engine.module[0].weight.detach().clone()
    for _ in range(3):  # the schedule begins with a rate of 0
        live.backward(live.engine)
        live.engine.step(lr_kwargs={})
    return live.engine.global_steps == 3 and not torch.equal(before, live.engine.module[0].weight)


def compiles(live: Live) -> bool:
    init = nn.Module.__init__  # torch's compiler patches it for good
    try:
        live.engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        return live.engine.is_compiled and live.engine(torch.ones(2, 4)).shape == (2, 4)
    finally:
        nn.Module.__init__ = init  # type: ignore[method-assign]


def saves_and_loads(live: Live) -> bool:
    live.backward(live.engine)
    live.engine.step()
    live.engine.save_checkpoint(
        live.folder, tag="here", client_state={"mine": 1}, exclude_frozen_parameters=True
    )
    path, state = live.engine.load_checkpoint(
        live.folder,
        tag="here",
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
    )
    return path is not None and state["mine"] == 1


def moves_states(live: Live) -> bool:
    """Offloaded states are restored unchanged, and training continues."""
    live.backward(live.sharded)
    live.sharded.step()
    kinds = found("deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum")
    before = [part.clone() for part in live.sharded.optimizer.fp32_partitioned_groups_flat]
    live.sharded.offload_states(include=[kinds.optim_states, kinds.hp_params])
    live.sharded.reload_states()
    after = live.sharded.optimizer.fp32_partitioned_groups_flat
    live.backward(live.sharded)
    live.sharded.step()
    return (
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and live.sharded.global_steps == 2
    )


def post_processes(live: Live) -> bool:
    """`set_data_post_process_func` needs a loader that takes it, and says so otherwise."""
    seen: list[Any] = []

    def process(data: Any, sampler: Any) -> Any:
        seen.append(sampler)
        return data

    live.engine.set_data_post_process_func(process)
    next(iter(live.engine.training_dataloader))
    return len(seen) == 1


def no_syncs(live: Live) -> bool:
    engine = live.make(1)
    with engine.no_sync():
        live.backward(engine)
    live.backward(engine)
    return engine.get_global_grad_norm() is None


def consolidated(live: Live) -> bool:
    state = live.sharded._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=False)
    closed = raises(ValueError, live.make(1)._zero3_consolidated_16bit_state_dict)
    return {key: tuple(value.shape) for key, value in state.items()}["0.weight"] == (8, 4) and closed


def destroyed(live: Live) -> bool:
    live.sharded.destroy()
    return live.sharded.module[0].weight.shape == (8, 4)


ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
OFFLOAD = "zero-3 optimizer.parameter_offload: "


def rehooked(live: Live) -> bool:
    """As TRL does around generation: remove the hooks, run a forward without them inside a gather, add them again."""
    expected = live.sharded(torch.ones(2, 4)).detach()
    offload = live.sharded.optimizer.parameter_offload
    for handle in [*offload.forward_hooks, *offload.backward_hooks]:
        handle.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    with deepspeed.zero.GatheredParameters(live.sharded.parameters()):
        bare = live.sharded.module(torch.ones(2, 4)).detach()
    offload._register_deepspeed_module(offload.module)
    return torch.equal(bare, expected) and torch.equal(live.sharded(torch.ones(2, 4)), expected)


def trace_is_dropped(live: Live) -> bool:
    """TRL drops the recorded order after generation unless it is invalid; ours is recorded again immediately."""
    coordinator = live.sharded.optimizer.parameter_offload.param_coordinator
    for _ in range(2):
        live.backward(live.sharded)
        live.sharded.step()
    before = coordinator.is_complete_trace() and not coordinator.is_invalid_trace()
    coordinator._invalidate_trace()
    dropped = not coordinator.is_complete_trace()
    live.backward(live.sharded)
    return before and dropped


def scheduler_members(live: Live) -> bool:
    scheduler = live.engine.lr_scheduler
    scheduler.step()
    scheduler.load_state_dict(scheduler.state_dict())
    return len(scheduler.get_last_lr()) == 1


def members(optimizer: Any) -> bool:
    lists = isinstance(optimizer.param_groups, list) and isinstance(optimizer.defaults, dict)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    return lists and hasattr(optimizer, "state") and callable(optimizer.step)


def external(live: Live) -> bool:
    first, last = live.sharded.module[0], live.sharded.module[2]
    deepspeed.zero.register_external_parameter(first, last.weight)
    return [(key, param is last.weight) for key, param in first.ds_external_parameters()] == [
        (last.weight.ds_id, True)
    ]


def foreign_attribute(live: Live) -> bool:
    with deepspeed.zero.Init():
        layer = nn.Linear(4, 4)
    layer.weight._is_hf_initialized = True
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
        pass
    engine, *_ = deepspeed.initialize(
        model=layer, config={"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    )
    return engine.module.weight._is_hf_initialized is True


def script_in_checkpoint(live: Live) -> bool:
    live.engine.save_checkpoint(live.folder)
    script = Path(live.folder, "zero_to_fp32.py")
    return script.read_text().startswith("#!") and bool(script.stat().st_mode & stat.S_IXUSR)


def boundary(live: Live) -> bool:
    live.engine.set_gradient_accumulation_boundary(is_boundary=False)
    closed = live.engine.is_gradient_accumulation_boundary()
    live.engine.set_gradient_accumulation_boundary(is_boundary=True)
    return not closed and live.engine.is_gradient_accumulation_boundary()


def settable(engine: Any, name: str) -> bool:
    setattr(engine, name, None)
    return getattr(engine, name) is None


MEMBERS: dict[str, Callable[[Live], Any]] = {
    f"{ENGINE}._consolidated_16bit_state_dict": lambda live: (
        live.engine._consolidated_16bit_state_dict()["0.weight"].shape == (8, 4)
    ),
    f"{ENGINE}._zero3_consolidated_16bit_state_dict": consolidated,
    f"{ENGINE}.backward": lambda live: (
        live.engine.backward(live.engine(torch.ones(2, 4)).mean(), retain_graph=False, scale_wrt_gas=False)
        is not None
    ),
    f"{ENGINE}.bfloat16_enabled": lambda live: live.engine.bfloat16_enabled() is False,
    f"{ENGINE}.compile": compiles,
    f"{ENGINE}.config": lambda live: live.engine.config.get("zero_optimization", {}).get("stage") == 2,
    f"{ENGINE}.data_parallel_group": lambda live: (
        torch.distributed.get_world_size(live.engine.data_parallel_group) == 1
    ),
    f"{ENGINE}.destroy": destroyed,
    f"{ENGINE}.device": lambda live: live.engine.device == torch.device("cpu"),
    f"{ENGINE}.forward": lambda live: live.engine.forward(torch.ones(2, 4)).shape == (2, 4),
    f"{ENGINE}.__call__": lambda live: live.engine(torch.ones(2, 4)).shape == (2, 4),
    f"{ENGINE}.fp16_enabled": lambda live: live.engine.fp16_enabled() is False,
    f"{ENGINE}.get_global_grad_norm": lambda live: live.engine.get_global_grad_norm() is None,
    f"{ENGINE}.get_lr": lambda live: len(live.engine.get_lr()) == 1,
    f"{ENGINE}.global_steps": lambda live: live.engine.global_steps == 0,
    f"{ENGINE}.gradient_accumulation_steps": lambda live: live.engine.gradient_accumulation_steps() == 1,
    f"{ENGINE}.is_gradient_accumulation_boundary": boundary,
    f"{ENGINE}.load_checkpoint": saves_and_loads,
    f"{ENGINE}.local_rank": lambda live: live.engine.local_rank == 0,
    f"{ENGINE}.lr_scheduler": lambda live: settable(live.engine, "lr_scheduler"),
    f"{ENGINE}.module": lambda live: isinstance(live.engine.module, nn.Sequential),
    f"{ENGINE}.no_sync": no_syncs,
    f"{ENGINE}.offload_states": moves_states,
    f"{ENGINE}.optimizer": lambda live: isinstance(
        live.engine.optimizer, found("deepspeed.runtime.base_optimizer.DeepSpeedOptimizer")
    ),
    f"{ENGINE}.optimizer_name": lambda live: live.engine.optimizer_name() == "adamw",
    f"{ENGINE}.reload_states": moves_states,
    f"{ENGINE}.save_checkpoint": saves_and_loads,
    f"{ENGINE}.set_data_post_process_func": post_processes,
    f"{ENGINE}.set_gradient_accumulation_boundary": boundary,
    f"{ENGINE}.step": steps,
    f"{ENGINE}.steps_per_print": lambda live: live.engine.steps_per_print() == 10,
    f"{ENGINE}.tput_timer": lambda live: live.engine.tput_timer.update_epoch_count() is None,
    f"{ENGINE}.train": lambda live: live.engine.train() is live.engine and live.engine.module.training,
    f"{ENGINE}.eval": lambda live: live.engine.eval() is live.engine and not live.engine.module.training,
    f"{ENGINE}.train_micro_batch_size_per_gpu": lambda live: (
        live.engine.train_micro_batch_size_per_gpu() == 2
    ),
    f"{ENGINE}.training_dataloader": lambda live: settable(live.engine, "training_dataloader"),
    f"{ENGINE}.wall_clock_breakdown": lambda live: live.engine.wall_clock_breakdown() is False,
    f"{ENGINE}.zero_gather_16bit_weights_on_model_save": lambda live: (
        live.sharded.zero_gather_16bit_weights_on_model_save() is True
    ),
    "file: zero_to_fp32.py": script_in_checkpoint,
    "lr scheduler: get_last_lr": scheduler_members,
    "lr scheduler: step": scheduler_members,
    "lr scheduler: state_dict": scheduler_members,
    "lr scheduler: load_state_dict": scheduler_members,
    "module: _z3_leaf": lambda live: (
        deepspeed.utils.set_z3_leaf_modules(live.engine.module, [nn.Tanh])[0]._z3_leaf is True
    ),
    "module: ds_external_parameters()": external,
    "parameter: _is_hf_initialized": foreign_attribute,
    "parameter: ds_active_sub_modules": lambda live: live.param.ds_active_sub_modules.clear() is None,
    "parameter: ds_id": lambda live: isinstance(live.param.ds_id, int),
    "parameter: ds_numel": lambda live: live.param.ds_numel == 32,
    "parameter: ds_shape": lambda live: live.param.ds_shape == torch.Size((8, 4)),
    "parameter: ds_status": lambda live: isinstance(
        live.param.ds_status, found("deepspeed.runtime.zero.partition_parameters.ZeroParamStatus")
    ),
    "parameter: ds_tensor": lambda live: live.param.ds_tensor.ds_numel == live.param.ds_tensor.numel() == 32,
    "parameter: partition_numel()": lambda live: live.param.partition_numel() == 32,
    "zero optimizer: fp32_partitioned_groups_flat": lambda live: (
        sum(part.numel() for part in live.sharded.optimizer.fp32_partitioned_groups_flat) == 76
    ),
    "zero optimizer: optimizer": lambda live: isinstance(
        live.engine.optimizer.optimizer, torch.optim.Optimizer
    ),
    "zero optimizer: overflow": lambda live: live.engine.optimizer.overflow is False,
    "zero optimizer: param_groups": lambda live: members(live.engine.optimizer),
    "zero optimizer: state": lambda live: members(live.sharded.optimizer),
    "zero optimizer: state_dict": lambda live: members(live.engine.optimizer),
    "zero optimizer: defaults": lambda live: live.engine.optimizer.defaults["lr"] == 1e-2,
    "zero optimizer: zero_grad": lambda live: members(live.sharded.optimizer),
    "zero optimizer: step": steps,
    "zero optimizer: parameter_offload": lambda live: (
        live.sharded.optimizer.parameter_offload.module is live.sharded.module
        and not hasattr(live.engine.optimizer, "parameter_offload")
    ),
    "zero optimizer: single_partition_of_fp32_groups": lambda live: (
        sum(part.numel() for part in live.engine.optimizer.single_partition_of_fp32_groups) == 76
        and not hasattr(live.sharded.optimizer, "single_partition_of_fp32_groups")
    ),
    f"{OFFLOAD}_register_deepspeed_module": rehooked,
    f"{OFFLOAD}module": rehooked,
    f"{OFFLOAD}forward_hooks": rehooked,
    f"{OFFLOAD}backward_hooks": rehooked,
    f"{OFFLOAD}param_coordinator.is_invalid_trace": trace_is_dropped,
    f"{OFFLOAD}param_coordinator._invalidate_trace": trace_is_dropped,
}


@pytest.mark.parametrize("name", MEMBERS)
@distributed(world_size=1)
def test_member(tmp_path: Path, name: str) -> None:
    assert MEMBERS[name](Live(tmp_path))

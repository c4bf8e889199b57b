"""Behaviour, beyond names, on which clients rely: twenty-two items, each with the tests that prove it.

`PROOFS` names them; those of this file need none of the clients.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import logging
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.pool import distributed

HERE = Path(__file__).parent
PROOFS = {
    1: ("the distribution and its version", "test_names.py::test_clients_see_the_distribution"),
    2: (
        "dotted access after `import deepspeed`",
        "test_behaviour.py::test_dotted_access_after_the_import_alone",
    ),
    3: ("initialize: four values, every way to pass things", "test_behaviour.py::test_four_values"),
    4: ("type of the engine; no look of an optimizer", "test_names.py::test_members_that_clients_read"),
    5: ("unknown keys, old names, auto", "test_behaviour.py::test_keys_of_a_config"),
    6: ("inf, 0, auto under zero.Init", "test_names.py::test_unresolved_auto_is_no_error_in_zero_init"),
    7: ("boundaries set from outside", "test_behaviour.py::test_boundary_from_outside_wins"),
    8: ("the loss is divided once", "test_behaviour.py::test_loss_is_divided_unless_told_otherwise"),
    9: ("what zero.Init patches", "test_behaviour.py::test_zero_init_reaches_classes_made_inside_it"),
    10: ("what a gather takes", "test_names.py::test_gathering_is_tolerant"),
    11: (
        "a partitioned parameter looks empty",
        "test_behaviour.py::test_a_partitioned_parameter_looks_empty",
    ),
    12: ("names and keys of checkpoints", "test_behaviour.py::test_files_and_keys_of_a_checkpoint"),
    13: ("client state comes back flat", "test_behaviour.py::test_client_state_comes_back"),
    14: ("the line of the start, the one logger", "test_behaviour.py::test_start_is_logged"),
    15: ("a quiet import", "test_names.py::test_import_is_quiet_and_starts_nothing"),
    16: ("a real default process group", "test_behaviour.py::test_a_process_group_exists"),
    17: ("a forward without hooks", "test_trl.py::test_generate_at_stage_3_with_uneven_lengths"),
    18: ("engines side by side", "test_accelerate.py::test_several_plugins_and_engines"),
    19: ("get_last_lr before a step", "test_behaviour.py::test_rate_before_the_first_step"),
    20: ("warm-up of 0 steps", "test_behaviour.py::test_number_of_warm_up_steps"),
    21: ("a host without a GPU", "test_behaviour.py::test_a_host_without_gpu"),
    22: ("optimizers for host memory", "test_names.py::test_cpu_optimizers"),
}


@pytest.mark.parametrize("number", PROOFS)
def test_behaviour_has_its_test(number: int) -> None:
    file, _, name = PROOFS[number][1].partition("::")
    defined = {
        n.name for n in ast.walk(ast.parse((HERE / file).read_text())) if isinstance(n, ast.FunctionDef)
    }
    assert name in defined


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}} | more


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def started(stage: int, **more: Any) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=nn.Linear(4, 4), config=config(stage, **(ADAM | more)))[0]


@contextlib.contextmanager
def without_process_group() -> Iterator[None]:
    """For a process that starts none itself: what is started inside ends with it."""
    before = dict(os.environ)
    assert not dist.is_initialized()
    try:
        yield
    finally:
        deepspeed.comm.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def whole(engine: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.detach().clone()


def test_dotted_access_after_the_import_alone() -> None:
    names = """zero comm utils ops runtime.lr_schedules runtime.utils runtime.config checkpointing moe.layer pipe
    module_inject accelerator initialize DeepSpeedEngine zero.Init utils.logging ops.adam""".split()
    script = "import deepspeed\n" + "\n".join(f"deepspeed.{name}" for name in names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr


WAYS: dict[str, Callable[[nn.Module, Path], dict[str, Any]]] = {
    "config dict": lambda model, file: {"config": config(2, **ADAM)},
    "config path": lambda model, file: {"config": str(file)},
    "config_params": lambda model, file: {"config_params": config(2, **ADAM)},
    "args": lambda model, file: {"args": Namespace(deepspeed_config=str(file), local_rank=0)},
    "args of Lightning": lambda model, file: {
        "args": Namespace(device_rank=None),
        "config": config(2, **ADAM),
    },
    "list": lambda model, file: {"config": config(2, **ADAM), "model_parameters": list(model.parameters())},
    "generator": lambda model, file: {"config": config(2, **ADAM), "model_parameters": model.parameters()},
    "filter": lambda model, file: {
        "config": config(2, **ADAM),
        "model_parameters": filter(lambda p: p.requires_grad, model.parameters()),
    },
    "optimizer and filter": lambda model, file: {
        "config": config(3),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "model_parameters": filter(lambda p: p.requires_grad, model.parameters()),
    },
    "no optimizer": lambda model, file: {"config": config(0)},
    "no optimizer, stage 3": lambda model, file: {"config": config(3)},
    "no optimizer, empty list": lambda model, file: {"config": config(3), "model_parameters": []},
}


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=1)
def test_four_values(tmp_path: Path, way: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(2, **ADAM)))
    model = nn.Linear(4, 4)
    result = deepspeed.initialize(model=model, **WAYS[way](model, file))
    engine, optimizer, loader, scheduler = result
    assert isinstance(result, tuple) and loader is None and scheduler is None
    assert engine(torch.ones(1, 4)).shape == (1, 4)
    if way.startswith("no optimizer, stage 3") or way == "no optimizer":
        assert not isinstance(optimizer, torch.optim.Optimizer)
    elif not way.startswith("no"):
        assert len(optimizer.param_groups) == 1


def test_keys_of_a_config(caplog: pytest.LogCaptureFixture) -> None:
    foreign = {
        "zero_optimization.reduce_bucket_size": 1.0,
        "msamp": {"enabled": False},
        "cuda_visible_devices": "0",
    }
    parsed = deepspeed.DeepSpeedConfig(config(2, **foreign, bfloat16={"enabled": True}))
    assert parsed.bfloat16_config.enabled
    with pytest.raises(ValueError, match="stagee"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stagee": 2}})
    default = deepspeed.DeepSpeedConfig(config(2)).zero_config.reduce_bucket_size
    auto = config(2, steps_per_print=float("inf"), gradient_clipping=0)
    auto["zero_optimization"]["reduce_bucket_size"] = "auto"
    read = deepspeed.DeepSpeedConfig(auto)
    assert read.zero_config.reduce_bucket_size == default
    assert read.steps_per_print == float("inf") and read.gradient_clipping == 0


@distributed(world_size=1)
def test_boundary_from_outside_wins() -> None:
    engine = started(2, gradient_accumulation_steps=4)
    for micro_step in range(1, 7):
        boundary = micro_step % 3 == 0
        engine.set_gradient_accumulation_boundary(is_boundary=boundary)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert engine.global_steps == micro_step // 3
    engine = started(2, gradient_accumulation_steps=2)
    for micro_step in range(1, 5):  # the examples call step() every time
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert engine.global_steps == micro_step // 2


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=1)
def test_loss_is_divided_unless_told_otherwise(stage: int) -> None:
    def norm(**options: Any) -> float:
        engine = started(stage, gradient_accumulation_steps=2)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4)).sum(), **options)
            engine.step()
        return float(engine.get_global_grad_norm())

    assert norm(scale_wrt_gas=False) == pytest.approx(2 * norm())


@distributed(world_size=1, init_process_group=False)
def test_zero_init_reaches_classes_made_inside_it() -> None:
    init = nn.Linear.__init__
    with without_process_group(), deepspeed.zero.Init(config_dict_or_path=config(3), dtype=torch.bfloat16):
        assert dist.is_initialized() and nn.Linear.__init__ is not init

        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3, 5))
                self.weight.mine = "kept"
                self.counts = torch.arange(4)
                self.table = torch.zeros(2)

        made = Inner()
        with deepspeed.zero.GatheredParameters(made.weight):
            assert torch.equal(made.weight, torch.ones(3, 5, dtype=torch.bfloat16))
            assert made.weight.mine == "kept"
    assert nn.Linear.__init__ is init
    assert made.weight.numel() == 0 and made.weight.ds_shape == (3, 5) and made.weight.mine == "kept"
    assert made.counts.dtype == torch.int64 and made.table.dtype == torch.bfloat16


@distributed(world_size=2)
def test_a_partitioned_parameter_looks_empty() -> None:
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        layer = nn.Linear(4, 6)
    assert layer.weight.numel() == 0 and layer.weight.shape == torch.Size([0])
    assert layer.weight.ds_shape == (6, 4) and layer.weight.ds_numel == 24
    assert layer.weight.partition_numel() == 12


KEYS = """module buffer_names optimizer param_shapes lr_scheduler sparse_tensor_module_names skipped_steps global_steps
global_samples dp_world_size mp_world_size ds_config ds_version""".split()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_files_and_keys_of_a_checkpoint(tmp_path: Path, stage: int, bf16: bool) -> None:
    engine = started(stage, bf16={"enabled": bf16})
    dtype = torch.bfloat16 if bf16 else torch.float32
    engine.backward(engine(torch.ones(1, 4, dtype=dtype)).float().sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path))
    dist.barrier()
    folder = tmp_path / "global_step1"
    assert (tmp_path / "latest").read_text() == "global_step1" and os.access(
        tmp_path / "zero_to_fp32.py", os.X_OK
    )
    model_file = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    state = torch.load(folder / model_file, weights_only=False)
    assert set(KEYS) <= set(state) and state["ds_version"] == deepspeed.__version__
    if stage:
        prefix = "bf16_" if bf16 else ""
        for rank in range(2):
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            saved = torch.load(folder / name, weights_only=False)
            assert saved["optimizer_state_dict"]["zero_stage"] == stage


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=1)
def test_client_state_comes_back(tmp_path: Path, stage: int) -> None:
    engine = started(stage)
    mine = {"epoch": 3, "state": {"rng": torch.arange(3)}, "list": [1, "two"]}
    engine.save_checkpoint(str(tmp_path), tag="here", client_state=mine)
    path, state = engine.load_checkpoint(str(tmp_path), tag="here")
    assert path is not None and state["epoch"] == 3 and state["list"] == [1, "two"]
    assert torch.equal(state["state"]["rng"], torch.arange(3))
    assert engine.load_checkpoint(str(tmp_path / "nothing"))[0] is None


@distributed(world_size=2)
def test_start_is_logged() -> None:
    from deepspeed.utils import logger
    from deepspeed.utils.logging import logger as same

    assert logger is same and logger.name == "DeepSpeed" and not logger.propagate
    assert logger.level == logging.WARNING
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        started(2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.WARNING)
    told = [r for r in records if "DeepSpeed info" in r.getMessage()]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all(r.levelno == logging.INFO for r in told)


@distributed(world_size=1, init_process_group=False)
def test_a_process_group_exists() -> None:
    with without_process_group():
        started(0)
        assert dist.is_initialized() and dist.get_world_size() == 1
        dist.broadcast(torch.ones(1), src=0)


@distributed(world_size=1)
def test_rate_before_the_first_step() -> None:
    """An AssertionError that tells to call step(), or a list: both are what clients expect."""
    from deepspeed.runtime import lr_schedules

    arguments = {"WarmupDecayLR": {"total_num_steps": 9}, "WarmupCosineLR": {"total_num_steps": 9}} | {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    }
    for name in lr_schedules.VALID_LR_SCHEDULES:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        schedule = getattr(lr_schedules, name)(optimizer, **arguments.get(name, {}))
        try:
            assert len(schedule.get_last_lr()) == 1
        except AssertionError as error:
            assert "need to call step() first" in str(error)
        schedule.step()
        assert len(schedule.get_last_lr()) == 1


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize(("steps", "fine"), [(0, True), (1, True), (None, False), (-5, False)])
def test_number_of_warm_up_steps(name: str, steps: int | None, fine: bool) -> None:
    from deepspeed.runtime import lr_schedules

    kind = getattr(lr_schedules, name)
    total = {"total_num_steps": 9} if "total_num_steps" in inspect.signature(kind).parameters else {}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    if fine:
        kind(optimizer, warmup_num_steps=steps, **total).step()
    else:
        with pytest.raises(ValueError, match="warmup_num_steps"):
            kind(optimizer, warmup_num_steps=steps, **total)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=1, init_process_group=False)
def test_a_host_without_gpu(stage: int) -> None:
    """No backend named: gloo; fp16 with optimizer state in host memory, as Accelerate's own tests ask for."""
    if torch.cuda.is_available():
        pytest.skip("what a host without GPU does")
    with without_process_group():
        deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False)
        assert dist.get_backend() == "gloo"
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        engine = started(stage, fp16={"enabled": True, "initial_scale_power": 4}, zero_optimization=zero)
        before = whole(engine)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).float().sum())
            engine.step()
        assert engine.global_steps == 2 and engine.skipped_steps == 0
        assert not torch.equal(whole(engine), before)

"""The documents' code, in programs of our own with the same calls; and that every block of the documents has a test."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.tools.nvme import tune
from tests.examples.documented_blocks import BLOCKS
from tests.examples.parsing import after_parsing
from tests.pool import ROOT, distributed

SECTIONS = json.loads((ROOT / "tests/config/printed_sections.json").read_text(encoding="utf-8"))
ADAM = {"type": "Adam", "params": {"lr": 1e-2}}
MEBIBYTE = 1 << 20


# The table --------------------------------------------------------------------------------------------------


def test_every_block_has_a_test() -> None:
    for block in BLOCKS:
        file, _, function = block.test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in names, f"{block.document}: {block.place}: there is no {block.test}"


def test_every_printed_section_is_of_a_document() -> None:
    listed = {place for block in BLOCKS for place in block.place.split(", ")}
    assert sorted(SECTIONS.keys() - listed) == []


# The core API -----------------------------------------------------------------------------------------------


def make_data() -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=made)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


@distributed(world_size=1)
def test_the_core_api(tmp_path: Path) -> None:
    """Four results, a loop of three lines, a checkpoint under either name, and the flags of the script."""
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "optimizer": ADAM}))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds_config.json")])

    def begin() -> tuple[Any, Any]:
        model = nn.Linear(8, 1)
        engine, optimizer, loader, scheduler = deepspeed.initialize(
            args=args, model=model, model_parameters=model.parameters(), training_data=make_data()
        )
        assert optimizer is engine.optimizer and scheduler is None
        return engine, loader

    engine, loader = begin()
    losses = []
    for inputs, wanted in loader:
        loss = nn.functional.mse_loss(engine(inputs), wanted)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and engine.global_samples == 64 and engine.local_rank in (-1, 0)
    engine.save_checkpoint(tmp_path, tag="saved")
    engine.store_checkpoint(tmp_path, tag="stored")
    other, _ = begin()
    for tag in ("saved", "stored"):
        folder, _ = other.load_checkpoint(tmp_path, tag=tag)
        assert folder and other.global_steps == 8
        torch.testing.assert_close(other.module.weight, engine.module.weight)


@distributed(world_size=2)
def test_communication_is_summed_up() -> None:
    section = SECTIONS["comms_logger"]
    engine = deepspeed.initialize(
        model=nn.Linear(8, 1), config={"train_batch_size": 8, "optimizer": ADAM, **section}
    )[0]
    try:
        engine.backward(engine(torch.ones(4, 8)).sum())
        engine.step()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            deepspeed.comm.log_summary()
        if torch.distributed.get_rank() == 0:
            assert "all_reduce" in printed.getvalue()
    finally:
        deepspeed.comm.reset_log()
        deepspeed.comm.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)


# DeepNVMe ---------------------------------------------------------------------------------------------------


def test_a_handle_as_it_is_printed() -> None:
    handle = AsyncIOBuilder().load().aio_handle()
    names = (
        "async_pread free_cpu_locked_tensor get_overlap_events get_single_submit new_cpu_locked_tensor pwrite "
        "sync_pread wait async_pwrite get_block_size get_queue_depth get_intra_op_parallelism pread read "
        "sync_pwrite write"
    )
    assert set(names.split()) <= set(dir(handle))

    def settings(of: Any) -> tuple[int, int, bool, bool, int]:
        return (
            of.get_block_size(),
            of.get_queue_depth(),
            of.get_single_submit(),
            of.get_overlap_events(),
            of.get_intra_op_parallelism(),
        )

    assert settings(handle) == (MEBIBYTE, 128, False, False, 1)
    tuned = AsyncIOBuilder().load().aio_handle(
        block_size=MEBIBYTE, queue_depth=32, single_submit=False, overlap_events=True, intra_op_parallelism=8
    )  # fmt: skip
    assert settings(tuned) == (MEBIBYTE, 32, False, True, 8)


@pytest.mark.parametrize("how", ["blocking", "non-blocking", "parallel", "pinned"])
def test_a_tensor_becomes_a_file(tmp_path: Path, how: str) -> None:
    path = str(tmp_path / "tensor.pt")
    tensor = torch.randint(256, (MEBIBYTE + 5,), dtype=torch.uint8)
    if how == "pinned":
        tensor = get_accelerator().pin_memory(tensor)
    handle = AsyncIOBuilder().load().aio_handle(**({"intra_op_parallelism": 4} if how == "parallel" else {}))
    if how == "blocking":
        handle.sync_pwrite(tensor, path)
    else:
        handle.async_pwrite(tensor, path)
        assert handle.wait() == 1
    assert Path(path).stat().st_size == tensor.numel()
    for read in (handle.sync_pread, handle.async_pread):
        back = torch.empty_like(tensor)
        read(back, path)
        if read == handle.async_pread:
            assert handle.wait() == 1
        assert torch.equal(back, tensor)


def test_wait_comes_before_a_change(tmp_path: Path) -> None:
    path = str(tmp_path / "tensor.pt")
    tensor = torch.zeros(4 * MEBIBYTE, dtype=torch.uint8)
    handle = AsyncIOBuilder().load().aio_handle()
    handle.async_pwrite(tensor, path)
    handle.wait()
    tensor += 1
    assert not any(Path(path).read_bytes())


def test_options_of_the_tuner() -> None:
    flags = "--no_read --no_write --gpu --gds --flush_page_cache --verbose"
    values = "--sweep_config f.json --io_size 1M --log_dir logs --loops 2"
    words = f"--nvme_dir one two {values} {flags}".split()
    assert after_parsing(lambda: tune.main(words), words, only_options=True) == []


# Profiler and monitor ---------------------------------------------------------------------------------------


def test_a_training_loop_with_a_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    profiler = FlopsProfiler(model)
    counted: list[Any] = []
    losses = []
    for step, (inputs, wanted) in enumerate(torch.utils.data.DataLoader(make_data(), batch_size=8)):
        if step == 5:
            profiler.start_profile()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        if step == 5:
            profiler.stop_profile()
            counted = [
                profiler.get_total_flops(),
                profiler.get_total_macs(),
                profiler.get_total_params(),
            ]
            profiler.print_model_profile(profile_step=step)
            profiler.end_profile()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    macs = 8 * (8 * 16 + 16)
    assert counted[1:] == [macs, 8 * 16 + 16 + 17] and 2 * macs <= counted[0] < 2.2 * macs
    assert len(losses) == 8 and "Profile Summary at step 5" in capsys.readouterr().out


@distributed(world_size=1)
def test_events_of_ones_own(tmp_path: Path) -> None:
    """A curve of the script in addition to the engine's, over the engine's samples."""
    file = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "optimizer": ADAM, **file}))
    monitor = MonitorMaster(DeepSpeedConfig(str(tmp_path / "ds_config.json")).monitor_config)
    engine, _, loader, _ = deepspeed.initialize(
        model=nn.Linear(8, 1), training_data=make_data(), config=str(tmp_path / "ds_config.json")
    )
    for data in loader:
        begin = time.time()
        inputs, wanted = data[0].to(engine.device), data[1].to(engine.device)
        engine.backward(nn.functional.mse_loss(engine(inputs), wanted))
        engine.step()
        monitor.write_events([("Time per step", time.time() - begin, engine.global_samples)])
    rows = (tmp_path / "job/Time_per_step.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(8, 72, 8))


# Keys and calls ---------------------------------------------------------------------------------------------


def test_the_printed_section_of_elasticity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has words of other sections where numbers belong: each is named. With the defaults that its table
    prints, the section is one of a job."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = {"max_train_batch_size": "seqlen", "max_gpus": "fixed_linear", "min_time": "seqlen"}
    report = deepspeed.check_config({"elasticity": {"enabled": True, "micro_batch_sizes": 8, **words}}, 8)
    assert not report.ok
    problems = "\n".join(map(str, report.errors))
    assert all(f"elasticity.{key}" in problems for key in [*words, "micro_batch_sizes"]), problems
    numbers = {
        "enabled": True,
        "max_train_batch_size": 2000,
        "micro_batch_sizes": [2, 4, 6],
        "min_gpus": 1,
        "max_gpus": 10000,
        "min_time": 0,
        "prefer_large_batch": True,
        "version": 0.2,
        "ignore_non_elastic_batch_info": False,
        "num_gpus_per_node": 1,
        "model_parallel_size": 1,
    }
    assert deepspeed.check_config({"elasticity": numbers}, 8).ok


@distributed(world_size=1)
def test_quantized_training_then_inference(tmp_path: Path) -> None:
    """The config under its old name, then `init_inference` with the older names of its arguments."""
    quantize = {
        "enabled": True,
        "quantize_bits": {"start_bits": 12, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "quantize_groups": 1,
    }
    config = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "optimizer": ADAM,
        "quantize_training": quantize,
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    engine = deepspeed.initialize(args=None, model=model, config_params=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(8, 8, dtype=torch.bfloat16)).sum())
        engine.step()
    engine.destroy()
    answer = deepspeed.init_inference(
        model, mp_size=1, mpu=None, checkpoint=None, dtype=torch.float32, injection_policy=None
    )
    assert answer(torch.ones(2, 8)).shape == (2, 1)

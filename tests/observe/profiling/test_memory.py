"""The profiler's report on memory, compared with known sizes, also for models that are spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.observe.flops import FlopsProfiler, get_model_profile
from deepspeed.observe.flops.counting import held_bytes, peak_bytes, weight_bytes
from deepspeed.parallel.expert.layer import MoE
from deepspeed.parallel.pipeline.module import LayerSpec, PipelineModule
from tests.pool import run

B, W, N = 6, 16, 40
F32 = 4


def profiled(model: nn.Module, x: Tensor) -> FlopsProfiler:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    out = model(x)
    profiler.stop_profile()
    del out
    return profiler


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_forward_leaves_and_what_it_needs(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(W, N), nn.GELU(), nn.Linear(N, W))
        x = torch.randn(B, W)
    profiler = profiled(model, x)
    wide, narrow = B * N * F32, B * W * F32
    assert [held_bytes(each) for each in model] == [wide, wide, narrow]
    assert profiler.get_total_held_memory() == 2 * wide + narrow == peak_bytes(model)
    assert weight_bytes(model) == (2 * W * N + W + N) * F32
    assert profiler.get_total_held_memory(as_string=True) == f"{round((2 * wide + narrow) / 1e3, 2)} KB"
    profiler.end_profile()
    with torch.no_grad():
        profiler = profiled(model, x)
    assert profiler.get_total_held_memory() == narrow
    assert wide + narrow <= int(profiler.get_total_peak_memory()) <= 2 * wide + narrow
    profiler.end_profile()


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W))

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, W).t() + self.weight.t()[:, :B]


def test_views_of_what_was_there_take_nothing() -> None:
    profiler = profiled(Views(), torch.randn(B, W))
    assert profiler.get_total_held_memory() == profiler.get_total_peak_memory() == B * W * F32
    profiler.end_profile()


class Block(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.up, self.down = again, nn.Linear(W, N), nn.Linear(N, W)

    def forward(self, x: Tensor) -> Tensor:
        if not self.again:
            return self.down(self.up(x).relu())
        return checkpoint(
            lambda y: self.down(self.up(y).relu()), x, use_reentrant=False, preserve_rng_state=False
        )  # type: ignore[return-value]


def test_checkpointing_holds_less_and_needs_as_much() -> None:
    found = {}
    for again in (False, True):
        profiler = profiled(nn.Sequential(*(Block(again) for _ in range(3))), torch.randn(B, W))
        found[again] = (
            profiler.get_total_held_memory(),
            [peak_bytes(block) for block in profiler.model.children()],
        )
        profiler.end_profile()
    wide, narrow = B * N * F32, B * W * F32
    assert found[False][0] == 3 * (wide + narrow) and found[True][0] == 3 * narrow
    assert min(found[True][1]) >= wide + narrow


def test_a_backward_changes_nothing_and_memory_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(W, N), nn.Linear(N, W))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(B, W, requires_grad=True)).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_held_memory() == B * (N + W) * F32
    profiler.print_model_profile()
    profiler.end_profile()
    out = " ".join(capsys.readouterr().out.split())
    assert "Memory Profile per GPU" in out and "activations per GPU, held after fwd: 1.34 KB" in out
    assert "module class weights held after fwd peak in fwd (model) Sequential 5.34 KB 1.34 KB 1.34 KB" in out
    get_model_profile(model, (B, W), detailed=False)
    assert "Memory Profile" not in capsys.readouterr().out


# Spread over ranks -----------------------------------------------------------------------------------------------

SECTION = {"enabled": True, "profile_step": 1, "detailed": False}
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def _pipeline(file: Path) -> Any:
    torch.manual_seed(0)
    layers = [
        LayerSpec(nn.Linear, W, N),
        *(LayerSpec(nn.Linear, N, N) for _ in range(2)),
        LayerSpec(nn.Linear, N, W),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        **CONFIG,
        "gradient_accumulation_steps": 2,
        "flops_profiler": {**SECTION, "output_file": str(file)},
    }
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    rows = iter([(torch.ones(2, W), torch.ones(2, W))] * 20)
    for _ in range(3):
        engine.train_batch(rows)
    found = engine.flops_profiler.ranks
    engine.destroy()
    return found


def test_stages_of_a_pipeline_add_up(tmp_path: Path) -> None:
    file = tmp_path / "profile.txt"
    found = run(_pipeline, 2, file=file)[0]
    macs = 2 * (W * N + N * N)
    assert [row[1] for row in found.by_rank] == [2 * macs, 2 * macs] and found.copies == 1
    assert [row[0] for row in found.by_rank] == [W * N + N + N * N + N, N * N + N + N * W + W]
    text = " ".join(file.read_text().split())
    assert f"whole model for one batch of a data-parallel rank, counted: {4 * macs / 1e3:g} K" in text
    assert "rank 0: params" in text and "rank 1: params" in text


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(W, nn.Linear(W, W, bias=False), num_experts=2, ep_size=2, k=1, capacity_factor=8.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0].square().mean()


def _experts(file: Path) -> Any:
    torch.manual_seed(0)
    section = {**SECTION, "output_file": str(file)}
    engine = deepspeed.initialize(model=Routed(), config={**CONFIG, "flops_profiler": section})[0]
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 4, W)))
        engine.step()
    found = engine.flops_profiler.ranks
    engine.destroy()
    return found


def test_ranks_with_experts_say_what_each_does(tmp_path: Path) -> None:
    first, second = run(_experts, 2, file=tmp_path / "profile.txt")
    assert first.by_rank == second.by_rank and len(first.by_rank) == 2
    for params, forward, backward, again, held, peak in first.by_rank:
        assert params >= W * W and forward > 0 and backward > 0 and again == 0 and 0 < held <= peak
    assert first.forward_flops == sum(row[1] for row in first.by_rank)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(W, 2 * N, bias=False), nn.Linear(2 * N, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def _tensors(file: Path) -> Any:
    torch.manual_seed(0)
    rules = {"partition_config": {"use_default_specs": False, "layer_specs": [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ]}}  # fmt: skip
    config = {
        **CONFIG,
        "tensor_parallel": {"autotp_size": 2, **rules},
        "flops_profiler": {**SECTION, "output_file": str(file)},
    }
    engine = deepspeed.initialize(model=Wide(), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(2, W)))
        engine.step()
    found = engine.flops_profiler.ranks
    engine.destroy()
    return found


def test_ranks_of_split_layers_add_up(tmp_path: Path) -> None:
    found = run(_tensors, 2, file=tmp_path / "profile.txt")[0]
    each = 2 * 2 * 2 * W * N  # half of both products
    assert found.copies == 1 and found.model == 2
    assert all(each <= row[1] <= each + 4 * N for row in found.by_rank)
    assert [row[0] for row in found.by_rank] == [2 * W * N] * 2

"""The section flops_profiler: one step of the engine, on every rank."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.pool import distributed


class Simple(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        return nn.functional.cross_entropy(x, y)


def train(
    file: Path, *, plain: bool = False, steps: int = 4, layers: int = 1, **more: Any
) -> tuple[Any, list[float]]:
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "flops_profiler": {"enabled": True, "profile_step": 1, "top_modules": 3, "output_file": str(file)},
        **more,
    }
    engine = deepspeed.initialize(model=Simple(layers), config=config)[0]
    losses = []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.randn(2, 10), torch.randint(0, 10, (2,)))
            losses.append(loss.item())
            loss.backward() if plain else engine.backward(loss)
            engine.step()
    return engine, losses


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("plain", [False, True])
@distributed(world_size=1)
def test_flops_of_a_step(tmp_path: Path, stage: int, plain: bool) -> None:
    file = tmp_path / "profile.txt"
    zero = {"zero_optimization": {"stage": stage}}
    engine, losses = train(file, plain=plain, layers=2, gradient_accumulation_steps=2, **zero)
    profiler = engine.flops_profiler
    assert (profiler.flops, profiler.macs, profiler.params) == (800, 400, 200)
    assert profiler.get_total_backward_flops() == 2 * 800 - 400
    subscribers = engine.events._subscribers["before_forward"]
    assert not any("FlopsOfOneStep" in repr(subscriber) for subscriber in subscribers)
    assert not any("_flops" in key for module in engine.module.modules() for key in vars(module))
    text = file.read_text()
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert {
        "world size: 1",
        "data parallel size: 1",
        "model parallel size: 1",
        "batch size per GPU: 2",
        "params per gpu: 200",
        "bwd flops per GPU, counted: 1.2 K",
    } <= lines
    for label in (
        "bwd latency:",
        "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency:",
        "fwd+bwd FLOPS per GPU = 3 * fwd flops per GPU / (fwd+bwd latency):",
        "step latency:",
        "iter latency:",
        "samples/second:",
    ):
        assert any(line.startswith(label) and not line.endswith(" 0.0 s") for line in lines), text
    engine.destroy()
    again = {"flops_profiler": {"enabled": False}}
    other, same = train(file, plain=plain, layers=2, gradient_accumulation_steps=2, **zero, **again)
    assert same == losses and other.flops_profiler is None
    other.destroy()


@distributed(world_size=1)
def test_a_file_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        engine, losses = train(tmp_path / "file" / "profile.txt")
    assert len(losses) == 4 and "Profile Summary at step 2:" in printed.getvalue()
    engine.destroy()


@distributed(world_size=2)
def test_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / f"{dist.get_rank()}.txt"
    engine, _ = train(file, zero_optimization={"stage": 2})
    assert engine.flops_profiler.flops == 400
    assert file.exists() == (dist.get_rank() == 0)
    if file.exists():
        text = " ".join(file.read_text().split())
        assert "data parallel size: 2" in text and "fwd flops of all ranks, counted: 800" in text
    engine.destroy()


@distributed(world_size=1)
def test_a_failed_batch_is_profiled_again(tmp_path: Path) -> None:
    file = tmp_path / "profile.txt"
    engine, _ = train(file, steps=1)
    with pytest.raises(ValueError, match="batch"):
        engine(torch.randn(2, 10), torch.randint(0, 10, (3,)))
    assert not any("_flops" in key for module in engine.module.modules() for key in vars(module))
    loss = engine(torch.randn(2, 10), torch.randint(0, 10, (2,)))
    engine.backward(loss)
    engine.step()
    assert engine.flops_profiler.flops == 400 and file.exists()
    engine.destroy()


@distributed(world_size=1)
def test_a_step_that_never_comes(tmp_path: Path) -> None:
    """Published scripts switch the profile off by this, and leave the section on."""
    file = tmp_path / "profile.txt"
    train(file, flops_profiler={"enabled": True, "profile_step": -1, "output_file": str(file)})
    assert not file.exists()

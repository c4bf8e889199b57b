"""Curves that the engine writes to monitors on its own: each documented event, on rank 0, and over which x axis."""

from __future__ import annotations

import csv
import itertools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.base.accelerator.host_memory import resident_bytes
from deepspeed.base.logging import logger
from deepspeed.engine.observers.progress import readings
from tests.pool import distributed, run
from tests.zero.models import batch, config_for, make_zoo

ELAPSED = {
    f"elapsed_time_ms_{part}"
    for part in ("forward", "backward", "backward_inner", "backward_allreduce", "step", "data")
}
NUMBERS = {"train_loss", "lr", "grad_norm", "samples_per_second", "tokens_per_second", "memory_gib"}
ALONE = {"elapsed_time_ms_exposed_communication"}  # zero on one rank


def curves(folder: Path, x: str = "Samples") -> dict[str, list[tuple[int, float]]]:
    found = {}
    for file in (folder / "job").glob(f"Train_{x}_*.csv"):
        with open(file, newline="") as text:
            rows = list(csv.reader(text))[1:]
        found[file.stem.removeprefix(f"Train_{x}_")] = [(int(x), float(y)) for x, y in rows]
    return found


def csv_section(folder: Path) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), "job_name": "job"}


def start(folder: Path, stage: int = 1, **more: Any) -> Any:
    config = {**config_for(stage), "csv_monitor": csv_section(folder)}
    return deepspeed.initialize(model=make_zoo(), config={**config, **more})[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_loss_and_rate_of_every_step(tmp_path: Path, stage: int) -> None:
    """The loss is the mean over the micro-batches of this rank; the rate is the engine's."""
    folder = tmp_path / str(dist.get_rank())
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
    engine = start(folder, stage, gradient_accumulation_steps=2, scheduler=scheduler)
    losses, rates = [], []
    for step in range(3):
        mine = []
        for micro in range(2):
            loss = engine(batch(2 * step + micro, 0, dist.get_rank()))
            mine.append(loss.item())
            engine.backward(loss)
            engine.step()
        with torch.no_grad():
            engine(batch(0, 0, 0))  # an evaluation pass is not in the curve
        losses.append(sum(mine) / 2)
        rates.append(engine.get_lr()[0])
    if dist.get_rank() > 0:
        assert engine.monitor.enabled and not folder.exists()
    else:
        found = curves(folder)
        samples = [engine.train_batch_size() * step for step in (1, 2, 3)]
        assert found.keys() == NUMBERS | {"bytes_sent_within_host", "bytes_sent_across_hosts"}
        for name, values in (("train_loss", losses), ("lr", rates)):
            assert [x for x, _ in found[name]] == samples
            assert [y for _, y in found[name]] == pytest.approx(values, rel=1e-6)
        assert engine.losses == pytest.approx(losses[-1])
    engine.destroy()


@distributed(world_size=2)
def test_norm_speed_and_memory_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is the engine's, speeds are over all ranks since the step before, memory is this process's."""
    now_s = itertools.count()
    monkeypatch.setattr(readings, "time", types.SimpleNamespace(perf_counter=lambda: next(now_s) ** 2.0))
    folder = tmp_path / str(dist.get_rank())
    engine = start(folder, 2, gradient_accumulation_steps=2)
    norms = []
    for step in range(4):
        for micro in range(2):
            engine.backward(engine(batch(step, micro, dist.get_rank())))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    if dist.get_rank() == 0:
        found, size = curves(folder), engine.train_batch_size()
        assert [y for _, y in found["grad_norm"]] == pytest.approx(norms, rel=1e-6)
        speeds = [size / seconds for seconds in (1.0, 3.0, 5.0)]
        assert found["samples_per_second"] == [
            (n * size, pytest.approx(speed)) for n, speed in enumerate(speeds, 2)
        ]
        assert [y for _, y in found["tokens_per_second"]] == pytest.approx([7 * speed for speed in speeds])
        assert [2**30 * y for _, y in found["memory_gib"]][-1] == pytest.approx(resident_bytes(), rel=0.1)
    engine.destroy()


def train_lengths(engine: Any, lengths: list[int]) -> None:
    for length in lengths:
        engine.backward(engine(batch(0, 0, 0)[:, :length]))
        engine.step()


@distributed(world_size=1)
def test_curves_over_steps_or_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names tell what x is; a count of tokens continues after loading a checkpoint, even one without it."""
    size = 2  # samples in a step
    for x, points in (("steps", [1, 2, 3, 4, 5]), ("tokens", [14, 26, 36, 44, 58])):
        engine = start(tmp_path / x, monitor={"x": x})
        train_lengths(engine, [7, 6, 5])
        engine.save_checkpoint(str(tmp_path / f"{x}_checkpoint"))
        engine.destroy()
        engine = start(tmp_path / x, monitor={"x": x})
        engine.load_checkpoint(str(tmp_path / f"{x}_checkpoint"))
        train_lengths(engine, [4, 7])
        found = curves(tmp_path / x, x.capitalize())
        assert found.keys() == NUMBERS and not curves(tmp_path / x)
        assert [at for at, _ in found["train_loss"]] == points and engine.train_batch_size() == size
        engine.destroy()
    engine = start(tmp_path / "other", monitor={"x": "tokens"})
    engine.load_checkpoint(str(tmp_path / "steps_checkpoint"))
    train_lengths(engine, [6, 7])
    assert [at for at, _ in curves(tmp_path / "other", "Tokens")["lr"]] == [4 * size * 6, 4 * size * 6 + 14]
    engine.destroy()
    told: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args, **_: told.append(text))
    config = {**config_for(1), "monitor": {"x": "tokens"}, "csv_monitor": csv_section(tmp_path / "no_tokens")}
    engine = deepspeed.initialize(model=torch.nn.Linear(3, 1), config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    assert [at for at, _ in curves(tmp_path / "no_tokens")["lr"]] == [size, 2 * size]
    assert ["monitor.x is 'tokens'" in text for text in told] == [True]
    engine.destroy()


@distributed(world_size=1)
def test_loss_of_a_plain_backward(tmp_path: Path) -> None:
    """Also where the module returns more than its loss; then what was returned counts, whatever is back-propagated."""
    for number, wrap in enumerate(
        (lambda loss: loss, lambda loss: {"loss": loss}, lambda loss: (loss, loss + 1))
    ):
        module = make_zoo()
        inner, losses = module.forward, []
        module.forward = lambda ids, inner=inner, wrap=wrap: wrap(inner(ids))  # type: ignore[method-assign]
        config = {
            **config_for(2),
            "csv_monitor": csv_section(tmp_path / str(number)),
            "wall_clock_breakdown": True,
        }
        engine = deepspeed.initialize(model=module, config=config)[0]
        for step in range(2):
            outputs = engine(batch(step, 0, 0))
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss" if number == 1 else 0]
            losses.append(loss.item())
            loss.backward()
            engine.step()
        found = curves(tmp_path / str(number))
        assert [value for _, value in found["train_loss"]] == pytest.approx(losses, rel=1e-6)
        assert all(value > 0 for _, value in found["elapsed_time_ms_backward"])
        engine.destroy()


@distributed(world_size=1)
def test_a_batch_that_failed_is_in_no_curve(tmp_path: Path) -> None:
    engine = start(tmp_path, 2, gradient_accumulation_steps=2)
    losses = []
    for micro in (0, None, 1, 2):
        if micro is None:
            with pytest.raises(IndexError):
                engine(torch.full((2, 4), 99))
            losses.clear()
            continue
        loss = engine(batch(micro, 0, 0))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 1
    assert curves(tmp_path)["train_loss"][0][1] == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert engine.losses == pytest.approx(sum(losses) / 2)
    engine.destroy()


@distributed(world_size=1)
def test_a_batch_that_a_load_drops_is_in_no_curve(tmp_path: Path) -> None:
    engine = start(tmp_path, 2, gradient_accumulation_steps=2)
    engine.save_checkpoint(tmp_path / "saved")
    losses = []
    for micro in range(3):
        loss = engine(batch(micro, 0, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if micro == 0:
            engine.load_checkpoint(tmp_path / "saved")
            losses.clear()
    assert engine.global_steps == 1
    assert curves(tmp_path)["train_loss"][0][1] == pytest.approx(sum(losses) / 2, rel=1e-6)
    engine.destroy()


@distributed(world_size=1)
def test_a_loss_that_the_client_has_divided(tmp_path: Path) -> None:
    """As Transformers does: each micro-batch's share of the loss of the whole step; they add up."""
    engine = start(tmp_path, 2, gradient_accumulation_steps=2)
    shares = []
    for micro in range(2):
        loss = engine(batch(micro, 0, 0)) * (0.25, 0.75)[micro]
        shares.append(loss.item())
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
    assert curves(tmp_path)["train_loss"][0][1] == pytest.approx(sum(shares), rel=1e-6)
    engine.destroy()


@distributed(world_size=1)
def test_loss_scale_under_fp16(tmp_path: Path) -> None:
    """Also of a step that overflows and is skipped."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = start(tmp_path, 2, fp16=fp16)
    for step in range(3):
        loss = engine(batch(step, 0, 0))
        engine.backward(loss * float("inf") if step == 1 else loss)
        engine.step()
    found = curves(tmp_path)
    assert [value for _, value in found["loss_scale"]] == [16.0, 8.0, 8.0]
    assert [value for _, value in found["train_loss"]][1] == float("inf") and len(found["lr"]) == 3
    engine.destroy()


@pytest.mark.parametrize("asked", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}])
@distributed(world_size=1)
def test_times_of_the_parts_of_a_step(tmp_path: Path, asked: dict[str, Any]) -> None:
    engine = start(tmp_path, 2, gradient_accumulation_steps=2, **asked)
    for step in range(4):
        engine.backward(engine(batch(step, 0, 0)))
        engine.step()
    found = curves(tmp_path)
    assert found.keys() == NUMBERS | ELAPSED | ALONE
    assert all(value == 0 for name in ALONE for _, value in found[name])
    for name in ELAPSED:
        assert len(found[name]) == 2 and all(value > 0 for _, value in found[name])
    for (_, whole), (_, inner), (_, reduced) in zip(
        *(found[f"elapsed_time_ms_backward{part}"] for part in ("", "_inner", "_allreduce")), strict=True
    ):
        assert inner + reduced <= whole
    engine.destroy()


@distributed(world_size=1)
def test_a_pass_that_fails_does_not_spoil_the_timers(tmp_path: Path) -> None:
    engine = start(tmp_path, 1, wall_clock_breakdown=True)
    for wrong in (torch.zeros(1, dtype=torch.float64), batch(0, 0, 0)):
        try:
            engine.backward(engine(wrong) * torch.ones(3))  # not scalar; before that, wrong inputs
        except Exception:
            engine.zero_grad()
    engine.backward(engine(batch(0, 0, 0)))
    engine.step()
    assert len(curves(tmp_path)["elapsed_time_ms_backward"]) == 1
    engine.destroy()


def weights_after_training(folder: Path, sections: dict[str, Any]) -> list[torch.Tensor]:
    engine = deepspeed.initialize(model=make_zoo(), config={**config_for(2), **sections})[0]
    for step in range(3):
        engine.backward(engine(batch(step, 0, dist.get_rank())))
        engine.step()
    weights = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    return weights


def with_a_monitor_that_fails(folder: Path) -> tuple[list[torch.Tensor], int]:
    """Training with places that cannot be written to, and how many warnings that made."""
    told: list[str] = []
    before, logger.warning = logger.warning, lambda text, *args, **_: told.append(str(text))  # type: ignore[method-assign]
    try:
        (folder / f"file{dist.get_rank()}").touch()
        bad = {"enabled": True, "output_path": str(folder / f"file{dist.get_rank()}")}
        return weights_after_training(folder, {"csv_monitor": bad, "tensorboard": bad}), len(told)
    finally:
        logger.warning = before  # type: ignore[method-assign]


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    plain = run(weights_after_training, 2, folder=tmp_path, sections={})
    failing = run(with_a_monitor_that_fails, 2, folder=tmp_path)
    assert [warnings for _, warnings in failing] == [2, 0]
    for wanted, (found, _) in zip(plain, failing, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))

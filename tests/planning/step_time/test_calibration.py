"""Calibrations: the file, what follows from one, and one that is really made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.planning.activations import shape_of
from deepspeed.planning.planner import PlanSetting
from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.step_time.calibration import (
    UNLIMITED,
    Calibration,
    CalibrationError,
    CostLine,
    Steps,
    contention,
    fabric_of,
    load,
    work_of,
)
from deepspeed.planning.step_time.hardware import NetworkSpec
from deepspeed.planning.step_time.shapes import build_shape
from deepspeed.planning.step_time.step import StepMachine, step_time
from deepspeed.planning.step_time.work import flops_by_call
from deepspeed.tools import calibrate as made_by
from deepspeed.tools.calibrate import CalibrationRequest, calibrate

MODEL, TOKENS = "gpt:3x64x2x256", 64


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }


def planned(stage: int, ranks: int, **zero: Any) -> tuple[PlanSetting, list[float]]:
    with torch.device("meta"):
        module = build_shape(MODEL)
    given = config(stage)
    given["zero_optimization"] |= zero
    found = answer(PlanRequest(module=module, config=given, ranks=ranks, device_type="cpu")).setting
    return found, flops_by_call(module, found.model, TOKENS, TOKENS, shape_of(module.config))


def made(**more: Any) -> Calibration:
    """A machine on which two ranks take a quarter longer in forward."""
    setting, flops = planned(0, 1)
    calls = len(setting.model.calls)
    steps = {}
    for stage in range(4):
        steps[f"1/{stage}"] = Steps(step=0.035, forward=0.01, backward=0.02, update=0.005)
        steps[f"2/{stage}"] = Steps(step=0.06 + 0.001 * stage, forward=0.0125, backward=0.04, update=0.0075)
    names = ("all_gather", "reduce_scatter", "all_reduce", "fetch")
    values: dict[str, Any] = {
        "machine": "made up",
        "date": "2026-01-01 00:00 UTC",
        "release": "0",
        "device_type": "cpu",
        "cores": 2,
        "threads": 1,
        "model": MODEL,
        "elements": setting.model.numel,
        "tokens": TOKENS,
        "precision": "bf16",
        "flops": sum(flops),
        "forward_share": [1 / calls] * calls,
        "backward_share": [1 / calls] * calls,
        "steps": steps,
        "lines": {name: CostLine(start=1e-4, byte=1e-9) for name in names},
    }
    return Calibration(**{**values, **more})


def step(
    found: Calibration, stage: int, ranks: int, network: NetworkSpec = UNLIMITED, beside: int = 1
) -> float:
    return seconds_of(found, *planned(stage, ranks), network, beside)


def seconds_of(
    found: Calibration, setting: PlanSetting, flops: Any, network: NetworkSpec, beside: int = 1
) -> float:
    machine = StepMachine(fabric=fabric_of(found, network, 1))
    return step_time(setting, work_of(found, setting, flops, beside), machine).seconds


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    made().save(path)
    assert load(path) == made()
    assert any("made up" in line for line in made().lines_of_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a calibration"),
        ({"version": 99}, "version 99, but this release reads version 1"),
        ({"surprise": 1}, "surprise is missing or unknown"),
        ({"elements": -1}, "invalid"),
        ({"steps": {}}, "invalid"),
        ({"steps": {"1/0": {"step": 1}}}, "invalid"),
        ({"lines": {"all_gather": {"start": "fast", "byte": 0}}}, "invalid"),
    ],
)
def test_a_wrong_file_says_what_to_do(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    if isinstance(change, str):
        path.write_text(change)
    else:
        made().save(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CalibrationError, match=message) as caught:
        load(path)
    assert "--calibrate FILE" in str(caught.value)


def test_no_file() -> None:
    with pytest.raises(CalibrationError, match="No such file"):
        load("nowhere.json")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_was_measured_is_predicted(stage: int) -> None:
    found = made()
    assert step(found, stage, 1) == pytest.approx(0.035)
    assert step(found, stage, 2) == pytest.approx(0.06 + 0.001 * stage, rel=1e-3)


def test_a_slower_link_adds_its_bytes() -> None:
    """At 1 MB/s, which hides whatever the ranks themselves limit: 4 bytes a parameter, half of them sent."""
    found = made()
    link = NetworkSpec(name="slow", rate=1e6)
    numel = planned(0, 2)[0].model.numel
    longer = step(found, 1, 2, link) - step(found, 1, 2)
    assert longer == pytest.approx(4 * numel / 2 / 1e6, rel=0.1)


def test_what_ranks_copy_hides_behind_a_slow_link() -> None:
    """Two ranks took 16 ms more than two that compute would: a slow link leaves time for those in backward."""
    usual = made()
    rows = {**usual.steps, "2/1": replace(usual.steps["2/1"], step=0.045)}
    setting, flops = planned(1, 2, reduce_bucket_size=20_000)

    def more(network: NetworkSpec) -> float:
        with_copies, without = (
            seconds_of(found, setting, flops, network) for found in (usual, replace(usual, steps=rows))
        )
        return with_copies - without

    assert more(UNLIMITED) == pytest.approx(0.016, rel=0.01)
    # What follows the first full bucket.
    assert 0 < more(NetworkSpec(name="slow", rate=2e6)) < 0.8 * more(UNLIMITED)


def test_ranks_that_are_faster_together() -> None:
    """Noise: two took less than each of them alone."""
    usual = made()
    found = replace(
        usual, steps={**usual.steps, "2/0": Steps(step=0.03, forward=0.01, backward=0.02, update=0.0)}
    )
    assert step(found, 0, 2) == pytest.approx(0.03, rel=1e-3)


def test_ranks_share_processors() -> None:
    found = made()
    assert [contention(found, n) for n in (1, 2, 3, 4)] == [1, 1, 1.5, 2]
    assert step(found, 0, 1, beside=4) == pytest.approx(2 * 0.035)
    assert contention(replace(found, device_type="cuda"), 4) == 1


def test_another_model_takes_as_long_as_its_operations() -> None:
    found = made()
    setting, flops = planned(0, 1)
    twice = replace(found, flops=found.flops / 2)
    assert seconds_of(twice, setting, flops, UNLIMITED) == pytest.approx(2 * 0.03 + 0.005)


def test_a_calibration_needs_a_batch() -> None:
    with pytest.raises(CalibrationError, match="give --batch module:function"):
        calibrate(CalibrationRequest(model="train:build", config={}))


def test_progress_and_a_busy_machine_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    (tmp_path / "progress").write_text("  stage 0: 1.0 ms per step\n  stage 1: 2.0 ms per step\n")
    assert made_by._first_failure([], tmp_path / "progress", told.append) is None
    assert told == ["  stage 0: 1.0 ms per step", "  stage 1: 2.0 ms per step"]
    step = {"step": 1.0, "forward": 0.3, "backward": 0.5, "update": 0.2}
    for spread, warned in ((0.1, False), (2.7, True)):
        told.clear()
        found = {
            "steps": {"1/0": {**step, "spread": spread}},
            "lines": {"all_gather": {"start": 0.0, "byte": 0.0}},
            "shares": ([1.0], [1.0]),
        }
        monkeypatch.setattr(made_by, "_run", lambda *_, found=found: found)
        calibrate(CalibrationRequest(model=MODEL, config=config(0)), tell=told.append)
        assert any("vary by up to 270%: the machine is busy" in line for line in told) is warned


def broken_batch() -> dict[str, torch.Tensor]:
    return {"y": torch.ones(2, 32)}


@pytest.mark.slow
def test_what_a_rank_says_is_passed_on() -> None:
    name = "tests.planning.step_time.test_calibration:"
    asked = CalibrationRequest(
        model=name + "user_model", batch=name + "broken_batch", config=config(0), steps=1
    )
    with pytest.raises(CalibrationError, match=r"exited with status 1(.|\n)*unexpected keyword argument 'y'"):
        calibrate(asked, tell=lambda text: None)


def user_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return UserModel()


class UserModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def user_batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(2, 32, dtype=torch.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (MODEL, None),
        (f"{__name__}:user_model", f"{__name__}:user_batch"),
    ],
)
def test_a_real_one(model: str, batch: str | None, tmp_path: Path) -> None:
    asked = CalibrationRequest(
        model=model,
        batch=batch,
        config=config(0),
        sequence=TOKENS,
        stages=(0, 3),
        steps=2,
        warmup=1,
        seconds=0,
    )
    found = calibrate(asked, tell=lambda text: None)
    assert set(found.steps) == {"1/0", "1/3", "2/0", "2/3"}
    assert set(found.lines) == {"all_gather", "reduce_scatter", "all_reduce", "fetch"}
    assert sum(found.forward_share) == pytest.approx(1)
    assert all(row.step > 0 for row in found.steps.values())
    found.save(tmp_path / "here.json")
    assert load(tmp_path / "here.json") == found
    if batch is None:
        setting, flops = planned(3, 2)
        seconds = seconds_of(found, setting, flops, UNLIMITED)
        assert seconds == pytest.approx(found.steps["2/3"].step, rel=1e-3)

"""The wide search: its space, its model of memory and time, and what it finds on machines that are made up."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.planning.request import PlanRequest, answer
from deepspeed.planning.variants import STAGES, TENSOR, note_variants, planned_variant, refuse_beyond
from deepspeed.tools.autotuning import scheduler
from deepspeed.tools.autotuning.arguments import ACCELERATE, arguments_for, given_config, start_command
from deepspeed.tools.autotuning.memory import SPARE, MemoryNeeds
from deepspeed.tools.autotuning.search import Search
from deepspeed.tools.autotuning.space import (
    BUCKET,
    BUDGET,
    OFFLOAD,
    PREFETCH,
    THREADS,
    Point,
    SpaceChoice,
    choices_of,
    key_of,
    threads_to_try,
    without_ineffective_sizes,
)
from deepspeed.tools.autotuning.step_model import PlannedPoint, StepBreakdown, StepModel, step_breakdown
from tests.tools.autotuning.made_up import tuner

ADAM = {"type": "Adam", "params": {"lr": 1e-3}}
GIB = 1 << 30
PARAMS = 20_000_000
"""Of the models that are made up."""


def test_the_space() -> None:
    assert choices_of({}, {}, fast=True).to_plan([1]) == [{"zero_optimization.stage": 1}]
    wide = choices_of({}, {}, fast=False)
    assert not any(
        choice.changes
        for room in wide.memory_combinations(0)
        for choice in room
        if choice.changes[0][0].startswith(OFFLOAD)
    )
    assert {key for room in wide.memory_combinations(1) for choice in room for key, _ in choice.changes} == {
        BUDGET, f"{OFFLOAD}.device", f"{OFFLOAD}.ratio",
    }  # fmt: skip
    keys = {stage: {choice.changes[0][0] for choice in wide.speed_choices(stage)} for stage in (2, 3)}
    assert keys == {2: {BUCKET}, 3: {BUCKET, PREFETCH}}
    given = {"zero_optimization": {"reduce_bucket_size": 10, "offload_optimizer": {"device": "cpu"}}}
    left = choices_of(given, {TENSOR: [1, 2], THREADS: [1, 3]}, fast=False)
    assert {key for room in left.memory_combinations(3) for c in room for key, _ in c.changes} == {
        BUDGET,
        TENSOR,
    }
    assert {choice.changes[0][0] for choice in left.speed_choices(3)} == {PREFETCH, THREADS}
    assert len(list(left.all_combinations(3))) == 2 * 3 * 3 * 3 and len(left.to_plan([3])) == 6 * (1 + 2 + 2)
    for numel, kept in ((10**6, set()), (10**7, {BUCKET, PREFETCH}), (10**9, {BUCKET, PREFETCH})):
        assert {c.changes[0][0] for c in without_ineffective_sizes(wide, numel, ()).speed_choices(3)} == kept
    assert len(list(without_ineffective_sizes(wide, 10**7, ()).speed_choices(3))) == 2
    assert len(list(without_ineffective_sizes(wide, 10**6, [BUCKET]).speed_choices(3))) == 2
    point = Point(2, 4, 2).with_choice(SpaceChoice(((BUCKET, 10),))).with_choice(SpaceChoice(((BUCKET, 20),)))
    assert point.changes == {BUCKET: 20} and point.name() == "z2_gas2_tmbspg4_reducebucketsize20"
    assert Point(0, 1, 1, (SpaceChoice(((TENSOR, 2),)),)).model_ranks() == 2
    assert [c.changes for c in threads_to_try(16, 2)] == [(), ((THREADS, 4),)] and len(
        threads_to_try(2, 2)
    ) == 1


def test_parts_of_a_step() -> None:
    assert step_breakdown(1.0, None) == StepBreakdown(1.0)
    told = {"fwd": 200.0, "bwd_allreduce": 100.0, "step": 300.0, "exposed_comm": 150.0, "data": 50.0}
    found = step_breakdown(1.0, told)
    assert found.exposed == 0.15 and found.update == 0.25 and found.data == 0.05
    assert found.total == pytest.approx(1.0) and found.compute == pytest.approx(0.55)
    # Where waits within the step are known, those in the middle of a backward are not taken for them.
    found = step_breakdown(1.0, {**told, "bwd_allreduce": 0.0, "step": 100.0, "step_waits": 20.0})
    assert found.update == pytest.approx(0.08) and found.compute == pytest.approx(0.72)


def offloaded(point: Point) -> float:
    return point.changes.get(f"{OFFLOAD}.ratio", 0.0)


def made_of(point: Point, ranks: int = 2) -> tuple[float, dict[str, float]]:
    """A machine: seconds of a step, and its breakdown."""
    sent = {0: 2.0, 1: 2.0, 2: point.gas + 1.0, 3: 3.0 * point.gas}[point.stage]
    compute = point.gas * (0.010 + 0.004 * point.size)
    share = point.changes.get(BUDGET)
    compute *= 1 + 0.3 * (1 - share) if share else 1
    exposed, update = 0.020 * sent, 0.030 / (ranks if point.stage else 1)
    exposed *= 0.5 if BUCKET in point.changes else 1.0
    on_host = offloaded(point)
    update = (1 - on_host) * update + on_host * planned_of(point).owned / 3e8
    told = {
        "fwd": 0.3 * compute,
        "bwd_allreduce": exposed,
        "step": update,
        "exposed_comm": exposed,
        "data": 0.0,
    }
    return compute + exposed + update, {name: ms * 1e3 for name, ms in told.items()}


def planned_of(point: Point) -> PlannedPoint:
    sent = {0: 2.0, 1: 2.0, 2: point.gas + 1.0, 3: 3.0 * point.gas}[point.stage]
    return PlannedPoint(sent, PARAMS / (2 if point.stage else 1))


def test_two_runs_tell_every_step() -> None:
    model = StepModel(planned_of)
    model.fit([(Point(0, size), *made_of(Point(0, size))) for size in (1, 4)])
    for stage, size, gas in itertools.product(range(4), (1, 8, 32), (1, 4)):
        point = Point(stage, size, gas)
        assert model.seconds(point) == pytest.approx(made_of(point)[0], rel=1e-6), point
    tight = Point(1, 8, 1, (SpaceChoice(((BUDGET, 0.5),)),))
    assert model.seconds(tight) == pytest.approx(made_of(tight)[0], rel=1e-6)
    model.fit([(Point(0, 1), 1.0, None)])  # without a breakdown all of it is computing
    assert model.seconds(Point(0, 2, 2)) == pytest.approx(4.0)


def test_a_rank_that_waited_by_chance_misleads_nobody() -> None:
    model, late = StepModel(planned_of), made_of(Point(0, 1))
    told = {
        **late[1],
        "exposed_comm": late[1]["exposed_comm"] + 90,
        "bwd_allreduce": late[1]["exposed_comm"] + 90,
    }
    model.fit([(Point(0, 1), late[0] + 0.09, told), (Point(0, 4), *made_of(Point(0, 4)))])
    for stage, size in itertools.product(range(4), (4, 8, 32)):
        assert model.seconds(Point(stage, size)) == pytest.approx(made_of(Point(stage, size))[0], rel=1e-6)
    assert model.seconds(Point(0, 1)) == pytest.approx(late[0] + 0.09)


def test_what_cannot_save_anything_is_not_run() -> None:
    search = Search("throughput", planned_of, 2)
    fine = SpaceChoice(((BUCKET, 5_000_000),), "exposed communication")
    search.record(Point(0, 1), 1.0, {"exposed_comm": 20.0, "bwd_allreduce": 20.0})
    search.record(Point(0, 4), 3.9, {"exposed_comm": 78.0, "bwd_allreduce": 78.0})
    assert search.may_save(Point(0, 1), fine) == pytest.approx(0.02)
    assert search.next(lambda _: [], lambda _: [fine]) is None and "was measured" in search.reason
    search.record(Point(0, 4), 3.9, {"exposed_comm": 800.0, "bwd_allreduce": 800.0})
    assert search.next(lambda _: [], lambda _: [fine]) == Point(0, 4, 1, (fine,))


class Machine:
    """Stands in for ``run_experiment``, with the times of ``made_of`` and memory by stage."""

    def __init__(self, free: int, ranks: int = 2) -> None:
        self.free, self.ranks = free, ranks
        self.runs: list[Point] = []
        self.each, self.states = 40 << 20, {0: 800 << 20, 1: 600 << 20, 2: 500 << 20, 3: 400 << 20}

    def need(self, point: Point) -> float:
        states = self.states[point.stage] - offloaded(point) * 12 * planned_of(point).owned
        return states + point.size * self.each * point.changes.get(BUDGET, 1.0)

    def point_of(self, config: dict[str, Any]) -> Point:
        zero = config["zero_optimization"]
        offload = zero.get("offload_optimizer", {})
        changes = {
            f"{OFFLOAD}.device": offload.get("device"),
            f"{OFFLOAD}.ratio": offload.get("ratio"),
            BUDGET: config.get("activation_checkpointing", {}).get("memory_budget"),
            BUCKET: zero.get("reduce_bucket_size"),
        }
        return Point(
            zero["stage"],
            config["train_micro_batch_size_per_gpu"],
            config["gradient_accumulation_steps"],
            tuple(SpaceChoice(((key, value),)) for key, value in changes.items() if value is not None),
        )

    def plan(self, changes: dict[str, Any]) -> dict[str, Any]:
        stage = changes["zero_optimization.stage"]
        told = planned_of(Point(stage, 1))
        need = self.states[stage] - changes.get(f"{OFFLOAD}.ratio", 0.0) * 12 * told.owned
        return {
            "changes": changes,
            "need": need,
            "fits": need < self.free,
            "sent": told.sent,
            "owned": told.owned,
        }

    def __call__(self, exp: dict[str, Any], *_: Any) -> int:
        config, folder = exp["ds_config"], Path(exp["result_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        section, point = config["autotuning"], self.point_of(config)
        if "model_info_path" in section:
            near = {"near": "device", "free": {"device": self.free}}
            stages = {
                str(s): {**near, "need": {"device": self.states[s]}, "fits": self.states[s] < self.free}
                for s in range(4)
            }
            info = {
                "num_params": PARAMS,
                "ranks_per_node": 2,
                "stages": stages,
                "blocks": 4,
                "device_type": "cuda",
            }
            info |= {"activation_mem_per_gpu": self.each * point.size, "micro_batch": point.size}
            info["variants"] = [self.plan(changes) for changes in section["variants"]]
            Path(section["model_info_path"]).write_text(json.dumps(info))
            if self.need(point) > self.free:  # refused before anything is allocated
                (folder / "stderr.log").write_text("ValueError: autotuning.memory_per_rank\n")
                return 1
        assert self.need(point) <= self.free, "it would have run out of memory"
        self.runs.append(point)
        seconds, breakdown = made_of(point)
        metrics = {
            "latency": seconds,
            "throughput": 2 * point.size * point.gas / seconds,
            "breakdown": breakdown,
        }
        metrics |= {"flops": 0, "samples": point.size, "peak_memory": round(self.need(point))}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        return 0


@pytest.mark.parametrize("free", [GIB // 2 + (32 << 20), GIB, 4 * GIB])
@pytest.mark.parametrize("config", [{}, {"train_batch_size": 64}])
def test_the_best_of_a_grid_in_three_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, free: int, config: dict[str, Any]
) -> None:
    """Stage, micro-batch, accumulation, offload, activation budget and bucket size, against all of them."""
    machine = Machine(free)
    found = tuner(tmp_path, monkeypatch, machine, config, fast=False, max_train_batch_size=256)
    found.tune()
    assert len(machine.runs) <= 2 + 3
    best = found.optimal_ds_config
    assert best is not None and "wall_clock_breakdown" not in best
    whole = config.get("train_batch_size")
    sizes = [1 << power for power in range(8)]
    choices: list[tuple[SpaceChoice, ...]] = [
        tuple(SpaceChoice(((key, value),)) for key, value in chosen if value)
        for chosen in itertools.product(
            [(f"{OFFLOAD}.ratio", ratio) for ratio in (None, 0.5, 1.0)],
            [(BUDGET, budget) for budget in (None, 0.5, 0.2)],
            [(BUCKET, bucket) for bucket in (None, 5_000_000)],
        )
    ]
    grid = [
        Point(stage, size, whole // (2 * size) if whole else 1, chosen)
        for stage, size, chosen in itertools.product(range(4), sizes, choices)
        if (not whole or size <= whole // 2) and (stage or not offloaded(Point(stage, size, 1, chosen)))
    ]
    grid = [point for point in grid if machine.need(point) <= SPARE * free]
    rates = {point: point.size * point.gas / made_of(point)[0] for point in grid}
    reached = machine.point_of(best)
    assert reached.size * reached.gas / made_of(reached)[0] >= 0.95 * max(rates.values())
    if whole:
        assert reached.size * reached.gas * 2 == whole
    found.print_tuning_results()
    out = capsys.readouterr().out
    assert "Why z" in out and "ms per sample, most of it for" in out
    assert "| run " in out and "communication" in out
    if free < 600 << 20:
        assert "not run: stage 0" in out and "does not fit" in out


def test_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the demo extra is not installed")
    found = tuner(tmp_path, monkeypatch, Machine(GIB), {})
    found.tune()
    found.print_tuning_results()
    assert (tmp_path / "autotuning_results" / "tuning.png").stat().st_size > 1000


def test_threads_and_lists_are_given_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuner(
        tmp_path,
        monkeypatch,
        Machine(GIB),
        {},
        tuning_space={THREADS: [3]},
        tuner_type="gridsearch",
        max_train_batch_size=2,
    )
    seen = []

    def run(exp: dict[str, Any], *given: Any) -> int:
        seen.append(exp["environment"])
        assert "tuning_space" not in exp["ds_config"]["autotuning"]
        return Machine(GIB)(exp, *given)

    monkeypatch.setattr(scheduler, "run_experiment", run)
    found.tune()
    assert {THREADS: "3"} in seen and {} in seen
    found.optimal_environment = {THREADS: "3"}
    found.write_optimal_config()
    command = (tmp_path / "autotuning_results" / "cmd_optimal.txt").read_text()
    assert command.startswith("OMP_NUM_THREADS=3 deepspeed ")
    more = scheduler.environment_for(Path("x"), {THREADS: "3"})
    assert more[THREADS] == "3" and "PATH" in more


def test_accumulation_steps_that_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(4 * GIB)
    found = tuner(
        tmp_path,
        monkeypatch,
        machine,
        {"gradient_accumulation_steps": [1, 8]},
        max_train_micro_batch_size_per_gpu=4,
    )
    found.tune()
    assert found.optimal_ds_config is not None
    assert found.optimal_ds_config["gradient_accumulation_steps"] == 8 and len(machine.runs) <= 5


# Memory ----------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(100, 64), *(nn.Linear(64, 64) for _ in range(4)), nn.LayerNorm(64))


def request(ranks: int = 4) -> PlanRequest:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, "zero_optimization": {"stage": 1}}
    return PlanRequest(module=model(), config=config, ranks=ranks, device_type="cuda")


def test_variants_are_planned_as_configs_are() -> None:
    plain = planned_variant(request(), {"zero_optimization.stage": 2})
    config = {**request().config, "zero_optimization": {"stage": 2}}
    found = answer(PlanRequest(module=model(), config=config, ranks=4, device_type="cuda"))
    assert plain["need"] == found.need(found.setting.near)[0] and plain["fits"]
    numel = sum(p.numel() for p in model().parameters())
    assert plain["owned"] == numel / 4 and plain["sent"] == pytest.approx(2 * 4 * numel * 3 / 4)
    whole = planned_variant(request(), {"zero_optimization.stage": 0})
    assert whole["owned"] == numel and whole["need"] > plain["need"]
    thrice = planned_variant(request(), {"zero_optimization.stage": 3})
    assert thrice["sent"] > plain["sent"]
    off = planned_variant(request(), {"zero_optimization.stage": 1, f"{OFFLOAD}.device": "cpu"})
    assert off["need"] < planned_variant(request(), {"zero_optimization.stage": 1})["need"]
    split = planned_variant(request(), {"zero_optimization.stage": 0, TENSOR: 2})
    linear = 4 * 64 * 64
    assert split["need"] == pytest.approx(whole["need"] * (1 - linear / numel / 2), rel=0.15)
    assert (
        "3 model-parallel parts"
        in planned_variant(request(), {"zero_optimization.stage": 0, STAGES: 3})["error"]
    )
    assert "error" in planned_variant(request(), {"zero_optimization.stage": 9})
    noted = note_variants(request(), [{"zero_optimization.stage": 2}])
    assert (
        noted["variants"] == [{"changes": {"zero_optimization.stage": 2}, **plain}] and noted["blocks"] == 4
    )


def test_a_run_beyond_its_limit_is_refused() -> None:
    plan = {"near": "host", "need": {"host": 100}, "fits": True}
    refuse_beyond(None, plan, 2)
    refuse_beyond(50, plan, 2)
    with pytest.raises(ValueError, match="autotuning.memory_per_rank is 49"):
        refuse_beyond(49, plan, 2)


def test_peaks_tell_what_a_sample_takes() -> None:
    near = {"near": "host", "free": {"host": 4000}, "need": {"host": 200}, "fits": True}
    info = {"ranks_per_node": 2, "stages": {"0": near}, "activation_mem_per_gpu": 40, "micro_batch": 4}
    needs = MemoryNeeds({**info, "resident": 1000, "device_type": "cpu"}, (), 1500)
    assert needs.free() == 1500 and needs.states(Point(0, 1)) == 100 and needs.per_sample() == 10
    assert needs.most_that_fits(Point(0, 1), 10**6) == (1350 - 100) // 10
    needs.fit({Point(0, 1): 1000 + 100 + 20 + 7, Point(0, 4): 1000 + 100 + 80 + 7})
    assert needs.per_sample() == 20 and needs.unexplained_bytes == 7
    assert needs.most_that_fits(Point(0, 1), 10**6) == (1350 - 107) // 20
    needs = MemoryNeeds({**info, "resident": 1000, "device_type": "cpu"}, (), 1500)
    needs.fit({Point(0, 1): 1000 + 100 + 10 + 300})  # one run tells what the plan has missed
    assert needs.unexplained_bytes == 300 and needs.most_that_fits(Point(0, 1), 10**6) == (1350 - 400) // 10
    two = (SpaceChoice(((BUCKET, 1),)), SpaceChoice(((PREFETCH, 1),)))
    plans = [(Point(3, 1), 10), (Point(3, 1, 1, two[:1]), 15), (Point(3, 1, 1, two[1:]), 12)]
    variants = [{"changes": key_of(point), "need": need, "fits": True} for point, need in plans]
    assert MemoryNeeds({"variants": variants}).states(Point(3, 1, 1, two)) == 17


# Accelerate ------------------------------------------------------------------------------------------------------


def test_accelerate_starts_its_ranks_itself(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="Accelerate's files are YAML")
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "autotuning": {"enabled": True}})
    )
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path}/ds.json\n"
    )
    given = ["launch", "--config_file", str(file), "train.py", "--lr", "1"]
    args = argparse.Namespace(user_script="/usr/bin/accelerate", user_args=given)
    assert given_config(given)["zero_optimization"] == {"stage": 2}
    assert start_command(args, "--num_gpus=2") == ACCELERATE
    new = tmp_path / "new.json"
    assert arguments_for(given, new, {}, {}) == ["launch", "--deepspeed_config_file", str(new), *given[1:]]
    named = ["launch", "--deepspeed_config_file", "old.json", "train.py"]
    assert arguments_for(named, new, {}, {}) == ["launch", "--deepspeed_config_file", str(new), "train.py"]

"""The section `trace` and `ds trace`: everything appears with its name, and nothing is left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.engine.observers.progress.timeline import unit_of
from deepspeed.observe.audit.records import read_run
from deepspeed.observe.timeline.analysis import late_ranks, longest_waits, merged, steps_of, subtract
from deepspeed.observe.timeline.files import RankTrace, UnreadableTrace, join, read_traces
from deepspeed.parallel.pipeline.module import LayerSpec, PipelineModule
from deepspeed.tools.trace import main
from tests.pool import distributed, run
from tests.zero.models import batch, config_for, make_zoo

SHARDED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def traced(
    folder: Path,
    stage: int,
    *,
    ranks: int = 2,
    gas: int = 1,
    zero: dict[str, Any] | None = None,
    late: float = 0.0,
    steps: int = 4,
    **trace: Any,
) -> None:
    run(
        _train,
        ranks,
        folder=folder,
        stage=stage,
        gas=gas,
        zero=zero or {},
        late=late,
        steps=steps,
        trace={"steps": [2, 3], "operations": False, **trace},
    )


def _train(
    folder: Path, stage: int, gas: int, zero: dict[str, Any], late: float, steps: int, trace: dict[str, Any]
) -> None:
    config = config_for(stage, gas, **zero) | {"trace": {"path": str(folder), **trace}}
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
    rank = dist.get_rank()
    plain = _marks(engine)
    for step in range(steps):
        for micro in range(gas):
            if rank == 1:
                time.sleep(late)
            engine.backward(engine(batch(step, micro, rank)))
            engine.step()
    assert _marks(engine) == plain - {"before_forward", "after_step", "on_destroy"} or steps < 4
    engine.destroy()


def _marks(engine: Any) -> set[str]:
    """Hooks of a module, methods that are not their class's, events that only the timeline has subscribed to."""
    found = {
        event for event, them in engine.events._subscribers.items() if any("imeline" in repr(t) for t in them)
    }
    parts = [*engine._network.communicators(), *engine.core.reducer.buckets]
    found |= {name for part in parts for name in vars(part) if callable(getattr(type(part), name, None))}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())
    return found | {f"{hooks} hooks"}


def names_of(trace: RankTrace, track: str) -> set[str]:
    return {event["name"] for event in trace.own(track)}


def test_stage_3_shows_modules_gathers_and_sums(tmp_path: Path) -> None:
    traced(tmp_path, 3, zero=SHARDED)
    first, second = read_traces(tmp_path)
    for trace in (first, second):
        assert [event["args"]["step"] for event in trace.own("steps")] == [2, 3]
        assert names_of(trace, "phases") >= {"forward", "backward", "step", "update"}
        assert names_of(trace, "modules, forward") >= {
            "blocks.0",
            "blocks.0.up",
            "blocks.2.norm",
            "twice",
            "embed",
        }
        assert names_of(trace, "modules, backward") >= {"blocks.0.up", "blocks.2.norm", "twice"}
        assert names_of(trace, "gathers") >= {"gather blocks.0", "gather blocks.2"}
        waits = {(e["args"]["operation"], e["args"]["of"]) for e in trace.own("waits")}
        assert ("reduce_scatter", "gradients of blocks.1") in waits
        twice = [event for event in trace.own("modules, forward") if event["name"] == "twice"]
        assert len(twice) == 4 and all(event["args"]["kind"] == "Linear" for event in twice)
    for step in steps_of(first):
        parts = (step.forward, step.backward, step.update, step.data)
        assert all(part > 0 for part in parts) and sum(parts) <= step.total
        assert 0 < step.exposed < step.total
    assert longest_waits([first])[0].milliseconds > 0


def test_a_late_rank_is_named(tmp_path: Path, capsys: Any) -> None:
    traced(tmp_path, 1, late=0.05)
    found = late_ranks(read_traces(tmp_path))
    assert (found[0].waiting, found[0].late) == (0, 1)
    assert sum(each.milliseconds for each in found if each.late == 1) > 2 * 50 * 0.8
    joined = tmp_path / "all.json"
    assert main([str(tmp_path), "-o", str(joined)]) == 0
    said = capsys.readouterr().out
    assert "who waited for whom" in said and "exposed communication" in said
    assert any(line.split()[:2] == ["0", "1"] for line in said.split("who waited")[1].splitlines())
    again = late_ranks(read_traces(joined))
    assert [(e.waiting, e.late, e.subject, e.times) for e in again] == [
        (e.waiting, e.late, e.subject, e.times) for e in found
    ]


def test_micro_batches_and_data(tmp_path: Path) -> None:
    traced(tmp_path, 2, ranks=1, gas=2, steps=3)
    (trace,) = read_traces(tmp_path)
    forwards = [event for event in trace.own("phases") if event["name"] == "forward"]
    assert len(forwards) == 4 and len(trace.own("steps")) == 2
    assert "data and script" in names_of(trace, "phases")


def test_swaps(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    traced(tmp_path / "trace", 2, ranks=1, steps=3, zero={"offload_optimizer": nvme})
    (trace,) = read_traces(tmp_path / "trace")
    assert names_of(trace, "copies and swaps") >= {"start reading", "start writing", "wait for file"}


def test_stages_of_a_pipeline_wait_for_one_another(tmp_path: Path) -> None:
    run(_train_pipeline, 2, folder=tmp_path)
    traces = read_traces(tmp_path / "trace")
    for trace, carried in zip(traces, ("gradients of activations", "activations"), strict=True):
        received = [e["args"] for e in trace.own("waits") if e["args"]["operation"] == "receive"]
        assert len(received) == 2 * 4  # two steps of four micro-batches
        assert {(each["of"], each["from"]) for each in received} == {(carried, 1 - trace.rank)}
    assert {(each.waiting, each.late) for each in late_ranks(traces)} >= {(0, 1), (1, 0)}
    steps = read_run(tmp_path / "audit").steps
    assert list(steps) == [0, 1, 2, 3]
    assert len(steps[2].tensors("gradients")) == 8  # of both stages


def _train_pipeline(folder: Path) -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 8, 8) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss())
    config = config_for(1, gas=4) | {
        "trace": {"path": str(folder / "trace"), "steps": [2, 3], "operations": False},
        "audit": {"record": str(folder / "audit")},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    batches = iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 24)
    for _ in range(3):
        engine.train_batch(batches)
    engine.destroy()


def test_operations_of_torch_are_on_the_same_clock(tmp_path: Path) -> None:
    traced(tmp_path, 1, ranks=1, steps=3, operations=True)
    (trace,) = read_traces(tmp_path)
    products = [e for e in trace.events if e.get("name") == "aten::addmm" and e.get("ph") == "X"]
    forwards = [e for e in trace.own("phases") if e["name"] == "forward"]
    begin, end = forwards[0]["ts"], forwards[0]["ts"] + forwards[0]["dur"]
    inside = [e for e in products if begin - 100 <= e["ts"] <= end + 100]
    assert len(inside) >= 8  # two in each of three blocks, two of `twice`
    moved = join([trace])["traceEvents"]
    assert {event["pid"] for event in moved} >= {0, 1}
    assert all(isinstance(event["pid"], int) for event in moved)


def test_a_run_that_ends_early_has_what_there_was(tmp_path: Path) -> None:
    traced(tmp_path, 1, ranks=1, steps=2)
    (trace,) = read_traces(tmp_path)
    assert [event["args"]["step"] for event in trace.own("steps")] == [2]


@distributed(world_size=1)
def test_the_same_bits_with_a_timeline(tmp_path: Path) -> None:
    def losses(**more: Any) -> list[float]:
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config_for(3, **SHARDED) | more)
        found = []
        for step in range(3):
            loss = engine(batch(step, 0, 0))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    trace = {"path": str(tmp_path), "steps": [1, 2], "operations": False}
    assert losses() == losses(trace=trace)


def test_unreadable_folders(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UnreadableTrace, match=r"trace\.path"):
        read_traces(tmp_path)
    (tmp_path / "rank00000.trace.json").write_text("[]")
    assert main([str(tmp_path)]) == 2
    assert "is not a timeline" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist: pass the trace.path folder" in capsys.readouterr().err
    facts = {"deepspeed": {"rank": 0, "ranks": 2}, "traceEvents": [], "baseTimeNanoseconds": 0}
    (tmp_path / "rank00000.trace.json").write_text(json.dumps(facts))
    with pytest.raises(UnreadableTrace, match="rank 1 of 2"):
        read_traces(tmp_path)


@pytest.mark.parametrize("steps", [[3, 2], [0, 1], [1]])
def test_steps_that_cannot_be(steps: list[int]) -> None:
    with pytest.raises(ValueError, match=r"trace\.steps"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "trace": {"path": "x", "steps": steps}})


def test_intervals() -> None:
    assert merged([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert subtract([(0, 10)], [(1, 2), (4, 20)]) == [(0, 1), (2, 4)]
    assert subtract([(0, 1)], []) == [(0, 1)]


@pytest.mark.parametrize(
    "names, unit",
    [
        (["blocks.3.up.weight", "blocks.3.up.bias"], "blocks.3.up"),
        (["blocks.3.norm.weight", "blocks.3.up.bias"], "blocks.3"),
        (["blocks.3.norm.weight", "blocks.4.up.bias"], "blocks.3 to blocks.4"),
        (["embed.weight", "blocks.0.up.bias"], "embed to blocks"),
        (["weight", "bias"], "parameters"),
        ([], "parameters"),
    ],
)
def test_buckets_are_named_by_their_modules(names: list[str], unit: str) -> None:
    assert unit_of(names) == unit

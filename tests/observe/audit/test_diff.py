"""`audit` and `ds diff`: runs that are the same are found so, and six planted faults are named with step and tensor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.observe.audit.compare import Comparison, compare
from deepspeed.observe.audit.records import read_run
from deepspeed.tools.diff import DIFFERENT, SAME, main
from tests.observe.audit.runs import (
    FAULTY_STEP,
    GRADIENT_PHASE,
    one_ulp,
    record,
    skipped_gradient,
    stale_parameter,
    wrong_scale,
)
from tests.pool import distributed, run
from tests.zero.models import batch, config_for

WEIGHT_PHASE = "weight for the next forward"


Healthy = Callable[..., Path]
SMALL_BUCKETS = {"reduce_bucket_size": 400}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """The record of a run without faults, which several tests compare with."""
    known: dict[str, Path] = {}

    def recorded(ranks: int = 2, **options: Any) -> Path:
        key = f"{ranks} {sorted(options.items())}"
        if key not in known:
            known[key] = tmp_path_factory.mktemp("healthy")
            train(known[key], ranks, **options)
        return known[key]

    return recorded


def compared(a: Path, b: Path, tolerance: float | None = None) -> Comparison:
    return compare(read_run(a), read_run(b), tolerance)


def train(folder: Path, ranks: int = 2, **options: Any) -> None:
    run(_train, ranks, folder=folder, options=options)


def _train(folder: Path, options: dict[str, Any]) -> None:
    record(folder, **options)


# Sameness ---------------------------------------------------------------------------------------------------

PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 0}, {"stage": 1}),
    (
        {"stage": 1},
        {"stage": 3, "zero": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}},
    ),
    (
        {"stage": 2, "bf16": True},
        {"stage": 3, "bf16": True, "zero": {"stage3_param_persistence_threshold": 0}},
    ),
    ({"stage": 0, "gas": 2}, {"stage": 1, "gas": 2}),
    ({"stage": 1}, {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}, **SMALL_BUCKETS}}),
]


@pytest.mark.parametrize("left, right", PAIRS)
def test_stages_do_the_same_to_the_bit(
    left: dict[str, Any], right: dict[str, Any], healthy: Healthy, tmp_path: Path
) -> None:
    train(tmp_path, **right)
    found = compared(healthy(**left), tmp_path)
    assert found.tolerance == 0 and found.reasons == []
    assert found.differences == [] and found.causes == [] and found.remarks == []
    assert found.steps == [0, 1, 2, 3, 4]
    steps = read_run(tmp_path).steps
    assert len(steps[1].tensors("gradients")) == len(steps[1].tensors("weights")) > 10
    assert all(line["proof"] and all(each["equal"] for each in line["proof"]) for line in steps[2].ranks)


def test_states_in_files_do_the_same_to_the_bit(healthy: Healthy, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    train(tmp_path, ranks=1, stage=3, zero={"offload_optimizer": nvme, "offload_param": nvme})
    found = compared(healthy(ranks=1, stage=0), tmp_path)
    assert found.differences == [] and found.tolerance == 0
    step = read_run(tmp_path).steps[2]
    assert len(step.tensors("master")) == len(step.tensors("gradients")) > 10


def test_another_number_of_ranks_and_another_precision_are_compared_within_a_tolerance(
    healthy: Healthy, tmp_path: Path
) -> None:
    train(tmp_path, ranks=1, stage=0, batches=_of_both_ranks)
    found = compared(healthy(stage=1), tmp_path)
    assert 0 < found.tolerance < 1e-3 and "data-parallel ranks 2 and 1" in found.reasons
    assert found.differences == []
    assert compared(healthy(stage=1), tmp_path, 0).differences  # sums in another order
    found = compared(healthy(stage=1), healthy(stage=2, bf16=True))
    assert found.tolerance > 1e-3 and found.differences == []
    assert compared(healthy(stage=1), healthy(stage=2, bf16=True), 1e-6).first is not None


def _of_both_ranks(step: int, micro: int) -> Tensor:
    return torch.cat([batch(step, micro, 0), batch(step, micro, 1)])


def test_a_fault_is_found_with_another_number_of_ranks(healthy: Healthy, tmp_path: Path) -> None:
    train(tmp_path, stage=2, fault=partial(skipped_gradient, "blocks.0.down.bias"))
    first = compared(healthy(ranks=1, stage=1, batches=_of_both_ranks), tmp_path).first
    assert first is not None and (first.step, first.tensor) == (FAULTY_STEP, "blocks.0.down.bias")


# Six faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"stage": 1, "zero": SMALL_BUCKETS}, {"stage": 3, "bf16": True}, {"stage": 0, "zero": SMALL_BUCKETS}],
)
def test_one_ulp_in_one_bucket(
    options: dict[str, Any], healthy: Healthy, tmp_path: Path, capsys: Any
) -> None:
    train(tmp_path, **options, fault=partial(one_ulp, "blocks.1.up.weight"))
    found = compared(healthy(**options), tmp_path)
    first = found.first
    assert first is not None
    assert (first.step, first.phase, first.tensor) == (FAULTY_STEP, GRADIENT_PHASE, "blocks.1.up.weight")
    assert first.module == "Linear blocks.1.up"
    assert [each.tensor for each in found.differences if each.phase == GRADIENT_PHASE and each.step == 3] == [
        "blocks.1.up.weight"
    ]
    assert main([str(healthy(**options)), str(tmp_path)]) == DIFFERENT
    said = capsys.readouterr().out
    assert (
        f"first difference: step 3, {GRADIENT_PHASE} of blocks.1.up.weight in Linear blocks.1.up: relative"
        in said
    )
    assert "every bit" in said


@pytest.mark.parametrize("options", [{"stage": 2, "bf16": True}, {"stage": 3, "bf16": True}])
def test_a_skipped_gradient(options: dict[str, Any], healthy: Healthy, tmp_path: Path) -> None:
    train(tmp_path, **options, fault=partial(skipped_gradient, "blocks.2.norm.weight"))
    found = compared(healthy(**options), tmp_path)
    first = found.first
    assert first is not None
    assert (first.step, first.phase, first.tensor) == (FAULTY_STEP, GRADIENT_PHASE, "blocks.2.norm.weight")
    assert first.relative > 0.1
    assert "blocks.2.norm.weight" in found.remarks[0] and "B, step 3" in found.remarks[0]


def test_a_wrong_scale(healthy: Healthy, tmp_path: Path) -> None:
    options: dict[str, Any] = {"stage": 1, "zero": SMALL_BUCKETS}
    train(tmp_path, **options, fault=partial(wrong_scale, "twice.bias"))
    found = compared(healthy(**options), tmp_path)
    first = found.first
    assert first is not None and (first.step, first.phase) == (FAULTY_STEP, GRADIENT_PHASE)
    wrong = {
        each.tensor: each for each in found.differences if (each.step, each.phase) == (3, GRADIENT_PHASE)
    }
    assert "twice.bias" in wrong and "embed.weight" not in wrong
    assert all("B is 2 times A" in each.text for each in wrong.values())
    assert (
        all("B, step 3" in remark and "gradient bucket" in remark for remark in found.remarks)
        and found.remarks
    )


def test_a_swapped_batch(healthy: Healthy, tmp_path: Path) -> None:
    train(tmp_path, stage=2, bf16=True, batches=_swapped)
    found = compared(healthy(stage=2, bf16=True), tmp_path)
    first, tensor = found.first, found.first_tensor
    assert first is not None and (first.step, first.phase, first.tensor) == (
        FAULTY_STEP,
        "batch",
        "inputs[0]",
    )
    assert first.text == "different samples on rank 1"
    assert tensor is not None and (tensor.step, tensor.phase) == (FAULTY_STEP, GRADIENT_PHASE)


def _swapped(step: int, micro: int) -> Tensor:
    rank = dist.get_rank()
    step = {2: 3, 3: 2}.get(step, step) if rank == 1 else step
    return batch(step, micro, rank)


def test_a_stale_parameter(healthy: Healthy, tmp_path: Path) -> None:
    train(tmp_path, stage=1, fault=partial(stale_parameter, "embed.weight"))
    first = compared(healthy(stage=1), tmp_path).first
    assert first is not None
    assert (first.step, first.phase, first.tensor) == (FAULTY_STEP, WEIGHT_PHASE, "embed.weight")
    assert first.text == "in B, rank 1 differs from the ranks before it"


def test_another_seed(healthy: Healthy, tmp_path: Path) -> None:
    train(tmp_path, stage=3, bf16=True, seed=7)
    found = compared(healthy(stage=3, bf16=True), tmp_path)
    assert found.first is not None and (found.first.step, found.first.tensor) == (0, "embed.weight")
    assert found.causes == ["step 1: the seed of rank 0 is 0 in A and 7 in B"]


def test_another_seed_of_dropout(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 4)):
        run(_with_dropout, 1, folder=tmp_path / name, seed=seed)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.first is not None and (found.first.step, found.first.phase) == (1, "loss")
    assert found.first_tensor is not None and found.first_tensor.step == 1
    assert found.causes == ["step 1: the seed of rank 0 is 3 in A and 4 in B"]


def _with_dropout(folder: Path, seed: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
    config = config_for(1) | {"audit": {"record": str(folder)}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    torch.manual_seed(seed)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    engine.destroy()


# What is recorded -------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_the_proof_names_the_bucket(tmp_path: Path) -> None:
    from deepspeed.engine.observers import audit

    with mock.patch.object(audit.logger, "error") as told:
        record(tmp_path, 2, fault=partial(skipped_gradient, "blocks.1.down.weight"))
    (call,) = told.call_args_list
    assert "in step 3 the sum of gradient bucket" in call.args[0] and "blocks.1.down.weight" in call.args[0]


@pytest.mark.parametrize(
    "stage, options",
    [(0, {"gas": 2}), (1, {}), (2, {"gas": 2, "zero": SMALL_BUCKETS}), (3, {"bf16": True, "gas": 2})],
)
@distributed(world_size=2)
def test_right_sums_are_proven(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    buckets = record(tmp_path, stage, steps=3, **options)
    dist.barrier()
    steps = read_run(tmp_path).steps
    looked_at = {each["bucket"] for n in (1, 2, 3) for line in steps[n].ranks for each in line["proof"]}
    assert looked_at == set(range(buckets))
    assert not [found for step in steps.values() for found in step.disproved()]


@distributed(world_size=1)
def test_steps_and_stride(tmp_path: Path) -> None:
    record(tmp_path, 1, steps=8, first_step=2, stride=3, gas=2, prove_buckets=0)
    assert list(read_run(tmp_path).steps) == [0, 2, 5, 8]


@distributed(world_size=1)
def test_after_its_last_step_an_audit_costs_nothing(tmp_path: Path) -> None:
    config = config_for(2) | {"audit": {"record": str(tmp_path), "steps": 2}}
    plain, audited = (
        deepspeed.initialize(model=nn.Linear(4, 1), config=each)[0] for each in (config_for(2), config)
    )
    for engine in (plain, audited):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()

    def count(engine: Any) -> dict[str, int]:
        return {event: len(found) for event, found in engine.events._subscribers.items() if found}

    assert count(plain) == count(audited)
    assert plain.core.executor.before_step == audited.core.executor.before_step == []
    plain.destroy()
    audited.destroy()


@distributed(world_size=1)
def test_losses_are_the_same_bits_with_an_audit(tmp_path: Path) -> None:
    def losses(**more: Any) -> list[float]:
        torch.manual_seed(0)
        engine, *_ = deepspeed.initialize(
            model=nn.Sequential(nn.Linear(4, 1), nn.Dropout()), config=config_for(1) | more
        )
        found = []
        for _ in range(3):
            loss = engine(torch.ones(2, 4)).square().sum()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found

    assert losses() == losses(audit={"record": str(tmp_path)})


# The command ------------------------------------------------------------------------------------------------


def test_exit_codes(healthy: Healthy, tmp_path: Path, capsys: Any) -> None:
    a, b = str(healthy(stage=0)), str(healthy(stage=1))
    assert main([a, b]) == SAME
    assert "the same" in capsys.readouterr().out
    assert main([a, b, "--json"]) == SAME
    assert json.loads(capsys.readouterr().out)["differences"] == []
    assert main([a, str(tmp_path)]) == 2
    assert "audit.record" in capsys.readouterr().err
    (tmp_path / "rank00000.jsonl").write_text("hello\n")
    assert main([a, str(tmp_path)]) == 2
    train(tmp_path, steps=6, first_step=6)
    assert main([a, str(tmp_path)]) == 2
    assert "audit.first_step" in capsys.readouterr().err
    (tmp_path / "rank00001.jsonl").unlink()
    assert main([a, str(tmp_path)]) == 2
    assert "2 ranks, but rank00001.jsonl is missing" in capsys.readouterr().err


def test_a_table_without_rich(healthy: Healthy, capsys: Any) -> None:
    folders = [str(healthy(stage=1)), str(healthy(stage=2, bf16=True))]
    with mock.patch.dict(sys.modules, {"rich.console": None}):
        assert main([*folders, "--show", "3", "--tolerance", "0"]) == DIFFERENT
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step") and line.endswith("by how much") for line in lines)
    assert lines[-1].startswith("and ") and lines[-1].endswith(" more")


@distributed(world_size=1)
def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"audit\.record.*cannot be used as a folder"):
        record(tmp_path / "file" / "folder")

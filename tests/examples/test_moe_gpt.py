"""The example with experts: its flags, PR-MoE, and a student that learns from a teacher's checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.programs import REPOSITORY
from tests.pool import distributed

SMALL = "--hidden-size 32 --seq-length 32 --train-iters 12 --eval-interval 6 --micro-batch-size 4 --lr 1e-2".split()


def example() -> Any:
    path = REPOSITORY / "examples/moe_gpt/train.py"
    spec = importlib.util.spec_from_file_location("moe_gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@distributed(world_size=2)
def test_teacher_and_student(tmp_path: Path) -> None:
    train = example()
    shared = [*SMALL, "--mlp-type", "residual", "--moe-expert-parallel-size", "2", "--topk", "2"]
    teacher = ["--num-layers", "4", "--num-experts", "2", "4", "--save", str(tmp_path)]
    losses = train.main([*shared, *teacher])
    assert len(losses) == 2 and losses[1] < losses[0] < 5.6
    student = ["--num-layers", "2", "--num-experts", "4", "--mos", "--load-teacher", str(tmp_path)]
    student += ["--num-layers-teacher", "4", "--num-experts-teacher", "2", "4", "--mos-stop", "6"]
    losses = train.main([*shared, *student])
    assert losses[1] < losses[0]


@distributed(world_size=2)
def test_flags_of_capacity() -> None:
    flags = (
        "--num-experts 4 --moe-train-capacity-factor 0.5 --moe-eval-capacity-factor 2 --moe-min-capacity 1"
    )
    losses = example().main([*SMALL, *flags.split(), "--zero-stage", "3"])
    assert losses[1] < losses[0]
    losses = example().main([*SMALL, "--num-experts", "1", "--disable-moe-token-dropping"])
    assert losses[1] < losses[0]


def test_a_teacher_is_needed() -> None:
    with pytest.raises(SystemExit):
        example().parse_arguments(["--mos"])

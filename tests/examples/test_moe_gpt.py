"""The example with experts: its flags, PR-MoE, and a student that learns from a teacher's checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepspeed import comm as dist
from tests.examples.scripts import script
from tests.pool import distributed

SMALL = "--hidden-size 32 --seq-length 32 --train-iters 12 --eval-interval 6 --micro-batch-size 4 --lr 1e-2".split()


def example(name: str = "train") -> Any:
    return script("moe_gpt", name)


@distributed(world_size=2)
def test_printed_teacher_and_student(tmp_path: Path) -> None:
    """Both commands of the docstring, in a short form."""
    train = example()
    printed = re.findall(
        r"train\.py (.*)", train.__doc__.replace("\\\n", " ").replace("out/", f"{tmp_path}/")
    )
    (teacher,) = [command.split() for command in printed if "--save" in command]
    (student,) = [command.split() for command in printed if "--mos" in command]
    first = train.main([*teacher, *SMALL])
    losses = train.main([*student, *SMALL, "--mos-stop", "6"])
    assert first[1] < first[0] < 5.6 and losses[1] < losses[0] < 5.6


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--num-layers 3 --num-experts 4 8", "--num-experts 4 8: give one number, or 1:"),
        (
            "--num-experts 4 --mos --load-teacher x --num-layers-teacher 6 --num-experts-teacher 4 8",
            "--num-experts-teacher 4 8: give one number, or 3: one for each .* every second of --num-layers-teacher 6",
        ),
    ],
)
def test_numbers_of_experts_fit_the_layers(
    flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example().parse_arguments(flags.split())
    assert re.search(named, capsys.readouterr().err)


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


SHORT = (
    "--steps 12 --batch 4 --layers 2 --heads 2 --width 32 --context 32 --evaluate_every 4 --lr 1e-2".split()
)


@pytest.mark.parametrize("topk", [1, 2])
def test_as_many_flops_as_the_dense_model(topk: int) -> None:
    """All but those of the gates."""
    pytest.importorskip("tokenizers")
    compare = example("compare")
    options, found = compare.parse_arguments([*SHORT, "--topk", str(topk)]), {}
    ids = torch.zeros(4, 32, dtype=torch.int64)
    for run in compare.RUNS:
        model = compare.model_of(options, run)
        with FlopCounterMode(display=False) as counter:
            model(ids, ids).backward()
        found[run] = counter.get_total_flops()
    gates = options.layers * 3 * 2 * ids.numel() * options.width * options.experts
    assert found["mixture"] == found["dense"] + gates


@distributed(world_size=2)
def test_against_the_dense_model(tmp_path: Path) -> None:
    """The short form, the experts spread over two ranks."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    compare = example("compare")
    sys.modules["data"].TEXT_LIMIT_BYTES = 500_000  # type: ignore[attr-defined]
    folders = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "out")]
    seeds = compare.main([*SHORT, "--seeds", "0", *folders])
    if dist.get_rank() == 0:
        for rows in seeds[0].values():
            assert [row["step"] for row in rows] == [4, 8, 12]
            assert rows[-1]["validation_loss"] < rows[0]["validation_loss"] < 8.3
        assert (tmp_path / "out/loss.png").stat().st_size > 5000
        assert compare.main(["--picture_only", *folders]) == seeds


def test_the_factor_in_steps() -> None:
    pytest.importorskip("tokenizers")
    compare = example("compare")

    def curve(*losses: float) -> list[dict[str, float]]:
        return [{"step": 10.0 * n, "validation_loss": loss} for n, loss in enumerate(losses, 1)]

    assert compare.factor({"dense": curve(5, 4, 3), "mixture": curve(4, 3.5, 2.5)}) == pytest.approx(30 / 25)
    assert compare.factor({"dense": curve(5, 4, 3), "mixture": curve(4, 3.5, 3.2)}) is None

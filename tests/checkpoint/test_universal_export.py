"""``ds_to_universal``: against that release's own conversion of the same checkpoints, and of our own."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import read_archive
from deepspeed.checkpoint.foreign import universal_export
from deepspeed.tools import ds_to_universal
from tests.checkpoint.make_universal_checkpoints import (
    CONVERTED,
    INFO,
    SPLIT,
    TP,
    UNIVERSAL,
    Unit,
    split_config,
    split_model,
    train_split,
)
from tests.checkpoint.make_upstream_checkpoints import FIXTURES
from tests.checkpoint.models import save_as_fixtures_were
from tests.checkpoint.test_universal import load_into
from tests.checkpoint.test_upstream_tp import load_into as load_split
from tests.checkpoint.test_upstream_tp import whole_state
from tests.pool import run


def content(path: Path) -> Any:
    """Without the dim along which parts were joined, which tensors that one rank saved do not have."""
    held = read_archive(path)
    return held["param"] if isinstance(held, dict) and "param" in held else held


@pytest.mark.parametrize(
    ("source", "theirs"),
    [(FIXTURES / name, UNIVERSAL / name) for name in CONVERTED]
    + [(SPLIT / name, SPLIT / name) for name in ("stage1_bf16", "stage2_fp32")],
    ids=str,
)
def test_bit_for_bit_what_that_release_makes_of_its_checkpoints(
    source: Path, theirs: Path, tmp_path: Path
) -> None:
    inject = source.parent == FIXTURES
    out = universal_export.convert(
        source / "global_step3", tmp_path / "universal", inject_missing_state=inject
    )
    assert (tmp_path / "latest_universal").read_text() == "universal"
    found, expected = ({p.relative_to(f) for p in f.rglob("*.pt")} for f in (out, theirs / "universal"))
    assert expected <= found  # that release leaves the step of stage 3 in the common file only
    assert all(path.name == "step.pt" for path in found - expected)
    for path in expected:
        ours, reference = content(out / path), content(theirs / "universal" / path)
        if path.name == "optimizer_state.pt":
            assert ours["param_groups"] == reference["param_groups"]
            assert vars(ours["loss_scaler"]) == vars(reference["loss_scaler"])
        elif path.parent.name == "head.weight":  # that release has the rounded weights for tied masters
            assert torch.equal(ours, content(out / "zero/emb.weight/fp32.pt"))
        elif path.parts[0] == "zero":
            reference = torch.as_tensor(reference)
            rows = len(reference) if reference.dim() else None  # the vocabulary without its padding
            assert torch.equal(torch.as_tensor(ours)[:rows] if rows else ours, reference), path
        else:
            assert (out / path).read_bytes() == (theirs / "universal" / path).read_bytes()


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "fp16"), (3, "bf16")])
def test_ours_comes_back_at_any_stage(stage: int, precision: str, tmp_path: Path) -> None:
    made = run(save_as_fixtures_were, 2, folder=str(tmp_path / "own"), stage=stage, precision=precision)[0]
    universal_export.convert(tmp_path / "own/global_step3", tmp_path / "made/universal")
    into = [0, 3] if stage in (1, 2) else [1, 2]
    for found in run(load_into, 1, folder=str(tmp_path / "made"), stages=into, precision=precision)[
        0
    ].values():
        assert found["client"]["epoch"] == 3 and found["schedule"] == made["schedule"]
        assert found["scaler"]["scale"] == made["scale"]
        for key, value in made["state"].items():
            assert torch.equal(found["state"][key], value), key
        for name, value in made["weights"].items():
            assert torch.equal(found["module"][name], value), name


def options_after_a_round_trip(folder: str) -> tuple[list[set[str]], list[set[str]]]:
    """Names of the group options of a fused Adam, as made and as loaded from a universal checkpoint."""
    import deepspeed

    found = []
    for universal in (False, True):
        settings = {
            "train_batch_size": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 1},
            "checkpoint": {"load_universal": universal},
        }
        net = torch.nn.Linear(2, 2)
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
        if universal:
            engine.load_checkpoint(folder, tag="universal")
        found.append([set(group) for group in engine.optimizer.param_groups])
        if not universal:
            engine.save_checkpoint(folder, tag="own")
            universal_export.convert(Path(folder, "own"), Path(folder, "universal"))
    return found[0], found[1]


def test_no_options_of_other_optimizers_are_loaded(tmp_path: Path) -> None:
    made, loaded = run(options_after_a_round_trip, 1, folder=str(tmp_path))[0]
    assert loaded == made and "amsgrad" not in made[0]


def save_split(folder: str, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    unit = Unit()
    model = split_model(unit)
    told_by_client = {"universal_checkpoint_info": INFO} if stage == 1 else {}
    if not told_by_client:
        model.universal_checkpoint_info = lambda: INFO
    engine, _, _, _ = deepspeed.initialize(model=model, config=split_config(stage, "bf16"), mpu=unit)
    train_split(engine, 0)
    engine.save_checkpoint(folder, client_state={"epoch": 3, **told_by_client})
    assert engine.load_checkpoint(folder)[1] == {"epoch": 3, "universal_checkpoint_info": INFO}
    return whole_state(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_ours_of_tensor_parallel_ranks(stage: int, tmp_path: Path) -> None:
    state = run(save_split, TP, folder=str(tmp_path / "own"), stage=stage)[0]
    out = universal_export.convert(tmp_path / "own/global_step3", tmp_path / "made/universal")
    assert all(
        read_archive(path)["universal_checkpoint_info"] == INFO for path in out.glob("*model_states.pt")
    )
    for tp, world in ((1, 1), (2, 2)):
        options = {"tp": tp, "stages": [2], "precision": "bf16", "universal": True}
        for found in run(load_split, world, folder=str(tmp_path / "made"), **options)[0]:
            for key, value in state.items():
                assert torch.equal(found["state"][key].view(-1), value.view(-1)), key


def test_the_command(tmp_path: Path) -> None:
    """Two processes share the work; Megatron's scripts and others call ``main`` with their own arguments."""
    source, out = FIXTURES / "stage2_bf16/global_step3", tmp_path / "a/universal"
    command = [sys.executable, "-m", "deepspeed.tools.ds_to_universal", "--input_folder", str(source)]
    done = subprocess.run(
        [*command, "--output_folder", str(out)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and str(out) in done.stdout, done.stderr
    args = argparse.Namespace(
        input_folder=source, output_folder=tmp_path / "b/universal", num_extract_workers=1
    )
    ds_to_universal.main(args)
    ours = sorted(p.relative_to(out) for p in out.rglob("*.pt"))
    assert ours == sorted(p.relative_to(tmp_path / "b/universal") for p in (tmp_path / "b").rglob("*.pt"))
    failed = subprocess.run(
        [*command, "--output_folder", str(source)], capture_output=True, text=True, timeout=100
    )
    assert failed.returncode and "would be overwritten" in failed.stderr


def test_processes_share_the_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(universal_export, "PER_PROCESS", 4)
    out = universal_export.convert(FIXTURES / "stage1_fp32/global_step3", tmp_path / "universal", processes=2)
    assert len(list(out.glob("zero/*/fp32.pt"))) == 7


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_half_written_is_left(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FIXTURES / "stage1_fp32/global_step3"
    before = universal_export.convert(source, tmp_path / "universal")
    files = sorted(before.rglob("*"))
    write = universal_export.write_archive

    def interrupted(path: Path, made: Any, **options: Any) -> int:
        if path.parent.name == "l2.bias":
            raise error
        return write(path, made, **options)

    monkeypatch.setattr(universal_export, "write_archive", interrupted)
    with pytest.raises(error):
        universal_export.convert(source, tmp_path / "universal")
    assert sorted(before.rglob("*")) == files
    assert {path.name for path in tmp_path.iterdir()} == {"universal", "latest_universal"}
    with pytest.raises(error):
        universal_export.convert(source, tmp_path / "other/universal")
    assert not list((tmp_path / "other").iterdir())


def test_a_universal_one_and_one_without_an_optimizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is already a universal checkpoint"):
        universal_export.convert(UNIVERSAL / "stage1_fp32/universal", tmp_path / "out")

"""Our exports in the layout of release 0.19.8, compared with files that it wrote itself.

``check_exports.py`` has that release load them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.consolidate import consolidate
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.files.archive_reader import read_archive
from deepspeed.checkpoint.foreign import upstream_export
from deepspeed.checkpoint.foreign.upstream_export import export_checkpoint
from tests.checkpoint.make_upstream_checkpoints import CASES, FIXTURES
from tests.checkpoint.models import config, make_engine, save_as_fixtures_were, train
from tests.checkpoint.test_upstream import expected, load_into
from tests.pool import distributed, run

SHARDED = [f"stage{stage}_{precision}" for stage, precision in CASES if stage] + ["stage2_round_robin"]


def differences(found: Any, wanted: Any, where: str = "", *, values: bool = True) -> list[str]:
    """Where two contents differ in keys and their order, types, shapes, dtypes and, if asked, ``values``."""
    if type(found) is not type(wanted) and not isinstance(wanted, (int, float)):
        return [f"{where}: {type(found).__name__} for {type(wanted).__name__}"]
    if isinstance(wanted, torch.Tensor):
        same = found.dtype == wanted.dtype and found.shape == wanted.shape
        if same and values:
            same = torch.equal(*(_without_padding(where, tensor) for tensor in (found, wanted)))
        return [] if same else [f"{where}: {found} for {wanted}"]
    if isinstance(wanted, dict):
        if list(found) != list(wanted):
            return [f"{where}: keys {list(found)} for {list(wanted)}"]
        return [
            line
            for key in wanted
            for line in differences(found[key], wanted[key], f"{where}/{key}", values=values)
        ]
    if isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            return [f"{where}: {len(found)} entries for {len(wanted)}"]
        pairs = enumerate(zip(found, wanted, strict=True))
        return [line for i, (f, w) in pairs for line in differences(f, w, f"{where}/{i}", values=values)]
    if hasattr(wanted, "__dict__") and not isinstance(wanted, torch.dtype):
        return differences(vars(found), vars(wanted), where, values=values)
    return (
        []
        if found == wanted or (not values and isinstance(wanted, float))
        else [f"{where}: {found!r} for {wanted!r}"]
    )


def _without_padding(where: str, tensor: torch.Tensor) -> torch.Tensor:
    for name, places in _stage3_padding().items():
        if where.startswith("rank_1") and where.endswith(name):
            tensor = tensor.clone()
            tensor[places] = 0
    return tensor


def _stage3_padding() -> dict[str, list[int]]:
    """Where the odd-sized tensors of rank 1 of 2 end, in tensors laid end to end."""
    groups = [[66, 35, 42], [7, 7, 7, 6]]
    made: dict[str, list[int]] = {"frozen_param_fragments/frozen.bias": [2]}
    for number, numels in enumerate(groups):
        ends, position = [], 0
        for numel in numels:
            position += -(-numel // 2)
            ends += [position - 1] if numel % 2 else []
        made[f"fp32_flat_groups/{number}"] = ends
    return made


def compare(exported: Path, fixture: Path, *, values: bool) -> list[str]:
    files = {path.name for path in fixture.iterdir()}
    assert {path.name for path in exported.iterdir()} == files
    found: list[str] = []
    for name in sorted(files):
        rank = re.search(r"_rank_(\d+)_mp", name)
        where = f"rank_{rank[1] if rank else 0}: {name}"
        found += differences(
            read_archive(exported / name), read_archive(fixture / name), where, values=values
        )
    return found


@pytest.mark.parametrize("name", SHARDED)
def test_a_checkpoint_of_that_release_comes_back_bit_for_bit(tmp_path, name):
    folder = export_checkpoint(FIXTURES / name, tmp_path)
    assert folder == tmp_path / "global_step3" and (tmp_path / "latest").read_text() == "global_step3"
    assert not compare(folder, FIXTURES / name / "global_step3", values=True)


def test_the_bf16_optimizer_of_that_release(tmp_path):
    """Its files come back, too, with the stage, without which its own zero_to_fp32 refuses them."""
    name = "stage1_fp32_accumulation"
    folder = export_checkpoint(FIXTURES / name, tmp_path)
    optims = compare(folder, FIXTURES / name / "global_step3", values=True)
    assert len(optims) == 2 and all("/optimizer_state_dict: keys" in line for line in optims), optims
    for path in (FIXTURES / name / "global_step3").glob("*optim_states.pt"):
        ours, theirs = (read_archive(f / path.name)["optimizer_state_dict"] for f in (folder, path.parent))
        assert ours.pop("zero_stage") == 1
        assert not differences(ours, theirs)


@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_what_our_engine_saved_has_its_structure(tmp_path, stage, precision):
    """The same model trained by us at another stage: every key, type, shape and dtype, and nearly the same values."""
    own = tmp_path / "own"
    made = run(save_as_fixtures_were, 2, folder=str(own), stage=3 - stage, precision=precision)[0]
    folder = export_checkpoint(own, tmp_path / "out", zero_stage=stage)
    fixture = FIXTURES / f"stage{stage}_{precision}/global_step3"
    lines = compare(folder, fixture, values=False)
    allowed = r"ds_config|/param_groups/\d: keys"
    allowed += "" if stage else "|/optimizer: keys"
    assert not [line for line in lines if not re.search(allowed, line)], lines
    for path in fixture.glob("*optim_states.pt"):
        ours, theirs = (read_archive(f / path.name)["optimizer_state_dict"] for f in (folder, fixture))
        inner = "base_optimizer_state" if stage < 3 else "optimizer_state_dict"
        for group, wanted in zip(ours[inner]["param_groups"], theirs[inner]["param_groups"], strict=True):
            assert {**wanted, **group}.keys() == group.keys() | {"decoupled_weight_decay", "fused"}
            assert {k: group[k] for k in ("lr", "betas", "eps", "weight_decay", "params")} == {
                k: wanted[k] for k in ("lr", "betas", "eps", "weight_decay", "params")
            }
        key = "single_partition_of_fp32_groups" if stage < 3 else "fp32_flat_groups"
        where = "rank_1" if "rank_1" in path.name else "rank_0"
        for number, pair in enumerate(zip(ours[key], theirs[key], strict=True)):
            mine, other = (_without_padding(f"{where}/{key}/{number}", tensor.detach()) for tensor in pair)
            assert (mine - other).abs().max() < (1e-5 if precision == "fp32" else 2e-2)
    whole = consolidate(folder).materialized()
    for name, value in made["state"].items():
        if name.endswith("/fp32") and stage:
            assert torch.equal(whole[name.removesuffix("/fp32")].view(-1), value.view(-1)), name


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_stage_and_number_of_ranks(tmp_path, stage, world):
    """From stage 3 on two ranks; what is read back is the oracle's, to the bit."""
    export_checkpoint(FIXTURES / "stage3_fp16", tmp_path, zero_stage=stage, world_size=world)
    optims = list((tmp_path / "global_step3").glob("*optim_states.pt"))
    assert len(optims) == world
    loaded = run(load_into, 2, folder=str(tmp_path), stages=[stage], precision="fp16")[0][stage]
    compared = 0
    for key, value in expected(3, "fp16").items():
        if key in loaded["state"]:
            assert torch.equal(loaded["state"][key].view(-1), value.float().view(-1)), key
            compared += 1
    assert compared >= 21
    assert (loaded["scaler"]["scale"], loaded["scaler"]["good_steps"]) == (256.0, 3)


def _save_zoo(folder: str) -> None:
    engine = make_engine(config(1))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)


def test_unused_empty_and_scalar_parameters(tmp_path):
    run(_save_zoo, 2, folder=str(tmp_path / "own"))
    before = consolidate(tmp_path / "own/global_step2").materialized()
    for stage in (0, 1, 2, 3):
        folder = export_checkpoint(tmp_path / "own", tmp_path / f"out{stage}", zero_stage=stage, world_size=3)
        after = consolidate(folder).materialized()
        assert after.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(after[name], value) and after[name].dtype == value.dtype, name


class Reversed(torch.nn.Module):
    """A model whose optimizer holds its parameters in another order than the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@distributed(world_size=2)
def test_parameters_lie_in_the_optimizers_order(tmp_path):
    import deepspeed

    model = Reversed()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=[model.b.weight, model.a.weight], config=config(2, scheduler=None)
    )
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path / "own", tag="t")
    if engine.global_rank == 0:
        folder = export_checkpoint(tmp_path / "own", tmp_path / "out", world_size=1)
        assert list(read_archive(folder / "mp_rank_00_model_states.pt")["param_shapes"][0]) == [
            "b.weight",
            "a.weight",
        ]
        state = read_archive(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        flat = torch.cat([model.b.weight.detach().view(-1), model.a.weight.detach().view(-1)])
        assert torch.equal(state["single_partition_of_fp32_groups"][0], flat)


def test_what_cannot_be_exported_says_why(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no file 'latest'"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="optimizer state by index.*load it into an engine"):
        export_checkpoint(FIXTURES / "stage0_fp32", tmp_path)
    with pytest.raises(ValueError, match="zero_stage=7, world_size=2"):
        export_checkpoint(FIXTURES / "stage1_fp32", tmp_path, zero_stage=7)
    with pytest.raises(ValueError, match="overwritten by its own export"):
        export_checkpoint(FIXTURES / "stage1_fp32", FIXTURES / "stage1_fp32")
    assert not [path for path in tmp_path.iterdir() if path.name != "out"]


def test_a_failure_leaves_the_former_export(tmp_path, monkeypatch):
    export_checkpoint(FIXTURES / "stage1_fp32", tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "global_step3").iterdir()}

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepspeed.checkpoint.files.archive_writer._write_tensor", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_checkpoint(FIXTURES / "stage2_fp32", tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "global_step3").iterdir()} == before


def test_command(tmp_path):
    command = [sys.executable, "-m", upstream_export.__name__, str(FIXTURES / "stage1_bf16"), str(tmp_path)]
    done = subprocess.run(
        [*command, "--zero_stage", "3", "--world_size", "4", "--tag", "global_step3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "global_step3").glob("bf16_zero_pp_rank_?_mp_rank_00_optim_states.pt"))) == 4
    failed = subprocess.run(
        [*command[:3], str(tmp_path / "none"), str(tmp_path)], capture_output=True, text=True
    )
    assert failed.returncode == 1 and "latest" in failed.stderr and "Traceback" not in failed.stderr

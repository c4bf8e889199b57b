"""Checkpoints that DeepSpeed 0.19.8 wrote (``make_upstream_checkpoints.py`` made them), and its layout from
ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.consolidate import consolidate
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.make_upstream_checkpoints import CASES, FIXTURES, groups, model
from tests.checkpoint.make_upstream_checkpoints import config as upstream_config
from tests.checkpoint.models import full_state
from tests.pool import run

TRAINED = [name for name, param in model().named_parameters() if param.requires_grad]
SHARDED = [case for case in CASES if case[0]]


def fixture(stage: int, precision: str) -> Path:
    return FIXTURES / f"stage{stage}_{precision}"


def converted(folder: Path) -> dict[str, torch.Tensor]:
    """That release's own conversion of what it saved in ``folder``."""
    kept = torch.load(folder / "expected.pt")
    return dict(zip(kept["sizes"], kept["flat"].split(list(kept["sizes"].values())), strict=True))


def expected(stage: int, precision: str) -> dict[str, torch.Tensor]:
    """Whole masters and moments: that release's own conversion, or the whole tensors that stage 0 saves."""
    if stage:
        return converted(fixture(stage, precision))
    saved = torch.load(fixture(0, precision) / "global_step3/mp_rank_00_model_states.pt")
    optimizer = saved["optimizer"]
    names = [
        [n for n, p in model().named_parameters() if p.requires_grad and (p.dim() > 1) == big]
        for big in (True, False)
    ]
    inner = optimizer.get("optimizer_state_dict", optimizer)
    found: dict[str, torch.Tensor] = {}
    for group, members in zip(inner["param_groups"], names, strict=True):
        for position, (number, name) in enumerate(zip(group["params"], members, strict=True)):
            for kind, value in inner["state"][number].items():
                found[f"{name}/{kind}"] = value
            masters = optimizer.get("fp32_groups")
            which = inner["param_groups"].index(group)
            found[f"{name}/fp32"] = masters[which][position] if masters else saved["module"][name]
    return found


def load_into(folder: str, stages: list[int], precision: str) -> dict[int, dict[str, Any]]:
    """Return the state of an engine at each stage after loading, on this rank."""
    import deepspeed

    found: dict[int, dict[str, Any]] = {}
    for stage in stages:
        torch.manual_seed(9)
        net = model()
        ds_config = upstream_config(stage, precision)
        engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=groups(net), config=ds_config)
        path, client = engine.load_checkpoint(folder)
        with deepspeed.zero.GatheredParameters(list(net.parameters())):
            module = {name: value.clone() for name, value in net.state_dict().items()}
        found[stage] = {
            "path": path,
            "client": client,
            "state": full_state(engine),
            "module": module,
            "steps": engine.global_steps,
            "lr": [group["lr"] for group in engine.optimizer.param_groups],
            "decay": [group["weight_decay"] for group in engine.optimizer.param_groups],
            "schedule": engine.lr_scheduler.state_dict(),
            "scaler": engine.state_access.scalars()["loss_scaler"],
        }
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_every_stage_resumes_from_that_releases_state(stage, precision, world):
    folder = str(fixture(stage, precision))
    for into, loaded in run(load_into, world, folder=folder, stages=[0, 1, 2, 3], precision=precision)[
        0
    ].items():
        _check_loaded(loaded, expected(stage, precision), precision, into)


def test_three_ranks_read_what_two_wrote():
    loaded = run(load_into, 3, folder=str(fixture(2, "bf16")), stages=[3], precision="bf16")[0][3]
    _check_loaded(loaded, expected(2, "bf16"), "bf16", 3)


def _check_loaded(
    loaded: dict[str, Any], reference: dict[str, torch.Tensor], precision: str, into: int
) -> None:
    assert loaded["client"] == {"epoch": 3, "note": "hello"} and loaded["steps"] == 3
    compared = 0
    for key, value in reference.items():
        name, kind = key.split("/")
        if kind in ("fp32", "exp_avg", "exp_avg_sq", "step") and name in TRAINED:
            assert torch.equal(loaded["state"][key].view(-1), value.float().view(-1)), (key, into)
            compared += 1
    assert compared >= 7 * 3
    assert loaded["decay"] == [0.1, 0.0] and loaded["lr"][0] == loaded["lr"][1] != 1e-2
    assert loaded["schedule"] == {"last_batch_iteration": 2}
    _check_module(loaded["module"], reference, precision)
    if precision == "fp16":
        assert (loaded["scaler"]["scale"], loaded["scaler"]["good_steps"]) == (256.0, 3)


def _check_module(
    module: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], precision: str
) -> None:
    """Weights are the masters rounded; tied ones are equal; frozen ones are as that release made them from its seed."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    torch.manual_seed(0)
    made = model().state_dict()
    for name, value in module.items():
        if name in TRAINED:
            assert torch.equal(value, reference[f"{name}/fp32"].view(value.shape).to(dtype)), name
        elif name.startswith("frozen"):
            assert torch.equal(value, made[name].to(dtype)), name
    assert torch.equal(module["count"], torch.arange(3.0))
    assert torch.equal(module["head.weight"], module["emb.weight"])


@pytest.mark.parametrize("world", [1, 2])
def test_round_robin_gradients(world):
    """Another order in the flat groups. The masters, rounded, are the weights of the model file, and the moments those
    of the run without the option, which differs by rounding alone."""
    folder = FIXTURES / "stage2_round_robin"
    saved = torch.load(folder / "global_step3/mp_rank_00_model_states.pt")["module"]
    plain = expected(2, "bf16")
    loaded = run(load_into, world, folder=str(folder), stages=[0, 2, 3], precision="bf16")[0]
    for found in loaded.values():
        for name in TRAINED:
            master = found["state"][f"{name}/fp32"].view(saved[name].shape)
            assert torch.equal(master.bfloat16(), saved[name]), name
            assert torch.equal(found["module"][name], saved[name]), name
            for kind in ("exp_avg", "exp_avg_sq"):
                wanted = plain[f"{name}/{kind}"].view(-1)
                assert (found["state"][f"{name}/{kind}"].view(-1) - wanted).norm() < 0.02 * wanted.norm(), (
                    name,
                    kind,
                )


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_accumulated_in_fp32(world):
    """At stage 1 that release then takes its own bf16 optimizer, whose files have other keys."""
    folder = FIXTURES / "stage1_fp32_accumulation"
    for into, loaded in run(load_into, world, folder=str(folder), stages=[0, 1, 2, 3], precision="bf16")[
        0
    ].items():
        _check_loaded(loaded, converted(folder), "bf16", into)


def test_the_fixtures_are_small():
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) < 1 << 20


@pytest.mark.parametrize(("stage", "precision"), SHARDED)
def test_frozen_weights_and_consolidation(stage, precision):
    folder = fixture(stage, precision)
    whole = get_fp32_state_dict_from_zero_checkpoint(folder)
    for key, value in expected(stage, precision).items():
        name, kind = key.split("/")
        if kind == "fp32" and name in TRAINED:
            assert whole[name].dtype == torch.float32 and torch.equal(
                whole[name], value.view(whole[name].shape)
            )
    torch.manual_seed(0)
    frozen = model().frozen.weight.detach()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert torch.equal(whole["frozen.weight"].float(), frozen.to(dtype).float())
    assert whole["head.weight"].data_ptr() == whole["emb.weight"].data_ptr()
    assert "frozen.weight" not in consolidate(folder / "global_step3", exclude_frozen=True).tensors


def test_a_lost_file_and_stale_files_of_more_ranks(tmp_path):
    shutil.copytree(fixture(2, "fp32"), tmp_path / "c")
    folder = tmp_path / "c/global_step3"
    part = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(part, folder / "zero_pp_rank_7_mp_rank_00_optim_states.pt")
    consolidate(folder)
    part.unlink()
    with pytest.raises(CheckpointError, match="lacks the optimizer file of rank 1"):
        consolidate(folder)

"""Universal checkpoints: those that DeepSpeed 0.19.8 made (``make_universal_checkpoints.py``), and ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.make_universal_checkpoints import CONVERTED, UNIVERSAL
from tests.checkpoint.make_upstream_checkpoints import config, groups, model
from tests.checkpoint.models import full_state
from tests.checkpoint.test_upstream import _check_loaded, expected
from tests.pool import run


def load_into(folder: str, stages: list[int], precision: str, **options: Any) -> dict[int, dict[str, Any]]:
    """Return the state of an engine at each stage after loading, on this rank, with ``load_universal``."""
    import deepspeed

    found: dict[int, dict[str, Any]] = {}
    for stage in stages:
        torch.manual_seed(9)
        net = model()
        settings = {**config(stage, precision), "checkpoint": {"load_universal": True}}
        engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=groups(net), config=settings)
        path, client = engine.load_checkpoint(folder, **options)
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


def of(name: str) -> tuple[int, str]:
    stage, _, precision = name.partition("_")
    return int(stage.removeprefix("stage")), precision


@pytest.mark.parametrize(("name", "world"), list(zip(CONVERTED, (2, 1, 2, 2), strict=True)))
def test_every_stage_resumes_from_that_releases_conversion(name: str, world: int) -> None:
    stage, precision = of(name)
    loaded = run(load_into, world, folder=str(UNIVERSAL / name), stages=[0, 1, 2, 3], precision=precision)[0]
    for into, found in loaded.items():
        assert Path(found["path"]).name == "universal"
        _check_loaded(found, expected(stage, precision), precision, into)


def test_weights_alone_and_consolidated() -> None:
    reference = expected(3, "bf16")
    loaded = run(
        load_into,
        2,
        folder=str(UNIVERSAL / "stage3_bf16"),
        stages=[0, 3],
        precision="bf16",
        load_module_only=True,
    )[0]
    whole = get_fp32_state_dict_from_zero_checkpoint(UNIVERSAL / "stage3_bf16", tag="universal")
    for key, value in reference.items():
        name, kind = key.split("/")
        if kind == "fp32":
            assert torch.equal(whole[name], value.view(whole[name].shape))
            for found in loaded.values():
                assert torch.equal(found["module"][name], whole[name].bfloat16()), name


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "stage2_bf16"
    shutil.copytree(UNIVERSAL / "stage2_bf16", folder)
    zero = folder / "universal/zero"
    (zero / "l2.bias/exp_avg.pt").unlink()
    with pytest.raises(AssertionError, match="does not hold .*exp_avg of l2.bias"):
        run(load_into, 1, folder=str(folder), stages=[2], precision="bf16")
    with open(zero / "l1.weight/fp32.pt", "r+b") as file:
        file.truncate(500)
    with pytest.raises(AssertionError, match="l1.weight/fp32.pt"):
        run(load_into, 1, folder=str(folder), stages=[2], precision="bf16")
    shutil.rmtree(zero / "norm.weight")
    with pytest.raises(AssertionError, match="norm.weight/fp32.pt is missing"):
        run(load_into, 1, folder=str(folder), stages=[2], precision="bf16")
    assert issubclass(CheckpointError, ValueError)

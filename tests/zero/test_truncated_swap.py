"""A swap file that something else truncates is an error that names it, at the next access: never a bus error."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.pool import distributed
from tests.zero.test_offload import offloaded, plain_config

ACCESSES = {
    "forward": lambda engine, loss, param: engine(torch.ones(1, 8, dtype=torch.bfloat16)),
    "backward": lambda engine, loss, param: engine.backward(loss),
    "step": lambda engine, loss, param: engine.step(),
    "save": lambda engine, loss, param: engine.save_checkpoint(engine.folder, tag="b"),
    "load": lambda engine, loss, param: engine.load_checkpoint(engine.folder, tag="a"),
    "state_dict": lambda engine, loss, param: engine.optimizer.state_dict(),
    "get": lambda engine, loss, param: safe_get_full_optimizer_state(param, "exp_avg"),
    "set": lambda engine, loss, param: safe_set_full_fp32_param(param, torch.zeros(8, 8)),
    "gradient": lambda engine, loss, param: safe_get_full_grad(param),
    "gathered": lambda engine, loss, param: deepspeed.zero.GatheredParameters([param]).__enter__(),
    "destroy": lambda engine, loss, param: engine.destroy(),
}
"""What reads or writes a mapping of a swap file: each would end the process with a bus error."""


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=1)
def test_a_swap_file_truncated_from_outside(tmp_path, stage):
    """By way of /proc, as the file has no name any more; a damaged file system does the same."""
    nvme: dict[str, Any] = {"device": "nvme"}
    params = {"offload_param": {**nvme, "max_in_cpu": 0}} if stage == 3 else {}
    config = offloaded(plain_config(stage, "bf16"), tmp_path / "disk", offload_optimizer=nvme, **params)
    for name, access in ACCESSES.items():
        if stage == 2 and name in ("forward", "gathered", "destroy"):
            continue  # weights are not in a file
        engine: Any = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
        engine.folder = tmp_path
        batch = torch.ones(1, 8, dtype=torch.bfloat16)
        for _ in range(2):
            loss = engine(batch).float().sum()
            if name != "backward":
                engine.backward(loss)
            if name not in ("backward", "step", "gradient"):
                engine.step()
        if name == "load":
            engine.save_checkpoint(tmp_path, tag="a")
        sizes = truncate_swap_files()
        with pytest.raises(
            OSError, match=r"swap file in .*disk.* was truncated from outside, to 0 of \d+ bytes"
        ):
            access(engine, loss, engine.module.weight)
        for path, size in sizes.items():
            os.truncate(path, size)
        engine.destroy()


BEFORE_AN_ENGINE = {
    "gathered": lambda model: deepspeed.zero.GatheredParameters([model.weight]).__enter__(),
    "copy": copy.deepcopy,
    "initialize": lambda model: deepspeed.initialize(model=model, config=plain_config(3, "fp32")),
}


@distributed(world_size=2)
def test_shards_of_zero_init_before_there_is_an_engine(tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    for access in BEFORE_AN_ENGINE.values():
        with deepspeed.zero.Init(
            config_dict_or_path={"zero_optimization": {"stage": 3, "offload_param": nvme}}
        ):
            model = torch.nn.Linear(8, 8)
        sizes = truncate_swap_files()
        with pytest.raises(OSError, match="swap file in .* was truncated from outside"):
            access(model)
        for path, size in sizes.items():
            os.truncate(path, size)
        del model
        gc.collect()


def truncate_swap_files() -> dict[str, int]:
    """Their paths in /proc, with the size that they had."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (
                "deepspeed_swap_" in os.readlink(path) and os.stat(path).st_size
            ):  # a mapping has one of its own
                found[str(path)] = os.stat(path).st_size
                os.truncate(path, 0)
    return found

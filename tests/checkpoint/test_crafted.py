"""Files that others have made execute nothing: checkpoints whose pickles call functions, configs and hostfiles with
commands for values."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.launcher.runner import fetch_hostfile
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.pool import distributed


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def start(stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=1)
def test_checkpoints(stage: int, kind: str, tmp_path: Path) -> None:
    engine = start(stage)
    engine.save_checkpoint(str(tmp_path), tag="one")
    (path,) = (tmp_path / "one").glob(f"*{kind}_states.pt")
    sprung = tmp_path / "sprung"
    torch.save({"module": Trap(sprung), "optimizer_state_dict": Trap(sprung)}, path)
    with pytest.raises(CheckpointError, match=path.name):
        engine.load_checkpoint(str(tmp_path), tag="one")
    with pytest.raises(CheckpointError, match=path.name):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="one")
    assert not sprung.exists()
    engine.destroy()


@pytest.mark.parametrize("text", ["$(mkdir {0})", "`mkdir {0}`", "__import__('os').mkdir('{0}')"])
def test_configs_and_hostfiles(text: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    value = text.format(sprung)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": value, "optimizer": {"type": value}}))
    with pytest.raises(DeepSpeedConfigError):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config=str(config))
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{value} slots=2\n")
    with suppress(ValueError):  # a name without blanks may be taken; it is quoted wherever it goes
        assert fetch_hostfile(str(hosts)) == {value: 2}
    hosts.write_text(f"worker slots={value}\n")
    with pytest.raises(ValueError):
        fetch_hostfile(str(hosts))
    assert not sprung.exists()

"""zero.Init: the configs it takes, and what may be done to modules built under it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.config_problems import DeepSpeedConfigError
from tests.pool import distributed

SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
HJSON = """{
  # brain floats
  train_micro_batch_size_per_gpu: 2
  bf16: {enabled: true}
  zero_optimization: {stage: 3}
}"""


def as_written(kind: str, folder: Path) -> Any:
    text = json.dumps(SETTINGS)
    if kind == "base64":
        return base64.urlsafe_b64encode(text.encode()).decode()
    if kind == "dict":
        return SETTINGS
    path = folder / f"config.{kind}"
    path.write_text(HJSON if kind == "hjson" else text)
    return path if kind == "hjson" else str(path)


@pytest.mark.parametrize("argument", ["config", "config_dict_or_path"])
@pytest.mark.parametrize("kind", ["dict", "json", "hjson", "base64"])
@distributed(world_size=1)
def test_it_takes_what_initialize_takes(tmp_path: Path, kind: str, argument: str) -> None:
    if kind == "hjson":
        pytest.importorskip("hjson")
    written = as_written(kind, tmp_path)
    with deepspeed.zero.Init(**{argument: written}):
        model = nn.Linear(4, 4)
    assert model.weight.dtype is torch.bfloat16
    engine, *_ = deepspeed.initialize(model=model, config=written)
    engine.destroy()


@pytest.mark.parametrize("config", ["missing.json", '{"bf16": '])
@distributed(world_size=1)
def test_a_config_that_cannot_be_read(tmp_path: Path, config: str) -> None:
    if config.startswith("{"):
        (tmp_path / "broken.json").write_text(config)
        config = str(tmp_path / "broken.json")
    before = nn.Linear.__init__
    with pytest.raises(DeepSpeedConfigError, match=r"zero\.Init.*(missing|broken)\.json"):
        deepspeed.zero.Init(config_dict_or_path=config)
    assert nn.Linear.__init__ is before

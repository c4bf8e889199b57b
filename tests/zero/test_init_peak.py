"""The most tensor memory that building a model under ``zero.Init`` takes on a rank: 1/N of the weights, the largest
parameter, and two buckets. Counted, not what the process happens to occupy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.allocations import counted
from tests.pool import distributed, run

ROWS, WIDTH = 2048, 256
SLACK = 16 << 10
"""Buffers, and the numbers of a collective."""


class Model(nn.Module):
    """The largest parameters come first and last, when the least and the most of the others is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)


def settings(precision: str) -> dict[str, Any]:
    made: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    return made if precision == "fp32" else {**made, precision: {"enabled": True}}


def sizes(model: nn.Module, precision: str) -> tuple[int, int]:
    """Bytes of all weights and of the largest parameter."""
    numels = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
    itemsize = 4 if precision == "fp32" else 2
    return sum(numels) * itemsize, max(numels) * itemsize


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@distributed(world_size=[1, 2, 4])
def test_building(precision: str, world_size: int) -> None:
    with counted() as building, deepspeed.zero.Init(config_dict_or_path=settings(precision)):
        model = Model()
    weights, largest = sizes(model, precision)
    assert building.peak <= weights / world_size + largest + SLACK
    assert building.kept <= weights / world_size + SLACK


@distributed(world_size=2)
def test_initialize_cuts_anew_within_two_buckets() -> None:
    """A bucket holds at most the parameters of one block, here the largest one."""
    with counted() as both:
        with deepspeed.zero.Init(config_dict_or_path=settings("fp32")):
            model = Model()
        deepspeed.initialize(model=model, config=settings("fp32"))
    weights, largest = sizes(model, "fp32")
    assert both.peak <= weights / 2 + 2 * largest + SLACK


def _save(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="3MB")


def _load(folder: str, precision: str) -> tuple[int, int, int, int]:
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    kept = HfDeepSpeedConfig({"train_batch_size": dist.get_world_size(), **settings(precision)})
    try:
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        with counted(Path(folder)) as loading:
            model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    finally:
        del kept
        unset_hf_deepspeed_config()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED")
    return (loading.peak, loading.kept, *sizes(model, precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_from_pretrained(tmp_path: Path, precision: str, world: int) -> None:
    """The files themselves are mapped."""
    pytest.importorskip("transformers")
    run(_save, 1, folder=str(tmp_path))
    for peak, kept, weights, largest in run(_load, world, folder=str(tmp_path), precision=precision):
        assert peak <= weights / world + largest + SLACK
        assert weights / world <= kept <= weights / world + SLACK

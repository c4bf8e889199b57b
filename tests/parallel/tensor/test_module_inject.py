"""Functions of ``deepspeed.compat.module_inject`` for scripts that replace and split layers themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed import comm as dist
from deepspeed.compat.module_inject import (
    LinearAllreduce,
    LinearLayer,
)
from deepspeed.compat.module_inject.tp_shard import (
    AutoTPMeta,
    get_shard_size,
    get_shard_size_list,
    set_num_kv_heads,
    set_tp_grain_size,
)
from tests.pool import distributed


class Block(nn.Module):
    """With the names of BERT's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.self = nn.Module()
        for name in ("query", "key", "value"):
            setattr(self.attention.self, name, nn.Linear(8, 8))
        self.attention.self.num_attention_heads = 2
        self.attention.output = nn.Module()
        self.attention.output.dense, self.attention.output.LayerNorm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.intermediate, self.output = nn.Module(), nn.Module()
        self.intermediate.dense = nn.Linear(8, 16)
        self.output.dense, self.output.LayerNorm = nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, inputs: Tensor) -> Tensor:
        part = self.attention.self
        mixed = part.query(inputs).sigmoid() * part.key(inputs) * part.value(inputs)
        hidden = self.attention.output.LayerNorm(self.attention.output.dense(mixed))
        return self.output.LayerNorm(self.output.dense(F.relu(self.intermediate.dense(hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def test_extents_of_ranks() -> None:
    try:
        set_num_kv_heads(3)
        assert get_shard_size_list(96, 2, "layers.0.attn.q_proj") == [64, 32]
        assert get_shard_size(96, 2, "q_proj", rank=1) == 32
        assert get_shard_size_list(96, 2, "mlp.up_proj") == [48, 48]
        set_tp_grain_size(64)
        assert get_shard_size_list(192, 2, "lm_head") == [128, 64] and get_shard_size_list(
            97, 2, "lm_head"
        ) == [49, 48]
        assert get_shard_size_list(96, 2, "q_proj", num_kv_heads=2) == [48, 48]
    finally:
        set_num_kv_heads(None)
        set_tp_grain_size(1)


def test_extents_by_the_numbers_of_one_model() -> None:
    meta = AutoTPMeta(num_kv_heads=3, num_attention_heads=6, n_embd=96, tp_grain_size=64)
    assert get_shard_size_list(96, 2, meta, "q_proj") == [64, 32]
    assert get_shard_size_list(192, 2, name="up_proj", meta=meta) == [128, 64]
    assert get_shard_size_list(97, 2, meta, "lm_head") == [64, 33]
    assert get_shard_size(96, 2, meta, "q_proj", 1) == get_shard_size(96, 2, "q_proj", 1, meta=meta) == 32
    assert get_shard_size_list(96, 2, "q_proj") == [48, 48]  # the process knows nothing of it


def test_layers_for_training_and_for_inference_by_the_documented_name() -> None:
    model = Model()
    assert deepspeed.replace_transformer_layer(Block, model, None, {"dtype": torch.bfloat16}, None) is model
    assert model.head.weight.dtype is torch.bfloat16
    with pytest.raises(TypeError, match="no_such"):
        deepspeed.replace_transformer_layer(Block, model, None, {}, None, no_such=1)


@distributed(world_size=2)
def test_layers_in_parts_keep_them_under_a_config_that_shares_layers() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    whole = copy.deepcopy(model).state_dict()
    both = dist.new_group([0, 1])
    model[0], model[1] = LinearLayer(model[0], both), LinearAllreduce(model[1], both)
    rules = {
        "layer_specs": [{"patterns": [r".*\.weight$"], "partition_type": "skip"}],
        "use_default_specs": False,
    }
    parallel = {"autotp_size": 2, "partition_config": rules}
    settings = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": parallel}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    found = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
    engine.destroy()

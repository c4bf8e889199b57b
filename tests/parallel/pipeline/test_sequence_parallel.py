"""Stages whose ranks share sequences (`sequence_parallel_size`), each against one process with whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.comm.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.parallel.sequence.hf import parallel_state_sp
from deepspeed.parallel.sequence.hf.loss import token_mean
from deepspeed.parallel.sequence.layer import DistributedAttention
from tests.parallel.pipeline.test_engine import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Plain,
    batches,
    compare,
    loss_of,
    make_engine,
)
from tests.pool import distributed

HEADS = 2
CUT = LENGTH // 2 + 1  # shards of different lengths


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[batch, tokens, heads, size]"""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        # no bias: that of keys has no gradient but noise, which Adam enlarges
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.shards = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1) if group else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        attended = attend(q, k, v) if self.shards is None else self.shards(q, k, v, 0)
        return x + self.out(attended.flatten(2))


def head(module: nn.Embedding, x: Tensor) -> Tensor:
    return x @ module.weight.T


def layers(group: Any = None, *, tied: bool = False) -> list[Any]:
    body = [LayerSpec(Attention, group) for _ in range(4)]
    if tied:
        first: Any = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
        return [first, *body, TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head)]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *body, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def shards(source: Iterator[tuple[Tensor, Tensor]], rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    part = slice(CUT) if rank == 0 else slice(CUT, None)
    for inputs, labels in source:
        yield inputs[:, part], labels[:, part]


@pytest.mark.parametrize(
    ("stage", "tied", "schedule"),
    [(0, False, "1f1b"), (1, True, "zero-bubble"), (2, False, "1f1b"), (3, False, "zero-bubble")],
)
@distributed(world_size=4)
def test_two_stages_of_two_shards(stage: int, tied: bool, schedule: str, tmp_path: Path) -> None:
    parallel_state_sp.initialize_sequence_parallel(2)
    group = parallel_state_sp.get_sequence_parallel_group()

    def loss_of_all(logits: Tensor, labels: Tensor) -> Tensor:
        return token_mean(loss_of(logits, labels), labels.numel(), group)

    module = PipelineModule(
        layers(group, tied=tied), num_stages=2, loss_fn=loss_of_all, partition_method="uniform"
    )
    engine = make_engine(module, stage, clip=0.1, sequence_parallel_size=2, pipeline={"schedule": schedule})
    assert (engine.dp_world_size, engine.seq_dp_world_size, engine.num_stages) == (1, 2, 2)
    plain = Plain(layers(tied=tied), lr=0.01, clip=0.1)
    own, whole = shards(batches(0), engine.grid.get_sequence_parallel_rank()), batches(0)
    for _ in range(3):
        expected = plain.step([whole])
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-5)
    compare(engine, plain)
    if stage == 1:  # every layer's file is written once
        engine.save_checkpoint(str(tmp_path))
        assert len(list(tmp_path.glob("*/layer_*"))) == len(layers(tied=tied)) - tied
    engine.destroy()


@distributed(world_size=8)
def test_the_groups_of_four_axes() -> None:
    """2 stages x 2 replicas that share a sequence x 2 parts."""
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))
    assert grid.get_sequence_parallel_group() is None
    grid.share_sequences(2)
    rank, sequence = dist.get_rank(), grid.get_sequence_parallel_group()
    assert sequence is not None
    start = rank // 4 * 4 + rank % 2
    assert dist.get_process_group_ranks(sequence) == [start, start + 2]
    assert dist.get_process_group_ranks(grid.get_sequence_data_parallel_group()) == [start, start + 2]
    assert grid.get_data_parallel_group_ranks() == [rank]
    assert (grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()) == (0, 1)
    assert grid.get_sequence_parallel_rank() == rank // 2 % 2


@distributed(world_size=2)
def test_too_few_replicas_are_refused() -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    with pytest.raises(DeepSpeedConfigError, match="sequence_parallel_size=2 does not divide the 1 replicas"):
        make_engine(module, sequence_parallel_size=2)

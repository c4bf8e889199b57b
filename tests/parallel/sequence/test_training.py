"""A model of one's own with DistributedAttention, through the engine: at every stage the training of one rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import deepspeed
from deepspeed.comm import documented_groups as groups
from deepspeed.parallel.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from deepspeed.parallel.sequence.hf import parallel_state_sp
from deepspeed.parallel.sequence.hf.loss import token_mean, token_sum
from deepspeed.parallel.sequence.layer import DistributedAttention
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from tests.cells.cell import Cell
from tests.cells.models import Kit, Language
from tests.pool import distributed

VOCAB, WIDTH, HEADS = 11, 12, 3


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Model(nn.Module):
    """One layer; `attention` takes [batch, tokens, heads, size]. Positions matter."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attention = DistributedAttention(Attention(), group, 2, 1)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.out(self.attention(q, k, v, 0).flatten(2) + x)


def make(group: Any = None) -> Model:
    torch.manual_seed(0)
    return Model(group)


def batch(seed: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCAB, (2, 2, length), generator=generator)
    labels[:, : length // 2 + 1] = -100  # nothing counts on the first rank of two
    return {"ids": ids, "positions": torch.arange(length).expand(2, -1), "labels": labels}


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_two_sequences_on_two_ranks_each(stage: int) -> None:
    lengths = (6, 3) if stage % 2 else (4, 5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    parallel_state_sp.initialize_sequence_parallel(2)
    group = parallel_state_sp.get_sequence_parallel_group()
    engine, *_ = deepspeed.initialize(model=make(group), config=config, mpu=parallel_state_sp)
    assert (engine.dp_world_size, engine.mesh.size("sp"), engine.seq_dp_world_size) == (2, 2, 4)
    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    row, column = divmod(dist.get_rank(), 2)
    for step in range(3):
        both = [batch(2 * step + replica, sum(lengths)) for replica in range(2)]
        expected = [mean_loss(plain(one["ids"], one["positions"]), one["labels"]) for one in both]
        own = {key: value.split(lengths, 1)[column] for key, value in both[row].items()}
        logits = engine(own["ids"], own["positions"])
        count = (own["labels"] != -100).sum()
        loss = token_mean(mean_loss(logits, own["labels"]), count, group)
        assert loss.item() == pytest.approx(expected[row].item(), rel=1e-5)
        engine.backward(loss)
        engine.step()
        (sum(expected) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()
    for ours, wanted in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert (ours - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))


@distributed(world_size=4)
def test_a_group_of_other_ranks_is_refused() -> None:
    """Neighbours share layers here, so that the neighbours of a sequence are others."""
    parallel_state_sp.initialize_sequence_parallel(2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
    }
    group, rank = parallel_state_sp.get_sequence_parallel_group(), dist.get_rank()
    model = Language(Cell(), Kit(attend=lambda: DistributedAttention(Attention(), group, 2, 1)))
    neighbours, wanted = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    with pytest.raises(ValueError, match=re.escape(f"among ranks {neighbours}, but here ranks {wanted}")):
        deepspeed.initialize(model=model, config=config)


@distributed(world_size=2)
def test_mean_over_tokens_of_all_ranks() -> None:
    rank = dist.get_rank()
    for counts in ((3, 1), (0, 2), (0, 0)):
        loss = torch.tensor(float("nan") if counts[rank] == 0 else 2.0 + rank, requires_grad=True)
        result = token_mean(loss, counts[rank], dist.group.WORLD)
        total = sum(counts)
        assert result.item() == pytest.approx((2 * counts[0] + 3 * counts[1]) / max(total, 1))
        (weight,) = torch.autograd.grad(result, loss)
        # The mean over ranks halves it.
        assert weight.item() == pytest.approx(2 * counts[rank] / max(total, 1))
    loss = torch.tensor(1.0 + rank, requires_grad=True)
    result = token_sum(loss, dist.group.WORLD)
    assert (result.item(), torch.autograd.grad(result, loss)[0].item()) == (3.0, 2.0)


@distributed(world_size=3)
def test_losses_of_all_tokens() -> None:
    lengths = (2, 4, 1)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 2, VOCAB, generator=generator, requires_grad=True)
    target = torch.randint(0, VOCAB, (7, 2), generator=generator)
    target[3, 1] = -100
    weights = torch.rand(7, 2, generator=generator)
    expected = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(7, 2)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    rank = dist.get_rank()
    own = logits.detach().split(lengths)[rank].clone().requires_grad_()
    losses = vocab_sequence_parallel_cross_entropy(own, target.split(lengths)[rank], dist.group.WORLD)
    torch.testing.assert_close(losses, expected)
    (found,) = torch.autograd.grad((losses * weights).sum(), own)
    torch.testing.assert_close(found / 3, wanted.split(lengths)[rank])  # what the mean over three ranks takes


@distributed(world_size=4)
def test_model_parallel_unit() -> None:
    with pytest.raises(ValueError, match="=3 does not divide the job's 4 ranks; these do: 1, 2, 4"):
        parallel_state_sp.initialize_sequence_parallel(3)
    parallel_state_sp.initialize_sequence_parallel(2)
    rank = dist.get_rank()
    group = parallel_state_sp.get_sequence_parallel_group()
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert parallel_state_sp.get_sequence_parallel_world_size() == 2
    assert parallel_state_sp.get_sequence_parallel_rank() == rank % 2
    assert dist.get_process_group_ranks(parallel_state_sp.get_sequence_data_parallel_group()) == [0, 1, 2, 3]
    assert groups._get_sequence_parallel_group() is group
    parallel_state_sp.initialize_sequence_parallel(2)
    assert parallel_state_sp.get_sequence_parallel_group() is group
    parallel_state_sp.initialize_sequence_parallel(4)
    assert groups._get_sequence_parallel_world_size() == 4
    groups.set_mesh(None)


@distributed(world_size=1, init_process_group=False)
def test_unit_without_groups() -> None:
    with pytest.raises(RuntimeError, match="init_distributed"):
        parallel_state_sp.initialize_sequence_parallel(1)
    with pytest.raises(RuntimeError, match="initialize_sequence_parallel"):
        parallel_state_sp.get_sequence_parallel_rank()


class Rows(list[dict[str, Any]]):
    """A loader: batches of one row each."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def rows(rank: int, count: int) -> Rows:
    result = Rows()
    for at in range(count):
        ids = torch.arange(7) + 100 * rank + 10 * at
        result.append(
            {
                "input_ids": ids[None],
                "labels": ids[None].clone(),
                "position_ids": torch.arange(7)[None],
                "pixels": torch.full((1, 3, 2), float(rank), dtype=torch.bfloat16),
                "keep": torch.tensor([True, False]),
                "name": f"{rank}.{at}",
            }
        )
    return result


@distributed(world_size=3)
def test_loader_of_shards() -> None:
    rank, world = dist.get_rank(), 3
    group = dist.group.WORLD
    loader = UlyssesSPDataLoaderAdapter(rows(rank, 2 if rank else 1), rank, group, world, "cpu")
    assert len(loader) == len(loader.dl) * 3
    loader.set_epoch(4)
    assert loader.dl.epoch == 4
    lengths, start = (3, 2, 2), (0, 3, 5)[rank]
    for _ in range(2):
        found = list(loader)
        assert [each["name"] for each in found] == ["0.0", "1.0", "2.0", "1.1", "2.1"]  # rank 0 has fewer
        for each in found:
            source, at = map(int, each["name"].split("."))
            ids = torch.arange(7) + 100 * source + 10 * at
            part = slice(start, start + lengths[rank])
            assert "labels" not in each
            assert torch.equal(each["input_ids"], ids[None, part])
            assert torch.equal(each["position_ids"], torch.arange(7)[None, part])
            assert torch.equal(each["shift_labels"], torch.cat([ids[1:], torch.tensor([-100])])[None, part])
            assert each["pixels"].dtype == torch.bfloat16 and each["pixels"].eq(source).all()
            assert each["keep"].tolist() == [True, False]


@distributed(world_size=2)
def test_what_the_loader_of_shards_refuses() -> None:
    def first(batch: Any) -> Any:
        return next(iter(UlyssesSPDataLoaderAdapter([batch], dist.get_rank(), dist.group.WORLD, 2, "cpu")))

    with pytest.raises(ValueError, match="no 'position_ids'.*input_ids"):
        first({"input_ids": torch.ones(1, 4)})
    with pytest.raises(ValueError, match="dicts of tensors, got list"):
        first([1])
    with pytest.raises(ValueError, match="1 tokens cannot be sharded over 2 ranks"):
        first({"position_ids": torch.zeros(1, 1)})

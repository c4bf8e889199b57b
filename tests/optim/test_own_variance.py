"""Variances that ranks update with their own gradients, compared with plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.optim.onebit.adam import (
    LOCAL_VARIANCE,
    OnebitAdam,
    RootCodec,
    average_variances,
    random_sums,
    share_of_mean,
)
from tests.comm.transports import using
from tests.optim.test_one_bit import BETAS, Ranks, assert_weights, config_of, start, train
from tests.pool import distributed

FREEZE, INTERVAL = 3, 4
KEYS = {"freeze_step": FREEZE, "variance_interval": INTERVAL}


def test_roots_in_eight_bits() -> None:
    """Nothing becomes 0, and what is no more than 2^28 times smaller than the largest stays what it was."""
    torch.manual_seed(1)
    values = torch.randn(3, 1000).exp().pow(4)
    values[0, 5], values[1, :256] = 1e-30, 0.0
    codec = RootCodec()
    payloads = codec.encode(values)
    found = codec.decode(payloads, 1000)
    assert payloads.shape == (3, codec.nbytes(1000)) and payloads.shape[1] <= 1.03 * 1000
    assert found[0, 5] > 0 and not found[1, :256].any()
    usual = values > values.max() * 2**-28
    torch.testing.assert_close(found[usual], values[usual], rtol=0.13, atol=0)


def test_random_sums() -> None:
    """Linear; the mean of the squared norms over seeds is that of what is summed."""
    torch.manual_seed(2)
    grads = [torch.randn(70, 300), torch.randn(5), torch.full((9000,), 0.2)]
    other = [torch.randn_like(grad) for grad in grads]
    both = [a + b for a, b in zip(grads, other, strict=True)]
    torch.testing.assert_close(random_sums(both, 3), random_sums(grads, 3) + random_sums(other, 3))
    squares = [float(random_sums(grads, seed).square().sum()) for seed in range(60)]
    expected = sum(float(grad.square().sum()) for grad in grads)
    assert sum(squares) / len(squares) == pytest.approx(expected, rel=0.05)


@distributed(world_size=2)
def test_share_of_mean() -> None:
    torch.manual_seed(3)
    common, noise = torch.randn(400_000), torch.randn(2, 400_000)
    grad = common + 2 * noise[dist.get_rank()]
    exact = float((common + 2 * noise.mean(0)).square().sum() / (common + 2 * noise).square().sum(1).mean())
    with using("gloo") as ranks:
        assert share_of_mean([grad], ranks, seed=1) == pytest.approx(exact, rel=0.1)
        assert share_of_mean([common], ranks, seed=1) == pytest.approx(1.0, rel=1e-4)
        assert share_of_mean([torch.zeros(9)], ranks, seed=1) == 1.0


@distributed(world_size=[2, 3])
def test_ranks_agree(world_size: int) -> None:
    """On the mean, up to the two ways of eight bits; the same bits everywhere."""
    torch.manual_seed(4)
    every = torch.rand(world_size, 5000) + 0.5
    mine = every[dist.get_rank()]
    pieces = mine.split([4000, 1000])
    found = [torch.empty(4000), torch.empty(1000)]
    with using("gloo") as ranks:
        before = ranks.bytes_sent
        average_variances(pieces, found, ranks)
        sent = ranks.bytes_sent - before
    assert sent <= 2.04 * 5000 * (world_size - 1) / world_size + 64 * world_size
    torch.testing.assert_close(torch.cat(found), every.mean(0), rtol=0.27, atol=0)
    assert float((torch.cat(found) / every.mean(0)).mean()) == pytest.approx(1.0, abs=0.05)
    first = torch.cat(found).clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, torch.cat(found))


def rounded(codec: RootCodec, values: Tensor, part: int) -> Tensor:
    """After a trip of its parts."""
    return torch.cat([codec.unpack(codec.pack(piece), part) for piece in values.split(part)])


def agreed(own: list[list[Tensor]], part: int) -> list[Tensor]:
    """Return the agreed values for ``own``, by worker and parameter."""
    codec, numels = RootCodec(), [one.numel() for one in own[0]]
    padding = part * len(own) - sum(numels)
    flats = [torch.cat([*(one.reshape(-1) for one in mine), torch.zeros(padding)]) for mine in own]
    mean = torch.stack([rounded(codec, flat, part) for flat in flats]).mean(0)
    pieces = rounded(codec, mean, part)[: sum(numels)].split(numels)
    return [piece.view(one.shape) for piece, one in zip(pieces, own[0], strict=True)]


@distributed(world_size=[2, 4])
def test_one_bit_adam(world_size: int, tmp_path: Path) -> None:
    """Equal to plain PyTorch with the share that was measured, which is about the true one; a resumed run is exact."""
    engine = start("OneBitAdam", KEYS)
    oracle, rank, share = Ranks(world_size), dist.get_rank(), 1.0
    own: list[list[Tensor]] = []
    for step in range(13):
        grads = oracle.gradients(step)
        train(engine, step, step + 1)
        if step < FREEZE:
            oracle.full(grads)
        else:
            own = own or [[v.clone() for v in oracle.variance] for _ in range(world_size)]
            if (step - FREEZE) % INTERVAL == 0:
                share = engine.optimizer._shares[0, 0]
                every = torch.stack([torch.cat([g.reshape(-1) for g in mine]) for mine in grads])
                exact = float(every.mean(0).square().sum() / every.square().sum(1).mean())
                assert share == pytest.approx(exact, rel=0.35)
            for variances, mine in zip(own, grads, strict=True):
                for v, g in zip(variances, mine, strict=True):
                    v.mul_(BETAS[1]).add_((1 - BETAS[1]) * share * g * g)
            if (step + 1 - FREEZE) % INTERVAL == 0:
                oracle.variance = agreed(own, oracle.parts[0])
            oracle.follow(grads)
            oracle.share()
        oracle.adam()
        assert_weights(engine, oracle.params[rank])
        if step == 8:
            engine.save_checkpoint(tmp_path)
    resumed = start("OneBitAdam", KEYS)
    resumed.load_checkpoint(tmp_path)
    train(resumed, 9, 13)
    for found, value in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(found, value)


@distributed(world_size=4)
def test_shards_and_other_ranks(tmp_path: Path) -> None:
    """Two copies in shards: the same weights everywhere, an exact resume, and copies that are whole go on from their
    mean."""
    engine = start("OneBitAdam", KEYS, **config_of(2))
    train(engine, 0, 9)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, 9, 13)
    weights = [param.detach().clone() for param in engine.module.parameters()]
    for weight in weights:
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight)
    again = start("OneBitAdam", KEYS, **config_of(2))
    again.load_checkpoint(tmp_path)
    assert train(again, 9, 13) == losses
    whole = start("OneBitAdam", KEYS)
    whole.load_checkpoint(tmp_path)
    means = variances_of(engine_at_the_checkpoint(tmp_path))
    for found, mean in zip(variances_of(whole), means, strict=True):
        torch.testing.assert_close(found, mean)
    assert all(loss < 10 for loss in train(whole, 9, 13))


def engine_at_the_checkpoint(path: Path) -> Any:
    engine = start("OneBitAdam", KEYS, **config_of(2))
    engine.load_checkpoint(path)
    return engine


def variances_of(engine: Any) -> list[Tensor]:
    """By parameter, the mean over copies of what ranks have of it."""
    store = engine.core.store
    totals = [torch.zeros(p.numel()) for p in store.params]
    copies = (
        engine.replica_groups.dense.replicas.size if engine.plan.zero.shard_state else dist.get_world_size()
    )
    for owned in store.fragments:
        first = owned.fragment.param_offset
        value = store.state_of(owned)[LOCAL_VARIANCE].reshape(-1)
        totals[owned.param_index][first : first + value.numel()] += value / copies
    for total in totals:
        dist.all_reduce(total)
    return totals


def test_alone() -> None:
    """Gradients are those of all: the variance is that of Adam whenever it is taken over, corrected."""
    torch.manual_seed(6)
    param, twin = (torch.ones(50, requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-3, "betas": BETAS}
    optimizer = OnebitAdam([param], **KEYS, **options)
    plain = torch.optim.AdamW([twin], weight_decay=0.0, **options)
    for update in range(1, FREEZE + 2 * INTERVAL + 1):
        param.grad = torch.randn(50)
        twin.grad = param.grad.clone()
        optimizer.step()
        plain.step()
        if update > FREEZE and (update - FREEZE) % INTERVAL == 0:
            stored = optimizer.state[param]["exp_avg_sq"] / (1 - BETAS[1] ** FREEZE)
            exact = plain.state[twin]["exp_avg_sq"] / (1 - BETAS[1] ** update)
            torch.testing.assert_close(stored, exact)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="variance_interval=-1"):
        OnebitAdam([torch.zeros(3, requires_grad=True)], variance_interval=-1)
    plain = OnebitAdam([torch.zeros(3, requires_grad=True)])
    assert LOCAL_VARIANCE not in plain.update_traits.rank_state

"""ZeRO++: quantized weights, quantized gradients and groups that hold all weights, alone and together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.formats.codecs import BlockCodec, seed_of
from deepspeed.zero.gathering import sharded_model
from deepspeed.zero.gradients.sums import feedback_of
from deepspeed.zero.step import clip_coefficient
from tests.pool import distributed
from tests.zero.models import Block, assert_same, config_for, engine_losses, make_zoo

WIDTH, STEPS, LR = 32, 4, 1e-2
NOTHING = {
    "stage3_param_persistence_threshold": 40,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
HPZ = {"zero_hpz_partition_size": 2}
LOCO = {**QGZ, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 3}}
ALL = {**QWZ, **QGZ, **HPZ}
AT_RANDOM = {"zero_quantized_rounding": "stochastic"}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return nn.Sequential(frozen, Block(WIDTH), nn.Tanh(), Block(WIDTH), nn.Linear(WIDTH, WIDTH))


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x = inputs(step, rank)
    return (model(x) - x.roll(1, 1)).square().mean()


def output(engine: Any, step: int, rank: int) -> Tensor:
    return engine(inputs(step, rank).to(engine.module[0].weight.dtype)).float()


def start(zero: dict[str, Any], **more: Any) -> Any:
    config = {**config_for(3, lr=LR, **NOTHING, **zero), **more}
    return deepspeed.initialize(model=make_model(), config=config)[0]


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Simulated:
    """All ranks of a stage-3 run in one process, in plain PyTorch: exact masters, weights and gradients in payloads.

    ``engine`` only tells how parameters lie in buckets.
    """

    def __init__(self, engine: Any, ranks: int, zero: dict[str, Any]) -> None:
        self.model, self.ranks = make_model(), ranks
        names = {id(p): n for n, p in engine.module.named_parameters()}
        self.buckets = [
            ([(names[id(p)], s.offset, s.numel) for p, s in zip(b.params, b.layout.slots, strict=True)], b)
            for b in engine.sharded.buckets
        ]
        weights = BlockCodec(zero.get("zero_quantized_weights_bits", 8))
        self.weights = weights if zero.get("zero_quantized_weights") else None
        self.frozen = weights if zero.get("zero_quantized_nontrainable_weights") else self.weights
        self.gradients = BlockCodec(4) if zero.get("zero_quantized_gradients") else None
        self.group = zero.get("zero_hpz_partition_size", 1) if ranks > 2 else 1
        self.loco = zero.get("zeropp_loco_param")
        self.errors: dict[tuple[int, int], Tensor] = {}
        self.optimizer = FusedAdam(
            [p for p in self.model.parameters() if p.requires_grad], lr=LR, weight_decay=0.1
        )

    def flat(self, values: dict[str, Tensor]) -> Iterator[tuple[Any, Tensor]]:
        for slots, bucket in self.buckets:
            if slots[0][0] not in values:
                continue
            flat = torch.zeros(bucket.layout.padded_numel)
            for name, offset, numel in slots:
                flat[offset : offset + numel] = values[name].reshape(-1)
            yield bucket, flat

    def parts(self, flat: Iterator[tuple[Any, Tensor]]) -> dict[str, Tensor]:
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        slots = {id(bucket): slots for slots, bucket in self.buckets}
        return {
            name: values[offset : offset + numel].view(shapes[name])
            for bucket, values in flat
            for name, offset, numel in slots[id(bucket)]
        }

    def rounded(self) -> nn.Module:
        """The model that every rank computes with."""
        working = copy.deepcopy(self.model)
        state = {name: p.detach() for name, p in self.model.named_parameters()}

        def packed() -> Iterator[tuple[Any, Tensor]]:
            for bucket, flat in self.flat(state):
                codec = self.weights if bucket.layout.requires_grad else self.frozen
                yield bucket, flat if bucket.persistent else self.through(codec, flat)

        working.load_state_dict(self.parts(packed()))
        return working

    def through(self, codec: BlockCodec | None, flat: Tensor) -> Tensor:
        if codec is None or flat.numel() // self.ranks < 256:
            return flat
        rows = flat.view(self.ranks, -1)
        return codec.decode(codec.encode(rows), rows.shape[1]).reshape(-1)

    def sum(self, index: int, step: int, flats: list[Tensor]) -> Tensor:
        if self.gradients is None or flats[0].numel() // self.ranks < 256:
            return torch.stack(flats).sum(0)
        groups = [flats[g : g + self.group] for g in range(0, self.ranks, self.group)]
        total = torch.zeros_like(flats[0])
        for number, group in enumerate(groups):
            wanted = torch.stack(group).sum(0)
            if self.loco:
                if step % self.loco["reset_T"] == 0:
                    self.errors[index, number] = torch.zeros_like(wanted)
                wanted = wanted + self.errors[index, number]
            rows = wanted.view(self.ranks, -1)
            sent = self.gradients.decode(self.gradients.encode(rows), rows.shape[1]).reshape(-1)
            if self.loco:
                beta = self.loco["err_beta"]
                self.errors[index, number] = beta * self.errors[index, number] + (1 - beta) * (wanted - sent)
            total += sent
        return total

    def step(self, step: int) -> list[float]:
        losses, by_rank = [], []
        for rank in range(self.ranks):
            working = self.rounded()
            loss = loss_of(working, step, rank)
            loss.backward()
            losses.append(loss.item())
            grads = {n: p.grad for n, p in working.named_parameters() if p.grad is not None}
            by_rank.append([flat for _, flat in self.flat(grads)])
        buckets = [bucket for bucket, _ in self.flat(grads)]
        sums = [
            self.sum(i, step, list(flats)) / self.ranks for i, flats in enumerate(zip(*by_rank, strict=True))
        ]
        averaged = self.parts(iter(zip(buckets, sums, strict=True)))
        clip = clip_coefficient(torch.cat([g.reshape(-1) for g in averaged.values()]).norm().item(), 1.0)
        for name, param in self.model.named_parameters():
            param.grad = averaged[name] * clip if name in averaged else None
        self.optimizer.step()
        return losses


COMBINATIONS = {
    "qwZ": QWZ,
    "frozen": {"zero_quantized_nontrainable_weights": True},
    "qgZ": QGZ,
    "LoCo": LOCO,
    "all": {**ALL, **LOCO},
    "all, 4 bits": {**ALL, "zero_quantized_weights_bits": 4},
}


@pytest.mark.parametrize("name", list(COMBINATIONS))
@distributed(world_size=[2, 4])
def test_equals_plain_pytorch(world_size: int, name: str) -> None:
    zero = COMBINATIONS[name]
    engine = start(zero)
    oracle = Simulated(engine, world_size, zero)
    for step in range(STEPS):
        expected = oracle.step(step)
        assert train(engine, 1, step)[0] == pytest.approx(expected[dist.get_rank()], rel=1e-5)
    engine.destroy()
    for (key, value), found in zip(oracle.model.named_parameters(), engine.module.parameters(), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=2e-6, msg=key)


@pytest.mark.parametrize("budget", [{}, NOTHING], ids=["keep all", "keep nothing"])
@distributed(world_size=4)
def test_groups_change_no_bit(budget: dict[str, Any]) -> None:
    found = engine_losses(make_zoo, config_for(3, gas=2, **HPZ, **budget), 3)
    expected = engine_losses(make_zoo, config_for(3, gas=2, **budget), 3)
    assert found[0] == expected[0] and found[2] == expected[2]
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("zero", [HPZ, {**ALL, **LOCO}], ids=["hpZ", "all"])
@distributed(world_size=4)
def test_scheduled_collectives(zero: dict[str, Any]) -> None:
    """The way that GPUs go, to the same bits."""
    engine = start(zero)
    expected = train(engine, STEPS)
    chosen = sharded_model.prefers_collectives
    sharded_model.prefers_collectives = lambda device_type: True
    try:
        engine = start(zero)
        assert train(engine, STEPS) == expected
        assert engine.sharded.gatherer.counts.hits > 0
        engine.destroy()
    finally:
        sharded_model.prefers_collectives = chosen


@pytest.mark.parametrize("bits", [8, 4])
@distributed(world_size=4)
def test_bytes_across_groups(bits: int) -> None:
    """Of two groups of two ranks, per parameter and step: 1 byte of weights or half a byte, half a byte of gradients,
    and scales, for the half that the other group needs; plain stage 3 sends 12 (fp32, three times)."""
    engine = start({**ALL, "zero_quantized_weights_bits": bits})
    train(engine, 2)
    replica_group = engine.replica_groups.dense
    across = replica_group.levels.across
    assert replica_group.levels.near.ranks == ((0, 1), (2, 3))[dist.get_rank() // 2]
    everyone, before = replica_group.shard.bytes_sent, across.bytes_sent
    train(engine, 1, 2)
    weights = [b for b in engine.sharded.buckets if not b.persistent]
    packed = sum(BlockCodec(bits).nbytes(b.layout.shard_numel) for b in weights)
    grads = sum(BlockCodec(4).nbytes(b.layout.shard_numel) for b in weights if b.layout.requires_grad)
    assert across.bytes_sent - before == packed + grads
    numel = sum(b.layout.shard_numel for b in weights)
    assert (packed + grads) / numel < {8: 1.56, 4: 1.06}[bits]
    whole = sum(b.layout.padded_numel for b in weights)
    assert 2 * (packed + grads) / whole < {8: 0.78, 4: 0.53}[bits]  # a group of two, per parameter
    small = sum(b.layout.padded_numel * 4 for b in engine.sharded.buckets if b.persistent)
    assert (
        replica_group.shard.bytes_sent - everyone < 4 * small + 4096
    )  # norms and biases, and the facts of the step
    engine.destroy()


@pytest.mark.parametrize("random", [False, True], ids=["nearest", "at random"])
@distributed(world_size=2)
def test_everybody_computes_with_the_same_weights_and_saves_the_exact_ones(
    tmp_path: Path, random: bool
) -> None:
    """Payloads of one rank are the same for all, and after resuming; each rank rounds stochastically by its own
    seed."""
    zero = {**QWZ, **(AT_RANDOM if random else {})}
    engine = start(zero, bf16={"enabled": True})
    rank = dist.get_rank()

    def decoded(values: Tensor, bucket: int, owner: int) -> Tensor:
        codec = BlockCodec(8, seed=seed_of(bucket, owner) if random else None)
        return codec.decode(codec.encode(values), values.numel())

    seen: dict[str, Tensor] = {}
    for name, module in engine.module.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda m, args, out, name=name: seen.update({name: m.weight.detach().clone()})
            )
    for step in range(2):
        engine.backward(output(engine, step, rank).square().mean())
        engine.step()
    engine.eval()
    output(engine, 9, rank)
    for bucket in engine.sharded.buckets:
        if bucket.persistent:
            continue
        flat = torch.empty(bucket.layout.padded_numel, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(flat, bucket.shard)
        shards = [decoded(part, bucket.layout.index, r) for r, part in enumerate(flat.view(2, -1))]
        rows = torch.cat(shards).bfloat16()
        for param, slot in zip(bucket.params, bucket.layout.slots, strict=True):
            name = next(n for n, p in engine.module.named_parameters() if p is param)
            if name.endswith("weight") and name[:-7] in seen:
                assert torch.equal(seen[name[:-7]].view(-1), rows[slot.offset : slot.end]), name
            with deepspeed.zero.GatheredParameters(param):
                assert torch.equal(param.data.view(-1), flat[slot.offset : slot.end])
    engine.save_checkpoint(tmp_path)
    engine.train()
    expected = output(engine, 5, rank)
    fresh = start(zero, bf16={"enabled": True})
    fresh.load_checkpoint(tmp_path)
    assert torch.equal(output(fresh, 5, rank), expected)


@pytest.mark.parametrize("all_at_once", [False, True])
@pytest.mark.parametrize("collectives", [False, True])
@distributed(world_size=2)
def test_by_hand_weights_are_not_rounded(
    all_at_once: bool, collectives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while what a forward gathered is still there, or what a backward will need is in flight, and where nothing
    changes the weights: frozen ones."""
    monkeypatch.setattr(sharded_model, "prefers_collectives", lambda device_type: collectives)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].requires_grad_(False)
    known = [param.detach().clone() for param in model.parameters()]
    room = {"stage3_max_live_parameters": 1100, "stage3_max_reuse_distance": 0} if collectives else {}
    zero = {"stage": 3, "zero_quantized_weights": True, "stage3_param_persistence_threshold": 0, **room}
    sgd = {"type": "SGD", "params": {"lr": 0.0}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": sgd, "zero_optimization": zero}
    engine = deepspeed.initialize(model=model, config=config)[0]
    pairs = list(zip(model.parameters(), known, strict=True))

    def check() -> None:
        for together in [pairs] if all_at_once else [[pair] for pair in pairs]:
            with deepspeed.zero.GatheredParameters([param for param, _ in together]):
                assert all(torch.equal(param, value) for param, value in together)

    for _ in range(4):
        x = torch.ones(1, 32)
        loss = engine(x).square().sum()
        assert loss != (x @ known[0].T + known[1]).matmul(known[2].T).add(known[3]).square().sum()
        check()
        engine.backward(loss)
        check()
        engine.step()
        check()


@pytest.mark.parametrize("zero", [{**QWZ, **LOCO}, ALL], ids=["LoCo", "all"])
@distributed(world_size=4)
def test_at_random_resumes_exactly(zero: dict[str, Any], tmp_path: Path) -> None:
    """And training proceeds about as with unquantized values."""
    plain = start({})
    expected = train(plain, 6)
    plain.destroy()
    engine = start({**zero, **AT_RANDOM})
    losses = train(engine, 3)
    engine.save_checkpoint(tmp_path)
    losses += train(engine, 3, 3)
    assert losses == pytest.approx(expected, rel=0.05) and losses != expected
    resumed = start({**zero, **AT_RANDOM})
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 3, 3) == losses[3:]


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_quantized_gradients_below_stage_3(stage: int) -> None:
    def run(**zero: Any) -> tuple[list[float], int]:
        config = config_for(stage, lr=LR, **zero)
        engine = deepspeed.initialize(model=make_model(), config=config)[0]
        losses = train(engine, 6)
        sent = engine.replica_groups.all_ranks.bytes_sent
        engine.destroy()
        return losses, sent

    plain, before = run()
    packed, after = run(**QGZ)
    assert packed == pytest.approx(plain, rel=0.05) and packed != plain
    assert after < 0.65 * before  # gradients to an eighth, weights as they are, and the start


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_errors_of_gradients_are_resumed(stage: int, tmp_path: Path) -> None:
    """LoCo's errors are in checkpoints: a resumed run is exact."""

    def start_again() -> Any:
        config = {**config_for(stage, lr=LR, **(NOTHING if stage == 3 else {})), "zero_optimization": zero}
        return deepspeed.initialize(model=make_model(), config=config)[0]

    zero = {**config_for(stage, **(NOTHING if stage == 3 else {}), **LOCO)["zero_optimization"]}
    engine = start_again()
    train(engine, 4)
    engine.save_checkpoint(tmp_path)
    expected = train(engine, 3, 4)
    resumed = start_again()
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 3, 4) == expected
    plain = start_again()
    plain.load_checkpoint(tmp_path)
    for bucket in plain.core.reducer.buckets:
        feedback = feedback_of(bucket.summed_over_ranks)
        if feedback is not None:
            feedback.error = None  # type: ignore[attr-defined]
    assert train(plain, 3, 4) != expected


@distributed(world_size=2)
def test_an_overflow_is_seen() -> None:
    engine = start(LOCO, fp16={"enabled": True, "initial_scale_power": 4})
    rank = dist.get_rank()
    for step in range(4):
        loss = output(engine, step, rank).square().mean()
        engine.backward(loss * (float("inf") if step == 1 and rank == 1 else 1.0))
        engine.step()
        assert engine.was_step_applied() == (step != 1)
    assert loss.isfinite()


@distributed(world_size=4)
def test_impossible_groups() -> None:
    with pytest.raises(DeepSpeedConfigError, match="zero_hpz_partition_size=3 must divide"):
        start({"zero_hpz_partition_size": 3})
    with pytest.raises(DeepSpeedConfigError, match="zero_hpz_partition_size"):
        start({**HPZ, "mics_shard_size": 2})

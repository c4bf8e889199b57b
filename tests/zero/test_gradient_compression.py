"""Gradients in a few bits per element at every stage, against ranks that are simulated in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.formats.codecs import CODECS, codec_named
from tests.pool import distributed

LR = 0.05
SHARE = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 70), nn.Tanh(), nn.Linear(70, 24))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - x.flip(1)).square().mean()


def start(codec: str, stage: int = 0, feedback: bool = True, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_compression": {"codec": codec, "share": SHARE, "error_feedback": feedback},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        **more,
    }
    return deepspeed.initialize(model=make_model(), config=config)[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Ranks:
    """Gradients of all ranks in one process; ``slots`` and ``numel`` of the only bucket say how they lie in it."""

    def __init__(self, ranks: int, engine: Any, codec: str, *, feedback: bool, whole: bool) -> None:
        (bucket,) = engine.core.reducer.buckets
        self.slots = [(s.param, s.offset, s.numel) for s in bucket.layout.slots]
        padded = bucket.layout.padded_numel
        self.codec, self.ranks, self.feedback, self.whole = codec_named(codec, SHARE), ranks, feedback, whole
        self.part = -(-padded // (ranks * 8)) * 8 if whole else padded // ranks
        self.model = make_model()
        self.errors = torch.zeros(ranks, self.part * ranks)
        self.served = torch.zeros(ranks, self.part)

    def trip(self, values: Tensor) -> Tensor:
        return self.codec.decode(self.codec.encode(values), values.shape[-1])

    def step(self, number: int) -> None:
        params, sent = list(self.model.parameters()), []
        for rank in range(self.ranks):
            self.model.zero_grad()
            loss_of(self.model, number, rank).backward()
            flat = torch.zeros(self.part * self.ranks)
            for param, offset, numel in self.slots:
                flat[offset : offset + numel] = params[param].grad.reshape(-1)
            wanted = flat + self.errors[rank]
            sent.append(torch.cat([self.trip(piece) for piece in wanted.split(self.part)]))
            if self.feedback:
                self.errors[rank] = wanted - sent[-1]
        means = (sum(sent) * (1.0 / self.ranks)).split(self.part)
        if self.whole:
            wanted = torch.stack(means) + self.served
            trips = [self.trip(row) for row in wanted]
            if self.feedback:
                self.served = wanted - torch.stack(trips)
            means = tuple(trips)
        mean = torch.cat(list(means))
        with torch.no_grad():
            for param, offset, numel in self.slots:
                params[param].sub_(LR * mean[offset : offset + numel].view(params[param].shape))


CASES = [(codec, 0, True) for codec in CODECS]
CASES += [("int8", 0, False), ("signs", 1, True), ("top_k", 2, True), ("fp8", 2, False)]


@pytest.mark.parametrize(("codec", "stage", "feedback"), CASES)
@distributed(world_size=[2, 4])
def test_equals_plain_pytorch(
    world_size: int, codec: str, stage: int, feedback: bool, tmp_path: Path
) -> None:
    """And a resumed run is exact, errors included."""
    engine = start(codec, stage, feedback)
    oracle = Ranks(world_size, engine, codec, feedback=feedback, whole=stage == 0)
    for step in range(5):
        oracle.step(step)
        train(engine, step, step + 1)
        for found, value in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), value.detach(), rtol=1e-5, atol=2e-5)
        if step == 2:
            engine.save_checkpoint(tmp_path)
    resumed = start(codec, stage, feedback)
    resumed.load_checkpoint(tmp_path)
    train(resumed, 3, 5)
    for found, value in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("codec", CODECS)
@distributed(world_size=2)
def test_bytes_and_losses(stage: int, codec: str) -> None:
    """Payloads of gradients, in bf16 with fp32 masters; losses fall like those of uncompressed gradients."""
    engine = start(codec, stage, bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 3e-3}})
    losses = train(engine, 0, 40)
    everyone, numel = engine.replica_groups.all_ranks, sum(p.numel() for p in make_model().parameters())
    before, gathers = everyone.bytes_sent, 2 * 2 * numel if stage else 0
    train(engine, 40, 41)
    per_element = {"int8": 1.02, "int4": 0.53, "fp8": 1.02, "signs": 0.13, "top_k": 8 * SHARE}[codec]
    assert (
        everyone.bytes_sent - before <= per_element * numel * (1 if stage else 2) / 2 * 1.05 + gathers + 400
    )
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize(
    ("codec", "stage", "feedback"), [("int4", 0, True), ("int8", 0, False), ("int4", 2, False)]
)
@distributed(world_size=2)
def test_rounded_at_random(codec: str, stage: int, feedback: bool, tmp_path: Path) -> None:
    """Weights stay the same on both ranks, losses fall, and a resumed run is exact."""
    section = {"codec": codec, "error_feedback": feedback, "rounding": "stochastic"}
    engine = start(codec, stage, gradient_compression=section)
    losses = train(engine, 0, 10)
    engine.save_checkpoint(tmp_path)
    losses += train(engine, 10, 40)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    resumed = start(codec, stage, gradient_compression=section)
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 10, 40) == losses[10:]
    for param in engine.module.parameters():
        others = [torch.empty_like(param) for _ in range(2)]
        dist.all_gather(others, param.detach())
        assert torch.equal(others[0], others[1])
    assert train(start(codec, stage, feedback), 0, 10) != losses[:10]


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)
def test_a_load_drops_what_is_owed(stage: int, tmp_path: Path) -> None:
    """What was not sent belongs to the run that is given up: a checkpoint from before it owes nothing."""
    engine = start("signs", stage)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, 0, 3)
    engine.load_checkpoint(tmp_path)
    assert train(engine, 0, 3) == losses


@distributed(world_size=2)
def test_an_overflow_leaves_no_trace() -> None:
    """A step with gradients that are not finite is skipped, and what is owed stays finite."""
    engine = start("signs", 0, fp16={"enabled": True, "initial_scale_power": 4})
    train(engine, 0, 2)
    loss = loss_of(engine, 2, 0) * float("inf")
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 1
    losses = train(engine, 3, 6)
    assert engine.skipped_steps == 1 and all(loss < 10 for loss in losses)


@distributed(world_size=1)
def test_what_is_refused() -> None:
    with pytest.raises(DeepSpeedConfigError, match="gradient_compression.codec"):
        start("pigeon")
    with pytest.raises(
        DeepSpeedConfigError, match='gradient_compression.rounding.*"fp8" has no stochastic rounding'
    ):
        start("fp8", gradient_compression={"codec": "fp8", "rounding": "stochastic"})
    with pytest.raises(DeepSpeedConfigError, match="zero_quantized_gradients"):
        start("int8", 1, zero_optimization={"stage": 1, "zero_quantized_gradients": True})
    start("int8")

"""1-bit Adam, 0/1 Adam and 1-bit LAMB against ranks that are simulated in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config.plan import Cadence
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.optim.onebit.adam import OnebitAdam
from deepspeed.optim.onebit.lamb import OnebitLamb
from deepspeed.optim.onebit.zoadam import ZeroOneAdam, is_variance_update, local_interval
from deepspeed.optim.sign_exchange import ExchangeGroup, SignExchange
from deepspeed.zero.tensor_fragment import safe_get_full_optimizer_state
from tests.pool import distributed, run

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-6, 0.1
PARAMS = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
BLOCK = 2048


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 70), nn.Tanh(), nn.Linear(70, 24))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - x.flip(1)).square().mean()


def start(kind: str, params: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": kind, "params": {**PARAMS, **params}},
        **more,
    }
    return deepspeed.initialize(model=model or make_model(), config=config)[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def signs(x: Tensor) -> Tensor:
    """Return ``x`` after one exchange: signs and means of magnitudes."""
    blocks = [torch.where(b >= 0, 1.0, -1.0) * b.abs().double().mean().float() for b in x.split(BLOCK)]
    return torch.cat(blocks)


def config_of(stage: int) -> dict[str, Any]:
    """Stage 0, or two groups of ranks that share a copy each."""
    return (
        {"zero_optimization": {"stage": stage, "mics_shard_size": dist.get_world_size() // 2}}
        if stage
        else {}
    )


def lines_of(engine: Any) -> list[list[tuple[int, int, int]]]:
    """Return the contents of each shard's message: number of the parameter, begin, elements."""
    mine = [(o.param_index, o.fragment.param_offset, o.fragment.numel) for o in engine.core.store.by_group[0]]
    shard = engine.replica_groups.dense.shard
    every: list[Any] = [mine]
    if engine.plan.zero.shard_state and shard.size > 1:
        every = [None] * shard.size
        dist.all_gather_object(every, mine, group=shard.group)
    return every


class Ranks:
    """Models, momenta and errors of all workers in one process: ranks, or groups of ``size`` ranks."""

    def __init__(
        self, workers: int, size: int = 1, lines: list[list[tuple[int, int, int]]] | None = None
    ) -> None:
        self.size = size
        self.models = [make_model() for _ in range(workers)]
        shapes = [p.shape for p in self.models[0].parameters()]
        self.momenta = [[torch.zeros(s) for s in shapes] for _ in range(workers)]
        self.variance = [torch.zeros(s) for s in shapes]
        self.lines = lines or [[(i, 0, s.numel()) for i, s in enumerate(shapes)]]
        numels = [sum(numel for _, _, numel in line) for line in self.lines]
        self.parts = [-(-numel // (workers * 8)) * 8 for numel in numels]
        self.worker = [[torch.zeros(part * workers) for part in self.parts] for _ in range(workers)]
        self.server = [[torch.zeros(part) for part in self.parts] for _ in range(workers)]

    @property
    def params(self) -> list[list[Tensor]]:
        return [[p.data for p in model.parameters()] for model in self.models]

    def gradients(self, step: int) -> list[list[Tensor]]:
        found = []
        for worker, model in enumerate(self.models):
            model.zero_grad()
            for rank in range(worker * self.size, (worker + 1) * self.size):
                (loss_of(model, step, rank) / self.size).backward()
            found.append([p.grad for p in model.parameters()])
        return found

    def mean(self, values: list[list[Tensor]]) -> list[Tensor]:
        """The compressed mean of every worker's tensors; errors are kept."""
        result = [torch.zeros_like(v) for v in values[0]]
        for number, line in enumerate(self.lines):
            flats = [torch.cat([own[i].reshape(-1)[b : b + n] for i, b, n in line]) for own in values]
            average = self.mean_of_line(number, flats)
            for (i, b, n), piece in zip(line, average.split([n for _, _, n in line]), strict=True):
                result[i].view(-1)[b : b + n] = piece
        return result

    def mean_of_line(self, number: int, flats: list[Tensor]) -> Tensor:
        workers, numel, part = len(flats), flats[0].numel(), self.parts[number]
        sent = []
        for worker, own in enumerate(flats):
            wanted = torch.zeros(part * workers)
            wanted[:numel] = own
            self.worker[worker][number][numel:] = 0
            wanted += self.worker[worker][number]
            trip = torch.cat([signs(piece) for piece in wanted.split(part)])
            self.worker[worker][number] = wanted - trip
            sent.append(trip)
        whole = []
        for worker in range(workers):
            parts = [trip[worker * part : (worker + 1) * part] for trip in sent]
            average = sum(parts) * (1.0 / workers) + self.server[worker][number]
            self.server[worker][number] = average - signs(average)
            whole.append(signs(average))
        return torch.cat(whole)[:numel]

    def adam(self, rates: float = LR) -> None:
        for params, momenta in zip(self.params, self.momenta, strict=True):
            for p, m, v in zip(params, momenta, self.variance, strict=True):
                p.mul_(1 - LR * DECAY).sub_(rates * m / (v.sqrt() + EPS))

    def full(self, grads: list[list[Tensor]]) -> None:
        average = [torch.stack(list(same)).mean(0) for same in zip(*grads, strict=True)]
        for v, g in zip(self.variance, average, strict=True):
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
        self.follow([average] * len(grads))

    def follow(self, grads: list[list[Tensor]]) -> None:
        for momenta, own in zip(self.momenta, grads, strict=True):
            for m, g in zip(momenta, own, strict=True):
                m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)

    def share(self, rate: float = 1.0) -> None:
        average = self.mean([[m * rate for m in own] for own in self.momenta])
        self.momenta = [[m / rate for m in average] for _ in self.momenta]


def assert_weights(engine: Any, expected: list[Tensor]) -> None:
    for found, value in zip(engine.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=[2, 4])
def test_one_bit_adam(world_size: int, stage: int, tmp_path: Path) -> None:
    """Equal to plain PyTorch; a resumed run is exact; and what an exchange costs."""
    keys = {"freeze_step": 3, "cuda_aware": False, "comm_backend_name": "nccl"}
    engine = start("OneBitAdam", keys, **config_of(stage))
    assert type(engine.optimizer) is OnebitAdam or stage
    size = world_size // 2 if stage else 1
    oracle, rank = Ranks(world_size // size, size, lines_of(engine)), dist.get_rank()
    for step in range(8):
        grads = oracle.gradients(step)
        if step < 3:
            oracle.full(grads)
        else:
            oracle.follow(grads)
            oracle.share()
        oracle.adam()
        train(engine, step, step + 1)
        assert_weights(engine, oracle.params[rank // size])
        if step == 5:
            engine.save_checkpoint(tmp_path)
    assert engine.core.reducer.cadence is Cadence.NEVER
    dense = engine.replica_groups.dense
    link = dense.replicas if stage else dense.all_ranks
    numel = sum(p.numel() for p in engine.module.parameters())
    before = link.bytes_sent
    train(engine, 8, 9)
    facts = 2 * 8 * 8 * (world_size - 1) // world_size + 64
    assert link.bytes_sent - before - facts <= 0.27 * numel / size
    resumed = start("OneBitAdam", {"freeze_step": 3}, **config_of(stage))
    resumed.load_checkpoint(tmp_path)
    train(resumed, 6, 9)
    for found, value in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=[2, 4])
def test_zero_one_adam(world_size: int, stage: int, tmp_path: Path) -> None:
    """Variance updates, exchanges of signs, and updates without communication; checkpoints in the middle of those."""
    keys = {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
    engine = start("ZeroOneAdam", keys, **config_of(stage))
    assert type(engine.optimizer) is ZeroOneAdam or stage
    size = world_size // 2 if stage else 1
    oracle, rank = Ranks(world_size // size, size, lines_of(engine)), dist.get_rank()
    link = engine.replica_groups.dense.replicas if stage else engine.replica_groups.all_ranks
    synced, done, rates = oracle.params, None, 0.0
    saved: dict[int, list[Tensor]] = {}
    for update in range(1, 17):
        grads = oracle.gradients(update)
        if update <= 6 and is_variance_update(update, 2):
            oracle.full(grads)
            oracle.adam()
        elif update <= 6:
            oracle.follow(grads)
            oracle.share(LR)
            oracle.adam()
        else:
            oracle.follow(grads)
            if done is None:
                synced = [[p.clone() for p in params] for params in oracle.params]
                done = [[torch.zeros_like(p) for p in params] for params in synced]
            rates += LR
            for own, momenta in zip(done, oracle.momenta, strict=True):
                for u, m in zip(own, momenta, strict=True):
                    u.add_(LR * m)
            for params in synced:
                for p in params:
                    p.mul_(1 - LR * DECAY)
            exchanges = update % local_interval(update, 6, 3, 4) == 0
            if exchanges:
                average = oracle.mean(done)
                done = [[u.clone() for u in average] for _ in done]
                oracle.momenta = [[u / rates for u in average] for _ in done]
            for params, start_at, own in zip(oracle.params, synced, done, strict=True):
                for p, s, u, v in zip(params, start_at, own, oracle.variance, strict=True):
                    p.copy_(s - u / (v.sqrt() + EPS))
            if exchanges:
                done, rates = None, 0.0
        before = link.collectives["all_to_all"]
        train(engine, update, update + 1)
        assert_weights(engine, oracle.params[rank // size])
        signs_sent = link.collectives["all_to_all"] - before
        assert signs_sent == (update in (3, 5) or (update > 6 and done is None)), update
        if update == 13:
            assert done is not None
            engine.save_checkpoint(tmp_path)
            saved[13] = [p.detach().clone() for p in engine.module.parameters()]
    resumed = start("ZeroOneAdam", keys, **config_of(stage))
    resumed.load_checkpoint(tmp_path)
    for found, value in zip(resumed.module.parameters(), saved[13], strict=True):
        assert torch.equal(found, value)
    train(resumed, 14, 17)
    for found, value in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(found, value)


@distributed(world_size=2)
def test_bytes_of_zero_one_adam() -> None:
    """In 1,000 updates after warm-up, when the interval grows to 16: what an exchange costs, and what local updates."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": "ZeroOneAdam",
            "params": {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4},
        },
    }
    engine = deepspeed.initialize(model=nn.Linear(200, 200), config=config)[0]
    link, sent = engine.replica_groups.all_ranks, dict[bool, int]()
    for update in range(1, 9):
        before = link.bytes_sent
        engine.backward(engine(torch.ones(2, 200)).square().mean())
        engine.step()
        if update > 1:
            sent[update % local_interval(update, 1, 1, 4) == 0] = link.bytes_sent - before
    numel = 200 * 201
    assert sent[False] <= 64 and sent[True] <= 0.27 * numel / 2 + 64  # the other half is this rank's own
    exchanges = sum(u % local_interval(u, 0, 50, 16) == 0 for u in range(1, 1001))
    average = 2 * (exchanges * sent[True] + (1000 - exchanges) * sent[False]) / 1000
    assert average <= 0.06 * numel


def test_schedules() -> None:
    found = [u for u in range(1, 33) if is_variance_update(u, 4)]
    assert found == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32]
    assert [local_interval(u, 10, 3, 8) for u in range(11, 25)] == [1] * 3 + [2] * 3 + [4] * 3 + [8] * 5
    assert local_interval(10**9, 10, 1, 16) == 16


def whole_states(engine: Any, numbers: Sequence[str]) -> list[dict[str, Any]]:
    """Return whole momentum and variance of each parameter, and ``numbers`` of its state, equal in all of its parts."""
    states: list[dict[str, Any]] = [
        {name: safe_get_full_optimizer_state(param, name) for name in ("exp_avg", "exp_avg_sq")}
        for param in engine.module.parameters()
    ]
    store = engine.core.store
    found: list[Any] = [None] * dist.get_world_size()
    mine = [(o.param_index, {n: float(store.state_of(o)[n]) for n in numbers}) for o in store.fragments]
    dist.all_gather_object(found, mine)
    for index, values in (entry for rank in found for entry in rank):
        assert all(states[index].setdefault(name, value) == value for name, value in values.items())
    return states


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=[2, 4])
def test_one_bit_lamb(world_size: int, stage: int, tmp_path: Path) -> None:
    keys = {"freeze_step": 6, "max_coeff": 0.5, "min_coeff": 0.01, "factor_max": 4.0, "factor_min": 0.5}
    keys |= {"coeff_beta": 0.8, "factor_threshold": 0.1}
    engine = start("OneBitLamb", keys, **config_of(stage))
    plain = start("Lamb", {"max_coeff": 0.5, "min_coeff": 0.01}, **config_of(stage))
    assert type(engine.optimizer) is OnebitLamb or stage
    size = world_size // 2 if stage else 1
    assert train(engine, 0, 6) == train(plain, 0, 6)  # warm-up is LAMB
    ratios = engine.core.store.optimizer.get_lamb_coeffs()
    assert len(ratios) == len(engine.core.store.fragments) and all(0.01 <= ratio <= 0.5 for ratio in ratios)
    model = copy.deepcopy(engine.module)
    states = whole_states(engine, ["lamb_coeff_freeze"])
    oracle, rank = Ranks(world_size // size, size, lines_of(engine)), dist.get_rank()
    scales = [float(s["exp_avg"].norm() / s["exp_avg"].numel() ** 0.5) for s in states]
    scales = [sum(scales) / 4 / scale for scale in scales]
    fresh, last = [s["exp_avg_sq"].clone() for s in states], [1.0] * 4
    for other in oracle.models:
        other.load_state_dict(model.state_dict())
    momenta = [s["exp_avg"] for s in states]
    for step in range(6, 10):
        new = [
            [
                (BETAS[0] * m + (1 - BETAS[0]) * g) * scale
                for m, g, scale in zip(momenta, own, scales, strict=True)
            ]
            for own in oracle.gradients(step)
        ]
        average = [m / scale for m, scale in zip(oracle.mean(new), scales, strict=True)]
        for i, (m, old, state) in enumerate(zip(average, momenta, states, strict=True)):
            gradient = (m - BETAS[0] * old) / (1 - BETAS[0])
            fresh[i] = BETAS[1] * fresh[i] + (1 - BETAS[1]) * gradient**2
            frozen = state["exp_avg_sq"].sqrt() + EPS
            first = oracle.params[0][i]
            share = min(1.0, float((m / frozen).norm() / (m / frozen + DECAY * first).norm()))
            factor = float((frozen / (fresh[i].sqrt() + EPS)).max()) * share + 1 - share
            factor = min(4.0, max(0.5, factor))
            last[i] = min(last[i] * 1.1, max(last[i] * 0.9, factor))
            for params in oracle.params:
                direction = m / frozen + DECAY * params[i]
                params[i].sub_(LR * float(state["lamb_coeff_freeze"]) * last[i] * direction)
        momenta = average
        train(engine, step, step + 1)
        assert_weights(engine, oracle.params[rank // size])
        if step == 7:
            engine.save_checkpoint(tmp_path)
    resumed = start("OneBitLamb", keys, **config_of(stage))
    resumed.load_checkpoint(tmp_path)
    train(resumed, 8, 10)
    for found, value in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(found, value)


TYPES = {
    "OneBitAdam": {"freeze_step": 10},
    "ZeroOneAdam": {"var_freeze_step": 20, "var_update_scaler": 8, "local_step_scaler": 16},
    "OneBitLamb": {"freeze_step": 10},
}


@pytest.mark.parametrize("kind", list(TYPES))
@pytest.mark.parametrize(
    "more",
    [
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 1.0},
        {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
    ],
    ids=["bf16", "fp16", "accumulation"],
)
@distributed(world_size=2)
def test_losses_fall_like_those_of_the_plain_optimizer(kind: str, more: dict[str, Any]) -> None:
    common = {"lr": 2e-2 if "Lamb" in kind else 3e-3, "weight_decay": 0.0, "bias_correction": True}
    losses = train(start(kind, {**TYPES[kind], **common}, **more), 0, 60)
    plain = start("Lamb" if "Lamb" in kind else "AdamW", common, **more)
    expected = train(plain, 0, 60)
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])
    assert "Lamb" in kind or sum(losses[-6:]) < 2 * sum(expected[-6:])


@distributed(world_size=2)
def test_groups_frozen_and_unused_parameters() -> None:
    """Rows and tensors without a gradient in warm-up do not diverge, and an unused parameter is unchanged."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.used = nn.Embedding(50, 8), nn.Linear(8, 8)
            self.frozen, self.late, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen.requires_grad_(False)

        def forward(self, ids: Tensor, late: bool) -> Tensor:
            x = self.used(self.frozen(self.table(ids)))
            return (self.late(x) if late else x).square().mean()

    torch.manual_seed(0)
    model = Sparse()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": list(model.table.parameters())},
        {
            "params": [*model.used.parameters(), *model.late.parameters(), *model.never.parameters()],
            "weight_decay": 0.0,
        },
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    for step in range(10):
        high = 10 if step < 4 else 50
        ids = torch.randint(
            0, high, (4,), generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
        )
        engine.backward(engine(ids, step >= 5))
        engine.step()
    for name, param in engine.module.named_parameters():
        moved = (param - before[name]).abs().max()
        assert moved < 1.0, name
        assert (moved == 0) == (name.split(".")[0] in ("frozen", "never")), name


@distributed(world_size=2)
def test_freeze_step_auto() -> None:
    """Warm-up ends in the same update on both ranks, once the sum of variances changes by less than 4 %."""
    engine = start("OneBitAdam", {"freeze_step": "auto", "betas": [0.9, 0.9], "lr": 1e-4})
    train(engine, 0, 80)
    assert 20 <= engine.optimizer.freeze_step < 80
    assert engine.core.reducer.cadence is Cadence.NEVER


@pytest.mark.parametrize(("corrected", "freeze"), [(True, 21), (False, 41)])
def test_gradients_that_do_not_change(corrected: bool, freeze: int) -> None:
    """The variance that updates use is stable from the start, or when it has grown from zero to its limit."""
    param = torch.ones(8, requires_grad=True)
    optimizer = OnebitAdam([param], freeze_step="auto", betas=(0.9, 0.9), bias_correction=corrected)
    for _ in range(freeze - 1):
        assert not optimizer.freeze_step < float("inf")
        param.grad = torch.ones(8)
        optimizer.step()
    assert optimizer.freeze_step == freeze


@pytest.mark.parametrize("kind", list(TYPES))
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=1)
def test_stages_are_refused(kind: str, stage: int) -> None:
    """One copy in shards, and weights that are nowhere whole."""
    with pytest.raises(DeepSpeedConfigError, match="optimizer.type.*use stage 0"):
        start(kind, {}, zero_optimization={"stage": stage})
    if stage == 3:
        with pytest.raises(DeepSpeedConfigError, match="optimizer.type.*use stage 0"):
            start(kind, {}, zero_optimization={"stage": stage, "mics_shard_size": 1})


FEW = {
    "OneBitAdam": {"freeze_step": 2},
    "ZeroOneAdam": {"var_freeze_step": 3, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": 2},
}


@pytest.mark.parametrize("kind", list(TYPES))
@distributed(world_size=4)
def test_another_layout(kind: str, tmp_path: Path) -> None:
    """Two groups in shards save; four copies that are whole resume, and the other way: the mean over copies of what is
    owed, to senders and as averages, stays."""
    first, other = config_of(2), {"zero_optimization": {"stage": 1, "mics_shard_size": 1}}
    for before, after in ((first, other), (other, first), (other, {}), ({}, first)):
        engine = start(kind, FEW[kind], **before)
        train(engine, 0, 6)
        engine.save_checkpoint(tmp_path)
        owed = everything_owed(engine)
        resumed = start(kind, FEW[kind], **after)
        resumed.load_checkpoint(tmp_path)
        torch.testing.assert_close(everything_owed(resumed), owed, rtol=1e-5, atol=1e-7)
        assert any(value.any() for value in owed)
        losses = train(resumed, 6, 10)
        assert all(loss < 10 for loss in losses)


class Tokens(nn.Module):
    """A model whose linear layers ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.config = SimpleNamespace(model_type="tokens")
        self.table, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.down(self.up(self.norm(self.table(input_ids))).tanh())


@pytest.mark.parametrize("kind", list(TYPES))
@distributed(world_size=4)
def test_split_layers(kind: str, tmp_path: Path) -> None:
    """Ranks that share layers save, and copies that are whole resume, and the other way: what is owed keeps its place
    in whole tensors, and counts once where several ranks keep it."""
    split = {"tensor_parallel": {"autotp_size": 2}}
    for before, after in ((split, {}), ({}, split)):
        engine = start(kind, FEW[kind], model=Tokens(), **before)
        replica = dist.get_rank() // (2 if before is split else 1)
        for step in range(6):
            ids = torch.randint(12, (8, 4), generator=torch.Generator().manual_seed(100 * step + replica))
            engine.backward((engine(ids) - engine.module.table(ids).flip(1)).square().mean())
            engine.step()
        engine.save_checkpoint(tmp_path)
        owed = everything_owed(engine)
        resumed = start(kind, FEW[kind], model=Tokens(), **after)
        resumed.load_checkpoint(tmp_path)
        torch.testing.assert_close(everything_owed(resumed), owed, rtol=1e-5, atol=1e-7)
        assert all(value.any() for value in owed)
        assert (engine.module.up.weight.numel() < resumed.module.up.weight.numel()) is (before is split)


def save_copies(kind: str, path: Path, stage: int) -> list[Tensor]:
    engine = start(kind, FEW[kind], **config_of(stage))
    train(engine, 0, 6)
    engine.save_checkpoint(path)
    return everything_owed(engine)


def resume_whole(kind: str, path: Path) -> tuple[list[Tensor], list[float]]:
    engine = start(kind, FEW[kind])
    engine.load_checkpoint(path)
    assert engine.optimizer.updates == 6
    return everything_owed(engine), train(engine, 6, 10)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", list(TYPES))
def test_fewer_ranks(kind: str, stage: int, tmp_path: Path) -> None:
    """Four ranks save, whole or in shards, two whole ones resume: what is owed is spread over them."""
    owed = run(save_copies, 4, kind=kind, path=tmp_path, stage=stage)[0]
    found, losses = run(resume_whole, 2, kind=kind, path=tmp_path)[0]
    torch.testing.assert_close(found, owed, rtol=1e-5, atol=1e-7)
    assert any(value.any() for value in owed) and all(loss < 10 for loss in losses)


def everything_owed(engine: Any) -> list[Tensor]:
    """By parameter, whole: the mean of the senders' errors, and that of the averaging ranks'."""
    store, found = engine.core.store, []
    debts = store.optimizer.server_errors([[o.master for o in group] for group in store.by_group])
    for number, param in enumerate(store.params):
        placement = placement_of(param)
        own = torch.zeros(4, param.numel())  # sums of errors, and how many; sums of debts, and how many
        for owned in store.fragments:
            begin = owned.fragment.param_offset
            if owned.param_index != number:
                continue
            error = store.state_of(owned)["worker_error"].reshape(-1)
            for row, start_at, values in (
                (0, 0, error),
                *((2, *debt) for debt in debts.get(id(owned.master), ())),
            ):
                low = begin + start_at
                own[row, low : low + values.numel()] += values
                own[row + 1, low : low + values.numel()] += 1
        whole = torch.zeros(4, *placement.global_shape)
        box = [slice(low, high) for side in placement.boxes for low, high in side]
        whole[(slice(None), *box)] = own.view(4, *param.shape)
        dist.all_reduce(whole)
        found.append(whole[0] / whole[1].clamp(min=1) + whole[2] / whole[3].clamp(min=1))
    return found


def test_arguments() -> None:
    params = [torch.zeros(3, requires_grad=True)]
    for cls in (OnebitAdam, ZeroOneAdam, OnebitLamb):
        with pytest.raises(ValueError, match="comm_backend_name='carrier pigeon'"):
            cls(params, comm_backend_name="carrier pigeon")
        with pytest.raises(RuntimeError, match="amsgrad"):
            cls(params, amsgrad=True)
    with pytest.raises(ValueError, match="local_step_clipper=0"):
        ZeroOneAdam(params, local_step_clipper=0)


def test_alone() -> None:
    """Without an engine and a process group: plain Adam, then momentum over a frozen variance."""
    model = make_model()
    optimizer = OnebitAdam(model.parameters(), lr=1e-2, freeze_step=5)
    losses = []
    for step in range(20):
        loss = loss_of(model, step, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and optimizer.adam_freeze_key
    fresh = OnebitAdam(make_model().parameters(), lr=1e-2, freeze_step=5)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.adam_freeze_key


@pytest.mark.parametrize("kind", [OnebitAdam, ZeroOneAdam, OnebitLamb])
def test_a_variance_of_few_gradients_is_warned_of(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.95 remembers 20 gradients, 0.99 a hundred."""
    told: list[str] = []
    monkeypatch.setattr("deepspeed.optim.one_bit.log_dist_once", lambda text, **options: told.append(text))
    kind([nn.Parameter(torch.zeros(4))], betas=(0.9, 0.99))
    assert not told
    kind([nn.Parameter(torch.zeros(4))], betas=(0.9, 0.95))
    assert "remembers 20 gradients" in told[0] and kind.__name__ in told[0]


@pytest.mark.parametrize("kind", [OnebitAdam, ZeroOneAdam])
def test_a_variance_is_corrected_by_the_gradients_that_it_saw(kind: type) -> None:
    """Which are fewer than there were updates: in 0/1 Adam, also where the variance changes; and for a parameter that
    joins later, also after warm-up."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(50)) for _ in range(3)]
    joined = [1, 3, 7]
    rate, eps, decay = 0.01, 1e-4, 0.1
    keys = {"freeze_step": 5} if kind is OnebitAdam else {"var_update_scaler": 2}
    optimizer = kind(params, lr=rate, eps=eps, weight_decay=decay, **keys)
    wanted = [param.detach().double() for param in params]
    m, v, seen = [torch.zeros(50).double()] * 3, [torch.zeros(50).double()] * 3, [0, 0, 0]
    for update in range(1, 14):
        changes = update <= 5 if kind is OnebitAdam else is_variance_update(update, 2)
        for i, param in enumerate(params):
            param.grad = None if update < joined[i] else torch.randn(50)
            if param.grad is None:
                continue
            grad = param.grad.double()
            m[i] = 0.9 * m[i] + 0.1 * grad
            if changes:
                v[i], seen[i] = 0.999 * v[i] + 0.001 * grad**2, seen[i] + 1
            elif not v[i].any():
                v[i] = torch.full_like(grad, 0.001) * grad.square().mean()
            steps = update - joined[i] + 1
            direction = m[i] / (1 - 0.9**steps) / ((v[i] / (1 - 0.999 ** max(1, seen[i]))).sqrt() + eps)
            wanted[i] = wanted[i] * (1 - rate * decay) - rate * direction
        optimizer.step()
        for param, value in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.detach().double(), value, rtol=1e-4, atol=1e-6)


def test_lines_that_were_loaded_share_the_masters_of_a_group_by_kind() -> None:
    """Copies of whole tensors and parts of others travel apart; some have one size."""
    copies, parts = [torch.zeros(4), torch.zeros(2)], [torch.zeros(4), torch.zeros(4)]
    exchange = SignExchange()
    for kind, sizes in ((1, [4, 4]), (0, [4, 2])):
        error = torch.full((sum(sizes),), float(kind + 1))
        exchange.groups[0, kind] = ExchangeGroup((0,), sizes, server_error=error)
    debts = exchange.server_errors([[*copies, *parts]])
    found = {member: [(start, debt.tolist()) for start, debt in owed] for member, owed in debts.items()}
    wanted = [(copies, 1.0), (parts, 2.0)]
    assert found == {id(m): [(0, [value] * m.numel())] for masters, value in wanted for m in masters}

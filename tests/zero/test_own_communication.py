"""An optimizer that at some point exchanges its momentum itself, instead of having gradients summed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.config.plan import Cadence
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.update import ALONE, UpdateContext, UpdateTraits
from deepspeed.planning.request import PlanRequest, answer
from tests.pool import distributed
from tests.zero.simulated_ranks import (
    BETA,
    LR,
    SimulatedRanks,
    config_of,
    loss_of,
    make_model,
    mean,
    train_batch,
)

STEPS, OWN_FROM = 7, 3


class MomentumExchange(torch.optim.Optimizer):
    """Momentum SGD. From update ``own_from`` (counted from 0) on, each rank adds its own gradient to the momentum, and
    the ranks average their momenta in the dtype ``wire``; what rounding takes away is added the next time."""

    update_traits = UpdateTraits(own_communication=True, rank_state=("error",))

    def __init__(self, params: Any, own_from: int = OWN_FROM, wire: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"lr": LR})
        self.own_from, self.wire = own_from, wire
        self.updates = 0
        self.exchanges: list[int] = []  # numbers of the updates, and who this was

    def wants_local_gradients(self) -> bool:
        return self.updates + 1 >= self.own_from

    def rank_state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "exchanges": list(self.exchanges), "rank": dist.get_rank()}

    def load_rank_state_dict(self, saved: Any, rank: int, ranks: int) -> None:
        found = saved[rank % len(saved)] if saved else {"updates": 0, "exchanges": [], "rank": rank}
        assert found["rank"] == rank
        self.updates, self.exchanges = found["updates"], found["exchanges"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        parts = [SimpleNamespace(masters=g, grads=[p.grad for p in g], lows=[None] * len(g)) for g in groups]
        self.step_fragments(parts, grad_scale=1.0, context=ALONE)

    def step_fragments(self, fragments: Any, *, grad_scale: float, context: UpdateContext) -> None:
        for group, part in zip(self.param_groups, fragments, strict=True):
            for p, g in zip(part.masters, part.grads, strict=True):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                self.state[p].setdefault("error", torch.zeros_like(p))
                momentum.mul_(BETA).add_(g.to(p.dtype) * grad_scale)
            for ranks, positions in context.holders(part.masters) if context.holders is not None else ():
                if not positions:  # no master of this kind
                    continue
                self._exchange(ranks, [self.state[part.masters[i]] for i in positions])
            for p, low in zip(part.masters, part.lows, strict=True):
                p.add_(self.state[p]["momentum"], alpha=-group["lr"])
                if low is not None:
                    low.copy_(p.view(-1))
        self.exchanges += [self.updates] if context.holders is not None else []
        self.updates += 1

    def _exchange(self, ranks: Any, states: list[dict[str, Tensor]]) -> None:
        full = torch.cat([(state["momentum"] + state["error"]).view(-1) for state in states])
        sent = full.to(self.wire)
        errors = full - sent
        ranks.all_reduce(sent, scale=1 / ranks.size).wait()
        sizes = [state["error"].numel() for state in states]
        for state, value, error in zip(states, sent.split(sizes), errors.split(sizes), strict=True):
            state["momentum"].view(-1).copy_(value)
            state["error"].view(-1).copy_(error)


def rounding(wire: torch.dtype) -> Callable[[list[Tensor], int], list[Tensor]]:
    """The same exchange among simulated ranks."""
    errors: dict[int, list[Tensor]] = {}

    def exchange(momenta: list[Tensor], number: int) -> list[Tensor]:
        owed = errors.get(number, [torch.zeros_like(m) for m in momenta])
        full = [m + e for m, e in zip(momenta, owed, strict=True)]
        sent = [f.to(wire) for f in full]
        errors[number] = [f - s for f, s in zip(full, sent, strict=True)]
        return [mean(sent).float()] * len(momenta)

    return exchange


def make_engine(dtype: torch.dtype, micro_batches: int = 1, clip: float = 0.0, **options: Any) -> Any:
    params = list((model := make_model()).parameters())
    optimizer = MomentumExchange([{"params": params[:3]}, {"params": params[3:]}], **options)
    config = config_of(0, dtype, micro_batches, clip, dist.get_world_size())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def assert_weights(engine: Any, expected: list[Tensor]) -> None:
    for param, value in zip(engine.module.parameters(), expected, strict=True):
        assert torch.equal(param, value)


@pytest.mark.parametrize(
    ("dtype", "wire", "micro_batches", "clip"),
    [
        (torch.float32, torch.float32, 1, 0.0),
        (torch.float32, torch.bfloat16, 2, 2.0),
        (torch.bfloat16, torch.float32, 2, 2.0),
        (torch.bfloat16, torch.bfloat16, 1, 0.0),
    ],
)
@distributed(world_size=[2, 4])
def test_momentum_instead_of_gradients(
    world_size: int, dtype: torch.dtype, wire: torch.dtype, micro_batches: int, clip: float, tmp_path: Path
) -> None:
    """Bit for bit what plain PyTorch gives, also resumed from before and after the change, and from the middle of a
    batch after it."""
    rank = dist.get_rank()
    engine = make_engine(dtype, micro_batches, clip, wire=wire)
    oracle = SimulatedRanks(
        world_size, dtype=dtype, micro_batches=micro_batches, clip=clip, exchange=rounding(wire)
    )
    everyone = engine.replica_groups.all_ranks
    for step in range(STEPS):
        everyone.reset_counters()
        train_batch(engine, step, micro_batches, dtype, rank)
        if step:  # the facts, and one exchange per group or one bucket of gradients
            assert everyone.collectives["all_reduce"] == (1 + 2 if step >= OWN_FROM else 1 + 1)
            assert everyone.collectives["broadcast"] == 0
        oracle.step(step, average_gradients=step < OWN_FROM)
        assert engine.get_global_grad_norm() == pytest.approx(oracle.norm, rel=1e-6)
        assert_weights(engine, [p.detach() for p in oracle.models[rank].parameters()])
        if step in (1, 4):
            engine.save_checkpoint(tmp_path, tag=f"step{step}")
        if step == 4 and micro_batches > 1:
            engine.backward(loss_of(engine, 5, 0, rank, dtype))
            engine.step()
            engine.save_checkpoint(tmp_path, tag="middle")
            engine.abandon_update()
    assert engine.core.store.optimizer.exchanges == list(range(OWN_FROM, STEPS))
    expected = [p.detach().clone() for p in oracle.models[rank].parameters()]
    for tag, done in (("step1", 2), ("step4", 5)) + ((("middle", 5),) if micro_batches > 1 else ()):
        resumed = make_engine(dtype, micro_batches, clip, wire=wire)
        resumed.load_checkpoint(tmp_path, tag)
        cadence = Cadence.NEVER if done >= OWN_FROM else Cadence.AT_BOUNDARY
        assert resumed.core.reducer.cadence is cadence
        first_micro = 1 if tag == "middle" else 0
        for step in range(done, STEPS):
            for micro in range(first_micro if step == done else 0, micro_batches):
                resumed.backward(loss_of(resumed, step, micro, rank, dtype))
                resumed.step()
        assert resumed.core.store.optimizer.exchanges == list(range(OWN_FROM, STEPS))
        assert_weights(resumed, expected)
        resumed.destroy()
    assert sorted(file.name for file in (tmp_path / "step4").glob("own_state_*")) == [
        f"own_state_rank_{r}.pt" for r in range(world_size)
    ]


@distributed(world_size=2)
def test_all_ranks_change_in_the_same_step() -> None:
    """One rank wants it two updates earlier, and a step in between is skipped."""
    rank = dist.get_rank()
    engine = make_engine(torch.float32, own_from=2 + 2 * rank)
    optimizer = engine.core.store.optimizer
    applied = []
    for step in range(7):
        loss = loss_of(engine, step, 0, rank)
        engine.backward(loss * float("inf") if step == 3 and rank == 0 else loss)
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [True, True, True, False, True, True, True]
    assert optimizer.updates == 6 and optimizer.exchanges == [4, 5]
    weights = torch.cat([p.detach().view(-1) for p in engine.module.parameters()])
    others = weights.clone()
    dist.broadcast(others, src=0)
    assert torch.equal(weights, others)


@distributed(world_size=1)
def test_another_number_of_ranks() -> None:
    """Errors keep their mean over ranks; the optimizer sees what every rank had saved."""
    engine = make_engine(torch.float32, own_from=1, wire=torch.bfloat16)
    for step in range(3):
        train_batch(engine, step, 1, torch.float32, 0)
    core = engine.core
    own = core.own_state.saved()
    errors = {name: state["error"].clone() for name, state in own["by_parameter"].items()}
    assert any(error.any() for error in errors.values())
    one = {**own, "by_parameter": {n: {"error": e * 3} for n, e in errors.items()}}
    two = {**own, "by_parameter": {n: {"error": e * 5} for n, e in errors.items()}}
    notes = core.own_state.load([one, two], 0, 1)
    assert notes == ["what 2 ranks did not share is spread over 1"]
    for name, state in core.own_state.saved()["by_parameter"].items():
        torch.testing.assert_close(state["error"], errors[name] * 4)
    assert core.store.optimizer.updates == 3


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=1)
def test_partitioned_tensors_are_refused(stage: int) -> None:
    """By training and by the memory planner, with the same words."""
    model = make_model()
    optimizer = MomentumExchange(model.parameters())
    config = config_of(stage, torch.float32, 1, 0.0, 1)
    for attempt in (
        lambda: deepspeed.initialize(model=model, optimizer=optimizer, config=config),
        lambda: answer(PlanRequest(module=model, config=config, ranks=1, optimizer=optimizer)),
    ):
        with pytest.raises(DeepSpeedConfigError, match="MomentumExchange does its own .* use stage 0"):
            attempt()

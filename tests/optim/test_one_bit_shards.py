"""1-bit optimizers under ZeRO 1 and 2: shards of a few copies do what as many whole copies do.

Signs of shards are not signs of whole tensors, as scales are shared by other elements. So most of these tests let the
momenta travel in full, which leaves everything else of an update to compare: groups, clipping, accumulation, and what
an update needs to know of whole tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.ops.formats.codecs import Codec
from deepspeed.zero.tensor_fragment import safe_get_full_optimizer_state
from tests.pool import distributed, run

KEYS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {
        "var_freeze_step": 4,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 2,
    },
    "OneBitLamb": {"freeze_step": 3, "max_coeff": 0.5, "coeff_beta": 0.8},
}
NAMES = {
    "OneBitAdam": ["exp_avg", "exp_avg_sq"],
    "ZeroOneAdam": ["exp_avg", "exp_avg_sq", "local_update", "synced"],
    "OneBitLamb": ["exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"],
}
NUMBERS = ["lamb_coeff_freeze", "scaling_coeff", "last_factor"]
"""Of 1-bit LAMB, one for each tensor."""


class InFull(Codec):
    """fp32 as it is."""

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def pack(self, values: Tensor) -> Tensor:
        return values.float().contiguous().view(torch.uint8)

    def unpack(self, payloads: Tensor, numel: int) -> Tensor:
        return payloads.contiguous().view(torch.float32)


class Model(nn.Module):
    """Two matrices, one of which is cut by shards; a group so small that not every shard has some of it; and weights
    that stay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.kept, self.last = nn.Linear(24, 70), nn.Linear(70, 70), nn.Linear(70, 24)
        self.scale = nn.Parameter(torch.full((3,), 1.5))
        self.kept.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.kept(self.first(x).tanh() * self.scale.mean()).tanh())

    def groups(self) -> list[dict[str, Any]]:
        matrices = [*self.first.parameters(), *self.last.parameters()]
        return [
            {"params": [p for p in matrices if p.dim() > 1]},
            {"params": [p for p in matrices if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
            {"params": [self.scale], "weight_decay": 0.0},
        ]


class Tokens(nn.Module):
    """A table of 50 rows, which two shards cut at row 30, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table, self.head = nn.Embedding(50, 24), nn.Linear(24, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).tanh())

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.parameters())}]


def start(
    kind: str, zero: dict[str, Any], *, in_full: bool, model: Model | Tokens | None = None, **more: Any
) -> Any:
    params = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.1, **KEYS[kind]}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": zero,
        **more,
    }
    model = model or Model()
    engine = deepspeed.initialize(model=model, model_parameters=model.groups(), config=config)[0]
    if in_full:
        engine.core.store.optimizer.exchange.codec = InFull()
    return engine


def groups_of(stage: int, size: int) -> dict[str, Any]:
    return {"stage": stage, "mics_shard_size": size} if stage else {"stage": 0}


def train(engine: Any, first: int, last: int, batches: int = 1) -> list[float]:
    """Updates ``first`` to ``last``; of each this rank computes ``batches`` together."""
    losses, accumulated = [], engine.gradient_accumulation_steps()
    for step in range(first * accumulated, last * accumulated):
        seeds = [1000 * step + dist.get_rank() * batches + batch for batch in range(batches)]
        rows = [torch.randn(8, 24, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        x = torch.cat(rows)
        loss = (engine(x.to(next(engine.module.parameters()).dtype)).float() - x.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights_of(engine: Any) -> list[Tensor]:
    return [param.detach().clone() for param in engine.module.parameters()]


def states_of(engine: Any, kind: str) -> list[Any]:
    """Whole states, and for 1-bit LAMB the numbers of each tensor, which all of its shards must agree about."""
    params = [param for param in engine.module.parameters() if param.requires_grad]
    found = [safe_get_full_optimizer_state(param, name) for param in params for name in NAMES[kind]]
    if kind != "OneBitLamb":
        return found
    store = engine.core.store
    mine = [(o.param_index, [float(store.state_of(o)[name]) for name in NUMBERS]) for o in store.fragments]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    numbers: dict[int, list[float]] = {}
    for index, values in (entry for rank in every for entry in rank):
        assert numbers.setdefault(index, values) == values
    return [*found, torch.tensor([numbers[index] for index in sorted(numbers)])]


CLIPPED = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05}
"""Far below the norm of any gradient here."""


def trained(
    kind: str, zero: dict[str, Any], batches: int, more: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    engine = start(kind, zero, in_full=True, **more)
    train(engine, 0, 10, batches)
    return weights_of(engine), states_of(engine, kind)


@pytest.mark.parametrize("more", [{}, CLIPPED], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", list(KEYS))
def test_two_copies_in_shards(kind: str, more: dict[str, Any]) -> None:
    """Four ranks with two copies in shards are two ranks with whole ones, each with the samples of two."""
    expected, states = run(trained, 2, kind=kind, zero={"stage": 0}, batches=2, more=more)[0]
    for stage in (1, 2):
        found = run(trained, 4, kind=kind, zero=groups_of(stage, 2), batches=1, more=more)
        for weights, others in found:
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(others, states, rtol=1e-3, atol=1e-6)


def with_unseen_rows(kind: str, zero: dict[str, Any], batches: int) -> tuple[list[Any], list[Any]]:
    """Of ten updates, those of warm-up see 20 of the table's rows."""
    engine = start(kind, zero, in_full=True, model=Tokens())
    for step in range(10):
        seeds = [1000 * step + dist.get_rank() * batches + batch for batch in range(batches)]
        rows = [
            torch.randint(0, 50 if step > 3 else 20, (64,), generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
        tokens = torch.cat(rows)
        engine.backward(nn.functional.cross_entropy(engine(tokens), tokens % 10))
        engine.step()
    return weights_of(engine), [safe_get_full_optimizer_state(engine.module.table.weight, "exp_avg_sq")]


@pytest.mark.parametrize("kind", list(KEYS))
def test_variances_of_unseen_rows_are_filled_by_whole_tensors(kind: str) -> None:
    """Not by the mean of a shard, which depends on the number of ranks."""
    expected, variances = run(with_unseen_rows, 2, kind=kind, zero={"stage": 0}, batches=2)[0]
    for weights, others in run(with_unseen_rows, 4, kind=kind, zero=groups_of(2, 2), batches=1):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(others, variances, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("kind", list(KEYS))
@distributed(world_size=[2, 4])
def test_copies_that_are_whole(kind: str, world_size: int) -> None:
    """Shards of one rank are whole tensors, and their signs those of stage 0: the same bits. At stage 2 with one
    micro-batch: it sums each over ranks, in another order than stage 0, and a sign magnifies what that rounds."""
    for stage, more in ((1, CLIPPED), (2, {"gradient_clipping": CLIPPED["gradient_clipping"]})):
        expected = start(kind, {"stage": 0}, in_full=False, **more)
        losses = train(expected, 0, 9)
        engine = start(kind, groups_of(stage, 1), in_full=False, **more)
        assert train(engine, 0, 9) == losses
        torch.testing.assert_close(weights_of(engine), weights_of(expected), rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@distributed(world_size=4)
def test_half_precision(precision: str) -> None:
    """1-bit LAMB: weights are near those of fp32, and the same on all ranks."""
    more = {
        precision: {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})},
        **CLIPPED,
    }
    exact, *engines = [
        start("OneBitLamb", groups_of(stage, 2), in_full=True, **(more if number else CLIPPED))
        for number, stage in enumerate((2, 1, 2))
    ]
    for engine in (exact, *engines):
        train(engine, 0, 12)
    assert all(engine.skipped_steps == 0 for engine in engines)
    before = torch.cat([p.detach().view(-1) for p in Model().parameters()])
    expected = torch.cat([w.view(-1) for w in weights_of(exact)])
    for engine in engines:
        found = torch.cat([w.float().view(-1) for w in weights_of(engine)])
        everyone = [torch.empty_like(found) for _ in range(4)]
        dist.all_gather(everyone, found)
        assert all(torch.equal(found, other) for other in everyone)
        assert (found - expected).norm() < 0.2 * (expected - before).norm()


@pytest.mark.parametrize("kind", list(KEYS))
@distributed(world_size=4)
def test_resumes_exactly(kind: str, tmp_path: Path) -> None:
    """With groups, clipping and accumulation, from the middle of warm-up and from after it."""
    engine = start(kind, groups_of(2, 2), in_full=False, **CLIPPED)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="early")
    train(engine, 2, 7)
    engine.save_checkpoint(tmp_path, tag="late")
    losses = train(engine, 7, 10)
    for tag, done in (("early", 2), ("late", 7)):
        resumed = start(kind, groups_of(2, 2), in_full=False, **CLIPPED)
        resumed.load_checkpoint(tmp_path, tag=tag)
        assert train(resumed, done, 10)[-len(losses) :] == losses
        assert all(map(torch.equal, weights_of(resumed), weights_of(engine)))


class SmallGroupLast(Model):
    """The small group lies in the last shard, of which the first rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.ParameterList([self.scale])
        del self.scale

    def __getattr__(self, name: str) -> Any:
        return self.end[0] if name == "scale" and "end" in self._modules else super().__getattr__(name)


@distributed(world_size=2)
def test_resumes_between_exchanges_of_a_group_that_the_first_rank_has_nothing_of(tmp_path: Path) -> None:
    zero = groups_of(1, 2)
    engine = start("ZeroOneAdam", zero, in_full=False, model=SmallGroupLast())
    train(engine, 0, 7)
    store = engine.core.store
    held = [store.params[owned.param_index] is engine.module.end[0] for owned in store.fragments]
    assert any(held) == (dist.get_rank() == 1)
    engine.save_checkpoint(tmp_path)
    resumed = start("ZeroOneAdam", zero, in_full=False, model=SmallGroupLast())
    resumed.load_checkpoint(tmp_path)
    assert train(resumed, 7, 10) == train(engine, 7, 10)
    assert all(map(torch.equal, weights_of(resumed), weights_of(engine)))


def save(kind: str, zero: dict[str, Any], path: Path) -> tuple[list[Any], list[Any]]:
    engine = start(kind, zero, in_full=False)
    train(engine, 0, 6)
    engine.save_checkpoint(path)
    return weights_of(engine), states_of(engine, kind)


def resume(kind: str, zero: dict[str, Any], path: Path) -> tuple[list[Any], list[Any], list[float]]:
    engine = start(kind, zero, in_full=False)
    engine.load_checkpoint(path)
    return weights_of(engine), states_of(engine, kind), train(engine, 6, 12)


@pytest.mark.parametrize("kind", list(KEYS))
@pytest.mark.parametrize(
    ("before", "after"), [((4, 2, 2), (2, 0, 1)), ((4, 0, 1), (2, 1, 1)), ((2, 0, 1), (4, 2, 2))]
)
def test_another_number_of_ranks(
    kind: str, before: tuple[int, int, int], after: tuple[int, int, int], tmp_path: Path
) -> None:
    """Ranks, stage and ranks per copy, before and after: weights, moments, ratios and scales are those that were saved,
    and training continues."""
    (ranks, stage, size), (others, other_stage, other_size) = before, after
    weights, states = run(save, ranks, kind=kind, zero=groups_of(stage, size), path=tmp_path)[0]
    for rank in run(resume, others, kind=kind, zero=groups_of(other_stage, other_size), path=tmp_path):
        assert all(map(torch.equal, rank[0], weights))
        assert all(map(torch.equal, rank[1], states))
        assert max(rank[2]) < 2  # as before: batches are random

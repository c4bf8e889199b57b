"""``activation_checkpointing.memory_budget``: the bytes and FLOPs it counts, and that nothing else changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import deepspeed
from deepspeed.comm.collectives import Communicator, communicator
from deepspeed.parallel.tensor.mappings import copy_to, reduce_from_
from deepspeed.transforms.recompute import checkpointing as ds
from deepspeed.transforms.recompute.budget import Budget, MemoryBudget, budget_blocks, report
from tests.allocations import counted
from tests.pool import distributed
from tests.transforms.recompute.gpt import gpt, tokens
from tests.transforms.recompute.models import assert_same_bits


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before, ds._state = ds._state, ds._CheckpointState()
    yield
    ds._state = before


def step(model: nn.Module, batch: Tensor, seed: int = 3) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, "next draw": torch.rand(2)}


def after_forward(model: nn.Module, batch: Tensor) -> int:
    """Return the bytes that a forward leaves allocated, whoever holds them."""
    with counted() as memory:
        loss = model(batch)
    assert loss.requires_grad
    return memory.kept


def flops_of_step(model: nn.Module, batch: Tensor) -> int:
    # Torch has formulas for devices alone.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def formula(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return sdpa_flop_count(query, key, value)

    with FlopCounterMode(display=False, custom_mapping={attention: formula}) as flops:
        model(batch).backward()
    return flops.get_total_flops()


# --- The numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "width", "length"), [(12, 256, 256), (24, 128, 128)])
def test_sixty_percent_of_a_gpt(depth: int, width: int, length: int) -> None:
    """Kept within 3 % with at most 5 % more FLOPs, both counted independently."""
    model, batch = gpt(depth=depth, width=width, heads=width // 32), tokens(rows=2, length=length)
    everything = after_forward(model, batch)
    plain_flops = flops_of_step(model, batch)
    budget = budget_blocks(model, 0.6, None)
    model(batch)
    choice = budget.choice
    assert choice is not None
    assert choice.budget * 0.97 <= choice.peak <= choice.budget
    assert choice.counted.everything == pytest.approx(everything, rel=0.01)
    assert 0.57 * everything <= after_forward(model, batch) <= 0.605 * everything
    more = flops_of_step(model, batch) - plain_flops
    assert 0 <= more <= 0.05 * plain_flops
    assert choice.extra == pytest.approx(more, rel=0.01)


def test_backward_holds_the_budget_too() -> None:
    """A recomputed block has all of its saved tensors, in addition to what earlier blocks kept."""
    model, batch = gpt(depth=10, width=64), tokens(rows=8, length=128)
    model(batch).backward()  # gradients of weights exist from here on
    with counted() as plain:
        model(batch).backward()
    budget = budget_blocks(model, 0.5, None)
    model(batch)
    assert budget.choice is not None
    with counted() as memory:
        model(batch).backward()
    assert memory.peak <= plain.peak - 0.9 * (budget.choice.counted.everything - budget.choice.peak)


def test_bytes_instead_of_a_share() -> None:
    model, batch = gpt(), tokens()
    whole = budget_blocks(model, 1.0, None)
    model(batch)
    assert whole.choice is not None and whole.choice.extra == 0
    assert all(way.chosen is None for way in whole.choice.options)
    limit = int(0.5 * whole.choice.counted.everything)
    bytes_, by_share = gpt(), gpt()
    in_bytes, share = budget_blocks(bytes_, float(limit), None), budget_blocks(by_share, 0.5, None)
    bytes_(batch), by_share(batch)
    assert in_bytes.choice is not None and share.choice is not None
    assert in_bytes.choice.options == share.choice.options and in_bytes.choice.extra > 0


# --- The same training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.8, 0.35])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_same_bits(limit: float, dropout: float) -> None:
    model, batch = gpt(dropout=dropout), tokens()
    expected = step(model, batch)
    budget = budget_blocks(model, limit, None)
    for _ in range(3):  # the first one is counted
        assert_same_bits(step(model, batch), expected)
    assert budget.choice is not None and budget.choice.extra_share < 0.34
    with torch.no_grad():
        assert torch.isfinite(model(batch))


def test_other_shapes_later_and_two_backwards() -> None:
    model = gpt()
    plain = copy.deepcopy(model)
    budget_blocks(model, 0.4, None)
    step(model, tokens())
    for rows, length in ((2, 32), (4, 7)):
        batch = tokens(rows=rows, length=length)
        assert_same_bits(step(model, batch), step(plain, batch))
    found = []
    for each in (model, plain):
        each.zero_grad()
        loss = each(tokens())
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({name: p.grad.clone() for name, p in each.named_parameters()})
    assert_same_bits(found[0], found[1])


def test_a_copy_has_its_own_blocks() -> None:
    model, batch = gpt(), tokens()
    budget_blocks(model, 0.5, None)
    expected = step(model, batch)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert_same_bits(step(twin, batch), expected)


class Tricky(nn.Module):
    """A block whose product is changed in place, and that draws from a named state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h += 1
        with ds.get_cuda_rng_tracker().fork():
            h = nn.functional.dropout(torch.tanh(h), 0.3)
        return x + nn.functional.dropout(self.down(h), 0.1)


class Model(nn.Module):
    def __init__(self, block: Any, *args: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(*args) for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("limit", [0.5, 0.6, 0.7, 0.9])
def test_changes_in_place_and_named_random_states(limit: float) -> None:
    model, batch = Model(Tricky), torch.randn(5, 16)
    found = []
    for attach in (False, True):
        if attach:
            budget_blocks(model, limit, None)
        ds.model_parallel_cuda_manual_seed(4)
        found.append([step(model, batch) for _ in range(3)])
    for got, expected in zip(found[1], found[0], strict=True):
        assert_same_bits(got, expected)


# --- What is refused and reported -------------------------------------------------------------------------------


def test_what_cannot_be_held_names_what_can() -> None:
    model, batch = gpt(), tokens()
    budget_blocks(model, 0.01, None)
    with pytest.raises(
        ValueError, match=r"memory_budget=0.01.*outside the model's blocks.*Set 0\.(\d+)"
    ) as found:
        model(batch)
    least = float(str(found.value).partition("Set ")[2].split()[0])
    again = gpt()
    budget_blocks(again, least, None)
    again(batch)


def test_models_without_blocks_or_with_their_own_checkpoints_are_refused() -> None:
    with pytest.raises(ValueError, match="no repeated blocks"):
        budget_blocks(nn.Linear(2, 2), 0.5, None)
    model: Any = gpt()
    model.blocks[0].gradient_checkpointing = True
    budget_blocks(model, 0.5, None)
    with pytest.raises(ValueError, match=r"blocks\.0 checkpoints itself"):
        model(tokens())


def test_the_report_names_layers() -> None:
    model = gpt(depth=8)
    budget = budget_blocks(model, 0.5, None)
    model(tokens())
    assert budget.choice is not None
    text = report(budget.choice)
    assert "more FLOPs" in text and "recomputes" in text and "qkv" in text


def test_pipelines_are_refused() -> None:
    class PipelineModule(nn.Sequential):
        pass

    with pytest.raises(ValueError, match="activation_checkpoint_interval"):
        MemoryBudget(0.5).apply(PipelineModule(nn.Linear(2, 2), nn.Linear(2, 2)), None)


@pytest.mark.parametrize("value", [0, -1, "much", True])
def test_values_that_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        ds.configure(None, {"activation_checkpointing": {"memory_budget": value}})


# --- Ranks -----------------------------------------------------------------------------------------------------


def budget_of(engine: Any) -> Budget:
    return vars(engine.module.blocks[0])["forward"].budget


def train(stage: int, limit: float | None, *, rows: int = 4, **config: Any) -> list[Tensor]:
    """Losses of three steps of two micro-batches, then the weights."""
    section = {} if limit is None else {"memory_budget": limit}
    whole = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **config},
        "activation_checkpointing": section,
    }
    engine, *_ = deepspeed.initialize(model=gpt(dropout=0.1), config=json.loads(json.dumps(whole)))
    torch.manual_seed(50 + dist.get_rank())
    results = []
    for number in range(6):
        loss = engine(tokens(10 * number + dist.get_rank(), rows=rows))
        engine.backward(loss)
        engine.step()
        results.append(loss.detach())
    if limit is not None:
        choice = budget_of(engine).choice
        assert choice is not None and choice.peak <= choice.budget
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            seen, [None if w.chosen is None else sorted(map(str, w.chosen)) for w in choice.options]
        )
        assert all(each == seen[0] for each in seen)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    return results + weights


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("stage", "limit", "options"),
    [
        (0, 0.4, {}),
        (1, 0.7, {}),
        (2, 0.4, {"offload_optimizer": {"device": "cpu"}}),
        (3, 0.4, {}),
        (3, 0.7, {"offload_param": {"device": "cpu"}}),
    ],
)
def test_training_is_that_without_it(stage: int, limit: float, options: dict[str, Any]) -> None:
    expected = train(stage, None, **options)
    got = train(stage, limit, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@distributed(world_size=2)
def test_ranks_with_different_batches_decide_alike() -> None:
    rows = 2 + 3 * dist.get_rank()
    expected = train(3, None, rows=rows)
    got = train(3, 0.5, rows=rows)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class Split(nn.Module):
    """A feed-forward layer over ranks, whose second product is summed in place over them."""

    def __init__(self, group: Communicator) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(copy_to(x, self.group)))
        return torch.tanh(x + reduce_from_(self.down(h), self.group))


@distributed(world_size=2)
@pytest.mark.parametrize("limit", [0.5, 0.7])
@pytest.mark.parametrize("zeros", [False, True])
def test_what_other_ranks_add_in_place_is_not_kept(limit: float, zeros: bool) -> None:
    model = Model(Split, communicator(dist.group.WORLD))
    with torch.no_grad():
        for block in model.blocks:
            # Zeros: the sum would not be noticed.
            block.down.weight.mul_(0 if zeros else dist.get_rank() + 1)
    torch.manual_seed(1)
    batch = torch.randn(5, 16)
    plain = copy.deepcopy(model)
    budget = budget_blocks(model, limit, None)
    assert_same_bits(step(model, batch), step(plain, batch))
    with torch.no_grad():
        for each in (model, plain):
            for block in each.blocks:
                block.down.weight.add_(0.1 * (dist.get_rank() + 1))
    assert_same_bits(step(model, batch), step(plain, batch))
    assert budget.choice is not None and budget.choice.extra > 0

"""Stage 3 with no room for idle parameters, against plain PyTorch: uses that reach weights in unusual ways."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.zero.gathering import sharded_model
from tests.pool import distributed
from tests.zero.models import Block, config_for

WIDTH, STEPS = 8, 3
NOTHING = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outlet(x)


def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    """WGAN-GP: a norm of the gradient with respect to the input."""
    x = x.clone().requires_grad_()
    score = model(x)
    (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (grad.norm(dim=1) - 1).square().mean()


def only_the_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum()


def penalty_of_a_derived_input(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    between = x * 2 + 1
    score = model(between)
    (grad,) = torch.autograd.grad(score.sum(), between, create_graph=True)
    return score.mean() + grad.square().sum()


def penalty_of_weights(model: Any, x: Tensor) -> Tensor:
    """The squared norm of the parameters' own gradients."""
    params = [p for p in model.parameters() if p.requires_grad]
    score = model(x)
    grads = torch.autograd.grad(score.square().mean(), params, create_graph=True)
    return score.mean() + 0.1 * sum(grad.square().sum() for grad in grads)


def third_order(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean()


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_weights(loss_of: Callable[[Any, Tensor], Tensor], world_size: int) -> dict[str, Tensor]:
    """One process that averages what the ranks' inputs give."""
    torch.manual_seed(0)
    model = Critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        for rank in range(world_size):
            (loss_of(model, inputs(step, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def start(model: nn.Module, *, collectives: bool = False, lr: float = 0.05, **more: Any) -> Any:
    config = {**config_for(3, clip=0.0, **NOTHING), **more}
    del config["optimizer"]
    chosen = sharded_model.prefers_collectives
    sharded_model.prefers_collectives = lambda device_type: collectives
    try:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
        return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
    finally:
        sharded_model.prefers_collectives = chosen


PENALTIES = [
    gradient_penalty,
    only_the_penalty,
    penalty_of_a_derived_input,
    penalty_of_weights,
    third_order,
]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("loss_of", PENALTIES)
@distributed(world_size=[1, 2])
def test_backward_of_a_backward(
    world_size: int, loss_of: Callable[[Any, Tensor], Tensor], plain: bool
) -> None:
    expected = plain_weights(loss_of, world_size)
    for collectives in {False, world_size > 1}:
        torch.manual_seed(0)
        model = Critic()
        engine = start(model, collectives=collectives)
        for step in range(STEPS):
            loss = loss_of(engine, inputs(step, dist.get_rank()))
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            assert not any(engine.sharded.transitions.holders)
            assert all(b.status.name == "SHARDED" for b in engine.sharded.buckets)
        engine.destroy()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@distributed(world_size=1)
def test_inputs_can_be_used_again_and_saved() -> None:
    """An attack or an inversion runs many forwards on one leaf: one hook, nothing that cannot be pickled."""
    engine = start(Critic())
    x = inputs(0, 0).requires_grad_()
    for _ in range(3):
        torch.autograd.grad(engine(x).sum(), x)
    assert len(x._backward_hooks) == 1  # type: ignore[arg-type]
    torch.save(x, io.BytesIO())
    copy.deepcopy(x)
    engine.destroy()


@distributed(world_size=2)
def test_gradients_with_a_graph_of_their_own_do_not_stay() -> None:
    """``loss.backward(create_graph=True)``: what is summed over ranks has no graph."""
    engine = start(Critic())
    engine(inputs(0, dist.get_rank())).mean().backward(create_graph=True)
    grad = deepspeed.utils.safe_get_full_grad(engine.module.inlet.weight)
    assert grad is not None
    assert not grad.requires_grad
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("collectives", [False, True])
@distributed(world_size=2)
def test_forward_on_another_thread(collectives: bool) -> None:
    """Evaluations on other threads, while this one trains: as many as each rank likes."""
    torch.manual_seed(0)
    reference = Critic()
    expected = reference.state_dict()
    model = copy.deepcopy(reference)
    engine = start(model, collectives=collectives, lr=0.0)
    results: list[Tensor] = []
    errors: list[BaseException] = []
    x = inputs(7, dist.get_rank())

    def evaluate() -> None:
        try:
            for _ in range(4 + 3 * dist.get_rank()):
                with torch.no_grad():
                    results.append(engine.module(x))
            results.append(engine.module(x).detach())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(4):
        engine.backward(engine(inputs(step, dist.get_rank())).square().mean())
        engine.step()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all(torch.equal(result, reference(x)) for result in results)
    engine.destroy()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("collectives", [False, True])
@distributed(world_size=2)
def test_training_on_another_thread_than_the_engine_was_made_on(collectives: bool) -> None:
    runs = []
    for apart in (False, True):
        torch.manual_seed(0)
        model = Critic()
        engine = start(model, collectives=collectives)

        def train(engine: Any = engine) -> None:
            for step in range(4):
                engine.backward(engine(inputs(step, dist.get_rank())).square().mean())
                engine.step()

        if apart:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        else:
            train()
        assert engine.global_steps == 4
        if collectives:
            assert engine.sharded.gatherer.counts.hits
        engine.destroy()
        runs.append(model.state_dict())
    assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())


class Words(nn.Module):
    """``bag``: an EmbeddingBag; ``tied``: the output layer reads the table, too."""

    def __init__(self, *, bag: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table = kind(13, 7, max_norm=0.8)  # rows straddle the ranks' shards
        self.table.weight.requires_grad_(not frozen)
        self.body = nn.Linear(7, 7)
        self.tied = tied

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.table(ids)))
        if self.tied:
            x = nn.functional.linear(x, self.table.weight)
        return x.square().mean()


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, 13, (2, 3), generator=torch.Generator().manual_seed(50 * step + rank))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [{}, {"bag": True}, {"tied": True}, {"frozen": True}])
@distributed(world_size=[1, 2])
def test_embeddings_keep_their_renormalization(
    world_size: int, kind: dict[str, bool], persistent: bool
) -> None:
    """Rows that any rank looked up are clipped for all, as one process does that sees every rank's batch."""
    if kind.get("tied") and world_size > 1:
        pytest.skip("what one rank looks up in a step is clipped for the others when it ends")
    torch.manual_seed(0)
    reference = Words(**kind)
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for step in range(4):
        for rank in range(world_size):
            (reference(ids_of(step, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = Words(**kind)
    engine = start(model, lr=0.5)
    if persistent:
        engine.destroy()
        torch.manual_seed(0)
        model = Words(**kind)
        engine = start(
            model,
            lr=0.5,
            zero_optimization={"stage": 3, **NOTHING, "stage3_param_persistence_threshold": 10**6},
        )
        assert model.table.weight.ds_persist
    for step in range(4):
        engine.backward(engine(ids_of(step, dist.get_rank())))
        engine.step()
    engine.destroy()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
def test_renormalization_with_16_bit_weights_leaves_other_masters_alone() -> None:
    torch.manual_seed(0)
    model = Words()
    engine = start(model, lr=0.0, bf16={"enabled": True})
    weight = model.table.weight
    before = deepspeed.utils.safe_get_full_fp32_param(weight)
    exact = before + 1e-4 * torch.arange(7.0)  # not a number of 16 bits
    deepspeed.utils.safe_set_full_fp32_param(weight, exact)
    ids = torch.tensor([[1, 2, 3]])
    engine.backward(engine(ids).float())
    engine.step()
    after = deepspeed.utils.safe_get_full_fp32_param(weight)
    seen = torch.zeros(13, dtype=torch.bool)
    seen[ids] = True
    assert torch.equal(after[~seen], exact[~seen])
    assert (after[seen].norm(dim=1) <= 0.81).all()
    engine.destroy()

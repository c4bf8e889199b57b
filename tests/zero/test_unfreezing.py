"""Parameters that are unfrozen, frozen or given to the optimizer during training behave as with a torch optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.checkpoint.placement import interval, place
from deepspeed.engine.optimizer import find_unfreezable
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.native import sum_of_squares
from deepspeed.zero.muon.muon_optimizer import build_muon
from deepspeed.zero.step import clip_coefficient, norm_from_squares
from tests.checkpoint.test_optimizer_state import Eager
from tests.pool import distributed
from tests.zero.models import assert_same

STEPS, GAS, CLIP = 9, 2, 0.1
LAYOUTS = [(0, None), (1, None), (2, "nvme"), (3, None), (3, "nvme"), (3, "params")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x * self.scale).square().mean()


def frozen(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    model.body.requires_grad_(False)
    model.scale.requires_grad_(False)
    return model


def gradually(step: int, model: Net) -> None:
    """One weight, then all, then some of them rest for a while."""
    if step == 2:
        model.body[1].weight.requires_grad_(True)
    if step == 4:
        model.requires_grad_(True)
    if step in (6, 8):
        model.body[1].requires_grad_(step == 8)
        model.head.weight.requires_grad_(step == 8)


def at_once(step: int, model: Net) -> None:
    if step == 4:
        model.requires_grad_(True)


def batch(step: int, micro: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + micro))


def plain(make: Callable[[Net], torch.optim.Optimizer], schedule: Callable[[int, Net], None]) -> Net:
    """The oracle: no engine, our norm."""
    model = frozen()
    optimizer = make(model)
    for step in range(STEPS):
        schedule(step, model)
        join(step, model, optimizer)
        for micro in range(GAS):
            (model(batch(step, micro)) / GAS).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = norm_from_squares(sum_of_squares(grads))
        torch._foreach_mul_(grads, clip_coefficient(norm, CLIP))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def join(step: int, model: Net, optimizer: Any) -> None:
    """Parameters that are not in the optimizer at first are added when all are unfrozen."""
    if step == 4:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        rest = [p for p in model.parameters() if id(p) not in held]
        if rest:
            optimizer.add_param_group({"params": rest, "lr": 0.005})


def config_for(stage: int, offload: str | None, folder: Path, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "sub_group_size": 10, "stage3_param_persistence_threshold": 6}
    place = {"device": "nvme", "nvme_path": str(folder)}
    if offload is not None:
        zero["offload_optimizer"] = place
    if offload == "params":
        zero["offload_param"] = {**place, "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": CLIP,
    }
    return {**config, "zero_optimization": zero, **more}


def steps(
    engine: Any, first: int, last: int, schedule: Callable[[int, Net], None], joins: bool = True
) -> dict[str, Tensor]:
    for step in range(first, last):
        schedule(step, engine.module)
        if joins:
            join(step, engine.module, engine.optimizer)
        for micro in range(GAS):
            dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
            engine.backward(engine(batch(step, micro).to(dtype)))
            engine.step()
    return whole(engine)


def whole(engine: Any) -> dict[str, Tensor]:
    params = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        found = {name: param.detach().clone() for name, param in params.items()}
    torch.distributed.barrier()  # other ranks may still read from this one
    return found


def assert_close(found: dict[str, Tensor], model: nn.Module) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6, msg=name)


def everything(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def eager(model: Net) -> torch.optim.Optimizer:
    return Eager(model.parameters())


def trainable(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("stage, offload", LAYOUTS)
@pytest.mark.parametrize("make", [everything, eager, trainable])
@distributed(world_size=2)
def test_as_with_torch(tmp_path: Path, stage: int, offload: str | None, make: Any) -> None:
    model = frozen()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make(model), config=config_for(stage, offload, tmp_path)
    )
    schedule = at_once if make is trainable else gradually
    assert_close(steps(engine, 0, STEPS, schedule), plain(make, schedule))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_optimizer_of_the_configuration(tmp_path: Path, stage: int) -> None:
    """It is made for all parameters of the model; frozen ones join it when they train."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}}
    config = config_for(stage, None, tmp_path, optimizer=optimizer)
    engine, *_ = deepspeed.initialize(model=frozen(), config=config)
    assert_close(steps(engine, 0, STEPS, gradually, joins=False), plain(everything, gradually))


@pytest.mark.parametrize("kind", ["AdamW", "Lamb", "Muon"])
@distributed(world_size=2)
def test_stages_agree(tmp_path: Path, kind: str) -> None:
    """In bf16, and with optimizers that look at whole tensors."""
    results = []
    for stage, offload in LAYOUTS:
        config = config_for(stage, offload, tmp_path, bf16={"enabled": True})
        model = frozen()
        if kind == "Muon":
            config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01}}
            parameters = [{"params": [p for p in model.parameters() if (p.dim() > 1) == m], "use_muon": m}
                          for m in (True, False)]  # fmt: skip
            engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        else:
            optimizer = everything(model) if kind == "AdamW" else FusedLamb(model.parameters(), lr=0.02)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        results.append(steps(engine, 0, STEPS, gradually))
        engine.destroy()
    start = dict(frozen().bfloat16().named_parameters())
    assert all(not torch.equal(value, start[name]) for name, value in results[0].items())
    for result in results[1:]:
        for name, value in result.items():
            torch.testing.assert_close(value, results[0][name], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_one_rank_alone_has_the_gradient(tmp_path: Path, stage: int) -> None:
    """Control flow may differ from rank to rank; the others count as zero."""
    model = frozen()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=everything(model), config=config_for(stage, None, tmp_path)
    )
    rank = torch.distributed.get_rank()

    def on_rank_1(step: int, model: Net) -> None:
        if step == 1:
            model.body[0].requires_grad_(rank == 1)

    found = steps(engine, 0, 3, on_rank_1)
    both = [torch.empty(6, 6) for _ in range(2)]
    torch.distributed.all_gather(both, found["body.0.weight"])
    assert torch.equal(*both) and not torch.equal(both[0], frozen().body[0].weight)


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_what_no_optimizer_holds_is_named(tmp_path: Path, stage: int) -> None:
    model = frozen()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=trainable(model), config=config_for(stage, None, tmp_path)
    )
    with warnings() as said:
        found = steps(engine, 0, STEPS, gradually, joins=False)
    said = [line for line in said if "add_param_group" in line]
    assert len(said) == 2 and said[0].startswith("parameter body.1.weight was unfrozen")
    assert "parameters body.0.weight, body.0.bias, body.1.bias" in said[1] or "scale" in said[1]
    assert torch.equal(found["body.0.weight"], frozen().body[0].weight)


@distributed(world_size=2)
def test_what_came_after_initialize_is_refused(tmp_path: Path) -> None:
    model = frozen()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=trainable(model), config=config_for(1, None, tmp_path)
    )
    extra = nn.Parameter(torch.ones(3))
    engine.optimizer.add_param_group({"params": [extra]})
    steps(engine, 0, 1, gradually)  # nothing happens as long as it has no gradient
    for _ in range(GAS):
        engine.backward(engine(batch(0, 0)) + extra.sum())
    with pytest.raises(RuntimeError, match=r"not part of the model when deepspeed.initialize was called"):
        for _ in range(GAS):
            engine.step()


@pytest.mark.parametrize("stage, other", [(0, 2), (1, 1), (2, 3), (3, 3), (3, 0)])
@pytest.mark.parametrize("make", [everything, trainable])
@distributed(world_size=2)
def test_resume_after_unfreezing(tmp_path: Path, stage: int, other: int, make: Any) -> None:
    """The new run begins frozen, as the old one did, and loads what was trained since."""
    engine, resumed = (
        deepspeed.initialize(model=m, optimizer=make(m), config=config_for(s, None, tmp_path))[0]
        for s, m in ((stage, frozen()), (other, frozen(seed=1)))
    )
    schedule = at_once if make is trainable else gradually
    steps(engine, 0, 6, schedule)
    engine.save_checkpoint(tmp_path)
    expected = steps(engine, 6, STEPS, schedule)
    if make is trainable:
        join(4, resumed.module, resumed.optimizer)
    resumed.load_checkpoint(tmp_path)
    resumed.module.requires_grad_(True)
    found = steps(resumed, 6, STEPS, schedule)
    if stage == other:
        assert_same(found, expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_frozen_later_is_not_unused(tmp_path: Path, stage: int) -> None:
    config = config_for(stage, None, tmp_path)
    config["zero_optimization"]["ignore_unused_parameters"] = False
    model = frozen()
    engine, *_ = deepspeed.initialize(model=model, optimizer=everything(model), config=config)

    def schedule(step: int, model: Net) -> None:
        model.head.weight.requires_grad_(step == 0)

    before = steps(engine, 0, 1, schedule)
    after = steps(engine, 1, 3, schedule)
    assert torch.equal(before["head.weight"], after["head.weight"])
    assert not torch.equal(before["head.bias"], after["head.bias"])


def test_parts_of_matrices_that_join_muon() -> None:
    """As from the start: those of a tensor-parallel split can be assembled, others would be refused."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in (model[1], model[2], model[3]):
        layer.weight.requires_grad_(False)
    place(model[2].weight, interval((4, 4), 0, [4, 4], 0))
    place(model[3].weight, interval((4, 4), 0, [4, 4], 0, axis="another"))
    for param in model.parameters():
        param.use_muon = param.dim() == 2  # type: ignore[attr-defined]
    muon = build_muon(model.parameters(), lr=0.1)
    joining = [id(model[1].weight), id(model[2].weight)]
    assert [id(param) for param in find_unfreezable(None, model, muon)] == joining


def test_a_callable_holds_what_it_is_given() -> None:
    """Of all trainable parameters in one group, frozen ones join later; of a choice of its own, none do."""
    model = frozen()
    every = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    assert {id(p) for p in find_unfreezable(None, model, every)} == {
        id(p) for p in model.parameters() if not p.requires_grad
    }
    assert find_unfreezable(None, model, torch.optim.SGD([model.head.weight], lr=0.1)) == []

"""The engine's interface: accumulation, several losses, plain backward, no_sync, kinds of outputs, several engines."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.zero.bucket import ParamBucket
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.gradients.reducer import GradReducer
from deepspeed.zero.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from tests.pool import distributed

WIDTH = 8


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def make_config(stage: int = 0, gas: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def start(stage: int = 0, gas: int = 1, model: nn.Module | None = None, **more: Any) -> Any:
    engine, *_ = deepspeed.initialize(model=model or make_model(), config=make_config(stage, gas, **more))
    return engine


def data(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def weights(engine: Any) -> list[Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_no_sync_equals_one_sum(stage: int) -> None:
    engine, reference = start(stage), start(stage)
    rank = dist.get_rank()
    with engine.no_sync():
        engine.backward(engine(data(0, rank)).square().mean())
        engine.backward(engine(data(1, rank)).square().mean())
        with pytest.raises(AssertionError, match="no_sync"):
            engine.step()
    engine.backward(engine(data(2, rank)).square().mean())
    engine.step()
    total = sum(reference(data(i, rank)).square().mean() for i in range(3))
    reference.backward(total)
    reference.step()
    for a, b in zip(weights(engine), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_several_backwards_per_step_add_up(stage: int, scaled: bool) -> None:
    engine, reference = start(stage), start(stage)
    rank = dist.get_rank()
    outputs = engine(data(0, rank))
    first, second = outputs.square().mean(), outputs.abs().mean()
    if scaled:
        engine.scale(first, retain_graph=True).backward(retain_graph=True)
        engine.scale(second).backward()
    else:
        engine.backward(first, retain_graph=True)
        engine.backward(second)
    engine.step()
    outputs = reference(data(0, rank))
    reference.backward(outputs.square().mean() + outputs.abs().mean())
    reference.step()
    for a, b in zip(weights(engine), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_unmanaged_accumulation(stage: int) -> None:
    managed, unmanaged = start(stage, gas=2), start(stage, managed_gradient_accumulation=False)
    rank = dist.get_rank()
    for step in range(3):
        for micro in range(2):
            managed.backward(managed(data(2 * step + micro, rank)).square().mean())
            managed.step()
            unmanaged.backward(unmanaged(data(2 * step + micro, rank)).square().mean() / 2)
        unmanaged.step()
    assert same(weights(managed), weights(unmanaged))
    assert managed.global_steps == unmanaged.global_steps == 3
    with pytest.raises(AssertionError, match="managed_gradient_accumulation"):
        unmanaged.set_gradient_accumulation_boundary(True)
    managed.destroy(), unmanaged.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_forced_boundary_as_accelerate_does_it(stage: int) -> None:
    counted, forced = start(stage, gas=2), start(stage, gas=2)
    rank = dist.get_rank()
    for step in range(2):
        for micro in range(2):
            counted.backward(counted(data(2 * step + micro, rank)).square().mean())
            counted.step()
            forced.set_gradient_accumulation_boundary(is_boundary=micro == 1)
            forced.backward(forced(data(2 * step + micro, rank)).square().mean())
            if micro == 1:
                forced.step()
    assert same(weights(counted), weights(forced))
    counted.destroy(), forced.destroy()


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = make_model()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        loss = logits.square().mean()
        return {
            "tuple": (loss, logits),
            "dict": {"loss": loss, "logits": [logits]},
            "dataclass": Output(loss, logits),
        }[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_plain_backward_on_any_output(stage: int, kind: str) -> None:
    engine, reference = start(stage, model=Wrapped(kind)), start(stage)
    rank = dist.get_rank()
    for step in range(2):
        output = engine(data(step, rank))
        loss = output[0] if kind == "tuple" else output["loss"] if kind == "dict" else output.loss
        loss.backward()
        engine.step()
        reference.backward(reference(data(step, rank)).square().mean())
        reference.step()
    assert same(weights(engine), weights(reference))
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("scaled", [True, False])
@distributed(world_size=2)
def test_plain_backward_counts_one_of_several_micro_batches(stage: int, kind: str, scaled: bool) -> None:
    """As ``engine.backward`` does, whether or not other outputs lie between the loss and the parameters."""
    engine, reference = start(stage, gas=4, model=Wrapped(kind)), start(stage, gas=4)
    rank = dist.get_rank()
    for micro in range(8):
        output = engine(data(micro, rank))
        loss = output[0] if kind == "tuple" else output["loss"]
        (engine.scale(loss) if scaled else loss).backward()
        reference.backward(reference(data(micro, rank)).square().mean())
        if engine.is_gradient_accumulation_boundary():
            for ours, theirs in zip(engine.module.parameters(), reference.module.parameters(), strict=True):
                assert torch.equal(safe_get_full_grad(ours), safe_get_full_grad(theirs))
        engine.step(), reference.step()
    assert same(weights(engine), weights(reference))
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_safe_getters_see_the_reduced_state(stage: int) -> None:
    engine = start(stage)
    rank = dist.get_rank()
    engine.backward(engine(data(0, rank)).square().mean())
    weight = engine.module[0].weight
    model = make_model()
    sum(model(data(0, r)).square().mean() for r in range(2)).div(2).backward()
    torch.testing.assert_close(safe_get_full_grad(weight), model[0].weight.grad, rtol=1e-5, atol=1e-7)
    engine.step()
    torch.testing.assert_close(safe_get_full_fp32_param(weight), weight.detach())
    moment = safe_get_full_optimizer_state(weight, "exp_avg")
    torch.testing.assert_close(moment, 0.1 * model[0].weight.grad, rtol=1e-5, atol=1e-7)
    engine.destroy()


@pytest.mark.parametrize("after_step", [True, False])
@distributed(world_size=2)
def test_gradients_that_a_script_keeps(after_step: bool) -> None:
    engine = start(0)
    rank = dist.get_rank()
    engine.backward(engine(data(0, rank)).square().mean())
    kept = [p.grad for p in engine.module.parameters()]
    expected = [grad.clone() for grad in kept]
    if after_step:
        engine.step()
    else:
        for param in engine.module.parameters():
            param.grad = None
    engine.backward(engine(data(1, rank)).square().mean())
    for param, grad, value in zip(engine.module.parameters(), kept, expected, strict=True):
        assert torch.equal(grad, value) and not torch.equal(param.grad, value)
    engine.destroy()


@distributed(world_size=2)
def test_stage_zero_leaves_averaged_gradients_readable() -> None:
    engine = start(0)
    rank = dist.get_rank()
    engine.backward(engine(data(0, rank)).square().mean())
    model = make_model()
    sum(model(data(0, r)).square().mean() for r in range(2)).div(2).backward()
    for p, q in zip(engine.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
    engine.zero_grad()
    assert all(p.grad is None for p in engine.module.parameters())
    engine.destroy()


@pytest.mark.parametrize("stages", [(0, 1), (1, 2), (2, 2)])
@distributed(world_size=2)
def test_several_engines_in_one_process(stages: tuple[int, int]) -> None:
    """Two engines trained in turn do what each does alone."""
    rank = dist.get_rank()

    def run(engines: list[Any]) -> list[list[Tensor]]:
        for step in range(3):
            for engine in engines:
                engine.backward(engine(data(step, rank)).square().mean())
                engine.step()
        result = [weights(engine) for engine in engines]
        for engine in engines:
            engine.destroy()
        return result

    together = run([start(stages[0]), start(stages[1], bf16={"enabled": True})])
    (first,), (second,) = run([start(stages[0])]), run([start(stages[1], bf16={"enabled": True})])
    assert same(together[0], first)
    assert same(together[1], second)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_an_engine_that_is_dropped_leaves_nothing(stage: int) -> None:
    """Without destroy(): else its process group would live on, and gloo's threads with it, after
    destroy_process_group."""
    engine = start(stage)
    for step in range(2):
        engine.backward(engine(data(step, dist.get_rank())).mean())
        engine.step()
    del engine
    gc.collect()
    left = [
        type(o).__name__ for o in gc.get_objects() if isinstance(o, GradReducer | ParamBucket | GradBucket)
    ]
    assert not left


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_detached_parameters_are_taken_back(stage: int) -> None:
    """``p.data = ...`` (a LoRA merge) between steps: training continues from the new value."""
    engine, reference = start(stage), start(stage)
    rank = dist.get_rank()
    for step in range(3):
        for e, detach in ((engine, True), (reference, False)):
            weight = e.module[0].weight
            if step == 1 and detach:
                weight.data = weight.data + 1.0
            elif step == 1:
                weight.data.add_(1.0)
            e.backward(e(data(step, rank)).square().mean())
            e.step()
    assert same(weights(engine), weights(reference))
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_a_stale_graph_is_an_error(stage: int) -> None:
    engine = start(stage)
    loss = engine(data(0)).square().mean()
    engine.backward(engine(data(1)).square().mean())
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=1)
def test_deepcopy_of_the_module_is_independent(stage: int) -> None:
    engine = start(stage)
    twin = copy.deepcopy(engine.module)
    twin(data(0)).square().mean().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in engine.module.parameters())
    engine.destroy()


@distributed(world_size=1)
def test_without_optimizer_stage_0_runs_forward_only() -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=make_model(), config=config)
    assert (optimizer, loader, scheduler) == (None, None, None)
    loss = engine(data(0)).sum()
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        engine.backward(loss)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=1)
def test_stages_1_and_2_refuse_to_start_without_optimizer(stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    with pytest.raises(AssertionError, match="requires an optimizer"):
        deepspeed.initialize(model=make_model(), config=config)
    frozen = make_model().requires_grad_(False)
    with pytest.raises(AssertionError):
        deepspeed.initialize(model=frozen, config=make_config(stage))


@distributed(world_size=2)
def test_ranks_with_different_models_are_told() -> None:
    model = nn.Linear(WIDTH, 2 + dist.get_rank(), bias=dist.get_rank() == 0)
    if dist.get_rank() == 1:
        model = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="disagree"):
        deepspeed.initialize(model=model, config=make_config(1))


@pytest.mark.parametrize("bad", ["vector", "number", "no grad"])
@distributed(world_size=1)
def test_bad_losses_are_refused(bad: str) -> None:
    engine = start(0)
    output = engine(data(0))
    loss = {"vector": output, "number": 1.0, "no grad": output.mean().detach()}[bad]
    with pytest.raises((TypeError, ValueError, RuntimeError), match="loss"):
        engine.backward(loss)
    engine.destroy()


@distributed(world_size=2)
def test_client_optimizer_keeps_its_groups() -> None:
    """Any elementwise torch optimizer, at every stage: the same result, and its group dicts stay the caller's."""
    rank = dist.get_rank()
    for cls, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ):
        results = []
        for stage in (0, 1, 2):
            model = make_model()
            groups = [
                {"params": model[0].parameters()},
                {"params": []},
                {"params": model[2].parameters(), "lr": 3e-3},
            ]
            optimizer = cls(groups, lr=1e-2, **options)
            first = optimizer.param_groups[0]
            config = {k: v for k, v in make_config(stage).items() if k != "optimizer"}
            engine, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            for step in range(3):
                engine.backward(engine(data(step, rank)).square().mean())
                engine.step()
            assert optimizer.param_groups[0] is first
            assert [len(g["params"]) for g in wrapped.param_groups] == [2, 0, 2]
            assert wrapped.param_groups[0]["params"][0] is model[0].weight
            assert engine.get_lr() == [1e-2, 1e-2, 3e-3]
            results.append(weights(engine))
            engine.destroy()
        assert same(results[0], results[1])
        assert same(results[0], results[2])


@pytest.mark.parametrize("options", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}])
@distributed(world_size=2)
def test_scaling_options_keep_the_mean(options: dict[str, Any]) -> None:
    engine, reference = start(1, **options), start(1)
    rank = dist.get_rank()
    for e in (engine, reference):
        e.backward(e(data(0, rank)).square().mean())
        e.step()
    for a, b in zip(weights(engine), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    engine.destroy(), reference.destroy()


@distributed(world_size=2)
def test_sparse_gradients_of_embeddings_travel_by_rows() -> None:
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(500, WIDTH, sparse=sparse), nn.Linear(WIDTH, 2))
        engine = start(0, model=model, sparse_gradients=sparse)
        ids = torch.tensor([[1, 2, 3 + dist.get_rank()]])
        sent = engine.core.reducer.communicator
        for _ in range(3):
            before = sent.bytes_sent
            engine.backward(engine(ids).square().mean())
            engine.step()
        results.append((weights(engine), sent.bytes_sent - before))
        engine.destroy()
    assert same(results[0][0], results[1][0])
    assert results[1][1] < results[0][1] / 10


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_compiled_module_trains_alike(stage: int) -> None:
    init = nn.Module.__init__
    engine, reference = start(stage), start(stage)
    rank = dist.get_rank()
    try:
        engine.compile(backend="aot_eager")
        for step in range(3):
            for e in (engine, reference):
                e.backward(e(data(step, rank)).square().mean())
                e.step()
    finally:
        nn.Module.__init__ = init  # torch's compiler patches it for good
    for a, b in zip(weights(engine), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_lamb_is_right_where_a_tensor_spans_ranks(stage: int) -> None:
    results = []
    for s in (0, stage):
        engine = start(s, optimizer={"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}})
        for step in range(4):
            engine.backward(engine(data(step, dist.get_rank())).square().mean())
            engine.step()
        results.append(weights(engine))
        engine.destroy()
    assert same(*results)


@distributed(world_size=1)
def test_attributes_fall_through_and_missing_ones_are_told() -> None:
    model = make_model()
    model.answer = 42
    engine = start(1, model=model)
    assert engine.answer == 42
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = engine.nothing_like_this
    assert engine.zero_optimization_stage() == 1
    assert engine.train_batch_size() == 4
    assert not hasattr(engine, "param_groups")
    assert engine.get_global_grad_norm() is None
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=1)
def test_a_failed_backward_leaves_nothing_behind(stage: int) -> None:
    engine, reference = start(stage), start(stage)

    def fail(grad: Tensor) -> None:
        raise KeyboardInterrupt

    hidden = engine.module[1](engine.module[0](data(0)))
    hidden.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(engine.module[2](hidden).square().mean())
    for e in (engine, reference):
        e.backward(e(data(1)).square().mean())
        e.step()
    engine.destroy(), reference.destroy()
    assert same(weights(engine), weights(reference))

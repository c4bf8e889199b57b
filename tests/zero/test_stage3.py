"""Stage 3: the same bits as DDP under every budget, and what the documented tools around it promise."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.zero.gathering import sharded_model
from deepspeed.zero.gathering.init_context import ZeroParamStatus
from tests.pool import distributed
from tests.zero.models import (
    Block,
    Zoo,
    assert_same,
    batch,
    config_for,
    ddp_losses,
    engine_losses,
    make_zoo,
    uses_sometimes,
)

STEPS = 7
BUDGETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "keep all": {"stage3_param_persistence_threshold": 0},
    "keep nothing": {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
    "some": {"stage3_param_persistence_threshold": 30, "stage3_max_live_parameters": 1500},
}
NOTHING = BUDGETS["keep nothing"]


@pytest.mark.parametrize("budget", list(BUDGETS))
@distributed(world_size=[1, 2, 4])
def test_equals_ddp(world_size: int, budget: str) -> None:
    losses, weights, norms = engine_losses(make_zoo, config_for(3, **BUDGETS[budget]), STEPS)
    expected_losses, expected_weights, expected_norms = ddp_losses(make_zoo, STEPS, gas=1, clip=1.0)
    assert losses == expected_losses
    assert norms == expected_norms
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("budget", list(BUDGETS))
@distributed(world_size=[2, 4])
def test_scheduled_collectives_equal_fetching(world_size: int, budget: str) -> None:
    """The way that GPUs go, with control flow that differs by rank."""
    chosen = sharded_model.prefers_collectives
    sharded_model.prefers_collectives = lambda device_type: True
    try:
        losses, weights, _ = engine_losses(make_zoo, config_for(3, gas=2, **BUDGETS[budget]), STEPS)
    finally:
        sharded_model.prefers_collectives = chosen
    expected_losses, expected_weights, _ = engine_losses(
        make_zoo, config_for(3, gas=2, **BUDGETS[budget]), STEPS
    )
    assert losses == expected_losses
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("budget", list(BUDGETS))
@pytest.mark.parametrize("reentrant", [True, False])
@distributed(world_size=2)
def test_activation_checkpointing(reentrant: bool, budget: str) -> None:
    def make() -> Zoo:
        return make_zoo(checkpoint=reentrant)

    losses, weights, _ = engine_losses(make, config_for(3, **BUDGETS[budget]), STEPS)
    expected_losses, expected_weights, _ = engine_losses(make, config_for(2), STEPS)
    assert losses == expected_losses
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("budget", ["keep all", "keep nothing"])
@distributed(world_size=2)
def test_accumulation_equals_stage_2_or_1(budget: str) -> None:
    """With room for everything gradients are summed once per step (as stage 1 does), else per micro-batch."""
    losses, weights, _ = engine_losses(make_zoo, config_for(3, gas=3, **BUDGETS[budget]), STEPS)
    twin = 1 if budget == "keep all" else 2
    expected_losses, expected_weights, _ = engine_losses(make_zoo, config_for(twin, gas=3), STEPS)
    assert losses == expected_losses
    assert_same(weights, expected_weights)


def start(model: nn.Module, stage: int = 3, **more: Any) -> Any:
    config = {**config_for(stage, **NOTHING), **more}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def gathered_blocks(engine: Any) -> list[int]:
    return [b for b, bucket in enumerate(engine.sharded.buckets) if bucket.status.name == "GATHERED"]


@distributed(world_size=2)
def test_parameters_exist_only_around_their_use() -> None:
    torch.manual_seed(0)
    seen: list[int] = []
    model = nn.Sequential(*(Block(16) for _ in range(6)))
    engine = start(model)
    for block in model:
        block.register_forward_hook(lambda *_: seen.append(len(gathered_blocks(engine))))
    assert {p.shape for p in model.parameters()} == {torch.Size([0])}
    assert {p.ds_status for p in model.parameters()} == {ZeroParamStatus.NOT_AVAILABLE}
    engine.backward(engine(torch.randn(2, 16)).square().mean())
    assert max(seen) == 1
    engine.step()
    assert gathered_blocks(engine) == []
    engine.destroy()
    assert all(p.numel() for p in model.parameters())


@pytest.mark.parametrize("grad", [True, False])
@distributed(world_size=2)
def test_one_gather_per_unit_and_forward(grad: bool) -> None:
    model = nn.Sequential(*(Block(16) for _ in range(6)))
    engine = start(model)
    server = engine.sharded.gatherer.server
    for _ in range(2):
        before = server.fetches
        with torch.set_grad_enabled(grad):
            loss = engine(torch.randn(2, 16)).square().mean()
        assert server.fetches - before == 6
        if grad:
            engine.backward(loss)
            assert server.fetches - before <= 12
            engine.step()
    engine.destroy()


@distributed(world_size=2)
def test_submodules_called_directly() -> None:
    model = make_zoo()
    reference = copy.deepcopy(model)
    engine = start(model)
    ids = batch(0, 0, dist.get_rank())
    hidden = model.embed(ids)
    torch.testing.assert_close(hidden, reference.embed(ids))
    torch.testing.assert_close(model.blocks[1](hidden), reference.blocks[1](reference.embed(ids)))
    logits = model.head(model.blocks[2].down(torch.ones(1, 24)))
    expected = reference.head(reference.blocks[2].down(torch.ones(1, 24)))
    torch.testing.assert_close(logits, expected)
    engine.backward(logits.square().mean())
    expected.square().mean().backward()
    grad = deepspeed.utils.safe_get_full_grad(model.blocks[2].down.weight)
    torch.testing.assert_close(grad, reference.blocks[2].down.weight.grad)
    engine.destroy()


class Functional(nn.Module):
    """Reads another module's weight, and its own parameters, at the beginning of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 1.5))
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embed.weight).square().mean()


@distributed(world_size=2)
def test_parameters_read_by_other_modules() -> None:
    runs = []
    for stage in (2, 3):
        torch.manual_seed(0)
        model = Functional()
        engine = start(model, stage)
        losses = []
        for step in range(4):
            ids = torch.randint(
                0, 11, (2, 5), generator=torch.Generator().manual_seed(step + 7 * dist.get_rank())
            )
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        runs.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@distributed(world_size=2)
def test_evaluation_and_inference_mode_between_steps() -> None:
    runs = []
    for evaluate in (False, True):
        engine = start(make_zoo())
        losses = []
        for step in range(4):
            if evaluate:
                engine.eval()
                for context in (torch.no_grad(), torch.inference_mode()):
                    with context:
                        engine(batch(step, 5, 0))
                engine.train()
            loss = engine(batch(step, 0, dist.get_rank()), uses_sometimes(step, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        runs.append(losses)
    assert runs[0] == runs[1]


@distributed(world_size=2)
def test_ranks_may_run_different_numbers_of_forwards() -> None:
    """Generation that ends at different lengths: no rank waits for another."""
    engine = start(make_zoo())
    with torch.no_grad():
        for _ in range(1 + 3 * dist.get_rank()):
            engine(batch(0, 0, 0))
    engine.backward(engine(batch(0, 0, dist.get_rank())))
    engine.step()
    engine.destroy()


@distributed(world_size=2)
def test_without_optimizer_the_engine_runs_forward() -> None:
    model = make_zoo()
    expected = copy.deepcopy(model)(batch(0, 0, 0)).item()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **NOTHING}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
    assert type(optimizer).__name__ == "DeepSpeedZeRoOffload"
    assert engine(batch(0, 0, 0)).item() == expected
    engine.destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=2)
def test_zero_init_builds_the_same_model(dtype: torch.dtype) -> None:
    expected = make_zoo().to(dtype)
    config = {**config_for(3, **NOTHING), "bf16": {"enabled": dtype is torch.bfloat16}}
    torch.manual_seed(0 if dist.get_rank() == 0 else 99)  # only rank 0's values count
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Zoo()

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(5))

        assert Inside().weight.shape == (0,)
    weight = model.blocks[0].up.weight
    assert weight.shape == (0,)
    assert weight.ds_shape == (24, 12)
    assert weight.ds_numel == 288
    assert weight.ds_tensor.numel() == weight.partition_numel() == 144
    assert weight.dtype == dtype
    assert model.nothing.ds_tensor.numel() == 0
    for (name, param), (_, value) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(param):
            assert param.shape == value.shape
            if dtype is torch.float32:  # random numbers drawn in bf16 are others than those drawn in fp32
                assert torch.equal(param, value), name
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine(batch(0, 0, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    engine.destroy()


@distributed(world_size=2)
def test_zero_init_is_always_undone() -> None:
    before = (nn.Module.__init__, torch.empty, nn.Linear.__init__, nn.Module.apply)
    with contextlib.suppress(RuntimeError), deepspeed.zero.Init():
        with deepspeed.zero.Init(dtype=torch.bfloat16):
            assert nn.Linear(4, 4).weight.dtype == torch.bfloat16
        assert nn.Linear(4, 4).weight.dtype == torch.float32
        raise RuntimeError("inside")
    with deepspeed.zero.Init(enabled=False):
        assert nn.Linear(4, 4).weight.shape == (4, 4)
    assert before == (nn.Module.__init__, torch.empty, nn.Linear.__init__, nn.Module.apply)
    model = nn.Linear(4, 6)
    deepspeed.zero.Init(module=model)
    assert model.weight.ds_shape == (6, 4)


@pytest.mark.parametrize("trained", [False, True])
@distributed(world_size=2)
@torch.no_grad()
def test_gathered_parameters_keep_what_the_modifier_wrote(trained: bool) -> None:
    engine = start(make_zoo(), bf16={"enabled": True})
    if trained:
        with torch.enable_grad():
            engine.backward(engine(batch(0, 0, dist.get_rank())))
        engine.step()
    weight, bias = engine.module.twice.weight, engine.module.twice.bias
    with deepspeed.zero.GatheredParameters([weight, bias, torch.ones(2)], modifier_rank=1):
        if dist.get_rank() == 1:
            weight.fill_(0.25)
            bias.fill_(-3.0)
    assert weight.shape == (0,)
    with deepspeed.zero.GatheredParameters(weight), deepspeed.zero.GatheredParameters([weight, bias]):
        assert weight.eq(0.25).all()
        assert bias.eq(-3).all()
        weight.fill_(9.0)  # no modifier rank: not kept
    with deepspeed.zero.GatheredParameters(iter([weight])):
        assert weight.eq(0.25).all()
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert master.eq(0.25).all()
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        assert all(p.shape == p.ds_shape for p in engine.parameters())
        assert torch.isfinite(engine(batch(0, 0, 0)))
    assert all(p.numel() == 0 for p in engine.parameters())
    engine.destroy()


@distributed(world_size=2)
def test_deepcopy_belongs_to_no_engine() -> None:
    engine = start(make_zoo())
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        twin = copy.deepcopy(engine.module)
    assert type(twin.embed._parameters) is not type(engine.module.embed._parameters)
    loss = twin(batch(0, 0, 0))
    loss.backward()
    assert not hasattr(twin.embed.weight, "ds_id")
    assert loss.item() == pytest.approx(engine(batch(0, 0, 0)).item())
    engine.destroy()


@distributed(world_size=2)
def test_register_external_parameter() -> None:
    engine = start(make_zoo())
    module, param = engine.module.blocks[0], engine.module.twice.weight
    deepspeed.zero.register_external_parameter(module, param)
    assert [p for _, p in module.ds_external_parameters()] == [param]
    deepspeed.zero.unregister_external_parameter(module, param)
    assert not list(module.ds_external_parameters())
    with pytest.raises(RuntimeError, match="torch.nn.Module"):
        deepspeed.zero.register_external_parameter("no module", param)
    with pytest.raises(RuntimeError, match="torch.nn.Parameter"):
        deepspeed.zero.register_external_parameter(module, "no parameter")
    engine.destroy()


@distributed(world_size=2)
def test_leaf_modules_gather_everything_below_at_once() -> None:
    model = make_zoo()
    deepspeed.utils.set_z3_leaf_modules(model, [nn.ModuleList], raise_if_not_found=False)
    deepspeed.utils.set_z3_leaf_modules(model, [Block])
    assert all(block._z3_leaf for block in model.blocks)
    engine = start(model)
    engine.backward(engine(batch(0, 0, dist.get_rank())))
    engine.step()
    engine.destroy()


@distributed(world_size=2)
def test_two_sharded_engines_take_turns() -> None:
    engines = [start(make_zoo(seed)) for seed in (0, 1)]
    alone = []
    for seed in (0, 1):
        engine = start(make_zoo(seed))
        losses = []
        for step in range(3):
            loss = engine(batch(step, 0, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        alone.append(losses)
    together: list[list[float]] = [[], []]
    for step in range(3):
        for engine, losses in zip(engines, together, strict=True):
            loss = engine(batch(step, 0, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert together == alone
    for engine in engines:
        engine.destroy()


@distributed(world_size=2)
def test_compiled_blocks_share_graphs_without_a_break() -> None:
    from torch._dynamo.utils import counters

    init = nn.Module.__init__
    runs = []
    try:
        for compiled in (False, True):
            torch.manual_seed(0)
            engine = start(nn.Sequential(*(Block(16) for _ in range(12))))
            torch._dynamo.reset()
            counters.clear()
            if compiled:
                engine.compile(backend="aot_eager")
            losses = []
            for step in range(4):
                if step == 2:
                    assert not counters["graph_break"]
                    counters.clear()
                loss = engine(torch.full((2, 16), 0.1 * step + dist.get_rank())).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            assert not counters["frames"]  # nothing was compiled again after the second step
            engine.destroy()
            runs.append(losses)
    finally:
        nn.Module.__init__ = init  # torch's compiler patches it for good
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)

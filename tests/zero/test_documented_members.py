"""Members of ZeRO's parameters and optimizers that scripts use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import skip_init

import deepspeed
from deepspeed import comm as dist
from deepspeed.compat.offload_states import get_state_devices
from deepspeed.compat.zero_linear import LinearModuleForZeroStage3
from deepspeed.config.sections.offload import OffloadStateTypeEnum
from deepspeed.zero.gathering.init_context import (
    MultipleAllGatherHandles,
    ZeroParamStatus,
    partitioned_param_data_shape,
)
from deepspeed.zero.tensor_fragment import safe_get_full_grad, safe_get_local_optimizer_state
from tests.pool import distributed

WIDTH = 6


def build(stage: int, model: nn.Module | None = None, **zero: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = model or nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weights, biases = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) > 1], []
    biases = [p for p in model.parameters() if all(p is not w for w in weights)]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": weights, "weight_decay": 0.1}, {"params": biases}],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        },
    )
    return engine, optimizer


def backward(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, WIDTH)).float().sum())


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_state_is_found_by_parameter_and_by_flat_group(stage: int) -> None:
    engine, optimizer = build(stage)
    backward(engine)
    engine.step()
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    groups = getattr(optimizer, name)
    assert len(groups) == 2
    for flat, group in zip(groups, optimizer.param_groups, strict=True):
        parts = [safe_get_local_optimizer_state(param, "exp_avg") for param in group["params"]]
        if flat.numel():
            assert flat in optimizer.state
            state = optimizer.optimizer.state[flat]
            assert int(state["step"]) == 1
            assert torch.equal(state["exp_avg"].sort().values, torch.cat(parts).sort().values)
        for param, part in zip(group["params"], parts, strict=True):
            assert (param in optimizer.state) == bool(part.numel())
            if part.numel():
                assert torch.equal(optimizer.state[param]["exp_avg"].view(-1), part.view(-1))
    assert nn.Parameter(torch.zeros(1)) not in optimizer.state
    assert len(optimizer.state) == len(engine.core.store.fragments)  # asking adds nothing
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_gradients_of_this_rank_by_group(stage: int) -> None:
    engine, optimizer = build(stage)
    assert optimizer.averaged_gradients == {} and optimizer.get_fp32_grad_partitions() == {}
    backward(engine)
    parts = optimizer.get_fp32_grad_partitions()
    assert {number: sorted(group) for number, group in parts.items()} == {0: [0, 1], 1: [0, 1]}
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            counts = torch.tensor([parts[number][place].numel(), 0.0])
            counts[1] = parts[number][place].double().sum()
            dist.all_reduce(counts)
            whole = safe_get_full_grad(param)
            assert whole is not None
            assert counts[0] == whole.numel() and torch.allclose(counts[1], whole.double().sum().float())
    kept = sum(grad.numel() for grads in optimizer.averaged_gradients.values() for grad in grads)
    assert kept == sum(part.numel() for group in parts.values() for part in group.values())
    engine.step()
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
    assert optimizer.averaged_gradients == {}
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_parameters_by_group(stage: int) -> None:
    engine, optimizer = build(stage)
    params = [list(group["params"]) for group in optimizer.param_groups]
    for groups in (optimizer.bit16_groups, optimizer.fp16_groups, optimizer.bf16_groups):
        assert [[id(param) for param in group] for group in groups] == [
            list(map(id, group)) for group in params
        ]
    assert optimizer.partition_count == ([2, 2] if stage else [1, 1])
    if stage == 3:
        for parts, group in zip(optimizer.fp16_partitioned_groups, params, strict=True):
            assert all(part is param.ds_tensor for part, param in zip(parts, group, strict=True))
    engine.destroy()


@distributed(world_size=2)
def test_a_parameter_is_freed_only_if_asked_to() -> None:
    with deepspeed.zero.Init():
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
    weight: Any = layer.weight
    assert weight.shape == torch.Size(partitioned_param_data_shape)
    weight.all_gather()
    weight.partition(free_data=False)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and weight.numel() == WIDTH * WIDTH
    weight.all_gather()
    weight.partition()
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and weight.numel() == 0


@distributed(world_size=2)
def test_parameters_are_gathered_together_and_waited_for() -> None:
    with deepspeed.zero.Init():
        layer = nn.Linear(WIDTH, WIDTH)
    params: list[Any] = list(layer.parameters())
    handles = [params[0].all_gather_coalesced(params), params[0].all_gather(async_op=True)]
    MultipleAllGatherHandles(handles).wait()
    assert [param.numel() for param in params] == [WIDTH * WIDTH, WIDTH]
    assert params[0].all_gather() is None
    assert layer(torch.ones(2, WIDTH)).shape == (2, WIDTH)
    params[0].partition(params)
    assert [param.numel() for param in params] == [0, 0]


def test_handles_are_told_of_dependencies_if_they_ask() -> None:
    told: list[Any] = []

    class Plain:
        def wait(self) -> None:
            told.append(None)

    class Named:
        def wait(self, *, handle_dependency: bool = True) -> None:
            told.append(handle_dependency)

    class Any_:
        def wait(self, **options: Any) -> None:
            told.append(options)

    MultipleAllGatherHandles([Plain(), Named(), Any_()]).wait(handle_dependency=False)
    assert told == [None, False, {"handle_dependency": False}]


@pytest.mark.parametrize("initialized", [False, True])
@distributed(world_size=2)
def test_dropped_changes_are_errors_with_sanity_checks(initialized: bool) -> None:
    zero = {"stage": 3, "enable_sanity_checks": True}
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": zero}, enabled=not initialized):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    if initialized:
        build(**zero, model=model)
    weight: Any = model[0].weight
    with deepspeed.zero.GatheredParameters(weight):
        kept = weight.detach().clone()
    dropped = pytest.raises(RuntimeError, match=r"in-place modification.*modifier_rank")
    with dropped, deepspeed.zero.GatheredParameters(weight), torch.no_grad():
        weight.add_(1.0)
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.add_(2.0)
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.allclose(weight.float(), kept.float() + 2.0, atol=0.02)


@distributed(world_size=2)
def test_modules_whose_initialization_is_skipped_are_sharded() -> None:
    class Inner(nn.Module):
        def __init__(self, width: int, device: Any = None) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(width, width, device=device)])

    with deepspeed.zero.Init():
        model = nn.Sequential(skip_init(nn.Linear, WIDTH, WIDTH), skip_init(Inner, WIDTH))
    for param in model.parameters():
        assert param.ds_tensor.numel() == -(-param.ds_numel // 2) and param.numel() == 0
    assert not hasattr(skip_init(nn.Linear, WIDTH, WIDTH).weight, "ds_tensor")


@distributed(world_size=2)
def test_a_rank_without_a_part_has_the_groups_of_the_others() -> None:
    engine, optimizer = build(2, nn.Linear(1, 1))
    engine.backward(engine(torch.ones(1, 1)).float().sum())
    groups = optimizer.averaged_gradients
    assert list(groups) == [0, 1]
    assert sum(part.numel() for parts in groups.values() for part in parts) == 1  # the weight, or the bias
    engine.destroy()


@pytest.mark.parametrize("persistent", [0, 10_000])
@distributed(world_size=1)
def test_where_states_are(persistent: int) -> None:
    engine, _ = build(3, stage3_param_persistence_threshold=persistent)
    backward(engine)
    engine.step()
    here = {torch.device("cpu")}
    for kind in (
        OffloadStateTypeEnum.hp_params,
        OffloadStateTypeEnum.optim_states,
        OffloadStateTypeEnum.lp_params,
    ):
        assert get_state_devices(engine, kind) == here
    engine.offload_states()
    assert get_state_devices(engine, OffloadStateTypeEnum.contiguous_grad_buffer) == set()
    engine.reload_states()
    engine.destroy()


@pytest.mark.parametrize("bias", [True, False])
def test_the_documented_linear_layer_is_a_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    layer = LinearModuleForZeroStage3(3, 5, bias=bias).double()
    plain = nn.Linear(3, 5, bias=bias).double()
    plain.load_state_dict(layer.state_dict())
    results = []
    for each in (layer, plain):
        inputs = torch.linspace(0, 1, 24, dtype=torch.float64).view(2, 4, 3).requires_grad_()
        outputs = each(inputs)
        outputs.square().sum().backward()
        results.append([outputs, inputs.grad, *(p.grad for p in each.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(torch.ones(1, 3)).dtype is torch.bfloat16


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_backward_of_the_optimizer_does_not_divide(stage: int) -> None:
    """``optimizer.backward(loss)`` after the caller divided equals ``engine.backward(loss)``."""
    gradients = []
    for direct in (True, False):
        engine, optimizer = build(stage)
        for _ in range(2):
            loss = engine(torch.ones(1, WIDTH)).float().sum()
            optimizer.backward(loss / 2) if direct else engine.backward(loss / 2, scale_wrt_gas=False)
        gradients.append([safe_get_full_grad(param) for param in engine.module.parameters()])
        engine.step()
        engine.destroy()
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other) and one.count_nonzero()


@distributed(world_size=2)
def test_parts_of_the_weights_are_aligned() -> None:
    engine, optimizer = build(2)
    parts = optimizer.parallel_partitioned_bit16_groups
    assert [len(ranks) for ranks in parts] == [2] * len(parts)
    for bucket, ranks in zip(engine.core.store.param_buckets, parts, strict=True):
        assert torch.equal(ranks[dist.get_rank()], bucket.shard)
        assert all(part.data_ptr() % (2 * optimizer.nccl_start_alignment_factor) == 0 for part in ranks)
    engine.destroy()


@distributed(world_size=2)
def test_class_of_optimizers_with_mics() -> None:
    from deepspeed.zero.mics import MiCS_Optimizer

    engine, optimizer = build(3, mics_shard_size=1)
    assert isinstance(optimizer, MiCS_Optimizer)
    assert not isinstance(build(3)[1], MiCS_Optimizer)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
@distributed(world_size=4)
def test_neighbours_that_parameters_are_gathered_from(size: int, ready: bool) -> None:
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        layer = nn.Linear(64, 64)
    if ready:
        build(3, layer, zero_hpz_partition_size=size)
    for param in layer.parameters():
        near: Any = param.ds_zero_param_process_group
        assert (near is None) == (size == 1)
        assert near is None or dist.get_world_size(near) == size
        assert (param.ds_secondary_tensor is param.ds_tensor) == (size == 4)


class BiasForTheCaller(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.linear(x, self.weight), self.bias


class AddsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = BiasForTheCaller(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.inner(x)
        return y + bias


@distributed(world_size=2)
def test_returned_parameters_belong_to_the_caller_too() -> None:
    model: Any = nn.Sequential(AddsBias())
    engine, _ = build(3, model)
    assert model._external_params == model[0]._external_params == {}
    for _ in range(2):
        backward(engine)
        engine.step()
        assert list(model[0]._external_params.values()) == [model[0].inner.bias]
        assert model._external_params == model[0].inner._external_params == {}
    engine.destroy()
    assert not hasattr(model, "_external_params")


class Replica:
    """Model-parallel unit of one of two replicas, each of which shards over two ranks."""

    def __init__(self) -> None:
        pairs = [dist.new_group(ranks=ranks) for ranks in ([0, 1], [2, 3])]
        self.group = pairs[dist.get_rank() // 2]

    def get_data_parallel_group(self) -> Any:
        return self.group

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() % 2

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> Any:
        return None


def trained(stage: int, mpu: Replica | None, hook: Any = None) -> list[torch.Tensor]:
    """Parameters after two updates, to which each of four ranks gives its own samples."""
    torch.manual_seed(3)
    engine, *_ = deepspeed.initialize(
        model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 10},
        },
    )
    engine.set_all_reduce_hook(hook)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        engine.backward(engine(torch.randn(1, WIDTH)).square().sum())
        engine.step()
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        values = [param.detach().clone() for param in params]
    engine.destroy()
    return values


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_a_hook_averages_gradients_over_replicas(stage: int) -> None:
    peers = [dist.new_group(ranks=ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    called = []

    def average(grads: torch.Tensor) -> None:
        called.append(grads.numel())
        dist.all_reduce(grads, group=peers)
        grads.div_(2)

    together = trained(stage, None)
    replicas = trained(stage, Replica(), average)
    assert called and sum(called) > 0
    torch.testing.assert_close(replicas, together)


@distributed(world_size=2)
def test_added_parameters_are_partitioned_like_another() -> None:
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
    base: Any = layer.weight
    values = torch.arange(5.0)
    layer.adapter = added = nn.Parameter(values.clone())
    base.convert_to_zero_parameters([added, base])
    assert added.ds_tensor.dtype == torch.float32 and base.ds_tensor.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert added.shape == torch.Size(partitioned_param_data_shape)
    for param in (base, added):
        assert param.ds_zero_partition_world_size == 2
        assert param.ds_zero_partition_rank == param.get_partition_rank() == dist.get_rank()
        assert param.get_partition_dp_group() is param.ds_process_group
    with deepspeed.zero.GatheredParameters([added]):
        assert torch.equal(added.data, values)
    engine, _, _, _ = deepspeed.initialize(
        model=layer, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    with pytest.raises(RuntimeError, match="already belongs to an engine"):
        base.convert_to_zero_parameters([nn.Parameter(values)])
    engine.destroy()


@pytest.mark.parametrize("checks", [True, False])
@distributed(world_size=1)
def test_whether_non_finite_gradients_skip_the_step(checks: bool) -> None:
    engine, optimizer, _, _ = deepspeed.initialize(
        model=nn.Linear(WIDTH, WIDTH),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True, "check_grad_overflow": checks},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
        },
    )
    assert optimizer.check_grad_overflow is checks
    engine.backward(engine(torch.ones(1, WIDTH)).float().sum() * float("nan"))
    engine.step()
    assert engine.skipped_steps == int(checks)
    engine.destroy()


class ScheduleFree(torch.optim.Optimizer):
    """SGD that averages: gradients are taken at a mix of the average and a faster sequence; ``eval`` and ``train``
    move the parameters between the two (Defazio et al. 2024)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0, "training": False})

    @torch.no_grad()
    def _move(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["training"] != training else ():
                if "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight)
            group["training"] = training

    def train(self) -> None:
        self._move(True, 0.1)

    def eval(self) -> None:
        self._move(False, 1 - 1 / 0.9)

    def steps_taken(self) -> int:
        return self.param_groups[0]["steps"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["training"], "call train() first"
            share = 1 / (group["steps"] + 1)
            for param in (param for param in group["params"] if param.grad is not None):
                fast = self.state[param].setdefault("z", param.clone())
                param.lerp_(fast, share).add_(param.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
                fast.sub_(param.grad, alpha=group["lr"])
            group["steps"] += 1


def schedule_free_losses(model: Any, optimizer: Any, backward: Any, step: Any) -> list[float]:
    """Train three steps, evaluate, train one more, evaluate; the losses of all forwards."""
    x, losses = torch.linspace(-1, 1, 16).view(2, 8), []
    for steps in (3, 1):
        optimizer.train()
        for _ in range(steps):
            loss = model(x).square().mean()
            losses.append(loss.item())
            backward(loss)
            step()
        optimizer.eval()
        losses.append(model(x).square().mean().item())
    return losses


@pytest.mark.parametrize(("stage", "device"), [(1, "none"), (3, "none"), (3, "cpu")])
@distributed(world_size=2)
def test_train_and_eval_of_a_schedule_free_optimizer(stage: int, device: str) -> None:
    def make() -> tuple[nn.Module, ScheduleFree]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        return model, ScheduleFree(model.parameters())

    model, client = make()

    def step() -> None:
        client.step()
        client.zero_grad()

    expected = schedule_free_losses(model, client, torch.Tensor.backward, step)
    model, client = make()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device}},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=client, config=config)
    found = schedule_free_losses(engine, optimizer, engine.backward, engine.step)
    assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(AttributeError, match=r"'steps_taken'; optimizer\.optimizer\.steps_taken is that of"):
        optimizer.steps_taken()
    assert optimizer.optimizer.steps_taken() == 4
    if stage == 3:
        with pytest.raises(AttributeError, match="see fp32_partitioned_groups_flat"):
            _ = optimizer.single_partition_of_fp32_groups
    engine.destroy()


@distributed(world_size=1)
def test_other_optimizers_have_no_train_and_eval() -> None:
    """Accelerate and others ask for them by ``hasattr``."""
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    assert not hasattr(optimizer, "train") and not hasattr(optimizer, "eval")
    engine.destroy()

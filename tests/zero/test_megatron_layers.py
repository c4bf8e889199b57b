"""A stranger's tensor parallelism: its own model-parallel unit and layers, split unevenly, with tied and frozen
weights, dropout and checkpointed blocks, under every stage of ZeRO. The engine is given the unit and
Megatron's marks on the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.checkpoint.placement import local_part, placement_of
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.transforms.recompute import checkpointing as activation_checkpointing
from deepspeed.zero import whole_matrices
from deepspeed.zero.muon.muon_optimizer import SingleDeviceMuon
from deepspeed.zero.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from tests.pool import distributed

VOCABULARY, WIDTH, HIDDEN, LENGTH, STEPS = 13, 6, 9, 5, 4


class Unit:
    """Neighbours share layers. Methods are named as old (``model``) or new (``tensor``) releases of Megatron-LM name
    them."""

    def __init__(self, size: int, names: str = "model") -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        tensor = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        data = [dist.new_group(list(range(first, world, size))) for first in range(size)]
        self.tensor, self.data, self.size = tensor[rank // size], data[rank % size], size
        self.rank = dist.get_rank(self.tensor)
        family = {"model": "model_parallel", "tensor": "tensor_model_parallel"}[names]
        self._methods = {
            f"get_{family}_group": self.tensor,
            f"get_{family}_rank": self.rank,
            f"get_{family}_world_size": size,
            "get_data_parallel_group": self.data,
            "get_data_parallel_rank": dist.get_rank(self.data),
            "get_data_parallel_world_size": world // size,
        }
        if names == "tensor":
            self._methods |= {"get_pipeline_model_parallel_rank": 0}
            self._methods |= {"get_pipeline_model_parallel_world_size": 1}

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return lambda: methods[name]
        raise AttributeError(name)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """The first ranks get one more where it does not divide."""
        return whole.tensor_split(self.size, dim)[self.rank].contiguous()


class ToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, unit: Unit) -> Tensor:
        ctx.unit = unit
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.unit.tensor)
        return grad, None


class FromParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, unit: Unit) -> Tensor:
        total = inputs.contiguous().clone()
        dist.all_reduce(total, group=unit.tensor)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def mark(param: nn.Parameter, dim: int) -> nn.Parameter:
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
    return param


class Linear(nn.Module):
    """``dim`` of the weight is split: 0 by columns, 1 by rows of the product."""

    def __init__(self, width: int, height: int, unit: Unit | None, dim: int) -> None:
        super().__init__()
        weight, bias = torch.randn(height, width) / 3, torch.randn(height) / 3
        self.unit, self.dim = unit, dim
        self.weight = nn.Parameter(weight if unit is None else unit.part(weight, dim))
        self.bias = nn.Parameter(bias if unit is None or dim else unit.part(bias, 0))
        if unit is not None:
            mark(self.weight, dim)
            if not dim:
                mark(self.bias, 0)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.unit is None:
            return functional.linear(inputs, self.weight, self.bias)
        if self.dim:
            return FromParts.apply(functional.linear(inputs, self.weight), self.unit) + self.bias
        return functional.linear(ToParts.apply(inputs, self.unit), self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, unit: Unit | None, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, HIDDEN, unit, 0)
        self.down = Linear(HIDDEN, WIDTH, unit, 1)
        self.dropout = dropout

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(inputs)))
        if self.dropout:
            with activation_checkpointing.get_cuda_rng_tracker().fork():  # other elements on each rank
                hidden = functional.dropout(hidden, self.dropout)
        return inputs + functional.dropout(self.down(hidden), self.dropout)


class Embedding(nn.Module):
    def __init__(self, unit: Unit | None) -> None:
        super().__init__()
        weight, self.unit = torch.randn(VOCABULARY, WIDTH) / 3, unit
        self.weight = nn.Parameter(weight if unit is None else unit.part(weight, 0))
        if unit is not None:
            mark(self.weight, 0)
            ends = [len(part) for part in torch.arange(VOCABULARY).tensor_split(unit.size)]
            self.first = sum(ends[: unit.rank])

    def forward(self, tokens: Tensor) -> Tensor:
        if self.unit is None:
            return functional.embedding(tokens, self.weight)
        own = tokens - self.first
        held = (own >= 0) & (own < self.weight.shape[0])
        found = functional.embedding(own.clamp(0, self.weight.shape[0] - 1), self.weight)
        return FromParts.apply(found * held.unsqueeze(-1), self.unit)


class Model(nn.Module):
    """The embedding is the head as well. ``extra`` never takes part."""

    def __init__(
        self,
        unit: Unit | None = None,
        *,
        dropout: float = 0.0,
        checkpoint: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = Embedding(unit)
        self.blocks = nn.ModuleList([Block(unit, dropout) for _ in range(2)])
        self.extra = Linear(WIDTH, HIDDEN, unit, 0)
        self.head = Embedding(unit)
        self.head.weight = self.embedding.weight
        self.unit, self.checkpoint = unit, checkpoint
        self.blocks[0].up.requires_grad_(not frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = activation_checkpointing.checkpoint(block, hidden) if self.checkpoint else block(hidden)
        head = self.head.weight
        if self.unit is None:
            logits = functional.linear(hidden, head)
        else:
            own = functional.linear(ToParts.apply(hidden, self.unit), head)
            rest = VOCABULARY - self.head.first - own.shape[-1]
            logits = FromParts.apply(functional.pad(own, (self.head.first, rest)), self.unit)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def alone(last: int, replicas: int, **options: Any) -> tuple[list[list[float]], list[float], Model]:
    model = Model(**options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(last):
        each = [model(batch(step, replica)) for replica in range(replicas)]
        (sum(each) / replicas).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, norms, model


def config(stage: int, *, offload: bool = False, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
        **more,
    }


def start(
    settings: dict[str, Any], size: int = 2, names: str = "model", *, init: bool = False, **options: Any
) -> Any:
    """``size`` 1: whole layers, no unit."""
    unit = Unit(size, names) if size > 1 else None
    with deepspeed.zero.Init(config_dict_or_path=settings, mpu=unit) if init else contextlib.nullcontext():
        model = Model(unit, **options)
    return deepspeed.initialize(model=model, config=settings, mpu=unit)[0]


def train(engine: Any, first: int, last: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, last):
        loss = engine(batch(step, engine.mesh.rank("dp")))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def assert_weights(engine: Any, model: nn.Module, **close: float) -> None:
    whole = dict(model.named_parameters())
    for name, param in engine.module.named_parameters():
        own = safe_get_full_fp32_param(param)
        if own is not None:
            torch.testing.assert_close(own, local_part(param, whole[name].detach()), msg=name, **close)


@contextlib.contextmanager
def model_parallel_states(unit: Unit) -> Iterator[None]:
    """Configured as a script does, and taken back."""
    before, activation_checkpointing._state = (
        activation_checkpointing._state,
        activation_checkpointing._CheckpointState(),
    )
    try:
        deepspeed.transforms.recompute.checkpointing.configure(unit)
        deepspeed.transforms.recompute.checkpointing.model_parallel_cuda_manual_seed(3)
        yield
    finally:
        activation_checkpointing.get_cuda_rng_tracker().reset()
        activation_checkpointing._state = before


@pytest.mark.parametrize(
    ("stage", "names", "frozen", "offload"),
    [
        (0, "model", False, False),
        (1, "tensor", True, False),
        (2, "model", True, True),
        (3, "tensor", False, False),
        (3, "model", True, True),
    ],
)
@distributed(world_size=(2, 4))
def test_trains_like_whole_layers(
    world_size: int, stage: int, names: str, frozen: bool, offload: bool
) -> None:
    engine = start(config(stage, offload=offload), names=names, frozen=frozen)
    losses, norms = train(engine, 0, STEPS)
    expected, expected_norms, model = alone(STEPS, world_size // 2, frozen=frozen)
    mine = [each[engine.mesh.rank("dp")] for each in expected]
    torch.testing.assert_close(losses, mine, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    assert_weights(engine, model, rtol=1e-4, atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize("batch_numel", [whole_matrices.BATCH_NUMEL, 50])
@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=(2, 4))
def test_muon_orthogonalizes_whole_matrices(world_size: int, stage: int, batch_numel: int) -> None:
    """Of uneven parts (5 and 4 rows or columns), also where the shards of a part have other owners elsewhere, and where
    the exchange of larger parts takes more batches."""
    settings = config(stage, optimizer={"type": "Muon", "params": {"lr": 0.02}}, gradient_clipping=0.0)
    engine = start(settings)
    with mock.patch.object(whole_matrices, "BATCH_NUMEL", batch_numel):
        losses, _ = train(engine, 0, STEPS)
    model, expected = Model(), []
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    muon = SingleDeviceMuon(matrices, lr=0.02)
    adam = torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(STEPS):
        each = [model(batch(step, replica)) for replica in range(world_size // 2)]
        (sum(each) / len(each)).backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        expected.append(each[engine.mesh.rank("dp")].item())
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert_weights(engine, model, rtol=1e-3, atol=1e-4)
    engine.destroy()


@distributed(world_size=2)
def test_muon_refuses_parts_that_cannot_be_assembled() -> None:
    model = Model(Unit(2))
    model.blocks[0].up.weight.partition_dim = None  # type: ignore[union-attr]
    settings = config(1, optimizer={"type": "Muon", "params": {"lr": 0.02}})
    with pytest.raises(
        DeepSpeedConfigError, match=r"cannot be assembled .*blocks\.0\.up\.weight.*use_muon = False"
    ):
        deepspeed.initialize(model=model, config=settings, mpu=model.unit)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_bf16_trains_as_one_rank_does(stage: int) -> None:
    settings = config(stage, bf16={"enabled": True})
    engine = start(settings)
    losses, _ = train(engine, 0, STEPS)
    engine.destroy()
    whole = start(settings, size=1)  # both ranks with the same data
    expected = []
    for step in range(STEPS):
        loss = whole(batch(step, 0))
        whole.backward(loss)
        whole.step()
        expected.append(loss.item())
    whole.destroy()
    torch.testing.assert_close(losses, expected, rtol=3e-2, atol=0)


@distributed(world_size=4)
def test_parts_built_under_zero_init() -> None:
    engine = start(config(3), init=True)
    losses, norms = train(engine, 0, STEPS)
    expected, expected_norms, _ = alone(STEPS, 2)
    mine = [each[engine.mesh.rank("dp")] for each in expected]
    torch.testing.assert_close(losses, mine, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_checkpointed_blocks_replay_the_dropout_of_each_rank(stage: int) -> None:
    results = []
    for checkpoint in (False, True):
        unit = Unit(2)
        with model_parallel_states(unit):
            model = Model(unit, dropout=0.3, checkpoint=checkpoint)
            engine = deepspeed.initialize(model=model, config=config(stage), mpu=unit)[0]
            results.append(train(engine, 0, 3))
            engine.destroy()
    assert results[0] == results[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=4)
def test_nan_on_one_rank_skips_everywhere(stage: int) -> None:
    engine = start(config(stage, fp16={"enabled": True, "initial_scale_power": 4}))
    before = [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]

    def spoil(grad: Tensor) -> Tensor:
        return grad * float("nan") if dist.get_rank() == 3 else grad

    handle = engine.module.blocks[1].up.weight.register_hook(spoil)
    engine.backward(engine(batch(0, engine.mesh.rank("dp"))))
    engine.step()
    handle.remove()
    assert engine.skipped_steps == 1
    after = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    engine.backward(engine(batch(0, engine.mesh.rank("dp"))))
    engine.step()
    assert engine.skipped_steps == 1
    engine.destroy()


@distributed(world_size=4)
def test_engines_with_different_splits_in_one_process() -> None:
    """Over two ranks, over four and not at all, step by step."""
    engines = {2: start(config(2)), 4: start(config(1), size=4), 1: start(config(3), size=1)}
    for step in range(3):
        for size, engine in engines.items():
            (loss,), (norm,) = train(engine, step, step + 1)
            expected, norms, _ = alone(step + 1, 4 // size)
            assert loss == pytest.approx(expected[step][engine.mesh.rank("dp")], rel=1e-5), (size, step)
            assert norm == pytest.approx(norms[step], rel=1e-5)
    for engine in engines.values():
        engine.destroy()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((1, 2), (3, 4)),
        ((3, 4), (2, 2)),
        ((2, 2), (0, 1)),
        ((0, 1), (3, 2)),
        ((3, 2), (1, 4)),
        ((0, 4), (1, 2)),
    ],
    ids=str,
)
@distributed(world_size=4)
def test_checkpoints_load_at_other_stages_and_splits(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    """(stage, tensor-parallel ranks) before and after; the number of data-parallel ranks is what is left of 4."""
    engine = start(config(saved[0]), size=saved[1], frozen=True)
    for step in range(2):
        engine.backward(engine(batch(step, 0)))
        engine.step()
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path)
    engine.destroy()
    _, _, model = alone(2, 1, frozen=True)
    if dist.get_rank() == 0:
        whole = dict(model.state_dict())
        exports = (
            torch.load(tmp_path / "pytorch_model.bin"),
            get_fp32_state_dict_from_zero_checkpoint(tmp_path),
        )
        for found in exports:
            torch.testing.assert_close(dict(found), whole, rtol=1e-4, atol=1e-5)
    other = start(config(loaded[0]), size=loaded[1], frozen=True)
    other.load_checkpoint(tmp_path)
    losses = []
    for step in range(2, 4):
        loss = other(batch(step, 0))
        other.backward(loss)
        other.step()
        losses.append(loss.item())
    expected = [each[0] for each in alone(4, 1, frozen=True)[0][2:]]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    other.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_safe_functions_see_the_rank_s_part(stage: int) -> None:
    """``full`` is all of this rank's part, ``local`` its shard of the part; the engine makes a part whole."""
    engine = start(config(stage))
    model = Model()
    (sum(model(batch(0, replica)) for replica in range(2)) / 2).backward()
    engine.backward(engine(batch(0, engine.mesh.rank("dp"))))
    for name, whole in model.named_parameters():
        param = engine.module.get_parameter(name)
        shape = local_part(param, whole.detach()).shape
        grad = safe_get_full_grad(param)
        assert safe_get_full_fp32_param(param).shape == shape
        if not name.startswith("extra"):
            assert grad is not None and grad.shape == shape
            torch.testing.assert_close(
                engine.whole_tensor(param, grad), whole.grad, rtol=1e-4, atol=1e-6, msg=name
            )
        torch.testing.assert_close(engine.whole_tensor(param), whole.detach(), msg=name)
        torch.testing.assert_close(
            engine.whole_tensor(param, safe_get_full_fp32_param(param)), whole.detach(), msg=name
        )
    param = engine.module.blocks[0].up.weight
    safe_set_full_grad(param, torch.ones(placement_of(param).index("").local_shape))
    assert (safe_get_full_grad(param) == 1).all()
    engine.step()
    value = torch.arange(HIDDEN * WIDTH, dtype=torch.float32).view(HIDDEN, WIDTH)
    safe_set_full_fp32_param(param, local_part(param, value))
    assert torch.equal(engine.whole_tensor(param), value)
    safe_set_full_optimizer_state(param, local_part(param, value), "exp_avg")
    assert torch.equal(engine.whole_tensor(param, safe_get_full_optimizer_state(param, "exp_avg")), value)
    if stage == 3:
        shard = safe_get_local_fp32_param(param)
        assert safe_get_local_optimizer_state(param, "exp_avg").numel() == shard.numel()
        safe_set_local_fp32_param(param, torch.zeros_like(shard))
        assert not safe_get_full_fp32_param(param).any()
    engine.destroy()

"""Two ranks share each layer, one weight split by columns and one by rows, under every stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import deepspeed
from deepspeed.checkpoint import names
from deepspeed.checkpoint.files import archive_reader
from deepspeed.checkpoint.placement import Placement, interval, place, placement_of
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.transforms.distributed_tensors import placement_of_dtensor
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.pool import distributed

TP, WIDTH, HIDDEN, STEPS = 2, 6, 10, 4


class Unit:
    """A model-parallel unit as Megatron-LM's: neighbours share the layers."""

    def __init__(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        tensor = [dist.new_group(list(range(first, first + TP))) for first in range(0, world, TP)]
        data = [dist.new_group(list(range(first, world, TP))) for first in range(TP)]
        self.tensor, self.data = tensor[rank // TP], data[rank % TP]

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return TP

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)


class Copied(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks that share a layer."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """Sum over the ranks that share a layer, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        total = inputs.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """A gated unit: ``up`` holds two matrices side by side, so that its split is strided; ``down`` is split by rows of
    the product; norm and ``down``'s bias are whole everywhere."""

    def __init__(self, unit: Unit | None = None, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(2 * HIDDEN, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 3)
        self.scale = nn.Parameter(1 + torch.rand(HIDDEN), requires_grad=not frozen)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 3)
        self.unit = unit
        if unit is not None:
            self._split("up", 0, stride=2)
            self._split("down", 1)
            self._split("scale", 0)

    def _split(self, name: str, dim: int, stride: int = 1) -> None:
        whole, rank = getattr(self, name), self.unit.get_model_parallel_rank()
        parts = [block.chunk(TP, dim)[rank] for block in whole.detach().chunk(stride, dim)]
        param = nn.Parameter(torch.cat(parts, dim).contiguous(), requires_grad=whole.requires_grad)
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
        setattr(self, name, param)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(inputs)
        if self.unit is not None:
            hidden = Copied.apply(hidden, self.unit.tensor)
        gate, value = nn.functional.linear(hidden, self.up).chunk(2, -1)
        made = nn.functional.linear(torch.tanh(gate) * value * self.scale, self.down)
        if self.unit is not None:
            made = Summed.apply(made, self.unit.tensor)
        return (inputs + made + self.bias).square().mean()


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + replica))


def alone(
    first: int, last: int, replicas: int, clip: float, **options: Any
) -> tuple[list[list[float]], list[float], Block]:
    """One process with the whole layers: losses by replica, norms, and the model after steps ``first`` to ``last``."""
    model = Block(**options)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )
    losses, norms = [], []
    for step in range(last):
        each = [model(batch(step, replica)) for replica in range(replicas)]
        (sum(each) / replicas).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        if step >= first:
            losses.append([loss.item() for loss in each])
            norms.append(norm.item())
    return losses, norms, model


def config(stage: int, clip: float = 0.05, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
        **more,
    }


def start(settings: dict[str, Any], *, split: bool = True, **options: Any) -> Any:
    unit = Unit() if split else None
    return deepspeed.initialize(model=Block(unit, **options), config=settings, mpu=unit)[0]


def train(engine: Any, first: int, last: int) -> tuple[list[float], list[float]]:
    replica = engine.mesh.rank("dp")
    losses, norms = [], []
    for step in range(first, last):
        loss = engine(batch(step, replica))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def assert_weights(engine: Any, model: Block, **close: float) -> None:
    """This rank's parts are those of the whole model."""
    whole = dict(model.named_parameters())
    for name, param in engine.module.named_parameters():
        placement, own = placement_of(param), safe_get_full_fp32_param(param)
        if own is None:  # frozen
            continue
        boxes = placement.boxes or (tuple((0, size) for size in placement.global_shape),)
        parts = [whole[name].detach()[tuple(slice(*side) for side in box)] for box in boxes]
        wanted = torch.cat([part.reshape(-1, *own.shape[1:]) for part in parts]).view(own.shape)
        torch.testing.assert_close(own, wanted, msg=name, **close)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=(2, 4))
def test_split_layers_train_like_whole_ones(world_size: int, stage: int, clip: float) -> None:
    engine = start(config(stage, clip))
    losses, norms = train(engine, 0, STEPS)
    expected, expected_norms, model = alone(0, STEPS, world_size // TP, clip)
    torch.testing.assert_close(
        losses, [each[engine.mesh.rank("dp")] for each in expected], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    assert_weights(engine, model, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=4)
def test_lamb_takes_norms_of_whole_tensors(stage: int) -> None:
    settings = config(stage, 0.0, optimizer={"type": "Lamb", "params": {"lr": 1e-2}})
    parts = start(settings)
    losses, _ = train(parts, 0, STEPS)
    whole = start({**settings, "zero_optimization": {"stage": 0}}, split=False)
    expected = []
    for step in range(STEPS):
        loss = whole(batch(step, dist.get_rank() // TP))
        whole.backward(loss)
        whole.step()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    parts.destroy(), whole.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=4)
def test_a_bad_gradient_on_one_part_skips_the_step_everywhere(stage: int) -> None:
    engine = start(config(stage, fp16={"enabled": True, "initial_scale_power": 4}))
    loss = engine(batch(0, engine.mesh.rank("dp")).half())
    if dist.get_rank() == 1:
        loss = loss * float("inf")
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 1
    engine.destroy()


@pytest.mark.parametrize(
    "later", [(0, True), (1, False), (3, False)], ids=["stage 0, split", "stage 1, whole", "stage 3, whole"]
)
@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=4)
def test_a_checkpoint_of_parts_resumes_anywhere_and_back(
    stage: int, later: tuple[int, bool], tmp_path: Path
) -> None:
    frozen = stage != 1
    expected, _, _ = alone(0, 6, 2, 0.05, frozen=frozen)
    engine = start(config(stage), frozen=frozen)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    train(engine, 2, 3)
    engine.destroy()

    # As many data-parallel ranks as before hold whole layers, two by two with the same batch; or parts once more.
    next_stage, split = later
    other = start(config(next_stage), split=split, frozen=frozen)
    other.load_checkpoint(tmp_path)
    replica = dist.get_rank() // TP
    losses = []
    for step in (2, 3):
        loss = other(batch(step, replica))
        other.backward(loss)
        other.step()
        losses.append(loss.item())
    torch.testing.assert_close(losses, [expected[step][replica] for step in (2, 3)], rtol=1e-5, atol=1e-6)
    other.save_checkpoint(tmp_path)
    other.destroy()

    back = start(config(stage), frozen=frozen)
    back.load_checkpoint(tmp_path)
    losses, _ = train(back, 4, 6)
    torch.testing.assert_close(losses, [expected[step][replica] for step in (4, 5)], rtol=1e-5, atol=1e-6)
    back.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=4)
def test_a_rank_opens_its_own_files(stage: int, tmp_path: Path) -> None:
    engine = start(config(stage), frozen=True)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    opened: set[str] = set()
    original = archive_reader.open_archive

    def opening(path: Path) -> Any:
        opened.add(path.name)
        return original(path)

    with mock.patch.object(archive_reader, "open_archive", opening):
        engine.load_checkpoint(tmp_path)
    dp, mp = engine.mesh.rank("dp"), engine.mesh.rank("tp")
    own = {names.optim_file(dp, mp, bf16=False)}
    if stage == 3:
        own |= {names.zero_model_file(0, 0), names.zero_model_file(dp, mp)}
    else:
        own |= {names.model_file(0), names.model_file(mp)}
    assert opened <= own, opened  # a rank may hold nothing of the frozen weights
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_exports_hold_whole_tensors(stage: int, tmp_path: Path) -> None:
    settings = config(stage, bf16={"enabled": True})
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = start(settings, frozen=True)
    engine.save_16bit_model(tmp_path)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    if dist.get_rank() == 0:
        whole = dict(Block(frozen=True).named_parameters())
        saved = torch.load(tmp_path / "pytorch_model.bin")
        fp32 = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
        for name, value in whole.items():
            torch.testing.assert_close(saved[name], value.detach().bfloat16(), msg=name)
            torch.testing.assert_close(fp32[name].float(), value.detach().bfloat16().float(), msg=name)


@distributed(world_size=2)
def test_known_copies_start_equal() -> None:
    unit = Unit()
    model = Block(unit)
    with torch.no_grad():
        model.bias += dist.get_rank()
        model.norm.bias += dist.get_rank()
    place(model.bias, Placement(global_shape=(WIDTH,), replicated=("tp",), counts=dist.get_rank() == 0))
    engine = deepspeed.initialize(model=model, config=config(2), mpu=unit)[0]
    torch.testing.assert_close(engine.module.bias, Block().bias)
    assert engine.module.norm.bias[0].item() == dist.get_rank()  # nothing says that these are copies
    engine.destroy()


@distributed(world_size=2)
def test_a_later_engine_with_another_mesh_looks_again() -> None:
    model = Block()
    first = deepspeed.initialize(model=model, config=config(2, 0.0), mpu=Unit())[0]
    assert placement_of(model.bias).counts == (dist.get_rank() == 0)
    first.destroy()

    reference = Block()
    (sum(reference(batch(0, replica)) for replica in range(2)) / 2).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    second = deepspeed.initialize(model=model, config=config(2, 0.0))[0]
    _, norms = train(second, 0, 1)
    assert norms == pytest.approx([expected.item()], rel=1e-5)
    second.destroy()


@distributed(world_size=4)
def test_dtensors_are_read() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(7 * 5.0).view(7, 5)
    for how in (
        [Replicate(), Shard(0)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ):
        tensor: DTensor = distribute_tensor(whole, mesh, how)
        placement = placement_of_dtensor(tensor)
        box = placement.boxes[0] if placement.boxes else tuple((0, size) for size in whole.shape)
        assert torch.equal(whole[tuple(slice(*side) for side in box)], tensor.to_local())
        assert placement.split == tuple(
            n for n, h in zip(("dp", "tp"), how, strict=True) if isinstance(h, Shard)
        )
        total = torch.tensor(float(placement.counts) * tensor.to_local().square().sum())
        dist.all_reduce(total)
        assert total.item() == whole.square().sum().item()
    partial = DTensor.from_local(whole, mesh, [Replicate(), torch.distributed.tensor.Partial()])
    with pytest.raises(ValueError, match="tp"):
        placement_of_dtensor(partial)


def test_intervals() -> None:
    placement = interval((4, 3), 0, [2, 4], 1, stride=2)
    assert placement.global_shape == (6, 3)
    assert placement.boxes == (((1, 3), (0, 3)), ((4, 6), (0, 3)))
    assert placement.index("w").numel == 12
    stacked = placement.stacked(1, 3, "ep")
    assert stacked.global_shape == (3, 6, 3) and stacked.index("w").numel == 12
    with pytest.raises(ValueError, match="extents"):
        interval((4, 3), 0, [2, 3], 1, stride=2)
    with pytest.raises(ValueError, match="elements"):
        place(nn.Parameter(torch.zeros(5)), placement)

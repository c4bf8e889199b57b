"""Parallel layers under every stage of ZeRO, against one process with the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import deepspeed
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.placements import is_partial
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.parallel.tensor.blocks import Model, batch, split
from tests.parallel.tensor.test_layers import own_part
from tests.pool import distributed

STEPS = 3
HEADS = 5, 1  # both ranks hold the key


class Unit:
    """A model-parallel unit as Megatron-LM's: runs of ``tp`` neighbours share the layers."""

    def __init__(self, tp: int = 2) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        tensor = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)]
        data = [dist.new_group(list(range(first, world, tp))) for first in range(tp)]
        self.tensor, self.data = tensor[rank // tp], data[rank % tp]

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return self.tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        return self.tensor.size()

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return self.data.rank()

    def get_data_parallel_world_size(self) -> int:
        return self.data.size()


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        **more.pop("zero", {}),
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": zero,
        **more,
    }


def alone(replicas: int, steps: int = STEPS) -> tuple[list[list[float]], list[float], Model]:
    """One process: losses by replica, norms, and the model at the end."""
    model = Model(*HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        each = [model(*batch(step, replica)) for replica in range(replicas)]
        (sum(each) / replicas).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, norms, model


def train(engine: Any, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(steps):
        loss = engine(*batch(step, engine.mesh.rank("dp")))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


CHECKPOINTS = {
    "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "reentrant": deepspeed.transforms.recompute.checkpointing.checkpoint,
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("stage", "by_sequence", "checkpoint", "zero"),
    [
        (0, False, None, {}),
        (0, True, "reentrant", {}),
        (1, True, None, {}),
        (2, False, "torch", OFFLOAD),
        (3, False, "reentrant", {}),
        (3, True, "torch", {}),
        (3, True, None, OFFLOAD),
    ],
)
@distributed(world_size=4)
def test_training_equals_one_process(
    stage: int, by_sequence: bool, checkpoint: str | None, zero: dict[str, Any]
) -> None:
    unit = Unit()
    model = split(Model(*HEADS), unit.tensor, by_sequence=by_sequence)
    model.checkpoint = CHECKPOINTS.get(checkpoint)
    engine = deepspeed.initialize(model=model, config=config(stage, zero=zero), mpu=unit)[0]
    losses, norms = train(engine)
    expected, expected_norms, reference = alone(2)
    replica = engine.mesh.rank("dp")
    torch.testing.assert_close(losses, [each[replica] for each in expected], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    whole = dict(reference.named_parameters())
    for name, param in engine.module.named_parameters():
        own = safe_get_full_fp32_param(param)
        wanted = own_part(whole[name].detach(), param)
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=4)
def test_checkpoints_and_exports_are_of_whole_tensors(stage: int, tmp_path: Path) -> None:
    expected, _, reference = alone(2, 3)
    unit = Unit()
    settings = config(stage, zero={"stage3_gather_16bit_weights_on_model_save": True})
    engine = deepspeed.initialize(model=split(Model(*HEADS), unit.tensor), config=settings, mpu=unit)[0]
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path)
    engine.destroy()

    _, _, after_two = alone(2, 2)
    fp32 = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    saved = torch.load(tmp_path / "pytorch_model.bin")
    for name, value in after_two.state_dict().items():
        torch.testing.assert_close(fp32[name], value, rtol=1e-4, atol=2e-5, msg=name)
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=2e-5, msg=name)

    # Over four ranks with split layers, all of which hold the one key head; and with whole layers.
    wide = Unit(4)
    later = deepspeed.initialize(
        model=split(Model(*HEADS), wide.tensor, by_sequence=True), config=config(stage), mpu=wide
    )[0]
    later.load_checkpoint(tmp_path)
    loss = later(*batch(2, 0))
    torch.testing.assert_close(loss.item(), expected[2][0], rtol=1e-5, atol=1e-6)
    later.destroy()
    whole = deepspeed.initialize(model=Model(*HEADS), config=config(stage))[0]
    whole.load_checkpoint(tmp_path)
    assert whole(*batch(2, 1)).item() == pytest.approx(expected[2][1], rel=1e-5)
    whole.destroy()


WIRES: dict[str, dict[str, Any]] = {
    "qgZ": {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
    "qwZ": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    "8 bits": {"gradient_compression": {"codec": "int8"}},
    "1-bit Adam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}},
    "0/1 Adam": {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-2, "var_freeze_step": 2}}},
}


@pytest.mark.parametrize(("wire", "late"), [*((wire, False) for wire in WIRES), ("1-bit Adam", True)])
@distributed(world_size=4)
def test_what_the_ranks_of_a_layer_share_stays_equal_on_a_wire_that_rounds(wire: str, late: bool) -> None:
    """A block that mixed norms with parts of split weights would round the norms differently on each rank. ``late``:
    they are unfrozen when the parts travel as signs already."""
    unit = Unit()
    model = split(Model(6, 2, blocks=5), unit.tensor)
    copies = ("norm.weight", "norm.bias", "out.bias", "down.bias")
    frozen = [param for name, param in model.named_parameters() if late and name.endswith(copies)]
    for param in frozen:
        param.requires_grad_(False)
    settings = {**config(0), **WIRES[wire], "gradient_clipping": 0.0}
    engine = deepspeed.initialize(model=model, config=settings, mpu=unit)[0]
    train(engine, 4)
    for param in frozen:
        param.requires_grad_(True)
    train(engine, 5)
    shared = 0
    for name, param in engine.module.named_parameters():
        if is_partial(param):
            continue
        own = safe_get_full_fp32_param(param)
        others = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(others, own, group=unit.tensor)
        assert torch.equal(*others), f"{name}: {(others[0] - others[1]).abs().max():.1e} apart"
        shared += own.numel()
    assert shared > 512  # fewer would not be rounded
    engine.destroy()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@distributed(world_size=2)
def test_16_bit_training_follows_fp32(precision: str) -> None:
    unit = Unit()
    model = split(Model(*HEADS), unit.tensor, by_sequence=precision == "bf16")
    scale = {"initial_scale_power": 4} if precision == "fp16" else {}
    settings = config(2, **{precision: {"enabled": True, **scale}})
    engine = deepspeed.initialize(model=model, config=settings, mpu=unit)[0]
    losses, _ = train(engine)
    expected, _, _ = alone(1)
    assert losses == pytest.approx([each[0] for each in expected], rel=0.03)
    assert engine.skipped_steps == 0
    engine.destroy()


@distributed(world_size=2)
def test_a_model_whose_head_is_to_be_split_by_words_but_has_none_is_refused() -> None:
    column = {"patterns": [r".*0\.weight$"], "partition_type": "column", "gather_output": True}
    section = {
        "autotp_size": 2,
        "vocab_parallel_lm_head": True,
        "partition_config": {"use_default_specs": False, "layer_specs": [column]},
    }
    with pytest.raises(ValueError, match="vocab_parallel_lm_head: true requires a supported nn.Linear"):
        deepspeed.initialize(model=nn.Sequential(nn.Linear(4, 8)), config=config(0, tensor_parallel=section))

"""MoQ: the documented MoQQuantizer alone, and in an engine by ``quantize_training``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.compression.moq import MoQQuantizer
from deepspeed.compression.utils import AsymQuantizer, SymQuantizer
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.compression.models import Bert, batch
from tests.pool import distributed


def parameter(start: int, target: int, period: int) -> Any:
    torch.manual_seed(0)
    param: Any = nn.Parameter(torch.randn(4, 6))
    param.start_bits, param.target_bits, param.q_period = start, target, period
    return param


def test_bits_fall_and_periods_double() -> None:
    quantizer, param = MoQQuantizer(), parameter(8, 5, 2)
    bits = []
    for _ in range(12):
        quantizer.quantize([[param]], False, False)
        bits.append(param.start_bits)
    assert bits == [8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 5]
    quantizer.quantize([[param]], True, False)  # an overflow counts for nothing
    assert quantizer.qsteps == 12


def test_curvature_stretches_periods() -> None:
    quantizer, param = MoQQuantizer(q_eigenvalue=True, layer_num=1), parameter(8, 5, 2)
    for _ in range(2):
        quantizer.quantize([[param]], False, True, {id(param): (0.6, 0)})
    assert (param.start_bits, param.q_period) == (7, 2 * 2 * 3)
    assert not quantizer.any_precision_switch()
    assert MoQQuantizer().any_precision_switch()


@pytest.mark.parametrize(("q_type", "kind"), [(0, SymQuantizer), (1, AsymQuantizer)])
def test_values(q_type: int, kind: Any) -> None:
    param = parameter(4, 4, 1)
    before = param.detach().clone()
    MoQQuantizer(q_groups=2, q_type=q_type).quantize([[param]], False, False)
    assert torch.equal(param, kind.apply(before, 4, None, None, 2))


def test_mixture() -> None:
    param = parameter(4, 4, 1)
    before = param.detach().clone()
    quantizer = MoQQuantizer(q_mixed_fp16=True, q_change_ratio=0.25)
    quantizer.quantize([[param]], False, False)
    rounded = SymQuantizer.apply(before, 4)
    torch.testing.assert_close(param.detach(), 0.75 * before + 0.25 * rounded)
    assert quantizer.quantize_real_ratio == 0.75


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "quantize_training": {
            "enabled": True,
            "quantize_verbose": True,
            "quantizer_kernel": True,
            "quantize_type": "symmetric",
            "quantize_bits": {"start_bits": 8, "target_bits": 4},
            "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
            "quantize_groups": 4,
            "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
            **more,
        },
    }


def steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(*batch(2 * step + dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def start(section: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    return deepspeed.initialize(model=Bert(), config=section)[0]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_are_quantized_after_each_update(stage: int, tmp_path: Path) -> None:
    eigenvalue = {"enabled": True, "layer_name": "layer", "layer_num": 2, "max_iter": 20}
    section = config(stage, eigenvalue=eigenvalue)
    engine = start(section)
    query = engine.module.layer[0].attention.self.query.weight
    for step, bits in enumerate([None, 7, 7, 7]):
        steps(engine, step, step + 1)
        exact = safe_get_full_fp32_param(query).bfloat16()
        if bits is None:
            assert torch.equal(query, exact)
        else:
            assert query.start_bits <= bits
            assert torch.equal(query, SymQuantizer.apply(exact, query.start_bits, None, None, 4))
    assert engine.module.classifier.weight.start_bits < 7  # no block: its period only doubles
    engine.save_checkpoint(str(tmp_path))
    resumed = start(section)
    resumed.load_checkpoint(str(tmp_path))
    for one, other in zip(engine.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(one, other)
        assert getattr(one, "start_bits", None) == getattr(other, "start_bits", None)
    assert steps(engine, 4, 7) == steps(resumed, 4, 7)


@distributed(world_size=1)
def test_eigenvalues_beside_a_loss_scale() -> None:
    section = config(1, eigenvalue={"enabled": True, "layer_name": "layer", "layer_num": 2, "max_iter": 5})
    del section["bf16"]
    engine = start(section | {"fp16": {"enabled": True, "loss_scale": 8.0}})
    steps(engine, 0, 2)
    query = engine.module.layer[0].attention.self.query.weight
    assert query.start_bits < 8 and engine.global_steps == 2 and not engine.skipped_steps


@distributed(world_size=2)
@pytest.mark.parametrize(("threshold", "curvature"), [(0, False), (100, False), (0, True)])
def test_partitioned_weights_are_quantized_after_each_update(
    threshold: int, curvature: bool, tmp_path: Path
) -> None:
    """At stage 3, one at a time; to the bit what stage 2 does, with large weights and small ones that stay whole."""
    eigenvalue = {"enabled": curvature, "layer_name": "layer", "layer_num": 2, "max_iter": 20}
    section = config(3, eigenvalue=eigenvalue)
    section["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    engine, other = start(section), start(config(2, eigenvalue=eigenvalue))
    assert steps(engine, 0, 4) == steps(other, 0, 4)
    engine.save_checkpoint(str(tmp_path))
    resumed = start(section)
    resumed.load_checkpoint(str(tmp_path))
    for each in (engine, resumed):
        with deepspeed.zero.GatheredParameters(list(each.module.parameters())):
            for one, whole in zip(each.module.parameters(), other.module.parameters(), strict=True):
                assert torch.equal(one, whole)
                assert getattr(one, "start_bits", None) == getattr(whole, "start_bits", None)
    assert steps(engine, 4, 6) == steps(resumed, 4, 6) == steps(other, 4, 6)


@distributed(world_size=1)
def test_what_cannot_be_quantized_is_refused() -> None:
    for section, message in (
        ({**config(0), "bf16": {"enabled": False}}, "training in fp32"),
        (config(0, quantize_groups=7), "quantize_groups=7"),
    ):
        with pytest.raises(ValueError, match=message):
            start(section)

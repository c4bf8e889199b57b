"""Eigenvalues of blocks against those of the whole Hessian matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.compression.eigenvalue import Eigenvalue
from tests.pool import distributed

WIDTH, BLOCKS = 3, 2


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))})

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.encoder["layer"]
        for layer in layers:
            x = x + layer(x).tanh()
        return x.square().sum(dim=1).mean()


def start() -> Stack:
    torch.manual_seed(5)
    return Stack()


def data(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def expected(x: Tensor) -> list[float]:
    """Relative to the largest."""
    model, values = start(), []
    for i, layer in enumerate(model.encoder["layer"]):
        shapes = [param.shape for param in layer.parameters()]

        def loss(flat: Tensor, i: int = i, shapes: Any = shapes) -> Tensor:
            parts = flat.split([shape.numel() for shape in shapes])
            named = zip(("weight", "bias"), parts, shapes, strict=True)
            own = {f"encoder.layer.{i}.{name}": part.view(shape) for name, part, shape in named}
            return torch.func.functional_call(model, own, (x,))

        flat = torch.cat([param.detach().reshape(-1) for param in layer.parameters()])
        matrix = torch.autograd.functional.hessian(loss, flat)
        spectrum = torch.linalg.eigvalsh(matrix)
        values.append(float(spectrum[spectrum.abs().argmax()].abs()))
    return [value / max(values) for value in values]


def test_power_iteration_finds_the_largest() -> None:
    model = start()
    model(data(0)).backward(create_graph=True)
    measure = Eigenvalue(max_iter=500, tol=1e-7, layer_name="encoder.layer", layer_num=BLOCKS)
    found = measure.compute_eigenvalue(model)
    for i, layer in enumerate(model.encoder["layer"]):
        for param in layer.parameters():
            value, block = found[id(param)]
            assert block == i
            assert value == pytest.approx(expected(data(0))[i], rel=1e-3)


def test_the_documented_parts() -> None:
    measure = Eigenvalue(layer_name="encoder.layer", layer_num=BLOCKS)
    assert measure.nan_to_num(torch.tensor([1.0, torch.nan, torch.inf])).tolist() == [1, 0, 0]
    assert float(measure.inner_product([torch.ones(3)], [torch.full((3,), 2.0)])) == 6
    assert measure.normalize([torch.tensor([3.0]), torch.tensor([4.0])]) == [
        pytest.approx(0.6),
        pytest.approx(0.8),
    ]
    assert measure.post_process([-4.0, 1.0, 0.0]) == [1.0, 0.25, 1.0]
    assert measure.get_layers(start()) is not None
    with pytest.raises(ValueError, match="layer_name=''"):
        Eigenvalue()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_measures_the_mean_over_ranks(stage: int, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
        "quantize_training": {
            "eigenvalue": {
                "enabled": True,
                "max_iter": 500,
                "tol": 1e-7,
                "stability": 0,
                "layer_name": "encoder.layer",
                "layer_num": BLOCKS,
            }
        },
    }
    engine, *_ = deepspeed.initialize(model=start(), config=config)
    assert engine.eigenvalue_enabled() and engine.quantizer is None
    engine.backward(engine(data(dist.get_rank())))
    engine.step()
    told = (
        [
            float(
                (tmp_path / "run" / f"Train_Eigenvalues_ModelBlockParam_{i}.csv").read_text().split(",")[-1]
            )
            for i in range(BLOCKS)
        ]
        if dist.get_rank() == 0
        else None
    )
    if told is not None:
        assert told == pytest.approx(expected(torch.cat([data(0), data(1)])), rel=1e-3)

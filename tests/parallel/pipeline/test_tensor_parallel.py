"""Stages whose layers the config splits (`tensor_parallel.autotp_size`), each against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.meta_model import MetaModel
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from tests.parallel.pipeline.test_combinations import evaluated, train_both
from tests.parallel.pipeline.test_engine import (
    COUNT,
    VOCABULARY,
    WIDTH,
    Block,
    Plain,
    batches,
    layers,
    loss_of,
    make_engine,
)
from tests.pool import distributed, run

SPLIT: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}


def engine_of(
    stage: int, *, stages: int = 2, tied: bool = False, parts: int = 2, **more: Any
) -> PipelineEngine:
    module = PipelineModule(layers(tied=tied), num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    return make_engine(module, stage, clip=0.1, tensor_parallel={"autotp_size": parts}, **more)


@pytest.mark.parametrize(
    ("stage", "tied", "schedule"),
    [
        (0, False, "1f1b"),
        (1, True, "zero-bubble"),
        (2, False, "zero-bubble"),
        (3, False, "1f1b"),
        (1, False, "1f1b"),
    ],
)
@distributed(world_size=4)
def test_two_stages_of_two_parts(stage: int, tied: bool, schedule: str) -> None:
    specs = layers(tied=tied)
    engine, plain = (
        engine_of(stage, tied=tied, pipeline={"schedule": schedule}),
        Plain(specs, lr=0.01, clip=0.1),
    )
    assert (engine.dp_world_size, engine.mp_world_size, engine.num_stages) == (1, 2, 2)
    rows = [each for each in engine.module.modules() if isinstance(each, LinearAllreduce)]
    assert len(rows) == 2  # the second product of each block of the stage
    train_both(engine, plain)
    with torch.no_grad():
        pairs = [next(batches(7)) for _ in range(COUNT)]
        expected = torch.stack([loss_of(plain.forward(x), y) for x, y in pairs]).mean()
    assert evaluated(engine) == pytest.approx(expected.item(), rel=1e-5)
    engine.destroy()


@distributed(world_size=4)
def test_a_vocabulary_is_spread_on_all_its_stages() -> None:
    """The embedding and the head are on different stages, which know of each other."""
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine = make_engine(module, **SPLIT)
    if module.stage_id == 0:
        assert isinstance(module.get_submodule("0"), VocabParallelEmbedding)
    else:
        head = module.get_submodule("5")
        assert isinstance(head, LinearLayer) and head.weight.shape == (VOCABULARY // 2, WIDTH)
    assert module.forward_funcs[0] is module.get_submodule(str(module._layer_indices[0]))
    engine.destroy()


@distributed(world_size=4)
def test_the_given_topology() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    engine = make_engine(PipelineModule(layers(), topology=topology, loss_fn=loss_of), clip=0.1, **SPLIT)
    train_both(engine, Plain(layers(), lr=0.01, clip=0.1), steps=2)
    engine.destroy()
    for other in (PipeDataParallelTopology(2, 2), PipeModelDataParallelTopology(1, 4, 1)):
        with pytest.raises(DeepSpeedConfigError, match="autotp_size=2.*num_mp=2"):
            make_engine(PipelineModule(layers(), topology=other, loss_fn=loss_of), **SPLIT)
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    with pytest.raises(DeepSpeedConfigError, match="autotp_size=3 does not divide the 2 ranks"):
        make_engine(module, tensor_parallel={"autotp_size": 3})


def first_job(folder: Path, stage: int) -> list[float]:
    engine = engine_of(stage)
    train_both(engine, Plain(layers(), lr=0.01, clip=0.1), steps=2)
    engine.save_checkpoint(folder)
    return last_steps(engine)


def second_job(folder: Path, stage: int, stages: int, parts: int) -> list[float]:
    engine = engine_of(stage, stages=stages, parts=parts)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == 2
    return last_steps(engine)


def last_steps(engine: PipelineEngine) -> list[float]:
    losses = [
        evaluated(engine),
        engine.train_batch(iter([next(batches(9))] * COUNT)).item(),
        evaluated(engine),
    ]
    engine.destroy()
    return losses


def test_checkpoints_resume_over_other_axes(tmp_path: Path) -> None:
    """Of PP 2 x TP 2: by the same, by PP 1 x TP 2, PP 2 x TP 1, and on one rank."""
    expected = run(first_job, 4, folder=tmp_path, stage=1)[0]
    for ranks, stage, stages, parts in ((4, 1, 2, 2), (2, 0, 1, 2), (2, 2, 2, 1), (1, 1, 1, 1)):
        found = run(second_job, ranks, folder=tmp_path, stage=stage, stages=stages, parts=parts)[0]
        assert found == pytest.approx(expected, rel=1e-5), (ranks, stages, parts)


# What the layers take ---------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A block between dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.block(inputs["x"]) * inputs["scale"], "scale": inputs["scale"]}


def test_what_the_first_layer_takes_is_found_or_given() -> None:
    whole = MetaModel(layers())
    assert whole.example().dtype == torch.int64
    assert (
        MetaModel([LayerSpec(nn.Linear, 6, 4), torch.relu, LayerSpec(nn.Linear, 4, 2)]).example().shape[-1]
        == 6
    )
    assert all(param.is_meta for param in whole.parameters())
    with pytest.raises(PipelineError, match="profile_input"):
        MetaModel([LayerSpec(Pair), LayerSpec(Pair)]).example()


def take_x(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["x"]


def square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


@distributed(world_size=4)
def test_layers_between_dicts() -> None:
    """With a function at the end; the weights of the second stage's blocks are split too."""
    specs = [*(LayerSpec(Pair) for _ in range(4)), take_x]
    source = torch.Generator().manual_seed(1)
    given = {"x": torch.randn(2, 3, WIDTH, generator=source), "scale": torch.rand(2, 3, 1, generator=source)}
    pairs = [(given, torch.randn(2, 3, WIDTH, generator=source)) for _ in range(COUNT)]
    module = PipelineModule(
        specs, num_stages=2, loss_fn=square, partition_method="uniform", profile_input=given
    )
    engine, plain = make_engine(module, stage=1, **SPLIT), Plain(specs, lr=0.01)
    assert any(isinstance(each, LinearAllreduce) for each in module.modules())
    for _ in range(2):
        loss = torch.stack([square(plain.forward(x), y) for x, y in pairs]).mean()
        plain.optimizer.zero_grad()
        loss.backward()
        plain.optimizer.step()
        assert engine.train_batch(iter(pairs)).item() == pytest.approx(loss.item(), rel=1e-5)
    engine.destroy()

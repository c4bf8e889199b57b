"""A resumed run continues bit for bit; any layout loads any other."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

import deepspeed
from deepspeed.checkpoint import load
from tests.checkpoint.models import (
    assert_equal,
    assert_restored,
    config,
    evaluate,
    full_state,
    make_engine,
    train,
    weights,
)
from tests.pool import distributed, run

LAYOUTS = [(stage, world) for stage in (0, 1, 2, 3) for world in (1, 2, 3)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_resume_is_bit_exact(tmp_path, stage, precision):
    ds_config = config(stage, precision, accumulation=2)
    engine = make_engine(ds_config)
    torch.manual_seed(100 + engine.global_rank)
    train(engine, 0, 4)
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "note": "hello"}) is True
    saved, expected = full_state(engine), train(engine, 4, 8)

    resumed = make_engine(ds_config, seed=9)
    path, client_state = resumed.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step2")
    assert client_state == {"epoch": 3, "note": "hello"}
    assert (resumed.global_steps, resumed.global_samples, resumed.micro_steps) == (2, 32, 4)
    assert_restored(full_state(resumed), saved)
    assert resumed.module.head.weight is resumed.module.emb.weight
    assert train(resumed, 4, 8) == expected
    assert_equal(weights(resumed), weights(engine))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_resume_in_the_middle_of_an_accumulation(tmp_path, stage):
    ds_config = config(stage, accumulation=3)
    engine = make_engine(ds_config)
    train(engine, 0, 5)
    engine.save_checkpoint(tmp_path)
    expected = train(engine, 5, 11)
    resumed = make_engine(ds_config, seed=9)
    train(resumed, 0, 1)  # what it had accumulated itself is forgotten
    resumed.load_checkpoint(tmp_path)
    assert resumed.micro_steps == 5
    assert train(resumed, 5, 11) == expected
    assert_equal(weights(resumed), weights(engine))


@distributed(world_size=2)
def test_random_states_of_every_kind_come_back(tmp_path):
    engine = make_engine(config(1))
    torch.manual_seed(3 + engine.global_rank)
    random.seed(4 + engine.global_rank)
    np.random.seed(5 + engine.global_rank)
    random.gauss(0, 1), np.random.randn()  # half of a pair is kept by both
    engine.save_checkpoint(tmp_path)
    expected = (torch.rand(3), random.gauss(0, 1), random.random(), np.random.randn(3).tolist())
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    engine.load_checkpoint(tmp_path)
    found = (torch.rand(3), random.gauss(0, 1), random.random(), np.random.randn(3).tolist())
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]


@distributed(world_size=2)
def test_loading_into_an_engine_that_has_trained(tmp_path):
    """The best model is put back in place at the end of training."""
    engine = make_engine(config(2))
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="best")
    before, expected = full_state(engine), train(engine, 2, 5)
    train(engine, 5, 8)
    engine.load_checkpoint(tmp_path, tag="best")
    assert_restored(full_state(engine), before)
    assert train(engine, 2, 5) == expected


@distributed(world_size=2)
def test_a_checkpoint_from_before_the_first_step(tmp_path):
    engine = make_engine(config(1))
    engine.save_checkpoint(tmp_path)
    expected = train(engine, 0, 3)
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 0
    assert train(engine, 0, 3) == expected


def _save(folder: str, stage: int, precision: str) -> tuple[dict[str, torch.Tensor], float]:
    engine = make_engine(config(stage, precision))
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    return full_state(engine), evaluate(engine)


def _load(folder: str, stage: int, precision: str) -> tuple[dict[str, torch.Tensor], float, int]:
    engine = make_engine(config(stage, precision), seed=9)
    engine.load_checkpoint(folder)
    loaded, loss = full_state(engine), evaluate(engine)
    train(engine, 3, 4)
    return loaded, loss, engine.global_steps


@pytest.mark.parametrize("saved_as", LAYOUTS, ids=str)
def test_every_layout_loads_every_other(tmp_path, saved_as):
    """At each stage on one of the numbers of ranks: any three of both stages and both numbers come together."""
    before, ranks = saved_as
    state, loss = run(_save, ranks, folder=str(tmp_path), stage=before, precision="fp32")[0]
    for stage in (0, 1, 2, 3):
        world = 1 + (before + stage + ranks) % 3
        loaded, found, steps = run(_load, world, folder=str(tmp_path), stage=stage, precision="fp32")[0]
        assert steps == 4
        assert found == loss, (stage, world)
        assert_restored(loaded, state)


@pytest.mark.parametrize("saved_in", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("loaded_in", ["fp32", "bf16", "fp16"])
def test_precisions_load_each_other(tmp_path, saved_in, loaded_in):
    """Masters and moments are fp32 everywhere, so nothing is lost on the way."""
    state, _ = run(_save, 2, folder=str(tmp_path), stage=2, precision=saved_in)[0]
    loaded, _, _ = run(_load, 1, folder=str(tmp_path), stage=1, precision=loaded_in)[0]
    assert_restored(loaded, state)


@distributed(world_size=2)
def test_other_bucket_cut_and_other_groups(tmp_path):
    ds_config = config(2, zero_optimization={"stage": 2, "reduce_bucket_size": 40})
    engine = make_engine(ds_config)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path)
    state = full_state(engine)
    resumed = make_engine(config(2), seed=9)
    resumed.load_checkpoint(tmp_path)
    assert_restored(full_state(resumed), state)

    model = copy.deepcopy(resumed.module)
    one_group, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config(1)
    )
    one_group.load_checkpoint(tmp_path)
    assert_restored(full_state(one_group), state)


def _bytes_read(folder: str, stage: int) -> int:
    """Counted on this rank while an engine loads."""
    reports: list[load.LoadReport] = []
    original = load.Restorer.finish

    def finish(self: load.Restorer) -> load.LoadReport:
        reports.append(original(self))
        return reports[-1]

    engine = make_engine(config(stage), model=_linears())
    load.Restorer.finish = finish
    try:
        engine.load_checkpoint(folder)
    finally:
        load.Restorer.finish = original
    return reports[0].bytes_read


def _linears() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(8)))


def _save_linear(folder: str) -> int:
    model = _linears()
    engine = make_engine(config(2), model=model)
    x = torch.randn(2, 300)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_reads_its_part_only(tmp_path, stage, world):
    numel = run(_save_linear, 2, folder=str(tmp_path))[0]
    for read in run(_bytes_read, world, folder=str(tmp_path), stage=stage):
        assert read <= 1.05 * 12 * numel / world

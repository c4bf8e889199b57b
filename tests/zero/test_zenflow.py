"""ZenFlow: the plain run where everything is chosen, close to it elsewhere, and exact over checkpoints."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.zero import ZenFlowConfig
from deepspeed.engine.zenflow import is_zenflow_update_boundary
from deepspeed.zero.offload import warm_up
from deepspeed.zero.offload.columns import columns_of
from deepspeed.zero.offload.zenflow_optimizer import (
    ZenFlowZeroOptimizer,
    ZenFlowZeroOptimizerParallel,
    ZenFlowZeroOptimizerSequential,
)
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.optim.test_one_bit import Tokens
from tests.pool import distributed
from tests.zero.models import assert_same, batch, config_for, engine_losses, make_zoo, uses_sometimes
from tests.zero.test_offload import assert_equal_runs, pretend_device

STEPS = 6


def with_zenflow(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    sections = {"offload_optimizer": {"device": "cpu"}, "zenflow": {"full_warm_up_rounds": 0, **options}}
    return {**config, "zero_optimization": {**config["zero_optimization"], **sections}}


def config_of(stage: int, precision: str = "bf16", **options: Any) -> dict[str, Any]:
    config = config_for(stage, stage3_param_persistence_threshold=0, **options)
    return {**config, precision: {"enabled": True}} if precision != "fp32" else config


def start(config: dict[str, Any], seed: int = 0) -> Any:
    return deepspeed.initialize(model=make_zoo(seed), config=config)[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    losses = []
    rank = torch.distributed.get_rank()
    for step in range(first, first + steps):
        loss = engine(batch(step, 0, rank), uses_sometimes(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=[1, 2])
def test_the_plain_run_where_everything_is_updated(world_size: int, stage: int, precision: str) -> None:
    config = config_of(stage, precision, gas=2)
    expected = engine_losses(make_zoo, config, STEPS, groups=True)
    for device in (contextlib.nullcontext, pretend_device):
        for options in (
            {"topk_ratio": 1.0, "update_interval": 2, "overlap_step": True, "select_interval": 3},
            {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": STEPS // 2},
        ):
            with device():
                assert_equal_runs(
                    engine_losses(make_zoo, with_zenflow(config, **options), STEPS, groups=True), expected
                )


def set_rate(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=[1, 2])
def test_updates_are_deferred_once_the_weights_settle(
    world_size: int, stage: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number of rounds: neither while they move far nor while the rate rises. Resuming changes nothing."""
    said: list[str] = []
    monkeypatch.setattr(warm_up, "log_dist", lambda text, ranks: said.append(text))
    monkeypatch.setattr(warm_up, "warning_once", said.append)
    config = with_zenflow(config_of(stage), topk_ratio=0.25, update_interval=2)
    del config["zero_optimization"]["zenflow"]["full_warm_up_rounds"]
    runs = []
    for resumed in (False, True):
        engine, losses = start(config), []
        for steps, lr in ((2, 1e-7), (2, 5e-2), (2, 5e-2), (1, 1e-4), (1, 1e-4), (5, 1e-4)):
            set_rate(engine, lr)
            assert not engine.core.executor.zenflow.warm_up.settled or len(losses) == 8
            losses += train(engine, len(losses), steps)
            if len(losses) == 7 and resumed:
                engine.save_checkpoint(tmp_path)
                engine.destroy()
                engine = start(config, seed=1)
                engine.load_checkpoint(tmp_path)
        assert engine.core.executor.zenflow.warm_up.settled
        runs.append((losses, engine.module.state_dict()))
        engine.destroy()
        assert "updates everything in every step" in said[0] and "from step 9 on" in said[1], said
        said.clear()
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    plain = start(config_of(stage))
    losses = []
    for steps, lr in ((2, 1e-7), (4, 5e-2), (2, 1e-4)):
        set_rate(plain, lr)
        losses += train(plain, len(losses), steps)
    plain.destroy()
    assert runs[0][0][:8] == losses


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_checkpoints_are_exact(stage: int, overlap: bool, tmp_path: Any) -> None:
    """Saved in the middle of a round, while the host works: the resumed run has the bits of the uninterrupted one."""
    config = with_zenflow(
        config_of(stage), topk_ratio=0.25, update_interval=3, select_interval=6, overlap_step=overlap
    )
    for saved_at in (2, 4, 7):
        engine = start(config)
        train(engine, 0, saved_at)
        engine.save_checkpoint(tmp_path, tag=str(saved_at))
        losses = train(engine, saved_at, 6)
        engine.destroy()
        other = start(config, seed=1)
        train(other, 20, 4)  # what it had chosen and deferred is forgotten
        other.load_checkpoint(tmp_path, tag=str(saved_at))
        assert train(other, saved_at, 6) == losses
        other.destroy()
        assert_same(other.module.state_dict(), engine.module.state_dict())


@distributed(world_size=2)
def test_checkpoints_cross_stages(tmp_path: Any) -> None:
    """Other stages cut parameters elsewhere: what was deferred and chosen is found by intersection."""
    options: dict[str, Any] = {"topk_ratio": 0.25, "update_interval": 3, "overlap_step": True}
    engine = start(with_zenflow(config_of(2), **options))
    train(engine, 0, 4)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, 4, 6)
    engine.destroy()
    for stage in (1, 3):
        other = start(with_zenflow(config_of(stage), **options), seed=1)
        other.load_checkpoint(tmp_path)
        assert train(other, 4, 6) == losses
        other.destroy()


@distributed(world_size=2)
def test_saving_changes_nothing_and_plain_runs_resume(tmp_path: Any) -> None:
    config = with_zenflow(config_of(2), topk_ratio=0.25, update_interval=3, overlap_step=True)
    engine = start(config)
    before = train(engine, 0, 8)
    engine.destroy()
    engine = start(config)
    losses = []
    for step in range(8):
        losses += train(engine, step, 1)
        engine.save_checkpoint(tmp_path)
        for param in engine.module.parameters():
            if param.requires_grad:
                safe_get_full_fp32_param(param)
    engine.destroy()
    assert losses == before
    for chosen in (config_of(3), config_of(1)):
        plain = start(chosen, seed=1)
        plain.load_checkpoint(tmp_path)
        assert all(torch.isfinite(torch.tensor(train(plain, 8, 2))))
        plain.save_checkpoint(tmp_path, tag="plain")
        plain.destroy()
    engine = start(config, seed=1)
    engine.load_checkpoint(tmp_path, tag="plain")
    train(engine, 10, 4)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=1)
def test_weights_written_from_outside_are_taken_over(stage: int) -> None:
    config = with_zenflow(config_of(stage), topk_ratio=0.25, update_interval=2, overlap_step=True)
    engine = start(config)
    train(engine, 0, 3)
    param = max(
        (p for p in engine.module.parameters() if p.requires_grad),
        key=lambda p: getattr(p, "ds_numel", p.numel()),
    )
    value = torch.full(getattr(param, "ds_shape", param.shape), 2.0)
    safe_set_full_fp32_param(param, value)
    train(engine, 3, 1)
    now = safe_get_full_fp32_param(param)
    assert now is not None and (now - value).abs().max() < 0.1
    train(engine, 4, 4)
    now = safe_get_full_fp32_param(param)
    assert now is not None and (now - value).abs().max() < 0.3
    engine.destroy()


@distributed(world_size=2)
def test_choices_do_not_depend_on_ranks_and_stages() -> None:
    """The chosen elements of all ranks together, by parameter."""
    found = []
    for stage in (1, 2, 3):
        config = with_zenflow(config_of(stage, "fp32"), topk_ratio=0.25, update_interval=4)
        engine = start(config)
        train(engine, 0, 1)
        chosen: dict[str, torch.Tensor] = {}
        pieces = {id(p.owned): p for p in engine.core.executor.zenflow._pieces.values()}
        for param, name in zip(engine.core.store.params, engine.core.trained.names, strict=True):
            shape = getattr(param, "ds_shape", param.shape)
            mask = torch.zeros(shape.numel())
            for piece in pieces.values():
                if engine.core.trained.names[piece.owned.param_index] == name:
                    mask[piece.chosen + piece.owned.fragment.param_offset] = 1
            torch.distributed.all_reduce(mask)
            chosen[name] = mask.view(shape)
            if mask.any() and columns_of(shape):
                columns = chosen[name].view(shape[0], -1)
                assert torch.equal(columns.amin(0), columns.amax(0))  # whole columns
                assert columns[0].sum() == max(1, round(0.25 * columns.shape[1]))
        found.append(chosen)
        engine.destroy()
    for other in found[1:]:
        assert_same(other, found[0])


@distributed(world_size=1)
def test_bytes_over_the_link_and_the_loss() -> None:
    """Rounds of 4 with a tenth of the columns: at most 0.6 of the model's bytes per step, and the model learns."""

    def run(config: dict[str, Any]) -> tuple[float, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 256),
            torch.nn.Tanh(),
            torch.nn.Linear(256, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, 8),
        )
        target = torch.nn.Linear(64, 8)
        config = {**config, "train_micro_batch_size_per_gpu": 32}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 2e-3}}
        engine = deepspeed.initialize(model=model, config=config)[0]
        losses = []
        counted = 0
        for step in range(96):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(32, 64, generator=generator)
            with torch.no_grad():
                y = torch.tanh(target(x))
            loss = torch.nn.functional.mse_loss(engine(x.bfloat16()).float(), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == 31 and "zenflow" in config["zero_optimization"]:
                flow = engine.core.executor.zenflow
                counted = -flow.bytes_to_host - flow.bytes_to_device
        if counted:
            counted += flow.bytes_to_host + flow.bytes_to_device
        size = 2 * sum(p.numel() for p in model.parameters())
        engine.destroy()
        return sum(losses[-16:]) / 16, counted / 64 / size

    config = config_of(2, clip=0.0)
    plain, _ = run(config)
    flowing, share = run(
        with_zenflow(config, topk_ratio=0.1, update_interval=4, select_interval=32, overlap_step=True)
    )
    assert 0 < share <= 0.6, share
    assert flowing <= 2 * plain, (flowing, plain)  # after 96 steps, in which the deferred columns have had 24


@distributed(world_size=1)
def test_documented_faces(tmp_path: Any) -> None:
    for overlap, kind in ((False, ZenFlowZeroOptimizerSequential), (True, ZenFlowZeroOptimizerParallel)):
        engine = start(with_zenflow(config_of(2), update_interval=2, overlap_step=overlap))
        assert (
            type(engine.optimizer) is kind is ZenFlowZeroOptimizer.create(ZenFlowConfig(overlap_step=overlap))
        )
        assert engine.zenflow and engine.update_interval == 2 and engine.overlap_step is overlap
        told = []
        for step in range(4):
            told.append(is_zenflow_update_boundary(engine))
            train(engine, step, 1)
        assert told == [False, True, False, True]
        engine.destroy()
    data = [batch(i, 0, 0)[0] for i in range(8)]
    engine = deepspeed.initialize(
        model=make_zoo(), config=with_zenflow(config_of(1), select_strategy="epoch"), training_data=data
    )[0]
    assert engine.core.executor.zenflow.steps_per_epoch == 4
    engine.destroy()
    engine = start(with_zenflow(config_of(1), select_strategy="epoch", select_interval=2, steps_per_epoch=3))
    assert engine.core.executor.zenflow._choice_steps() == 6  # of a loader that only the script knows
    engine.destroy()
    unknown = with_zenflow(config_of(1), select_strategy="epoch", update_interval=1, full_warm_up_rounds=0)
    engine = start(unknown)
    for step in range(3):
        train(engine, step, 1)
    engine.destroy()


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2, "zenflow": {}}, "offload_optimizer.device"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}, "zenflow": {}}, "stage"),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}, "zenflow": {}},
            "super_offload",
        ),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"update_interval": 0}},
            "update_interval",
        ),
    ],
)
@distributed(world_size=1)
def test_what_it_needs(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=said):
        deepspeed.initialize(model=make_zoo(), config={**config_for(0), "zero_optimization": zero})


@distributed(world_size=1)
def test_optimizers_that_need_whole_tensors_are_refused() -> None:
    config = with_zenflow(config_of(2))
    config["optimizer"] = {"type": "Lamb", "params": {"lr": 1e-3}}
    with pytest.raises(DeepSpeedConfigError, match="Lamb"):
        deepspeed.initialize(model=make_zoo(), config=config)


@distributed(world_size=2)
def test_split_layers_begin_anew(tmp_path: Any) -> None:
    """Deferred gradients and selections of parts of tensors are ignored by ranks with other parts."""
    split = {"tensor_parallel": {"autotp_size": 2}}

    def started(more: dict[str, Any]) -> Any:
        config = with_zenflow(config_of(2) | more, topk_ratio=0.25, update_interval=3, overlap_step=False)
        return deepspeed.initialize(model=Tokens(), config=config)[0]

    def steps_of(engine: Any) -> int:
        ids = torch.arange(8).view(2, 4)
        for _ in range(2):
            engine.backward(engine(ids).square().mean())
            engine.step()
        return engine.core.own_state.steps

    for before, after in ((split, {}), ({}, split)):
        engine = started(before)
        assert steps_of(engine) == 2
        engine.save_checkpoint(tmp_path)
        for more, steps in ((after, 2), (before, 4)):
            resumed = started(more)
            resumed.load_checkpoint(tmp_path)
            assert steps_of(resumed) == steps
            resumed.destroy()
        engine.destroy()


@distributed(world_size=1)
def test_a_load_frees_the_former_packed_state(tmp_path: Any) -> None:
    engine = start(with_zenflow(config_of(2)))
    train(engine, 0, 6)
    engine.save_checkpoint(tmp_path)
    packed = engine.core.executor.zenflow._packed_optimizer.state
    held = len(packed)
    for _ in range(2):
        engine.load_checkpoint(tmp_path)
        assert len(packed) == held > 0

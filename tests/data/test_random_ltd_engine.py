"""Random-LTD in an engine: the schedule, ranks, recomputation, checkpoints."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule
from tests.data.test_random_ltd import SECTION, Block, Stack
from tests.pool import distributed, run

LENGTH = 16


def config(
    stage: int = 0, batch: int = 4, micro: int = 2, *, ltd: dict[str, Any] | None = None, **rest: Any
) -> Any:
    section = copy.deepcopy({**SECTION, **(ltd or {})})
    del section["global_batch_size"]
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}},
        **rest,
    }


def engine_of(settings: Any, model: nn.Module | None = None, *, convert: bool = True) -> Any:
    torch.manual_seed(3)
    engine, *_ = deepspeed.initialize(model=model or Stack(), config=settings)
    return convert_to_random_ltd(engine, Block) if convert else engine


def batch(step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, LENGTH, 8, generator=torch.Generator().manual_seed(step))


def train(engine: Any, first: int, last: int) -> list[float]:
    """The mean losses of global batches; each rank takes its rows, micro-batch by micro-batch."""
    ranks, rank = engine.mesh.size("dp"), engine.mesh.rank("dp")
    micro, losses = engine.train_micro_batch_size_per_gpu(), []
    for step in range(first, last):
        total = torch.zeros(())
        for part in batch(step).view(-1, ranks, micro, LENGTH, 8):
            loss = engine(part[rank])
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        if ranks > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total / ranks))
    return losses


def seen_lengths(engine: Any) -> list[list[int]]:
    """For each block, how many tokens its attention gets at every forward."""
    lengths: list[list[int]] = []
    for each in engine.module.modules():
        if isinstance(each, Block):
            lengths.append([])
            each.out.register_forward_hook(
                lambda _, args, __, found=lengths[-1]: found.append(args[0].shape[1])
            )
    return lengths


@distributed(world_size=1)
def test_layers_keep_what_the_schedule_says() -> None:
    engine = engine_of(config())
    lengths = seen_lengths(engine)
    train(engine, 0, 4)
    assert engine.random_ltd_enabled() and engine.random_ltd_config()["model_type"] == "decoder"
    assert lengths == [[16] * 8, [4, 4, 4, 4, 8, 8, 8, 8], [4, 4, 4, 4, 8, 8, 8, 8], [16] * 8]
    scheduler = engine.random_ltd_scheduler
    assert scheduler.get_current_seq() == 8
    assert scheduler.state["consumed_layer_tokens"] == 4 * 2 * (4 + 4 + 8 + 8 + 4 * 16)
    engine.eval()
    with torch.no_grad():
        engine(batch(0))
    assert [seen[-1] for seen in lengths] == [16] * 4 and scheduler.get_current_seq() == 8


def trained(stage: int, *, micro: int = 2, convert: str = "after", **rest: Any) -> tuple[list[float], Tensor]:
    """Losses, and all weights at the end."""
    model = None
    if convert == "before":
        torch.manual_seed(3)
        model = convert_to_random_ltd(Stack(), Block)
    engine = engine_of(config(stage, micro=micro, **rest), model, convert=convert == "after")
    losses = train(engine, 0, 5)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = torch.cat([param.detach().flatten().clone() for param in engine.module.parameters()])
    engine.destroy()
    return losses, weights


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], Tensor]:
    """One process, whole batches."""
    return run(trained, 1, stage=0, micro=4)[0]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 1)])
def test_any_ranks_and_stages_are_as_one_process(stage: int, ranks: int, alone: Any) -> None:
    losses, weights = run(trained, ranks, stage=stage)[0]
    assert losses == pytest.approx(alone[0], rel=1e-5)
    torch.testing.assert_close(weights, alone[1], rtol=1e-4, atol=1e-6)
    assert len(set(alone[0])) == 5


def test_a_model_that_was_converted_before(alone: Any) -> None:
    assert run(trained, 1, stage=0, micro=4, convert="before")[0][0] == alone[0]


def test_dropping_matters(alone: Any) -> None:
    whole, _ = run(trained, 1, stage=0, micro=4, convert="never")[0]
    assert whole[0] != alone[0][0]


# Computing again -------------------------------------------------------------------------------------------


def with_recomputation(how: str) -> tuple[list[float], Tensor]:
    torch.manual_seed(3)
    model = Stack()
    if how in ("reentrant", "non-reentrant"):
        model.recompute = how == "reentrant"
    engine = engine_of(config(micro=4), model)
    if how == "deepspeed":
        forward = deepspeed.transforms.recompute.checkpointing.checkpoint
        deepspeed.transforms.recompute.checkpointing.configure(None, num_checkpoints=4)
        for name, layer in engine.module.layers.named_children():
            setattr(engine.module.layers, name, Recomputed(layer, forward))
    elif how == "inside":
        for layer in engine.module.layers:
            block = layer.random_ltd_layer
            block.forward = lambda *args, forward=block.forward: checkpoint(
                forward, *args, use_reentrant=False
            )
    losses = []
    for step in range(5):
        loss = engine(batch(step).requires_grad_())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    weights = torch.cat([param.detach().flatten() for param in engine.module.parameters()])
    return losses, weights


class Recomputed(nn.Module):
    kind = "full"

    def __init__(self, layer: nn.Module, forward: Any) -> None:
        super().__init__()
        self.layer, self.recomputed = layer, forward

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.recomputed(self.layer, x)


def compiled() -> list[float]:
    init = nn.Module.__init__
    engine = engine_of(config(micro=4))
    try:
        engine.compile(backend="eager")
        return train(engine, 0, 5)
    finally:
        nn.Module.__init__ = init  # torch's compiler patches it for good


def test_compiled_modules_keep_the_same_tokens(alone: Any) -> None:
    assert run(compiled, 1)[0] == pytest.approx(alone[0], rel=1e-6)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "deepspeed", "inside"])
def test_recomputation_keeps_the_same_tokens(how: str, alone: Any) -> None:
    losses, weights = run(with_recomputation, 1, how=how)[0]
    assert losses == pytest.approx(alone[0], rel=1e-6)
    torch.testing.assert_close(weights, alone[1], rtol=1e-5, atol=1e-7)


# Checkpoints -----------------------------------------------------------------------------------------------


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_goes_on_exactly(tmp_path: Path, stage: int) -> None:
    engine = engine_of(config(stage, micro=1))
    train(engine, 0, 3)
    engine.save_checkpoint(str(tmp_path))
    expected = train(engine, 3, 6)
    other = engine_of(config(stage, micro=1))
    other.load_checkpoint(str(tmp_path))
    assert other.random_ltd_scheduler.get_current_seq() == 8
    assert train(other, 3, 6) == expected
    assert other.random_ltd_scheduler.state_dict() == engine.random_ltd_scheduler.state_dict()


@distributed(world_size=1)
@pytest.mark.parametrize("stage", [0, 2])
def test_checkpoints_have_no_trace_of_it(tmp_path: Path, stage: int) -> None:
    engine = engine_of(config(stage))
    train(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path / "dropping"), tag="t")
    saved = torch.load(tmp_path / "dropping/t/mp_rank_00_model_states.pt", weights_only=False)
    assert list(saved["module"]) == list(Stack().state_dict())
    assert saved["random_ltd"] == engine.random_ltd_scheduler.state_dict()
    assert set(saved["random_ltd"]) == {
        "consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value",
    }  # fmt: skip
    assert list(save_without_random_ltd(engine)) == list(Stack().state_dict())

    settings = config(stage)
    del settings["data_efficiency"]
    plain = engine_of(settings, convert=False)
    plain.load_checkpoint(str(tmp_path / "dropping"))
    engine.eval(), plain.eval()
    assert torch.equal(engine(batch(9)), plain(batch(9)))
    plain.save_checkpoint(str(tmp_path / "plain"))
    again = engine_of(config(stage))
    again.load_checkpoint(str(tmp_path / "plain"))
    again.eval()
    assert torch.equal(again(batch(9)), plain(batch(9)))
    engine.save_16bit_model(str(tmp_path), "weights.bin")
    Stack().load_state_dict(torch.load(tmp_path / "weights.bin"))


# Messages ----------------------------------------------------------------------------------------------


@distributed(world_size=1)
def test_curves(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    train(engine_of(config(csv_monitor=monitor)), 0, 4)

    def curve(name: str) -> list[tuple[int, float]]:
        with open(tmp_path / "run" / f"Train_Samples_{name}.csv") as file:
            return [(int(row[0]), float(row[1])) for row in list(csv.reader(file))[1:]]

    assert curve("random_ltd_reserved_length") == [(4, 4), (8, 4), (12, 8), (16, 8)]
    assert [value for _, value in curve("consumed_layer_tokens")] == [160, 320, 512, 704]


@distributed(world_size=1)
def test_a_learning_rate_by_layer_tokens(tmp_path: Path) -> None:
    schedule = {
        "layer_token_lr_schedule": {"enabled": True, "total_layer_tokens": 1000, "warmup_layer_tokens": 320}
    }
    engine = engine_of(config(ltd=schedule))
    rates = []
    for step in range(4):
        rates += engine.get_lr()
        train(engine, step, step + 1)
        if step == 1:
            engine.save_checkpoint(str(tmp_path))
    assert rates == pytest.approx([0, 0.25, 0.5, 0.5 * (1000 - 512) / 680])
    other = engine_of(config(ltd=schedule))
    other.load_checkpoint(str(tmp_path))
    assert other.get_lr() == rates[2:3]
    with pytest.raises(
        DeepSpeedConfigError, match="layer_token_lr_schedule.enabled=true sets the learning rate"
    ):
        engine_of(config(ltd=schedule, scheduler={"type": "WarmupLR", "params": {}}))


@distributed(world_size=1)
def test_a_module_converted_after_initialize_drops_the_same_tokens() -> None:
    expected, _ = trained(0)
    late = engine_of(config(), convert=False)
    assert convert_to_random_ltd(late.module, Block) is late.module
    assert train(late, 0, 5) == expected
    later = engine_of(config(), convert=False)
    train(later, 0, 1)
    convert_to_random_ltd(later.module, Block)
    lengths = seen_lengths(later)
    train(later, 1, 2)
    assert [seen[0] for seen in lengths] == [16, 4, 4, 16]


@distributed(world_size=1)
@pytest.mark.parametrize("before", [True, False])
def test_converted_layers_that_no_engine_has_drop_tokens_of_say_so(before: bool) -> None:
    settings = config()
    del settings["data_efficiency"]
    model = convert_to_random_ltd(Stack(), Block) if before else Stack()
    engine = engine_of(settings, model, convert=False)
    convert_to_random_ltd(engine.module, Block)
    lengths = seen_lengths(engine)
    with mock.patch("deepspeed.data.data_routing.basic_layer.warning_once") as told:
        train(engine, 0, 2)
    assert lengths == [[16] * 4] * 4
    assert {call.args[0] for call in told.call_args_list} == {told.call_args.args[0]}
    assert "class Block drop no token" in told.call_args.args[0]


@distributed(world_size=1)
def test_an_engine_without_converted_layers_says_so() -> None:
    with mock.patch("deepspeed.engine.observers.random_ltd.logger") as log:
        train(engine_of(config(), convert=False), 0, 2)
    (line,) = [call.args[0] for call in log.warning.call_args_list]
    assert "call convert_to_random_ltd" in line


@distributed(world_size=1)
def test_what_does_not_fit_is_refused_by_name() -> None:
    for ltd, told in (
        ({"random_ltd_layer_num": 3}, "random_ltd_layer_id has 2 entries, random_ltd_layer_num is 3"),
        ({"random_ltd_layer_id": [1, 4]}, "random_ltd_layer_id has 4: layers are numbered from 0 to 3"),
        ({"random_ltd_layer_id": [1, 1]}, "random_ltd_layer_id has 1"),
        (
            {"total_layer_num": 9, "random_ltd_layer_id": [1, 7]},
            "has 7, but the converted layers are 0, 1, 2, 3",
        ),
    ):
        with pytest.raises(DeepSpeedConfigError, match=told):
            engine_of(config(ltd=ltd))
    off = config()
    off["data_efficiency"]["data_routing"]["enabled"] = False
    with pytest.raises(DeepSpeedConfigError, match="set enabled to true there"):
        engine_of(off)
    with pytest.raises(DeepSpeedConfigError, match="PipelineModule"):
        module = PipelineModule([LayerSpec(nn.Linear, 8, 8)], num_stages=1, loss_fn=nn.MSELoss())
        deepspeed.initialize(model=module, config=config())


@distributed(world_size=2)
def test_ranks_that_share_a_sequence_are_refused() -> None:
    with pytest.raises(DeepSpeedConfigError, match="cannot be combined with sequence_parallel_size"):
        engine_of(config(sequence_parallel_size=2))

"""Pipelines together with what else an engine does, in pairs, each against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.compat.module_inject import LinearAllreduce, LinearLayer
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule
from tests.parallel.pipeline.test_engine import (
    COUNT,
    MICRO,
    VOCABULARY,
    WIDTH,
    Block,
    Plain,
    batches,
    compare,
    layers,
    loss_of,
    make_engine,
)
from tests.pool import distributed, run

ZERO_BUBBLE = {"pipeline": {"schedule": "zero-bubble"}}


def train_both(engine: PipelineEngine, plain: Plain, steps: int = 3) -> None:
    own = batches(engine.grid.get_data_parallel_id())
    everyone = [batches(replica) for replica in range(engine.dp_world_size)]
    for _ in range(steps):
        expected = plain.step(everyone)
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "tiers"), [(1, ["optimizer"]), (2, ["optimizer"]), (3, ["optimizer", "param"])]
)
@distributed(world_size=2)
def test_states_in_files(stage: int, tiers: list[str], tmp_path: Path) -> None:
    offload = {f"offload_{tier}": {"device": "nvme", "nvme_path": str(tmp_path)} for tier in tiers}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **offload}
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine = make_engine(module, clip=0.1, zero_optimization=zero, **ZERO_BUBBLE)
    plain = Plain(layers(), lr=0.01, clip=0.1)
    train_both(engine, plain)
    compare(engine, plain)
    engine.destroy()


def freeze(params: dict[str, nn.Parameter]) -> None:
    """The embedding, and in the blocks all but the second product, as adapters would be."""
    for name, param in params.items():
        param.requires_grad_("down" in name or name.startswith("5."))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_frozen_weights(stage: int, schedule: str) -> None:
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    freeze(dict(module.named_parameters()))
    plain = Plain(layers(), lr=0.01, clip=0.1)
    freeze(plain.params)  # type: ignore[arg-type]
    engine = make_engine(module, stage, clip=0.1, pipeline={"schedule": schedule})
    train_both(engine, plain)
    compare(engine, plain)
    engine.destroy()


def layers_without_weights() -> list[Any]:
    """On two stages: all weights are on the first one."""
    return [*layers(1), nn.Tanh(), nn.Tanh(), nn.Tanh()]


@pytest.mark.parametrize(("which", "stage"), [("first", 0), ("first", 3), ("last", 1), ("no weights", 2)])
@distributed(world_size=4)
def test_a_stage_that_trains_nothing(which: str, stage: int, tmp_path: Path) -> None:
    """Frozen layers, or none with weights, at one end: it takes part in every step, and in checkpoints."""
    specs = layers_without_weights() if which == "no weights" else layers()
    kept = {"first": range(3, 6), "last": range(3), "no weights": range(6)}[which]

    def freeze_all_but_kept(params: Any) -> None:
        for name, param in params:
            param.requires_grad_(int(name.split(".")[0]) in kept)

    def engine_of() -> PipelineEngine:
        module = PipelineModule(specs, num_stages=2, loss_fn=loss_of, partition_method="uniform")
        freeze_all_but_kept(module.named_parameters())
        return make_engine(module, stage, clip=0.1, **ZERO_BUBBLE)

    engine, plain = engine_of(), Plain(specs, lr=0.01, clip=0.1)
    freeze_all_but_kept(plain.params.items())
    assert engine.stage_module.idle == (engine.stage_id == (0 if which == "first" else 1))
    train_both(engine, plain, steps=2)
    compare(engine, plain)
    engine.save_checkpoint(tmp_path)
    again = engine_of()
    again.load_checkpoint(tmp_path)
    pairs = [next(batches(9))] * COUNT
    for each in (engine, again):
        each.train_batch(iter(pairs))
    assert engine.train_batch(iter(pairs)).item() == again.train_batch(iter(pairs)).item()
    engine.destroy()
    again.destroy()


@distributed(world_size=2)
def test_groups_of_a_clients_optimizer_and_a_schedule() -> None:
    def groups(params: dict[str, Any]) -> list[dict[str, Any]]:
        norms = [param for name, param in params.items() if "norm" in name]
        rest = [param for name, param in params.items() if "norm" not in name]
        return [{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 0.003}]

    module, plain = (
        PipelineModule(layers(), num_stages=2, loss_fn=loss_of),
        Plain(layers(), lr=0.01, clip=0.1),
    )
    plain.optimizer = torch.optim.AdamW(groups(plain.params), lr=0.01)
    from tests.parallel.pipeline.test_engine import set_weights

    set_weights(module)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(groups(dict(module.named_parameters())), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    theirs = torch.optim.lr_scheduler.StepLR(plain.optimizer, 1, 0.5)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)
    assert isinstance(engine, PipelineEngine)
    own, same = batches(0), batches(0)
    for _ in range(3):
        expected = plain.step([same])
        theirs.step()
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        assert engine.get_lr() == theirs.get_last_lr()
    compare(engine, plain)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_an_overflow_skips_the_step_of_all_stages(stage: int) -> None:
    """Only the last stage's gradients overflow at first; the scale halves everywhere until none does."""
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
    engine = make_engine(
        module, stage, fp16={"enabled": True, "initial_scale_power": 22, "hysteresis": 1}, **ZERO_BUBBLE
    )
    pairs = [next(batches(0))] * COUNT
    losses = [engine.train_batch(iter(pairs)).item() for _ in range(16)]
    seen: list[Any] = [None, None]
    dist.all_gather_object(
        seen, (engine.skipped_steps, engine._require_core("").scaler.scale, engine.global_steps)
    )
    assert seen[0] == seen[1] and 1 <= engine.skipped_steps < 12
    assert losses[-1] < losses[0]
    engine.destroy()


@pytest.mark.parametrize(("stage", "schedule"), [(3, "1f1b"), (2, "zero-bubble")])
@distributed(world_size=4)
def test_bf16_with_replicas_learns(stage: int, schedule: str) -> None:
    module = PipelineModule(layers(tied=True), num_stages=2, loss_fn=loss_of)
    engine = make_engine(module, stage, clip=1.0, bf16={"enabled": True}, pipeline={"schedule": schedule})
    pairs = [next(batches(0))] * COUNT
    losses = [engine.train_batch(iter(pairs)).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=4)
def test_the_first_stage_sums_while_its_last_backward_runs(stage: int) -> None:
    """The other one as soon as it is through, before the loss is known; with the results of one process."""
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    zero = {"stage": stage, "reduce_bucket_size": 200, "overlap_comm": True}
    engine, plain = make_engine(module, clip=0.1, zero_optimization=zero), Plain(layers(), lr=0.01, clip=0.1)
    assert ("once per batch" in engine.when_gradients_are_summed()) == (stage == 2)
    reducer, seen = engine._require_core("").reducer, []
    launch, end = reducer.launch, engine._end_backward
    reducer.launch = lambda b: (seen.append("sum"), launch(b))[1]  # type: ignore[method-assign]
    engine._end_backward = lambda: (seen.append("end"), end())[1]  # type: ignore[method-assign]
    train_both(engine, plain)
    compare(engine, plain)
    batch = seen[-len(seen) // 3 :]
    sums = len(reducer.buckets)
    assert sums > 2 and batch.count("sum") == sums and batch.count("end") == COUNT
    during = batch[: len(batch) - batch[::-1].index("end") - 1].count("sum")
    assert during == (0 if engine.stage_id else during) and (engine.stage_id or during > 1)
    engine.destroy()


# With layers that several ranks share -------------------------------------------------------------------------


def filled(module: nn.Module, index: int) -> None:
    """The values that ``test_engine.set_weights`` gives the same layer."""
    for name, param in module.named_parameters():
        key = f"{index}.{name}"
        source = torch.Generator().manual_seed(sum(map(ord, key)) + 7 * len(key))
        param.data.copy_(torch.randn(param.shape, generator=source) * 0.3)


class SharedBlock(Block):
    """A block in parts: the first product by outputs, the second by inputs."""

    def __init__(self, index: int, group: Any) -> None:
        super().__init__(WIDTH)
        filled(self, index)
        if group is not None and dist.get_world_size(group) > 1:
            self.up = LinearLayer(self.up, group)  # type: ignore[assignment]
            self.down = LinearAllreduce(self.down, group)  # type: ignore[assignment]


class FilledEmbedding(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        filled(self, 0)


class FilledHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)
        filled(self, 5)


def three_axes(stages: int, parts: int, replicas: int, stage: int, **more: Any) -> PipelineEngine:
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=parts, num_dp=replicas)
    group = PipelineParallelGrid(topology).get_slice_parallel_group()
    blocks = [LayerSpec(SharedBlock, index, group) for index in range(1, 5)]
    specs = [LayerSpec(FilledEmbedding), *blocks, LayerSpec(FilledHead)]
    module = PipelineModule(specs, topology=topology, loss_fn=loss_of, partition_method="uniform")
    return deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": COUNT,
            "gradient_clipping": 0.1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.0}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **more,
        },
    )[0]  # type: ignore[return-value]


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=4)
def test_two_stages_of_two_parts(stage: int) -> None:
    engine = three_axes(2, 2, 1, stage, **ZERO_BUBBLE)
    train_both(engine, Plain(layers(), lr=0.01, clip=0.1))
    engine.destroy()


def evaluated(engine: PipelineEngine) -> float:
    pairs = [next(batches(7)) for _ in range(COUNT)]
    return engine.eval_batch(iter(pairs)).item()


def first_job(folder: Path, replicas: int) -> list[float]:
    """On 4 ranks and more: two steps as one process takes them, a checkpoint, and what is lost on held-out data."""
    engine = three_axes(2, 2, replicas, 1)
    train_both(engine, Plain(layers(), lr=0.01, clip=0.1), steps=2)
    engine.save_checkpoint(folder)
    return [evaluated(engine), engine.train_batch(iter([next(batches(9))] * COUNT)).item(), evaluated(engine)]


def second_job(folder: Path, parts: int) -> list[float]:
    engine = three_axes(1, parts, 1, 1)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None and engine.global_steps == 2
    return [evaluated(engine), engine.train_batch(iter([next(batches(9))] * COUNT)).item(), evaluated(engine)]


def test_stages_in_parts_and_back(tmp_path: Path) -> None:
    """PP 2 x TP 2 resumes on one rank, with its moments."""
    expected = run(first_job, 4, folder=tmp_path, replicas=1)[0]
    assert run(second_job, 1, folder=tmp_path, parts=1)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_three_axes_and_back(tmp_path: Path) -> None:
    """PP 2 x TP 2 x DP 2 resumes at PP 1 x TP 4, and on one rank."""
    expected = run(first_job, 8, folder=tmp_path, replicas=2)[0]
    for parts in (4, 1):
        assert run(second_job, parts, folder=tmp_path, parts=parts)[0] == pytest.approx(expected, rel=1e-5)

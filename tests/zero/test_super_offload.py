"""SuperOffload: the updates of a run are those of the synchronous run, bit for bit, taken or rolled back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.zero.offload.shadow_copies import host_worker
from deepspeed.zero.offload.speculation import Speculation
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_grad
from tests.pool import distributed
from tests.zero.models import assert_same, batch, config_for, engine_losses, make_zoo, uses_sometimes
from tests.zero.test_offload import assert_equal_runs, pretend_device

STEPS = 6
NEVER, ALWAYS = 1e9, 1e-3  # clipping norms


def with_speculation(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    section = {"device": "cpu", "super_offload": True, **options}
    return {**config, "zero_optimization": {**config["zero_optimization"], "offload_optimizer": section}}


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[int, int]]]:
    """Buckets whose speculative update was taken, and rolled back, by engine."""
    counts: list[tuple[int, int]] = []
    close = Speculation.close

    def counting(self: Speculation) -> None:
        counts.append((self.taken, self.rolled_back))
        close(self)

    Speculation.close = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Speculation.close = close  # type: ignore[method-assign]


def config_of(stage: int, precision: str, clip: float, **options: Any) -> dict[str, Any]:
    config = config_for(stage, clip=clip, stage3_param_persistence_threshold=0, **options)
    return {**config, precision: {"enabled": True}} if precision != "fp32" else config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=[1, 2])
def test_bits_of_the_synchronous_run(world_size: int, stage: int, precision: str) -> None:
    """Each with and without a device; any three of the rest meet either."""
    for number, clip in enumerate((NEVER, ALWAYS, 1.0)):
        config = config_of(stage, precision, clip, gas=2)
        expected = engine_losses(make_zoo, config, STEPS, groups=True)
        with_device = (number + stage + world_size + (precision == "bf16")) % 2
        with pretend_device() if with_device else contextlib.nullcontext(), counted() as counts:
            assert_equal_runs(engine_losses(make_zoo, with_speculation(config), STEPS, groups=True), expected)
        ((taken, rolled_back),) = counts
        assert taken if clip == NEVER else rolled_back
        assert not taken or clip != ALWAYS


def train(engine: Any, steps: int, between: Any = lambda step: None) -> None:
    for step in range(steps):
        engine.backward(engine(batch(step, 0, 0), uses_sometimes(step, 0)))
        between(step)
        engine.step()


def engines(config: dict[str, Any]) -> Iterator[Any]:
    for chosen in (config, with_speculation(config)):
        yield deepspeed.initialize(model=make_zoo(), config=chosen)[0]


@distributed(world_size=1)
def test_overflow_of_fp16_keeps_the_state() -> None:
    config = config_of(2, "fp16", NEVER)
    config["fp16"] |= {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 3}
    with counted() as counts:
        assert_equal_runs(
            engine_losses(make_zoo, with_speculation(config), 16), engine_losses(make_zoo, config, 16)
        )
    assert counts[0][0] and counts[0][1]


@pytest.mark.parametrize(("share", "threads"), [(0.8, 3), (0.25, 1), (0.1, 1), (1.0, 4)])
def test_the_worker_leaves_cores_to_others(share: float, threads: int) -> None:
    """The share of a rank's four threads; those of the worker's creator are unaffected."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        worker = host_worker("tried", share)
        assert worker.submit(torch.get_num_threads).result() == threads
        assert torch.get_num_threads() == 4
        worker.shutdown()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=1)
def test_whoever_reads_or_writes_between_backward_and_step(stage: int) -> None:
    """Weights and state are those of before the step until it is taken; new gradients and rates are heeded."""
    seen: list[list[Any]] = []
    for engine in engines(config_of(stage, "bf16", NEVER)):
        own: list[Any] = []

        def between(step: int, engine: Any = engine, own: list[Any] = own) -> None:
            trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
            own.extend((name, safe_get_full_fp32_param(param)) for name, param in trained)
            param = trained[0][1]
            if step == 3:
                safe_set_full_grad(param, safe_get_full_grad(param) * 2)
            if step == 4:
                engine.optimizer.param_groups[0]["lr"] *= 0.5
            if step == 5:
                own.append(("all", engine.optimizer.state_dict()["shards"]))

        train(engine, 7, between)
        own.append(("end", engine.optimizer.state_dict()["shards"]))
        seen.append(own)
        engine.destroy()
    for (name, left), (_, right) in zip(*seen, strict=True):
        if isinstance(left, dict):
            for shard, tensors in left.items():
                assert_same(
                    {k: torch.as_tensor(v) for k, v in tensors.items()},
                    {k: torch.as_tensor(v) for k, v in right[shard].items()},
                )
        else:
            assert torch.equal(left, right), name


@distributed(world_size=2)
def test_checkpoints_cross(tmp_path: Any) -> None:
    """Saved by a run that speculates, loaded by one that does not, and the reverse."""
    finals = []
    config = config_of(3, "bf16", NEVER)
    for first, second in (
        (config, config),
        (with_speculation(config), config),
        (config, with_speculation(config)),
    ):
        engine = deepspeed.initialize(model=make_zoo(), config=first)[0]
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        train(engine, 1)
        engine.load_checkpoint(tmp_path)  # also into an engine that has shadow copies
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        engine = deepspeed.initialize(model=make_zoo(1), config=second)[0]
        engine.load_checkpoint(tmp_path)
        train(engine, 3)
        engine.destroy()
        finals.append(engine.module.state_dict())
    for final in finals[1:]:
        assert_same(final, finals[0])


@distributed(world_size=1)
def test_an_optimizer_of_another_package_is_updated_by_the_step() -> None:
    config = config_of(2, "fp32", NEVER)
    del config["optimizer"]
    finals = []
    for chosen in (config, with_speculation(config)):
        model = make_zoo()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        chosen = {**chosen, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=chosen)[0]
        train(engine, 2)
        engine.destroy()
        finals.append(engine.module.state_dict())
    assert_same(*finals)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "offload_optimizer": {"super_offload": True}},
        {"stage": 0, "offload_optimizer": {"device": "cpu", "super_offload": True}},
    ],
)
@distributed(world_size=1)
def test_it_says_what_it_needs(zero: dict[str, Any]) -> None:
    with pytest.raises(DeepSpeedConfigError, match="super_offload"):
        deepspeed.initialize(model=make_zoo(), config={**config_for(0), "zero_optimization": zero})

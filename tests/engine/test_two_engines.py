"""Two engines in one process, with different configs: each does what it does alone."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.comm import documented_groups as groups
from deepspeed.comm.collectives import communicator
from deepspeed.comm.groups import timeout_of
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.transforms.recompute import checkpointing
from deepspeed.transforms.recompute.rng import MODEL_PARALLEL_RNG
from tests.pool import distributed

WIDTH = 16
BUFFERS = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "logged": {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "comms_logger": {"enabled": True},
        "comm": {"shared_memory": False},
        "activation_checkpointing": BUFFERS,
        "gradient_clipping": 0.5,
    },
    "sharded": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"partition_activations": False},
    },
    "plain": {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "comm": {"shared_memory": True},
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
    "selected": {
        "zero_optimization": {"stage": 1},
        "activation_checkpointing": {"profile": False},
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"]},
    },
}


class Checkpointed(nn.Module):
    """Two recomputed regions with a dropout that draws from the named random state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def _region(self, x: Tensor, layer: nn.Module) -> Tensor:
        with deepspeed.transforms.recompute.checkpointing.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(torch.tanh(layer(x)), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = deepspeed.transforms.recompute.checkpointing.checkpoint(self._region, x, layer)
        return x.float().square().mean()


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = Checkpointed()
    deepspeed.transforms.recompute.checkpointing.model_parallel_cuda_manual_seed(7)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **CONFIGS[name],
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train_step(engine: Any, number: int) -> float:
    torch.manual_seed(100 * number + torch.distributed.get_rank())
    loss = engine(torch.randn(4, WIDTH))
    engine.backward(loss)
    engine.step()
    return loss.item()


def facts(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Return what an engine did: results, traffic, records, and how inputs were kept."""
    wire = engine.mesh.communicator("dp", "sp")
    log = engine._network.log
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [p.detach().clone() for p in engine.module.parameters()]
    return {
        "losses": losses,
        "weights": [w.view(torch.uint8).tolist() for w in weights],
        "collectives": Counter(wire.collectives),
        "bytes": wire.bytes_sent,
        "transport": wire.transport_name("cpu") if wire.size > 1 else None,
        "recorded": {
            op: Counter({s: r[0] for s, r in sizes.items()}) for op, sizes in log.comms_dict.items()
        },
        "buffers": engine._checkpointing.arena is not None,
        "drawn": engine._checkpointing.tracker.get_states()[MODEL_PARALLEL_RNG].tolist(),
    }


def alone(name: str) -> dict[str, Any]:
    engine = build(name)
    result = facts(engine, [train_step(engine, number) for number in range(3)])
    engine.destroy()
    return result


@contextlib.contextmanager
def as_in_a_new_process() -> Iterator[None]:
    before, checkpointing._state = checkpointing._state, checkpointing._CheckpointState()
    try:
        yield
    finally:
        checkpointing._state = before


# Stages, precisions, logs, transports, ways of keeping inputs.
@pytest.mark.parametrize(
    "first, second", [("logged", "sharded"), ("sharded", "selected"), ("plain", "logged")]
)
@distributed(world_size=[1, 2])
def test_each_does_what_it_does_alone(world_size: int, first: str, second: str) -> None:
    names = (first, second)
    expected = {}
    for name in names:
        with as_in_a_new_process():
            expected[name] = alone(name)
    with as_in_a_new_process():
        _alternately(names, expected)


def _alternately(names: Sequence[str], expected: dict[str, Any]) -> None:
    engines = {name: build(name) for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(3):
        for name in names if number % 2 else reversed(names):
            losses[name].append(train_step(engines[name], number))
    for name in names:
        found = facts(engines[name], losses[name])
        for fact, value in expected[name].items():
            assert found[fact] == value, (name, fact)
    for engine in engines.values():
        engine.destroy()


@distributed(world_size=2)
def test_one_goes_and_the_other_works_on() -> None:
    """Destroyed, or only dropped: the documented functions then speak of the one before it, and it is freed."""
    with as_in_a_new_process():
        expected = alone("logged")
    with as_in_a_new_process():
        _one_goes(expected)


def _one_goes(expected: dict[str, Any]) -> None:
    one = build("logged")
    losses = [train_step(one, 0)]
    two = build("sharded")
    assert groups.get_mesh() is two.mesh and checkpointing._current() is two._checkpointing
    train_step(two, 0)
    losses.append(train_step(one, 1))
    two.destroy()
    assert groups.get_mesh() is one.mesh and checkpointing._current() is one._checkpointing
    three = build("sharded")
    train_step(three, 0)
    dropped = weakref.ref(three)
    kept = weakref.ref(three._checkpointing)
    del two, three
    gc.collect()
    assert dropped() is None and kept() is None
    assert groups.get_mesh() is one.mesh and checkpointing._current() is one._checkpointing
    losses.append(train_step(one, 2))
    # The random states were seeded again when the third engine was built: what it draws is not compared.
    found = facts(one, losses)
    for fact in ("collectives", "bytes", "recorded", "transport", "buffers"):
        assert found[fact] == expected[fact], fact
    one.destroy()


@distributed(world_size=2)
def test_documented_functions_follow_the_newest() -> None:
    """The log and the transport of calls that name no engine; settings given before an engine stay in force."""
    with as_in_a_new_process():
        _documented_functions()


def _documented_functions() -> None:
    dist = deepspeed.comm
    imported = dist.comms_logger
    deepspeed.transforms.recompute.checkpointing.configure(None, partition_activations=True)
    one = build("logged")
    assert one._checkpointing.section.number_checkpoints is None  # what configure said, not the config
    wire = communicator()
    assert wire.transport_name("cpu") == "gloo"
    dist.reset_log()
    dist.all_reduce(torch.ones(3))
    assert one._network.log.get_operation_names() == ["all_reduce"] == imported.get_operation_names()
    two = build("selected")
    dist.all_reduce(torch.ones(3))
    assert one._network.log.get_total_operations() == 1
    dist.configure(prof_ops=["all_reduce"])
    dist.all_reduce(torch.ones(3))
    assert "all_reduce" in two._network.log.get_operation_names()
    assert imported.prof_ops == ["all_reduce"] and dist.get_comm_operation_count() >= 1
    three = build("plain")
    assert wire.transport_name("cpu") == three.mesh.communicator("dp").transport_name("cpu")
    assert one.mesh.communicator("dp").transport_name("cpu") == "gloo"
    for engine in (one, two, three):
        engine.destroy()


@distributed(world_size=2)
def test_groups_of_an_engine_have_its_timeout() -> None:
    engines = [
        DeepSpeedEngine(
            None,
            nn.Linear(2, 2),
            config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
            mesh_device=ProcessMesh.build(timeout=timedelta(seconds=seconds)),
        )
        for seconds in (111, 222)
    ]
    found = [timeout_of(engine.mesh.group("tp")) for engine in engines]
    assert found == [timedelta(seconds=111), timedelta(seconds=222)]
    for engine in engines:
        engine.destroy()


def _trained(engine: Any, seed: int) -> list[Tensor]:
    for step in range(4):
        data = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed + step))
        engine.backward(engine(data).square().mean())
        engine.step()
    return [param.detach().clone() for param in engine.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_a_second_engine_of_one_model_gets_all_gradients(stage: int) -> None:
    """Without ``destroy`` of the first, which notebooks and trainers leave to the garbage collector."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    }
    weights = []
    for former in (False, True):
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        first = deepspeed.initialize(model=model, config=config)[0] if former else None
        if first is not None:
            first.backward(first(torch.ones(2, WIDTH)).sum())  # not followed by a step
        second = deepspeed.initialize(model=model, config=config)[0]
        weights.append(_trained(second, 3))
        if first is not None:
            with pytest.raises(RuntimeError, match=r"took over parameter 0\.weight"):
                first.backward(first(torch.ones(2, WIDTH)).sum())
            first.destroy()
            assert deepspeed.utils.safe_get_full_fp32_param(model[0].weight) is not None
            _trained(second, 9)
        second.destroy()
    for alone, after in zip(*weights, strict=True):
        assert torch.equal(alone, after)

"""An engine that is dropped without ``destroy()`` takes its threads, sockets and shards with it."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.pool import distributed

NOTHING_KEPT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
LAYOUTS: list[dict[str, Any]] = [{}, NOTHING_KEPT, {**NOTHING_KEPT, "zero_quantized_weights": True}]


def start(**zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, **zero},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    return deepspeed.initialize(model=model, config=config)[0]


def train(**zero: Any) -> list[weakref.ref[Any]]:
    """Two steps of an engine that is then dropped; what must be gone after it."""
    engine = start(**zero)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
    shards = [bucket.shard for bucket in engine.sharded.buckets]
    return [weakref.ref(engine), *map(weakref.ref, shards)]


def servers() -> int:
    return sum(thread.name == "shard-server" for thread in threading.enumerate())


def sockets() -> int:
    return sum(
        os.path.realpath(f"/proc/self/fd/{fd}").rpartition("/")[2].startswith("socket:") for fd in files()
    )


def files() -> list[str]:
    return os.listdir("/proc/self/fd")


def counted() -> tuple[int, int]:
    """Threads and open files. What hangs on a file that was collected is collected the next time."""
    gc.collect()
    return threading.active_count(), len(files())


def soon(reached: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not reached() and time.monotonic() < end:
        time.sleep(0.01)
    return reached()


@pytest.mark.parametrize("zero", LAYOUTS)
@distributed(world_size=2)
def test_nothing_of_a_dropped_engine_is_left(zero: dict[str, Any]) -> None:
    train(**zero)  # the first one starts what all share
    gc.collect()
    assert soon(lambda: servers() == 0)
    dist.barrier()
    before = sockets()
    for _ in range(3):
        left = train(**zero)
        gc.collect()
        assert soon(lambda: all(reference() is None for reference in left)), left  # noqa: B023
    assert soon(lambda: servers() == 0 and sockets() <= before), (servers(), sockets(), before)
    dist.barrier()


@distributed(world_size=1)
def test_threads_and_files_of_the_parts_go_too(tmp_path: Path) -> None:
    """Of a swap file, a writer of checkpoints in the background and a monitor."""

    def train_with_parts() -> weakref.ref[Any]:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")},
                "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "swap")},
            },
            "checkpoint": {"writer": {"type": "FAST", "decoupled": True}},
            "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv")},
        }
        engine = deepspeed.initialize(model=nn.Linear(64, 2), config=config)[0]
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path / "saved"), tag="t")
        return weakref.ref(engine)

    train_with_parts()  # the first one starts what all share
    soon(lambda: counted() == (0, 0), 0.5)
    threads, opened = counted()
    rounds = 3
    for _ in range(rounds):
        left = train_with_parts()
        gc.collect()
        assert soon(lambda: left() is None)  # noqa: B023

    def gone() -> bool:
        """Whether all is; one that something else in this process opens meanwhile is none of the engines'."""
        now = counted()
        return now[0] <= threads and now[1] < opened + rounds

    assert soon(gone), (
        (threads, opened),
        [thread.name for thread in threading.enumerate()],
        "\n".join(sorted(os.path.realpath(f"/proc/self/fd/{fd}") for fd in files())),
    )


@distributed(world_size=2)
def test_others_still_read_from_a_rank_that_has_dropped_its_engine() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(64, 64).weight.detach()
    engine = start(**NOTHING_KEPT)
    dropped = dist.get_rank() == 0
    if dropped:
        del engine
        gc.collect()
    dist.barrier()
    if not dropped:
        time.sleep(0.2)  # by now the other has said that it leaves
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            assert torch.equal(engine.module[0].weight, expected)
        del engine
        gc.collect()
    assert soon(lambda: servers() == 0)
    dist.barrier()


@distributed(world_size=1)
def test_the_collector_is_on_again_after_the_last_engine_that_wants_it_off() -> None:
    def start_without_collector() -> Any:
        config = {"train_micro_batch_size_per_gpu": 1, "disable_python_gc": True}
        return deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]

    first, second = start_without_collector(), start_without_collector()
    first.destroy()
    first.destroy()  # a second time is nothing
    assert not gc.isenabled()
    del second
    gc.collect()
    assert gc.isenabled()

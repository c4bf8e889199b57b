"""A gather that fails leaves nothing that a later use could take for weights."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.zero.gathering import shard_server
from tests.pool import distributed
from tests.zero.test_offload import offloaded, plain_config


def started(config: dict[str, Any]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return an engine whose weights are sharded, an input, and what it computes from it."""
    torch.manual_seed(3)
    engine: Any = deepspeed.initialize(model=torch.nn.Linear(8, 8, bias=False), config=config)[0]
    batch = torch.ones(1, 8)
    with torch.no_grad():
        expected = engine(batch).clone()
    engine.empty_partition_cache()
    return engine, batch, expected


def gathered(engine: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.detach().clone()


@pytest.mark.parametrize("use", ["evaluation", "training", "by hand"])
@distributed(world_size=1)
def test_a_read_that_fails(tmp_path, use):
    """As of a disk with a bad moment: the caller catches the error and goes on."""
    params = {"offload_param": {"device": "nvme", "max_in_cpu": 0}}
    engine, batch, expected = started(offloaded(plain_config(3, "fp32"), tmp_path / "disk", **params))
    weight = gathered(engine)
    engine.empty_partition_cache()
    gatherer = engine.sharded.gatherer
    read = gatherer.read

    def fail() -> None:
        raise OSError("a bad sector")

    def half(index: int, full: torch.Tensor) -> Any:
        full.fill_(7.0)
        return fail

    for broken in (half, lambda index, full: fail()):
        gatherer.read = broken
        with pytest.raises(OSError, match="a bad sector"):
            if use == "by hand":
                gathered(engine)
            else:
                with torch.set_grad_enabled(use == "training"):
                    engine(batch)
        gatherer.read = read
        if use == "by hand":
            assert torch.equal(gathered(engine), weight)
            engine.empty_partition_cache()
            assert engine.module.weight.numel() == 0
        with torch.no_grad():
            assert torch.equal(engine(batch), expected)
        engine.empty_partition_cache()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@distributed(world_size=2)
def test_a_fetch_that_breaks_off(error, monkeypatch):
    """What was left unread of the answer is not taken for the next one: scripts export the weights after Ctrl-C."""
    engine, batch, expected = started(plain_config(3, "fp32"))
    if dist.get_rank() == 0:
        fill, here = shard_server._fill, threading.get_ident()

        def cut_off(view: memoryview, connection: Any) -> None:
            alone = threading.get_ident() == here  # not a thread that serves the other rank
            fill(view[: len(view) // 8 * 4] if alone else view, connection)
            if alone:
                raise error

        monkeypatch.setattr(shard_server, "_fill", cut_off)
        with pytest.raises((KeyboardInterrupt, RuntimeError)), torch.no_grad():
            engine(batch)
        monkeypatch.setattr(shard_server, "_fill", fill)
    dist.barrier()
    with torch.no_grad():
        assert torch.equal(engine(batch), expected)

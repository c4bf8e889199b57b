"""Bytes by link: what transports count, and where an engine says it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.comm.links import BytesSent, far_share
from tests.comm.transports import two_hosts, using
from tests.pool import distributed
from tests.zero.test_placements import Unit


@pytest.mark.parametrize("transport", ["gloo", "hierarchical"])
@distributed(world_size=4)
def test_collectives(transport: str) -> None:
    """Two hosts with two ranks: of what a rank sends to three others, two thirds go to the other host, or, where the
    ranks of a host help each other, one third."""
    n = 6000
    far = {"gloo": 2, "hierarchical": 1}[transport]
    with two_hosts(), using(transport) as group:
        whole, before = torch.ones(4 * n), group.sent_by_link()

        def sent() -> BytesSent:
            nonlocal before
            now = group.sent_by_link()
            found, before = now - before, now
            return found

        assert sent() == BytesSent()
        mine = whole[group.rank * n : (group.rank + 1) * n]
        group.all_gather(whole, mine).wait()
        assert sent() == BytesSent(4 * n * (3 - far), 4 * n * far)
        group.reduce_scatter(mine, whole).wait()
        assert sent() == BytesSent(4 * n * (3 - far), 4 * n * far)
        group.all_reduce(whole).wait()
        assert sent() == BytesSent(8 * n * (3 - far), 8 * n * far)
        other = torch.empty_like(whole)
        group.all_to_all(other, whole).wait()
        assert sent() == BytesSent(4 * n, 8 * n)
        group.bytes_sent += 3000
        group.bytes_fetched += 3000
        assert sent() == BytesSent(1000, 2000)


@pytest.mark.parametrize("shared", [True, False])
@distributed(world_size=2)
def test_one_host(shared: bool) -> None:
    with using("shared_memory" if shared else "gloo") as group:
        before, payload = group.sent_by_link(), group.bytes_sent
        tensor = torch.ones(30_000)
        group.all_reduce(tensor).wait()
        group.all_reduce_max(tensor).wait()
        group.broadcast(tensor, 1).wait()
        group.reduce(tensor, 0).wait()
        now = group.sent_by_link()
        assert now - before == BytesSent(group.bytes_sent - payload, 0)


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert far_share((0, 1, 2, 3), 0, None) == pytest.approx(2 / 3)
    assert far_share((1, 3), 0, None) == 1.0 and far_share((2, 3), 1, None) == 0.0
    assert far_share((0,), 0, None) == 0.0
    assert far_share((4, 5, 6), 2, ((0, 1), (2,))) == 1.0
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert far_share((0, 1, 2, 3), 0, None) == 0.0


@pytest.mark.parametrize("kind", ["AdamW", "OneBitAdam"])
@distributed(world_size=4)
def test_an_engine_says_it(kind: str, tmp_path: Path) -> None:
    """In the curves of the first rank and in the log; signs of momenta are a small part of gradients."""
    params = {"freeze_step": 2} if kind == "OneBitAdam" else {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}},
        "comms_logger": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "wall_clock_breakdown": True,
    }
    with two_hosts():
        engine = deepspeed.initialize(model=nn.Linear(256, 256), config=config)[0]
        for step in range(4):
            x = torch.randn(2, 256, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
            engine.backward(engine(x).square().mean())
            engine.step()
        links = comm.log_summary(return_dict=True)["links"]
    numel = 256 * 257
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, links)
    assert all(one["steps"] == 4 for one in everyone)
    if dist.get_rank() != 0:
        return
    curves: dict[str, list[float]] = {}
    for path in tmp_path.rglob("*bytes_sent*.csv"):
        with open(path) as file:
            curves[path.stem] = [float(row[1]) for row in list(csv.reader(file))[1:]]
    across = next(values for name, values in curves.items() if "across" in name)
    assert len(curves) == 2 and len(across) == 4
    assert sum(across) == links["bytes_across_hosts"] == 4 * links["bytes_across_hosts_per_step"]
    # Of a sum over two hosts each rank sends its quarter twice, and 24 bytes for the norm.
    assert 2 * numel <= across[1] <= 2 * numel + 400
    if kind == "OneBitAdam":
        assert across[3] <= 0.27 * numel + 400


@distributed(world_size=4)
def test_groups_of_somebody_else() -> None:
    """Two ranks share each layer; what the others of a data-parallel group get is counted."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "comms_logger": {"enabled": True},
    }
    torch.manual_seed(dist.get_rank() % 2)
    engine = deepspeed.initialize(model=nn.Linear(64, 64), config=config, mpu=Unit())[0]
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
    links = comm.log_summary(return_dict=True)["links"]
    assert links["steps"] == 1 and links["bytes_within_host"] >= 4 * 64 * 65

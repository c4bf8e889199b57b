"""Messages of a pipeline through shared memory, gloo, or both: the same bits; and a rank that is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.transports import host_messages as neighbours
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import PipelineModule
from deepspeed.parallel.pipeline.messages.channels import (
    LocalReceiver,
    LocalSender,
    Receiver,
    SameStageChannel,
    Sender,
)
from tests.comm.transports import run_two_ranks
from tests.parallel.pipeline.test_chunks import SCHEDULES, engine_of, weights
from tests.parallel.pipeline.test_engine import batches, layers, loss_of, make_engine
from tests.pool import distributed

GLOO = {"comm": {"shared_memory": False}}


def trained(engine: PipelineEngine, steps: int = 3) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    data = batches(0)
    return [engine.train_batch(data) for _ in range(steps)], weights(engine)


def same(one: Any, two: Any) -> bool:
    losses, values = all(map(torch.equal, one[0], two[0])), one[1].keys() == two[1].keys()
    return losses and values and all(torch.equal(value, two[1][name]) for name, value in one[1].items())


def kinds(engine: PipelineEngine) -> set[type]:
    """Of the channels between ranks."""
    return {type(channel) for _, channel in engine.pipe_channels()} - {SameStageChannel}


@pytest.mark.parametrize("schedule", SCHEDULES)
@distributed(world_size=2)
def test_the_same_bits_as_over_gloo(schedule: str) -> None:
    memory, gloo = engine_of(schedule, 2, 0, 4), engine_of(schedule, 2, 0, 4, **GLOO)  # two engines at once
    assert kinds(memory) == {LocalSender, LocalReceiver} and kinds(gloo) == {Sender, Receiver}
    assert same(trained(memory), trained(gloo))
    memory.destroy()
    gloo.destroy()


@distributed(world_size=4)
def test_four_stages_on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle link goes over gloo, the others through memory."""
    gloo = engine_of("zero-bubble", 4, 0, 6, **GLOO)
    expected = trained(gloo)
    gloo.destroy()
    monkeypatch.setattr(neighbours, "host_identity", lambda: b"%d" % (dist.get_rank() // 2))
    mixed = engine_of("zero-bubble", 4, 0, 6)
    inner = {Sender, Receiver, LocalSender, LocalReceiver}
    assert kinds(mixed) == (inner if mixed.stage_id in (1, 2) else {LocalSender, LocalReceiver})
    assert same(trained(mixed), expected)
    mixed.destroy()


@distributed(world_size=2)
def test_what_cannot_be_opened_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may not look into the other: both use gloo, in both directions."""
    said: list[str] = []
    monkeypatch.setattr(neighbours, "warning_once", said.append)
    if dist.get_rank() == 1:
        monkeypatch.setattr(neighbours, "_may_open_files_of", lambda pid: False)
        monkeypatch.setattr(neighbours, "_open", lambda record, key: None)
    engine = make_engine(PipelineModule(layers(), num_stages=2, loss_fn=loss_of))
    assert kinds(engine) == {Sender, Receiver}
    assert len(said) == dist.get_rank() and all("slower" in text for text in said)
    engine.train_batch(batches(0))
    engine.destroy()


KILLED = """
import os, signal
import torch, torch.distributed as dist
from deepspeed.parallel.pipeline import PipelineModule
from tests.parallel.pipeline.test_engine import batches, layers, loss_of, make_engine
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=os.environ["TEST_STORE"], rank=rank, world_size=2)
engine = make_engine(PipelineModule(layers(), num_stages=2, loss_fn=loss_of))
engine.train_batch(batches(0))
count = 0
def load_and_die(batch):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch
if rank == 1:
    engine.set_batch_fn(load_and_die)
try:
    engine.train_batch(batches(0))
except RuntimeError as error:
    print(f"caught: {error}", flush=True)
    os._exit(3)
"""


def test_a_killed_stage_is_named(tmp_path: Path) -> None:
    codes, output, seconds = run_two_ranks(KILLED, tmp_path)
    assert codes == (3, -signal.SIGKILL), output
    assert "waiting for rank 1: its process has exited" in output
    assert "stage 0 failed at micro-batch" in output
    assert seconds < 50  # far from the timeout of the group

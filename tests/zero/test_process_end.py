"""A rank that is done first serves its shards until the others are done as well."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.comm.hangs import watch as hang_watch
from deepspeed.tools.launcher import ports
from tests import forked
from tests.pool import distributed
from tests.tools.launcher.programs import environment

SCRIPT = """\
import sys, time
import torch
import deepspeed
from deepspeed.zero.gathering import shard_server as termination_barrier

if sys.argv[2] == "through the store":
    termination_barrier.DIRECT_RANKS = 1
deepspeed.init_distributed(auto_mpi_discovery=False)
rank = deepspeed.comm.get_rank()
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
if rank == 0:
    time.sleep(2)
elif sys.argv[1] == "fails":
    raise ValueError("on purpose")
if sys.argv[1] == "destroys":
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(1, 8))
    if rank == 1:
        engine.destroy()
        print("rank 1 saw", sum(p.numel() for p in model.parameters()), flush=True)
        time.sleep(4)
        sys.exit()
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    print("rank", rank, "saw", sum(p.numel() for p in engine.module.parameters()), flush=True)
"""


def launched(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    """Under a launcher, which ends the other rank when one has failed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, str(script), how, "directly"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )


def ended(folder: Path, how: str, way: str) -> str:
    """Return the output of both ranks, each run to a successful end."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.find_free("127.0.0.1"))}
    ranks = [
        forked.start([str(script), how, way], env=environment(**where, RANK=str(rank), LOCAL_RANK=str(rank)))
        for rank in range(2)
    ]
    said = ""
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors[-2000:]
            said += output
    finally:
        for rank in ranks:
            rank.kill()
    return said


@pytest.mark.parametrize("way", ["directly", "through the store"])
def test_the_last_rank_still_gets_its_shards(tmp_path: Path, way: str) -> None:
    said = ended(tmp_path, "ends", way)
    assert "rank 0 saw 216" in said and "rank 1 saw 216" in said


@pytest.mark.parametrize("way", ["directly", "through the store"])
def test_a_rank_that_destroyed_its_engine_serves_the_last_gather(tmp_path: Path, way: str) -> None:
    """Its parameters were gathered, so that nothing made it wait for the other one, which comes two seconds later."""
    said = ended(tmp_path, "destroys", way)
    assert "rank 0 saw 216" in said and "rank 1 saw 216" in said


@pytest.mark.parametrize("how", ["fails"])
def test_a_failing_rank_does_not_stay(tmp_path: Path, how: str) -> None:
    begin = time.monotonic()
    done = launched(tmp_path, how)
    assert done.returncode != 0 and "on purpose" in done.stderr
    assert time.monotonic() - begin < 300  # half the timeout of a collective


@distributed(world_size=2)
def test_an_engine_that_nobody_destroyed_keeps_no_thread_after_its_group() -> None:
    """A second run in the same process must not find the first one's servers."""
    before = threading.active_count()
    for _ in range(2):
        config = {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        assert threading.active_count() > before
    communicator = engine.mesh.communicator("dp", "sp")
    hang_watch.end()  # as destroy_process_group() does first,
    communicator.close()  # and then this
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before

"""Ranks that end, leave or never come: the others say which one, within the timeout, on each transport."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from deepspeed.comm import shared_memory
from tests.comm.transports import TRANSPORTS
from tests.pool import ROOT

PROLOGUE = """
import os, signal, sys, time
from datetime import timedelta
import torch
from deepspeed import comm as dist
from deepspeed.comm.collectives import communicator
rank, timeout_s = int(os.environ["RANK"]), float(os.environ["TEST_TIMEOUT"])
dist.init_distributed("gloo", init_method=os.environ["TEST_STORE"], rank=rank,
                      world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=timeout_s))
comm = communicator().prepare()
assert comm.transport_name("cpu") == os.environ["TEST_TRANSPORT"]
tensor = torch.ones(1_000_000)
comm.all_reduce(tensor).wait()
"""


def run_ranks(tmp_path: Path, transport: str, body: str, *, world_size: int = 2, timeout_s: float = 60.0):
    """Run a script on real processes; their (exit code, output, seconds)."""
    if transport == "shared_memory" and not shared_memory.is_available():
        pytest.skip("no native library")
    script = tmp_path / "script.py"
    script.write_text(PROLOGUE + textwrap.dedent(body))
    common = {
        **os.environ,
        "DS_SHM": "1" if transport == "shared_memory" else "0",
        "TEST_TRANSPORT": transport,
        "TEST_TIMEOUT": str(timeout_s),
        "TEST_STORE": f"file://{tmp_path}/store",
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    start = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    results = []
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=60)
            results.append((process.returncode, output, time.monotonic() - start))
    finally:
        for process in ranks:
            process.kill()
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_is_named(tmp_path, transport):
    results = run_ranks(
        tmp_path,
        transport,
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(tensor).wait()
        """,
    )
    code, output, seconds = results[0]
    assert results[1][0] == -signal.SIGKILL
    assert code == 1 and "CommunicationError: all_reduce" in output and "among ranks [0, 1] failed" in output
    assert "waiting for rank 1" in output and seconds < 30
    assert "DEEPSPEED_TIMEOUT" in output


def test_everyone_learns_which_rank_died(tmp_path):
    """Rank 2 waits for rank 1, which waits for rank 0, which is gone."""
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.broadcast(tensor, 0).wait()
        except dist.CommunicationError as error:
            print(error)
            try:
                comm.barrier().wait()
            except dist.CommunicationError as again:
                print("again:", again)
            time.sleep(1)
            os._exit(3)
        """,
        world_size=3,
    )
    for code, output, _ in results[1:]:
        assert code == 3 and output.count("waiting for rank 0: its process is gone") == 2, output


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_is_named_within_the_timeout(tmp_path, transport):
    results = run_ranks(
        tmp_path,
        transport,
        """
        if rank == 1:
            time.sleep(5)
            os._exit(0)
        start = time.monotonic()
        try:
            comm.all_reduce(tensor).wait()
        except dist.CommunicationError as error:
            assert 0.9 < time.monotonic() - start < 4
            print(error)
            os._exit(4)
        """,
        timeout_s=1,
    )
    code, output, _ = results[0]
    assert code == 4 and "waiting for rank 1" in output, output


def test_a_rank_that_destroys_its_group_is_named(tmp_path):
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        if rank == 1:
            dist.destroy_process_group()
            time.sleep(1)
            os._exit(0)
        try:
            dist.all_reduce(tensor)
        except dist.CommunicationError as error:
            print(error)
            os._exit(5)
        """,
    )
    code, output, _ = results[0]
    assert code == 5 and "waiting for rank 1: it destroyed its process group" in output, output


def test_killing_all_ranks_leaves_nothing(tmp_path):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        pending = comm.all_reduce(tensor)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert [code for code, _, _ in results] == [-signal.SIGKILL] * 2
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not [name for name in after - before if "deepspeed" in name]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_leaving_while_something_is_under_way(tmp_path, transport):
    """The interpreter ends with a collective in flight that the other rank never joins."""
    results = run_ranks(
        tmp_path,
        transport,
        """
        if rank == 0:
            pending = comm.all_gather(torch.empty(2_000_000), tensor)
            time.sleep(0.2)
        """,
    )
    assert [code for code, _, _ in results] == [0, 0], results


def test_ranks_in_different_collectives_are_told_apart(tmp_path):
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        try:
            if rank == 0:
                comm.all_reduce(torch.ones(10)).wait()
            else:
                comm.broadcast(torch.ones(10), 1).wait()
                comm.all_reduce(torch.ones(20)).wait()
        except dist.CommunicationError as error:
            print(error)
            os._exit(6)
        """,
    )
    assert results[0][0] == 6, results
    message = results[0][1]
    assert "all_reduce of 10 float32 among ranks [0, 1] failed while waiting for rank 1" in message
    assert "in another call, broadcast of 40 bytes" in message
    assert results[1][0] == 6, results


def test_ranks_that_disagree_on_a_size(tmp_path):
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        try:
            comm.all_reduce(torch.ones(10 + rank)).wait()
        except dist.CommunicationError as error:
            print(error)
            os._exit(7)
        """,
    )
    for rank, (code, output, _) in enumerate(results):
        assert code == 7 and f"all_reduce of {11 - rank} float32. All ranks have to" in output, output

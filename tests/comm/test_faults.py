"""Ranks that end, leave or never come: the others say which one, within the timeout, on each transport."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from deepspeed.comm.pending import CommunicationError, OrderedPending, Pending
from deepspeed.comm.transports import shared_memory
from tests import forked
from tests.comm.transports import TRANSPORTS, names_that_stay, shared_names
from tests.pool import ROOT

PROLOGUE = """
import os, signal, sys, time
from datetime import timedelta
import torch
from deepspeed import comm as dist
from deepspeed.comm.collectives import communicator
rank, timeout_s = int(os.environ["RANK"]), float(os.environ["TEST_TIMEOUT"])
def say(what):
    open(what + str(rank), "w").close()
def hear(what, *ranks):
    while not all(os.path.exists(what + str(rank)) for rank in ranks):
        time.sleep(0.01)
dist.init_distributed("gloo", init_method=os.environ["TEST_STORE"], rank=rank,
                      world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=timeout_s))
"""
RENDEZVOUS = """
comm = communicator().prepare()
assert comm.transport_name("cpu") == os.environ["TEST_TRANSPORT"]
tensor = torch.ones(1_000_000)
comm.all_reduce(tensor).wait()
"""


def run_ranks(
    tmp_path: Path,
    transport: str,
    body: str,
    *,
    world_size: int = 2,
    timeout_s: float = 300.0,
    rendezvous: str = RENDEZVOUS,
):
    """Run a script on real processes; their (exit code, output, seconds)."""
    return finish_ranks(
        *start_ranks(tmp_path, transport, rendezvous + textwrap.dedent(body), world_size, timeout_s)
    )


def start_ranks(tmp_path: Path, transport: str, body: str, world_size: int = 2, timeout_s: float = 300.0):
    if transport == "shared_memory" and not shared_memory.is_available():
        pytest.skip("no native library")
    script = tmp_path / "script.py"
    script.write_text(PROLOGUE + body)
    common = {
        **os.environ,
        "DS_SHM": "1" if transport == "shared_memory" else "0",
        "TEST_TRANSPORT": transport,
        "TEST_TIMEOUT": str(timeout_s),
        "TEST_STORE": f"file://{tmp_path}/store",
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # a rank that is killed, or leaves at once, has said what it printed
        "PYTHONPATH": str(ROOT),
    }
    start = time.monotonic()
    ranks = [
        forked.start(
            [str(script)],
            cwd=tmp_path,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            merged=True,
        )
        for rank in range(world_size)
    ]
    return ranks, start


def finish_ranks(ranks: list[forked.Process], start: float):
    results = []
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=240)
            results.append((process.returncode, output, time.monotonic() - start))
    finally:
        for process in ranks:
            process.kill()
    return results


@pytest.mark.parametrize("begins", ["while it dies", "once it is gone"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_is_named(tmp_path, transport, begins):
    results = run_ranks(
        tmp_path,
        transport,
        f"""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep({1.0 if begins == "once it is gone" else 0.0})
        comm.all_reduce(tensor).wait()
        """,
    )
    code, output, seconds = results[0]
    assert results[1][0] == -signal.SIGKILL
    assert code == 1 and "CommunicationError: all_reduce" in output and "among ranks [0, 1] failed" in output
    assert "waiting for rank 1" in output and seconds < 200
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
            say("done")
            hear("done", 1, 2)
            os._exit(3)
        """,
        world_size=3,
    )
    for code, output, _ in results[1:]:
        assert code == 3 and output.count("waiting for rank 0: its process has exited") == 2, output


CALLS = """
for issue in (
    lambda: comm.all_reduce(tensor), lambda: comm.all_gather(torch.empty(2_000_000), tensor),
    lambda: comm.reduce_scatter(torch.empty(500_000), tensor), lambda: comm.broadcast(tensor, 1),
    lambda: comm.all_to_all(torch.empty_like(tensor), tensor), lambda: comm.all_reduce_max(tensor),
    lambda: dist.all_reduce(tensor, async_op=True), lambda: dist.all_reduce(tensor.view(1000, -1).t(), async_op=True),
    lambda: dist.all_reduce_coalesced([tensor, tensor.double()], async_op=True), lambda: comm.barrier(),
):
    try:
        pending = issue()
    except RuntimeError:
        continue  # it failed before there was anything to wait for
    for time_of_wait in range(3):
        try:
            pending.wait()
        except RuntimeError:
            continue
        print("returned from wait", time_of_wait)
        os._exit(1)
os._exit(3)
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_wait_for_a_failed_collective_raises(tmp_path, transport):
    body = "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n" + CALLS
    code, output, _ = run_ranks(tmp_path, transport, body)[0]
    assert code == 3, output


@pytest.mark.parametrize("kind", [Pending, OrderedPending])
def test_a_collective_that_is_interrupted_stays_unfinished(kind):
    def finish() -> None:
        raise KeyboardInterrupt

    pending = kind(finish)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    with pytest.raises(CommunicationError, match="interrupted"):
        pending.wait()


def test_waiting_for_what_a_destroyed_group_left_raises():
    pending = OrderedPending(lambda: None)
    OrderedPending.forget_all()
    for _ in range(2):
        with pytest.raises(CommunicationError, match="destroyed"):
            pending.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_is_named_within_the_timeout(tmp_path, transport):
    results = run_ranks(
        tmp_path,
        transport,
        """
        if rank == 1:
            hear("done", 0)
            os._exit(0)
        start = time.monotonic()
        try:
            comm.all_reduce(tensor).wait()
        except dist.CommunicationError as error:
            assert 3.9 < time.monotonic() - start < 60
            print(error, flush=True)
            say("done")
            os._exit(4)
        """,
        timeout_s=4,
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
            hear("done", 0)
            os._exit(0)
        try:
            dist.all_reduce(tensor)
        except dist.CommunicationError as error:
            print(error, flush=True)
            say("done")
            os._exit(5)
        """,
    )
    code, output, _ = results[0]
    assert code == 5 and "waiting for rank 1: it destroyed its process group" in output, output


@pytest.fixture
def nothing_stays():
    """In the folders where shared memory has names."""
    before = shared_names()
    yield
    assert not names_that_stay(before)


@pytest.mark.usefixtures("nothing_stays")
def test_killing_all_ranks_leaves_nothing(tmp_path):
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        pending = comm.all_reduce(tensor)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert [code for code, _, _ in results] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("delay_ms", [1, 30, 90])
@pytest.mark.usefixtures("nothing_stays")
def test_killed_in_the_middle_of_a_collective(tmp_path, transport, delay_ms):
    """Over gloo the wait sometimes ends only with the timeout: see docs/communication.md."""
    results = run_ranks(
        tmp_path,
        transport,
        f"""
        import threading
        if rank == 1:
            threading.Timer({delay_ms} / 1000, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        tensor = torch.ones(30_000_000)
        try:
            while True:
                comm.all_reduce(tensor).wait()
                comm.all_gather(torch.empty(2_000_000), tensor[:1_000_000]).wait()
        except dist.CommunicationError as error:
            print(error)
            os._exit(3)
        """,
        timeout_s=20 if transport == "gloo" else 300,
    )
    assert results[1][0] == -signal.SIGKILL
    code, output, seconds = results[0]
    assert code == 3 and "waiting for rank 1" in output and seconds < 200, output


# Where in the rendezvous of the ranks one of them ends: it is killed as soon as it comes to this function.
MOMENTS = {
    "before": (0, "hosts.connect_hosts"),
    "before making the segment": (0, "shared_memory.create_segment"),
    "with the segment made": (0, "hosts._connect_host"),
    "before mapping it": (1, "shared_memory.attach"),
    "having mapped it": (1, "shared_memory.SharedMemoryChannel.start"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.usefixtures("nothing_stays")
def test_killed_during_the_rendezvous(tmp_path, moment):
    dying, where = MOMENTS[moment]
    results = run_ranks(
        tmp_path,
        "shared_memory",
        f"""
        from deepspeed.comm.transports import hosts, shared_memory
        def die(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == {dying} and {moment != "with the segment made"}:
            {where} = die
        elif rank == {dying}:
            made = shared_memory.create_segment
            shared_memory.create_segment = lambda size: (made(size), die())
        try:
            comm = communicator().prepare()
            comm.barrier().wait()
        except dist.CommunicationError as error:
            print(error)
            os._exit(8)
        """,
        rendezvous="",
        timeout_s=8,
    )
    assert results[dying][0] == -signal.SIGKILL
    code, output, seconds = results[1 - dying]
    assert code == 8 and f"waiting for rank {dying}" in output and seconds < 200, output


def test_two_jobs_at_once_keep_to_themselves(tmp_path):
    body = """
    for step in range(300):
        tensor = torch.full((1 + step * 37,), {number} + float(rank))
        comm.all_reduce(tensor).wait()
        assert tensor[0] == tensor[-1] == 2 * {number} + 1
    """
    jobs = []
    for number in (10, 2000):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = textwrap.dedent(body.format(number=number))
        jobs.append(start_ranks(folder, "shared_memory", RENDEZVOUS + text))
    for job in jobs:
        assert [code for code, _, _ in finish_ranks(*job)] == [0, 0]


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
    assert "in a different call, broadcast of 40 bytes" in message
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
        assert code == 7 and f"all_reduce of {11 - rank} float32. All ranks must" in output, output


def test_everyone_learns_which_call_does_not_fit(tmp_path):
    """Rank 2 waits for rank 0, which has met rank 1 in another call."""
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        try:
            if rank > 0:
                comm.reduce(torch.ones(10), 1).wait()
            comm.barrier().wait()
        except dist.CommunicationError as error:
            print(error)
            os._exit(9)
        """,
        world_size=3,
    )
    assert [code for code, _, _ in results] == [9] * 3
    for (_, output, _), other in zip(
        results, ("reduce of 10 float32 to", "barrier", "reduce of 10 float32 to"), strict=True
    ):
        assert f"in a different call, {other}" in output, output


def test_ranks_that_disagree_on_the_counts_of_an_exchange(tmp_path):
    results = run_ranks(
        tmp_path,
        "shared_memory",
        """
        try:
            comm.all_to_all(torch.empty(2 + rank), torch.ones(2), [1 + rank, 1], [1, 1]).wait()
        except dist.CommunicationError as error:
            print(error)
            os._exit(10)
        """,
    )
    for rank, (code, output, _) in enumerate(results):
        assert (
            code == 10 and f"waiting for rank {1 - rank}" in output and "different number of bytes" in output
        )

"""Shared memory: when it is chosen, what it allocates, and that it works alone."""

from __future__ import annotations

import logging
import os
import random
import resource
import stat
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from deepspeed.base.logging import logger
from deepspeed.comm.collectives import communicator, forget_communicators, use_shared_memory
from deepspeed.comm.groups import new_group
from deepspeed.comm.init import init_distributed
from deepspeed.comm.transports import shared_memory
from deepspeed.config.sections.comm import CommConfig
from tests.comm.transports import (
    names_that_stay,
    rank_order_sum,
    same_bits,
    shared_names,
    two_hosts,
    using,
    values,
)
from tests.pool import distributed

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="no native library")


@distributed(world_size=2)
def test_one_rank_that_does_not_want_it_is_enough():
    forget_communicators()
    use_shared_memory(torch_dist.get_rank() == 0)
    try:
        assert communicator().transport_name("cpu") == "gloo"
        tensor = torch.ones(3)
        communicator().all_reduce(tensor).wait()
        assert tensor[0] == 2
    finally:
        forget_communicators()
        use_shared_memory(True)


@distributed(world_size=2)
def test_environment_turns_it_off():
    before = os.environ.get("DS_SHM")
    forget_communicators()
    os.environ["DS_SHM"] = "0"
    try:
        assert communicator().transport_name("cpu") == "gloo"
    finally:
        forget_communicators()
        os.environ.pop("DS_SHM") if before is None else os.environ.update(DS_SHM=before)


@distributed(world_size=2)
def test_config_turns_it_off_and_on():
    def configure(section):
        init_distributed(
            config=types.SimpleNamespace(comms_config=None, schema=types.SimpleNamespace(comm=section))
        )
        tensor = torch.ones(3)
        comm.all_reduce(tensor).wait()
        assert tensor[0] == 2
        return comm.transport_name("cpu")

    with using("shared_memory") as comm:
        assert configure(CommConfig(shared_memory=False)) == "gloo"
        assert configure(CommConfig()) == "gloo"  # says nothing
        assert configure(CommConfig(shared_memory=True)) == "shared_memory"


@distributed(world_size=2)
def test_other_hosts_and_failed_mappings_fall_back():
    with two_hosts(), using("gloo"):
        use_shared_memory(True)
        forget_communicators()
        assert communicator().transport_name("cpu") == "gloo"
    original = shared_memory.attach
    try:
        if torch_dist.get_rank() == 1:
            shared_memory.attach = lambda *arguments: None
        forget_communicators()
        assert communicator().transport_name("cpu") == "gloo"
    finally:
        shared_memory.attach = original
        forget_communicators()


@distributed(world_size=2)
def test_no_room_for_a_segment_is_one_note():
    """As where the machine limits memory or files: making the segment fails."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())
    logger.addHandler(handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        forget_communicators()
        for comm in (communicator(), communicator(new_group([1, 0]))):
            assert comm.transport_name("cpu") == "gloo"
            tensor = torch.ones(5)
            comm.all_reduce(tensor).wait()
            assert tensor[0] == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        logger.removeHandler(handler)
        forget_communicators()
    found = [note for note in notes if "gloo" in note]
    assert len(found) == (torch_dist.get_rank() == 0), notes
    assert not found or "creating a segment failed: File too large" in found[0]


def test_segments_have_no_name_and_are_private():
    before = shared_names()
    descriptor, token = shared_memory.create_segment(3)
    try:
        found = os.fstat(descriptor)
        assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 0 and found.st_uid == os.getuid()
        assert not names_that_stay(before)
        ranks = (0, 1, 2)
        assert shared_memory.attach(os.getpid(), descriptor, token + 1, 0, ranks) is None  # another job's
        assert shared_memory.attach(os.getpid(), descriptor, token, 0, (0, 1)) is None
        with open(os.devnull) as other:
            assert shared_memory.attach(os.getpid(), other.fileno(), token, 0, ranks) is None
        own = shared_memory.attach(os.getpid(), descriptor, token, 0, ranks)
        assert own is not None
        own.close()
    finally:
        os.close(descriptor)


@distributed(world_size=2)
def test_waiting_long_leaves_the_core_alone():
    with using("shared_memory") as comm:
        tensor = torch.ones(1000)
        comm.all_reduce(tensor).wait()
        for waits_in_background in (False, True):
            comm.barrier().wait()
            if comm.rank == 1:
                time.sleep(2)
                comm.all_reduce(tensor).wait()
                continue
            begin, spent = time.monotonic(), time.process_time()
            pending = comm.all_reduce(tensor)
            if waits_in_background:
                time.sleep(1)
            pending.wait()
            # Rank 1 began to sleep when this rank began to wait, or before.
            assert time.monotonic() - begin > 1
            assert time.process_time() - spent < 0.2


@distributed(world_size=2)
def test_handles_tell_when_they_are_done():
    with using("shared_memory") as comm:
        tensor = torch.ones(200_000)
        if comm.rank == 0:
            pending = comm.all_reduce(tensor)
            time.sleep(0.01)
            assert not pending.is_completed()
            torch_dist.barrier()
        else:
            torch_dist.barrier()
            pending = comm.all_reduce(tensor)
        while not pending.is_completed():
            time.sleep(0.001)
        assert tensor[-1] == 2


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:deepspeed" in line]


def descriptors() -> list[str]:
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [link for link in links if "memfd:deepspeed" in link]


@distributed(world_size=[2, 4])
def test_memory_is_bounded_private_and_given_back(world_size):
    with using("shared_memory") as comm:
        (line,) = mappings()
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        comm.all_reduce(torch.ones(6_000_000)).wait()
        assert mappings() == [line] and last - first <= 16 << 20
        assert descriptors() == []
    assert mappings() == []


@distributed(world_size=2)
def test_it_works_while_its_owner_does_something_else():
    with using("shared_memory") as comm:
        tensor, far = torch.ones(3_000_000), torch.ones(1)
        pending = comm.all_reduce(tensor)
        deadline = time.monotonic() + 20
        while tensor[-1] != 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert tensor[-1] == 2
        if comm.rank == 0:  # an exchange on another path, in the middle of one that is not waited for
            torch_dist.send(far, 1)
        else:
            torch_dist.recv(far, 0)
        pending.wait()


@distributed(world_size=2)
def test_forked_children_leave_the_channel_alone():
    with using("shared_memory") as comm:
        child = os.fork()
        if child == 0:
            try:
                forget_communicators()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        tensor = torch.ones(1000)
        comm.all_reduce(tensor).wait()
        assert tensor[0] == 2


KINDS = "all_reduce reduce_scatter all_gather broadcast max reduce all_to_all barrier".split()


def soak(rank: int, world_size: int, collectives: int, seed: int) -> None:
    """Random operations of random size, type and group, some late, some waited for later, all checked."""
    plan = random.Random(seed)
    own = random.Random(seed * 1000 + rank)
    half = world_size // 2 * 2
    groups = {
        "world": communicator(),
        "pair": communicator(new_group([rank // 2 * 2, rank // 2 * 2 + 1])) if rank < half else None,
    }
    waiting = []
    for step in range(collectives):
        name = plan.choice(["world", "world", "pair"])
        kind = plan.choice(KINDS)
        numel = int(10 ** plan.uniform(0, 4.8)) if plan.random() < 0.97 else plan.randrange(500_000)
        dtype = plan.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])
        root, later, delay = plan.randrange(2), plan.random() < 0.3, plan.random() < 0.01
        comm = groups[name]
        if comm is None:
            continue
        assert comm.transport_name("cpu") == "shared_memory"
        if delay and own.random() < 0.5:
            time.sleep(own.random() * 0.01)
        whole = numel * comm.size
        parts = [values(whole, dtype, member, step) for member in comm.ranks]
        given = parts[comm.rank].clone()
        mine = slice(comm.rank * numel, (comm.rank + 1) * numel)
        if kind == "all_reduce":
            pending, result, expected = comm.all_reduce(given), given, rank_order_sum(parts, dtype)
        elif kind == "reduce_scatter":
            result = torch.empty(numel, dtype=dtype)
            pending, expected = comm.reduce_scatter(result, given), rank_order_sum(parts, dtype)[mine]
        elif kind == "all_gather":
            result = torch.empty(whole, dtype=dtype)
            pending = comm.all_gather(result, given[:numel])
            expected = torch.cat([part[:numel] for part in parts])
        elif kind == "broadcast":
            pending, result, expected = comm.broadcast(given, root), given, parts[root]
        elif kind == "max":
            pending, result, expected = comm.all_reduce_max(given), given, torch.stack(parts).amax(0)
        elif kind == "reduce":
            pending, result = comm.reduce(given, root), given
            expected = rank_order_sum(parts, dtype) if comm.rank == root else parts[comm.rank]
        elif kind == "all_to_all":
            counts = [[numel * ((r + s) % 3) // 2 for s in range(comm.size)] for r in range(comm.size)]
            received = [counts[r][comm.rank] for r in range(comm.size)]
            result = torch.empty(sum(received), dtype=dtype)
            runs = [part[: sum(row)].split(row) for part, row in zip(parts, counts, strict=True)]
            pending = comm.all_to_all(result, given[: sum(counts[comm.rank])], received, counts[comm.rank])
            expected = torch.cat([row[comm.rank] for row in runs])
        else:
            pending, result, expected = comm.barrier(), given, parts[comm.rank]
        waiting.append((pending, result, expected, (step, kind, name, numel, dtype)))
        if not later:
            own.shuffle(waiting)
            for handle, got, wanted, what in waiting:
                handle.wait()
                assert same_bits(got, wanted), what
            waiting.clear()
    for handle, got, wanted, what in waiting:
        handle.wait()
        assert same_bits(got, wanted), what


@distributed(world_size=[2, 3], timeout=120)
def test_soak(world_size):
    with using("shared_memory") as comm:
        soak(comm.rank, world_size, 150, seed=world_size)


@pytest.mark.slow
@distributed(world_size=2, timeout=300)
def test_more_than_two_gigabytes():
    """Counts beyond 32 bits; memory is the tensors and the segment."""
    with using("shared_memory") as comm:
        numel = (2 << 30) + 5
        tensor = torch.zeros(numel, dtype=torch.uint8)
        tensor[-3:] = comm.rank + 1
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        comm.all_reduce(tensor).wait()
        assert tensor[-4:].tolist() == [0, 3, 3, 3]
        tensor[-3:] += comm.rank
        comm.broadcast(tensor, 1).wait()
        assert tensor[-4:].tolist() == [0, 4, 4, 4]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.slow
@distributed(world_size=[2, 4], timeout=1500)
def test_soak_of_10_000_collectives(world_size):
    with using("shared_memory") as comm:
        soak(comm.rank, world_size, 10_000, seed=world_size)

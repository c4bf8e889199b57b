"""What is special about shared memory: when it is chosen, what it holds, that it works alone."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from deepspeed.comm import shared_memory
from deepspeed.comm.collectives import communicator, forget_communicators, use_shared_memory
from deepspeed.comm.groups import new_group
from tests.comm.transports import rank_order_sum, same_bits, two_hosts, using, values
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
        kind = plan.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "max", "reduce"])
        numel = int(10 ** plan.uniform(0, 4.8)) if plan.random() < 0.97 else plan.randrange(500_000)
        dtype = plan.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64])
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
        else:
            pending, result = comm.reduce(given, root), given
            expected = rank_order_sum(parts, dtype) if comm.rank == root else parts[comm.rank]
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
@distributed(world_size=[2, 4], timeout=1500)
def test_soak_of_10_000_collectives(world_size):
    with using("shared_memory") as comm:
        soak(comm.rank, world_size, 10_000, seed=world_size)
